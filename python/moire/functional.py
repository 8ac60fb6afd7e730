"""The stateless functions of the grouped MLP: grouped_linear, grouped_mlp, moe and grouped_mm.

All take Torch tensors, with gradients, or NumPy arrays, without. Shapes: T tokens, k experts per
token, G groups, H hidden size, F expert width, `rows` rows of the ragged tensors. Weights are one
packed tensor [G, out, in], or a list of G matrices; with weight_layout="in_out" they are [G, in,
out].

compute_dtype=None takes the operands as they are stored (under torch.autocast: its dtype).
Otherwise x and the weights are cast to it at the edge and y comes back in the dtype of x; weight
gradients are computed in the weights' own dtype, so FP32 master weights get FP32 gradients of BF16
products.

recipe (a name or a moire.Recipe) says what the products read. With "mxfp8", "mxfp8_fast" and
"fp8_block" x, the weights, the activation and every gradient are quantised just before the products
that read them: x and incoming gradients from their type (or compute_dtype), weights from their own,
uncast; what an MLP makes between its products is rounded to BF16 first, whatever x is. x may be a
GroupedTensor that is quantised already, and so may weights (then they have no gradient);
w_quantized stands in for a weight whose gradient is wanted (see WeightCache). For the weight
gradient an x in expert order is kept as its 8-bit column-wise copy, an x that rows are
gathered from by reference; Recipe(save=) decides otherwise, moire.explain says what is kept.
"""

from __future__ import annotations

from typing import Any, Optional

from . import steps
from .arrays import Numpy, as_fp32, check_array, check_rank, framework_of, torch
from .errors import invalid, unsupported
from .grouped_tensor import GroupedTensor
from .groups import Groups, as_groups
from .hints import Array, Dtype, Tensor
from .layouts import Activation, ActivationLike, GluLayout, GluLayoutLike, weight_layout_code
from .operands import Operand, Ragged, WeightLike, Weights, check_glu_layout, needs_grad
from .recipes import Recipe, RecipeLike
from .routing import Plan, as_plan, check_inverse, make_plan
from .values import choice, flag

if torch is not None:
    from .autograd import LinearFunction, MlpFunction, MoeFunction
    from .autograd_ops import GroupedMmFunction


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
    w_quantized: Optional[GroupedTensor] = None,
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
    call = "grouped_linear"
    recipe = Recipe.of(recipe, f"{call}: recipe")
    optional = {
        "bias": bias,
        "scale": scale,
        "row_idx": row_idx,
        "scatter_idx": scatter_idx,
        "out": out,
        "grad_x_out": grad_x_out,
    }
    operand = Ragged.of(call, x, compute_dtype, recipe, optional)
    fw, x = operand.fw, operand.array
    layout = weight_layout_code(call, weight_layout)
    weights = Weights.of(fw, call, "w", w, layout, recipe, w_quantized)
    groups = as_groups(call, groups)
    capacity = _capacity(call, groups, x, row_idx)
    spec = steps.LinearSpec(
        groups.num_groups,
        capacity,
        weights.layout,
        weights.out_features,
        _tail(call, tail, out),
        None if recipe.is_quantized else operand.operands,
        recipe,
    )
    out = _out(call, fw, out)
    scale = as_fp32(fw, call, "scale", scale)
    offsets = groups.offsets_for(x)
    check_inverse(fw, call, x, row_idx, scatter_idx, offsets)
    needs_wgrad = needs_grad(fw, *weights.arrays)
    copies = operand.copies(call, groups, row_idx, needs_wgrad, weights.copies)
    if needs_wgrad or needs_grad(fw, x, bias, scale):
        if needs_grad(fw, x):
            weights.check_backward(call, "w")
        spec = spec._replace(saves_copy=needs_wgrad and recipe.saves_copy(row_idx is not None))
        y = LinearFunction.apply(
            *(spec, wgrad, grad_x_out, copies),
            *(x, row_idx, scatter_idx, bias, scale, offsets, out),
            *weights.arrays,
        )
    else:
        arrays = [fw.cast(t, spec.compute_dtype) for t in weights.arrays]
        y, _ = steps.linear_forward(
            fw, spec, x, row_idx, arrays, bias, scale, offsets, out, copies=copies
        )
        fw.written(out)
    return fw.cast(y, operand.result)


