"""The stateless functions of the grouped MLP: grouped_linear, grouped_mlp, moe and grouped_mm; and
call, which runs any C entry on arrays that the caller has.

All take Torch tensors, with gradients, or NumPy arrays, without. Shapes: T tokens, k experts per
token, G groups, H hidden size, F expert width, `rows` rows of the ragged tensors. Weights are one
packed tensor [G, out, in], or [G, in, out] with weight_layout="in_out", or a list of G matrices.

compute_dtype=None takes the operands as they are stored (under torch.autocast: its dtype).
Otherwise x and the weights are cast to it at the edge and y comes back in the dtype of x; weight
gradients are computed in the weights' own dtype: FP32 masters get FP32 gradients of BF16 products.

recipe (a name or a moire.Recipe) says what the products read. With "mxfp8", "mxfp8_fast" and
"fp8_block" x, the weights, the activation and every gradient are quantised just before the products
that read them: x and incoming gradients from their type (or compute_dtype), weights from their own,
uncast; what an MLP makes between its products is rounded to BF16 first, whatever x is. x and
weights may be GroupedTensors, quantised already; w_quantized stands in for a weight whose gradient
is wanted (see WeightCache). What is kept of x for the weight gradient, Recipe(save=) decides and
moire.explain says.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

from .arrays import DEFAULT, Numpy, as_fp32, check_array, framework_of
from .autograd import Op, run
from .dtypes import Array, Dtype, Tensor
from .errors import invalid, unsupported
from .groups import Groups
from .invoke import ARRAYS, ENTRIES, LISTS
from .layers import LINEAR, MLP, MOE
from .layouts import Activation, ActivationLike, GluLayout, GluLayoutLike
from .operands import BiasScale, Operand, Operands, WeightCopies, WeightLike, own_scale
from .prepared_weight import PreparedWeight
from .recipes import Recipe, RecipeLike
from .routing import Plan, as_plan, make_plan
from .tapes import learn, replayed
from .values import choice, integer, number, wrong
from .wgrad import Beta, FreshGradients, ParameterGradients

learn(
    {
        Groups: ("offsets", "capacity"),
        Plan: Plan._fields,
        Recipe: tuple(Recipe.__dataclass_fields__),
        Activation: ("fields",),
        GluLayout: ("fields",),
        PreparedWeight: ("memory", "form", "shape"),
        ParameterGradients: ("delayed",),
        FreshGradients: ("delayed",),
        Beta: Beta._fields,
    }
)


@replayed
def grouped_linear(
    x: Operand[Array],
    w: WeightLike[Array],
    groups: Groups,
    *,
    bias: Optional[Array] = None,
    scale: Optional[Array] = None,
    row_idx: Optional[Array] = None,
    scatter_idx: Optional[Array] = None,
    weight_layout: str = "out_in",
    recipe: RecipeLike = None,
    compute_dtype: Optional[Dtype] = None,
    w_quantized: Optional[WeightCopies] = None,
    out: Optional[Array] = None,
    grad_x_out: Optional[Array] = None,
    tail: str = "zero",
    wgrad: Any = None,
) -> Array:
    """y_i = x_i W_g^T (+ scale_i bias_g) for the rows i of each group g.

    x [rows, in]; or [T, in] with row_idx [rows]: row i is x[row_idx[i]], and no permuted copy is
    kept. bias [G, out], scale [rows]. scatter_idx [T, k] is the inverse of row_idx, where there
    is one: it makes the gradient of x cheaper. y and the gradient of x (in expert order) are
    written into `out` and `grad_x_out` if they are given. The tail of y (rows past the last group)
    is zeros, or stays as `out` had it with tail="untouched".
    """
    optional = {"bias": bias, "scale": scale, "row_idx": row_idx, "scatter_idx": scatter_idx}
    optional.update(out=out, grad_x_out=grad_x_out)
    given = Operands("grouped_linear", x, recipe, optional)
    given.give_x(compute_dtype)
    given.give_weight("w", w, weight_layout, w_quantized)
    given.give_fp32("scale")
    given.give_groups(groups)
    given.give_out(tail)
    return given.run(LINEAR, wgrad)


@replayed
def grouped_mlp(
    x: Operand[Array],
    w1: WeightLike[Array],
    w2: WeightLike[Array],
    groups: Groups,
    *,
    probs: Optional[Array] = None,
    b1: Optional[Array] = None,
    b2: Optional[Array] = None,
    b2_scale: BiasScale = "probs",
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    recipe: RecipeLike = None,
    row_idx: Optional[Array] = None,
    scatter_idx: Optional[Array] = None,
    weight_layout: str = "out_in",
    compute_dtype: Optional[Dtype] = None,
    w1_quantized: Optional[WeightCopies] = None,
    w2_quantized: Optional[WeightCopies] = None,
    save_act: bool = False,
    save_z: bool = True,
    out: Optional[Array] = None,
    grad_x_out: Optional[Array] = None,
    tail: str = "zero",
    wgrad: Any = None,
) -> Array:
    """z = x W1^T (+ b1); y = (glu(z) probs) W2^T (+ b2_scale b2), for the rows of each group.

    x [rows, H], or [T, H] with row_idx [rows] (and scatter_idx [T, k], its inverse, where there is
    one); w1 [G, 2F, H], w2 [G, N, F], b1 [G, 2F], b2 [G, N], probs [rows]. b2_scale is "probs",
    None (b2 is added as it is) or an array [rows]; probs scales the activation in any case.
    `layout` says how gate and up lie along the 2F rows of w1 and b1 (see GluLayout), `act` is the
    activation (see Activation). For the backward x, z and probs are kept, and with save_act=True
    the activation too (in 8 bits with a recipe of 8 bits), which saves computing it again; with
    save_z=False z is not, and FC1 runs again. out, grad_x_out and tail: as in grouped_linear.
    """
    optional = {"probs": probs, "b1": b1, "b2": b2, "b2_scale": own_scale(b2_scale)}
    optional.update(row_idx=row_idx, scatter_idx=scatter_idx, out=out, grad_x_out=grad_x_out)
    given = Operands("grouped_mlp", x, recipe, optional)
    given.give_x(compute_dtype)
    given.give_experts((w1, w2), (w1_quantized, w2_quantized), weight_layout, act, layout)
    given.give_fp32("probs")
    given.give_b2_scale(b2_scale)
    given.give_groups(groups)
    given.give_out(tail)
    return given.run(MLP, wgrad, save_act, save_z)


@replayed
def moe(
    x: Array,
    w1: WeightLike[Array],
    w2: WeightLike[Array],
    topk_idx: Optional[Array],
    topk_weights: Array,
    *,
    plan: Optional[Plan] = None,
    b1: Optional[Array] = None,
    b2: Optional[Array] = None,
    b2_scale: BiasScale = "probs",
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    recipe: RecipeLike = None,
    weight_layout: str = "out_in",
    compute_dtype: Optional[Dtype] = None,
    w1_quantized: Optional[WeightCopies] = None,
    w2_quantized: Optional[WeightCopies] = None,
    save_act: bool = False,
    save_z: bool = True,
    wgrad: Any = None,
    group: Any = None,
    micro_batches: int = 1,
) -> Array:
    """y_t = sum over j of topk_weights[t, j] * expert topk_idx[t, j] (x_t), for any model's router.

    x [T, H], topk_idx [T, k] (-1 or G drops the choice), topk_weights [T, k], as is b2_scale, if it
    is an array; the rest as in grouped_mlp. A plan that make_plan has already made of topk_idx is
    used as it is. Rows are gathered inside the ops: no permuted copy of x is kept.

    group is an ExpertParallel whose ranks have the experts: topk_idx is among all of them, weights
    and biases are of this rank's, and neither a plan nor an array b2_scale can be given. The
    ranks call it together. With micro_batches (as many on all ranks) tokens are cut into parts,
    and those of one move beside the experts of another.
    """
    call = "moe"
    given = Operands(call, x, recipe, {"b1": b1, "b2": b2, "b2_scale": own_scale(b2_scale)})
    check_array(given.fw, call, "topk_weights", topk_weights)
    if plan is None:
        check_array(given.fw, call, "topk_idx", topk_idx)
    given.give_experts((w1, w2), (w1_quantized, w2_quantized), weight_layout, act, layout)
    parts = integer(f"{call}: micro_batches", micro_batches, 1)
    run = partial(_on_tokens, b2_scale, compute_dtype, (save_act, save_z))
    if group is None:
        if parts > 1:
            raise invalid(f"{call}: micro_batches is {parts}, but there is no group")
        return run(given, topk_idx, topk_weights, plan, wgrad)
    if not hasattr(group, "run_experts"):
        raise wrong(f"{call}: group", group, "a moire.ExpertParallel")
    group.check_experts(given, plan=plan, b2_scale=own_scale(b2_scale))
    return group.run_experts(given, (topk_idx, topk_weights), wgrad, compute_dtype, run, parts)


def _on_tokens(
    b2_scale, compute_dtype, options, given, topk_idx, topk_weights, plan, wgrad, way=None
):
    """moe of the tokens given.x, whose weights are `given` already."""
    call, fw, fields = given.call, given.fw, given.fields
    given.give_x(compute_dtype)
    if plan is None:
        plan = make_plan(topk_idx, given.weight_shape("w1")[0])
    plan, x = as_plan(fw, call, plan), fields["x"]
    shape = topk_weights.shape
    if shape != plan.scatter_idx.shape or shape[0] != x.shape[0]:
        raise invalid(
            f"{call}: topk_weights is {list(shape)} and topk_idx {list(plan.scatter_idx.shape)}, "
            f"must both be [T, k] with T = {x.shape[0]}"
        )
    fields["topk_weights"] = as_fp32(fw, call, "topk_weights", topk_weights)
    given.give_b2_scale(b2_scale, shape)
    given.give_plan(plan)
    out_dtype = fw.float32 if given.result == fw.float32 else x.dtype
    options = wgrad, *options, out_dtype
    return given.run(MOE, *options) if way is None else way.run(given, *options)


def grouped_mm(
    a: Tensor,
    b_t: Tensor,
    offs: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    out_dtype: Optional[Dtype] = None,
) -> Tensor:
    """torch's grouped_mm for its ragged forms; offs [G] holds cumulative ends, int32 or int64.

    a [rows, K] with b_t [G, K, N]: rows of a are ragged, result [rows, N], its tail zeros (torch
    leaves it undefined). a [M, K] with b_t [K, N]: the contraction is ragged, result [G, M, N],
    zeros for an empty group.
    """
    call = "grouped_mm"
    fw = framework_of(call, {"a": a, "b_t": b_t}, {"offs": offs})
    if fw is Numpy:
        raise unsupported(
            f"{call}: has torch's signature and takes Torch tensors; for NumPy arrays use "
            f"grouped_linear"
        )
    if bias is not None:
        raise unsupported(f"{call}: bias is not supported, as in torch; use moire.grouped_linear")
    if offs is None or (a.ndim, b_t.ndim) not in ((2, 3), (2, 2)):
        offs_is = "absent" if offs is None else f"{list(offs.shape)}"
        raise unsupported(
            f"{call}: a is {list(a.shape)}, b_t is {list(b_t.shape)}, offs is {offs_is}; the "
            f"ragged forms are 2-D x 3-D (ragged rows) and 2-D x 2-D (ragged contraction), both "
            f"with offs; for the others use torch.bmm or a loop"
        )
    inner = a.shape[1], b_t.shape[-2]
    if inner[0] != inner[1]:
        raise invalid(
            f"{call}: a is {list(a.shape)} but b_t is {list(b_t.shape)}: {inner[0]} and "
            f"{inner[1]} must be equal"
        )
    groups = Groups(ends=offs, capacity=a.shape[0] if b_t.ndim == 3 else a.shape[1])
    if b_t.ndim == 3 and b_t.shape[0] != groups.num_groups:
        raise invalid(f"{call}: b_t has {b_t.shape[0]} groups but offs has {groups.num_groups}")
    dtype = a.dtype if out_dtype is None else fw.compute_dtype(f"{call}: out_dtype", out_dtype)
    fields = {"a": a, "b_t": b_t}
    groups.give(fields, a, groups.capacity)
    return run(_GROUPED_MM, fw, fields, dtype)


def call(name: str, /, **fields: Any) -> None:
    """Runs moire_<name> on the fields of its struct in moire.h: `call("grouped_mlp_backward", x=x,
    ..., grad_x=grad_x)`.

    Arrays are all Torch tensors, whatever autograd thinks of them, or all NumPy arrays. A weight is
    one packed array or a list of matrices, with <weight>_layout beside it; a moire_quantized is
    (data, scales), E8M0 scales may be uint8; moire_groups are offsets, num_groups and capacity, the
    activation and the layout of gate and up what Activation and GluLayout take; from and to are
    from_ and to_. What is left out is zero. Nothing is made, cast or returned: outputs ("out",
    "in/out" in moire.h) are arrays of the caller, overwritten as the entry says, and the workspace
    is seen to. explain() knows the call, strict() and settings() hold for it.
    """
    entry = ENTRIES[choice("call: name", name, ENTRIES)]
    for key in fields:
        if key not in entry.kinds:
            keywords = ", ".join(sorted(entry.kinds))
            raise invalid(f"{name}: {key!r} is no field of it, which are {keywords}")
    fields = {key: value for key, value in fields.items() if value is not None}
    arrays = {}
    for key, value in fields.items():
        arrays.update(_arrays_of(name, key, value, entry.kinds[key]))
    fw = framework_of(name, arrays) if arrays else DEFAULT
    values = {k: _value(fw, name, k, v, entry.kinds[k]) for k, v in fields.items()}
    fw.run(name, values)
    for field in entry.outputs:
        given = values.get(field)
        fw.written(*(given if isinstance(given, list) else [given]))


def _arrays_of(name, key, value, kind):
    """The arrays of one field, by what a message calls them."""
    if kind in ARRAYS:
        return {key: value}
    if kind not in LISTS:
        return {}
    is_list = isinstance(value, (list, tuple))
    if kind == "moire_quantized":
        if not is_list or len(value) != 2:
            raise wrong(f"{name}: {key}", value, "(data, scales)")
        return {f"{key}.data": value[0], f"{key}.scales": value[1]}
    return {f"{key}[{i}]": array for i, array in enumerate(value)} if is_list else {key: value}


def _value(fw, name, key, value, kind):
    """As invoke.py takes it."""
    called = f"{name}: {key}"
    if kind in ARRAYS:
        return fw.detached(value)
    if kind in LISTS:
        return [fw.detached(a) for a in (value if isinstance(value, (list, tuple)) else [value])]
    if kind == "moire_activation":
        return Activation.of(value, called).fields
    if kind == "moire_glu_layout":
        return GluLayout.of(value, called).fields
    if kind == "float":
        return number(called, value)
    most = 2 ** (63 if kind in ("int64_t", "form") else 31)
    if kind in ("form", "flags"):
        return [integer(called, n, -most, most - 1) for n in value]
    return integer(called, value, -most, most - 1)


class _GroupedMm(Op):
    """d = a b_t of type `how`: ragged rows of a (b_t of rank 3) or ragged contraction (rank 2)."""

    def forward(self, fw, fields, how):
        a, b_t = fields["a"], fields["b_t"]
        if b_t.ndim == 3:
            return {"d": _ragged_rows(fw, fields, a, b_t, how)}
        return {"d": _ragged_contraction(fw, fields, a.t(), b_t, how)}

    def gradients(self, fw, fields, how, needs, likes):
        a, b_t, found = fields["a"], fields["b_t"], {}
        grad = fw.cast(fields["grad_d"], a.dtype)
        if b_t.ndim == 3:
            if needs["a"]:
                found["a"] = _ragged_rows(fw, fields, grad, b_t.transpose(1, 2), a.dtype)
            if needs["b_t"]:
                found["b_t"] = _ragged_contraction(fw, fields, a, grad, b_t.dtype)
        else:
            if needs["a"]:
                found["a"] = _ragged_rows(fw, fields, b_t, grad.transpose(1, 2), a.dtype).t()
            if needs["b_t"]:
                found["b_t"] = _ragged_rows(fw, fields, a.t(), grad, b_t.dtype)
        return found


def _ragged_rows(fw, groups, a, b_t, dtype):
    """[rows, K] x [G, K, N]: a transposed view of [G, N, K] weights is used as it lies."""
    is_transposed = b_t.stride(-1) != 1
    b = b_t.transpose(1, 2) if is_transposed else b_t
    d = fw.empty(a, (a.shape[0], b_t.shape[2]), dtype)
    fields = {"a": a, "b": [b], "b_layout": 0 if is_transposed else 1, "d": d}
    fw.run("grouped_gemm", {**groups, **fields})
    return d


def _ragged_contraction(fw, groups, a, b, dtype):
    """[rows, M] and [rows, N] to [G, M, N]."""
    d = fw.empty(a, (groups["num_groups"], a.shape[1], b.shape[1]), dtype)
    fw.run("grouped_gemm_wgrad", {**groups, "a": a, "b": b, "d": [d]})
    return d


_GROUPED_MM = _GroupedMm(
    *("grouped_gemm", "grouped_gemm_wgrad"),
    inputs=("a", "b_t"),
    outputs=("d",),
    saved=("a", "b_t", "offsets"),
)