def grouped_mlp(
    x: Operand[Array],
    w1: WeightLike[Array],
    w2: WeightLike[Array],
    groups: Groups,
    *,
    probs: Optional[Array] = None,
    b1: Optional[Array] = None,
    b2: Optional[Array] = None,
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    recipe: RecipeLike = None,
    row_idx: Optional[Array] = None,
    scatter_idx: Optional[Array] = None,
    weight_layout: str = "out_in",
    compute_dtype: Optional[Dtype] = None,
    w1_quantized: Optional[GroupedTensor] = None,
    w2_quantized: Optional[GroupedTensor] = None,
    save_act: bool = False,
    out: Optional[Array] = None,
    grad_x_out: Optional[Array] = None,
    tail: str = "zero",
    wgrad: Any = None,
) -> Array:
    """z = x W1^T (+ b1); y = (glu(z) probs) W2^T (+ probs b2), for the rows of each group.

    x [rows, H], or [T, H] with row_idx [rows] (and scatter_idx [T, k], its inverse, where there is
    one); w1 [G, 2F, H], w2 [G, H, F], b1 [G, 2F], b2 [G, H], probs [rows]. `layout` says how gate
    and up lie along the 2F rows of w1 and b1 (see GluLayout), `act` is the activation (see
    Activation). For the backward x, z and probs are kept, and with save_act=True the activation
    too (in 8 bits with a recipe of 8 bits), which saves computing it again. out, grad_x_out and
    tail: as in grouped_linear.
    """
    call = "grouped_mlp"
    recipe = Recipe.of(recipe, f"{call}: recipe")
    optional = {
        "probs": probs,
        "b1": b1,
        "b2": b2,
        "row_idx": row_idx,
        "scatter_idx": scatter_idx,
        "out": out,
        "grad_x_out": grad_x_out,
    }
    operand = Ragged.of(call, x, compute_dtype, recipe, optional)
    fw, x = operand.fw, operand.array
    groups = as_groups(call, groups)
    capacity = _capacity(call, groups, x, row_idx)
    given = (w1, w1_quantized), (w2, w2_quantized)
    pair = _weights(call, operand, recipe, given, weight_layout)
    gating = gating_of(call, given, act, layout)
    tail = _tail(call, tail, out)
    out = _out(call, fw, out)
    probs = as_fp32(fw, call, "probs", probs)
    offsets = groups.offsets_for(x)
    check_inverse(fw, call, x, row_idx, scatter_idx, offsets)
    save_act = flag("grouped_mlp: save_act", save_act)
    arrays, copies, needs_w1 = _operands(call, operand, pair, groups, row_idx)
    saves = needs_grad(fw, x, probs, b1, b2, *arrays)
    saves_copy = needs_w1 and recipe.saves_copy(row_idx is not None)
    keeps = (saves, save_act, saves_copy)
    spec = _mlp_spec(operand, recipe, groups, capacity, pair, gating, tail, keeps)
    if saves:
        y = MlpFunction.apply(
            *(spec, wgrad, grad_x_out, copies),
            *(x, row_idx, scatter_idx, probs, b1, b2, offsets, out),
            *arrays,
        )
    else:
        w1, w2 = spec.operands(fw, arrays)
        forward = (x, row_idx, w1, b1, w2, b2, probs, offsets, out)
        y, _ = steps.mlp_forward(fw, spec, *forward, copies=copies)
        fw.written(out)
    return fw.cast(y, operand.result)


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
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    recipe: RecipeLike = None,
    weight_layout: str = "out_in",
    compute_dtype: Optional[Dtype] = None,
    w1_quantized: Optional[GroupedTensor] = None,
    w2_quantized: Optional[GroupedTensor] = None,
    save_act: bool = False,
    wgrad: Any = None,
) -> Array:
    """y_t = sum over j of topk_weights[t, j] * expert topk_idx[t, j] (x_t): the seam for any
    model's own router.

    x [T, H], topk_idx [T, k] (-1 or G drops the choice), topk_weights [T, k]; the rest as in
    grouped_mlp. A plan that make_plan has already made of topk_idx is used as it is. Rows are
    gathered inside the ops: no permuted copy of x is kept.
    """
    call = "moe"
    recipe = Recipe.of(recipe, f"{call}: recipe")
    operand = Ragged.of(call, x, compute_dtype, recipe, {"b1": b1, "b2": b2})
    fw, x = operand.fw, operand.array
    check_array(fw, call, "topk_weights", topk_weights)
    if plan is None:
        check_array(fw, call, "topk_idx", topk_idx)
    given = (w1, w1_quantized), (w2, w2_quantized)
    pair = _weights(call, operand, recipe, given, weight_layout)
    if plan is None:
        plan = make_plan(topk_idx, pair[0].num_groups)
    plan = as_plan(fw, call, plan)
    shape = topk_weights.shape
    if shape != plan.scatter_idx.shape or shape[0] != x.shape[0]:
        raise invalid(
            f"{call}: topk_weights is {list(shape)} and topk_idx "
            f"{list(plan.scatter_idx.shape)}, "
            f"must both be [T, k] with T = {x.shape[0]}"
        )
    capacity = plan.gather_idx.shape[0]
    groups = Groups.over(plan.offsets)
    gating = gating_of(call, given, act, layout)
    topk_weights = as_fp32(fw, call, "topk_weights", topk_weights)
    save_act = flag("moe: save_act", save_act)
    out_dtype = fw.float32 if operand.result == fw.float32 else x.dtype
    arrays, copies, needs_w1 = _operands(call, operand, pair, groups, plan.gather_idx)
    saves = needs_grad(fw, x, topk_weights, b1, b2, *arrays)
    keeps = (saves, save_act, needs_w1 and recipe.saves_copy(True))
    spec = _mlp_spec(operand, recipe, groups, capacity, pair, gating, 0, keeps)
    if saves:
        inputs = (x, topk_weights, b1, b2, *plan, *arrays)
        y = MoeFunction.apply(spec, wgrad, out_dtype, copies, *inputs)
    else:
        w1, w2 = spec.operands(fw, arrays)
        forward = (x, topk_weights, w1, b1, w2, b2, *plan)
        y, *_ = steps.moe_forward(fw, spec, out_dtype, *forward, copies=copies)
    return fw.cast(y, operand.result)


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
            f"ragged forms are 2-D x 3-D "
            "(ragged rows) and 2-D x 2-D (ragged contraction), both with offs; for the "
            "others use torch.bmm or a loop"
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
    return GroupedMmFunction.apply(a, b_t, groups.offsets_for(a), groups.num_groups, dtype)


def _weights(call, operand, recipe, given, layout):
    """Weights of FC1 and FC2, each given as (weight, copy or None)."""
    (w1, w1_quantized), (w2, w2_quantized) = given
    layout = weight_layout_code(call, layout)
    return (
        Weights.of(operand.fw, call, "w1", w1, layout, recipe, w1_quantized),
        Weights.of(operand.fw, call, "w2", w2, layout, recipe, w2_quantized),
    )


def _mlp_spec(operand, recipe, groups, capacity, weights, gating, tail, keeps):
    w1, w2 = weights
    saves, saves_act, saves_copy = keeps
    # NOTE: by position, which takes a third of the time that fifteen keywords do.
    return steps.MlpSpec(
        groups.num_groups,
        capacity,
        w1.layout,
        w2.layout,
        len(w1.arrays),
        w2.out_features,
        w2.in_features,
        gating[0].fields,
        gating[1].fields,
        tail,
        saves,
        saves and saves_act,
        None if recipe.is_quantized else operand.operands,
        recipe,
        saves and saves_copy,
    )


def gating_of(call, given, act, layout):
    """(Activation, GluLayout): the layout is that of W1, wherever W1 has a tag."""
    activation = Activation.of(act, f"{call}: act")
    layout = GluLayout.of(layout, f"{call}: layout")
    check_glu_layout(call, "w1", given[0][0], layout)
    check_glu_layout(call, "w1_quantized", given[0][1], layout)
    return activation, layout


def _operands(call, operand, weights, groups, row_idx):
    """(weight arrays, all copies, whether the gradient of W1 is wanted)."""
    w1, w2 = weights
    fw, arrays = operand.fw, [*w1.arrays, *w2.arrays]
    needs_w1, needs_x = needs_grad(fw, *w1.arrays), needs_grad(fw, operand.array)
    copies = operand.copies(call, groups, row_idx, needs_w1, w1.copies, w2.copies)
    if needs_x:
        w1.check_backward(call, "w1")
    if needs_w1 or needs_x:
        w2.check_backward(call, "w2")
    return arrays, copies, needs_w1


def _capacity(call, groups, x, row_idx):
    rows = x if row_idx is None else check_rank(call, "row_idx", row_idx, 1)
    return groups.rows(rows.shape[0])


def _out(call, fw, out):
    """A caller's buffer, which may be overwritten."""
    if out is None or fw is Numpy:
        return out
    if torch.is_grad_enabled() and out.is_leaf and out.requires_grad:
        raise invalid(f"{call}: out is a leaf that requires grad and would be overwritten")
    return fw.to_write(out)


def _tail(call, tail, out):
    """The tail of moire.h; there is a buffer where it is to stay."""
    code = steps.TAILS.index(choice(f"{call}: tail", tail, steps.TAILS))
    if code != 0 and out is None:
        raise invalid(
            f"{call}: tail is 'untouched' but out is absent; it needs a buffer whose tail stays"
        )
    return code
