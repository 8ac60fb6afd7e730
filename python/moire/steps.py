"""What each function runs, forward and backward, as calls of the C entries on either kind of array.

`fw` is arrays.Numpy or arrays.Torch. Nothing is cast and nothing is differentiated here:
autograd.py, functional.py and gradients.py do that around it. Where a recipe is one of 8 bits,
copies are [data, scales], and an incoming gradient may be a GroupedTensor.
"""

from typing import Any, NamedTuple

from .formats import COLUMNWISE, DIRECTIONS, ROWWISE
from .grouped_storage import check_groups, empty_copy, pair
from .grouped_tensor import GroupedTensor
from .recipes import Recipe

TAILS = ("zero", "untouched")


class LinearSpec(NamedTuple):
    """What a grouped linear layer is, besides its arrays."""

    num_groups: Any
    capacity: Any
    layout: int  # of the weight
    out_features: Any
    tail: int = 0
    compute_dtype: Any = None  # that weights are cast to
    recipe: Recipe = Recipe()
    saves_copy: bool = False  # of x, column-wise, for the weight gradient

    def groups(self, offsets):
        return {"offsets": offsets, "num_groups": self.num_groups, "capacity": self.capacity}


class MlpSpec(NamedTuple):
    """What a grouped MLP is, besides its arrays."""

    num_groups: Any
    capacity: Any
    w1_layout: int
    w2_layout: int
    num_w1: int  # how many of the arrays are W1's
    hidden: Any
    width: Any  # F
    activation: tuple
    glu_layout: tuple
    tail: int = 0
    saves: bool = False  # z is kept for a backward
    saves_act: bool = False  # and act: memory for time
    compute_dtype: Any = None
    recipe: Recipe = Recipe()
    saves_copy: bool = False

    def groups(self, offsets):
        return {"offsets": offsets, "num_groups": self.num_groups, "capacity": self.capacity}

    def operands(self, fw, arrays):
        """(W1, W2), each a list, in the type that they are multiplied in."""
        if self.compute_dtype is not None:
            arrays = [fw.cast(t, self.compute_dtype) for t in arrays]
        return arrays[: self.num_w1], arrays[self.num_w1 :]


class WeightCopies(NamedTuple):
    """A weight in 8 bits for its two products: blocks along in, and along out; or tiles."""

    forward: Any = None
    backward: Any = None


class Copies(NamedTuple):
    """What a call is given in 8 bits: x, and the weight, or W1 and W2."""

    x: Any = None
    x_columnwise: Any = None
    w1: WeightCopies = WeightCopies()
    w2: WeightCopies = WeightCopies()


NO_COPIES = Copies()


class Kept(NamedTuple):
    """What a forward leaves for the backward, besides what it was given."""

    z: Any = None
    act: Any = None
    x_columnwise: Any = None
    act_columnwise: Any = None


NOTHING_KEPT = Kept()


class LinearSaved(NamedTuple):
    """What the backward of a grouped linear layer reads."""

    x: Any  # None where x_columnwise is there
    row_idx: Any
    w: list
    bias: Any
    scale: Any
    offsets: Any
    x_columnwise: Any = None
    w_copy: Any = None  # in the place of w


class LinearGrads(NamedTuple):
    """Outputs of the backward, each an array to write into or None."""

    x: Any = None
    w: Any = None
    bias: Any = None
    scale: Any = None


class MlpSaved(NamedTuple):
    """What the backward of a grouped MLP reads: all by reference but z (and act, if kept)."""

    x: Any
    row_idx: Any
    w1: list
    w2: list
    b2: Any
    probs: Any
    offsets: Any
    z: Any
    act: Any
    x_columnwise: Any = None
    act_columnwise: Any = None
    w1_copy: Any = None
    w2_copy: Any = None


class MlpGrads(NamedTuple):
    """Outputs of the backward, each an array to write into or None."""

    x: Any = None
    w1: Any = None
    b1: Any = None
    w2: Any = None
    b2: Any = None
    probs: Any = None
    z: Any = None
    act: Any = None
    z_columnwise: Any = None
    act_columnwise: Any = None


class Beta(NamedTuple):
    """0 overwrites a gradient, 1 accumulates; per group where a uint8 array is given."""

    value: int = 0
    per_group: Any = None


def empty_columns(fw, spec, like, columns, element="e4m3"):
    """[data, scales] for a column-wise copy of [capacity, columns]."""
    shape, groups = (spec.capacity, columns), spec.num_groups
    copy = empty_copy(fw, like, spec.recipe.format, element, COLUMNWISE, shape, groups)
    return pair(fw, copy, element)


def requantized(fw, spec, rowwise, offsets):
    """The column-wise copy of a ragged [data, scales]."""
    columns = empty_columns(fw, spec, rowwise[0], rowwise[0].shape[1])
    fw.run(
        "requantize",
        source=rowwise,
        scaling=spec.recipe.format.scaling,
        direction=ROWWISE,
        fractional_scales=int(spec.recipe.fractional_scales),
        target=columns,
        **spec.groups(offsets),
    )
    return columns


def linear_forward(fw, spec, x, row_idx, w, bias, scale, offsets, out=None, copies=NO_COPIES):
    """(y, what is kept for a backward)."""
    y = fw.empty(x, (spec.capacity, spec.out_features), x.dtype) if out is None else out
    columns = _columns_of_x(fw, spec, x, copies)
    fields = {
        "x": x,
        "row_idx": row_idx,
        "w": w,
        "w_layout": spec.layout,
        "bias": bias,
        "scale": scale,
        "y": y,
        "x_columnwise": columns,
        "tail": spec.tail,
        "offsets": offsets,
        "num_groups": spec.num_groups,
        "capacity": spec.capacity,
    }
    if spec.recipe.is_quantized:
        fields.update(spec.recipe.forward_fields)
        _give_x(fields, copies.x)
        _give_weight(fields, "w", copies.w1.forward)
    fw.run_fields("grouped_linear", fields)
    return y, NOTHING_KEPT if columns is None else Kept(x_columnwise=columns)


def linear_backward(fw, spec, saved, grad_y, grads, beta):
    """Writes the gradients that `grads` has arrays for. Beta is that of the weight gradient; a bias
    gradient is always fresh, hence a call of its own beside a beta that accumulates.
    """
    fused = beta.value == 0 and beta.per_group is None
    fields = {
        "x": saved.x,
        "row_idx": saved.row_idx,
        "w": saved.w,
        "w_layout": spec.layout,
        "bias": saved.bias,
        "scale": saved.scale,
        "grad_y": grad_y,
        "grad_x": grads.x,
        "grad_bias": grads.bias,
        "grad_scale": grads.scale,
        "grad_w": grads.w if fused else None,
        "grad_w_layout": spec.layout,
        "offsets": saved.offsets,
        "num_groups": spec.num_groups,
        "capacity": spec.capacity,
    }
    if spec.recipe.is_quantized:
        fields.update(spec.recipe.backward_fields, x_columnwise=saved.x_columnwise)
        _give_weight(fields, "w", saved.w_copy)
        needs = grads.x is not None, grads.w is not None
        _give_grad_y(fw, "grouped_linear_backward", fields, grad_y, *needs)
    fw.run_fields("grouped_linear_backward", fields)
    if not fused and grads.w is not None:
        operands = Wgrad(x=saved.x, x_idx=saved.row_idx, x_columnwise=saved.x_columnwise)
        operands = operands._replace(grad_y=grad_y)
        wgrad(fw, spec.recipe, spec.groups(saved.offsets), spec.layout, operands, grads.w, beta)


class Wgrad(NamedTuple):
    """What a weight gradient is made of: of each operand either rows (gathered where there is an
    index) or the column-wise copy.
    """

    x: Any = None
    x_idx: Any = None
    x_columnwise: Any = None
    grad_y: Any = None
    grad_y_idx: Any = None
    grad_y_columnwise: Any = None


def wgrad(fw, recipe, groups, layout, operands, grad_w, beta):
    """dW = beta dW + dy^T x, or its transpose for [G, in, out] weights: the delayed weight
    gradient.
    """
    x, x_idx, x_columnwise, grad_y, grad_y_idx, grad_y_columnwise = operands
    beta_fields = {"beta": beta.value, "beta_per_group": beta.per_group}
    if recipe.is_quantized:
        call = "grouped_linear_backward"
        fields = {"grad_y_columnwise": grad_y_columnwise, **groups}
        if grad_y_columnwise is None:
            _give_grad_y(fw, call, fields, grad_y, False, True)
        fw.run(
            call,
            x=x,
            row_idx=x_idx if grad_y_idx is None else grad_y_idx,
            x_columnwise=x_columnwise,
            gathered_grad_y=int(grad_y_idx is not None),
            grad_w=grad_w,
            grad_w_layout=layout,
            **fields,
            **beta_fields,
            **recipe.backward_fields,
        )
        return
    a, a_idx, b, b_idx = (
        (grad_y, grad_y_idx, x, x_idx) if layout == 0 else (x, x_idx, grad_y, grad_y_idx)
    )
    fw.run(
        "grouped_gemm_wgrad",
        a=a,
        a_row_idx=a_idx,
        b=b,
        b_row_idx=b_idx,
        d=grad_w,
        **beta_fields,
        **groups,
    )


def mlp_forward(fw, spec, x, row_idx, w1, b1, w2, b2, probs, offsets, out=None, copies=NO_COPIES):
    """(y, what is kept for a backward if the spec saves)."""
    rows, kept = spec.capacity, NOTHING_KEPT
    if spec.saves:
        kept = Kept(
            z=fw.empty(x, (rows, 2 * spec.width), spec.recipe.between(fw, x.dtype)),
            x_columnwise=_columns_of_x(fw, spec, x, copies),
        )
        if spec.saves_act and spec.recipe.is_quantized:
            kept = kept._replace(act_columnwise=empty_columns(fw, spec, x, spec.width))
        elif spec.saves_act:
            kept = kept._replace(act=fw.empty(x, (rows, spec.width), x.dtype))
    y = fw.empty(x, (rows, spec.hidden), x.dtype) if out is None else out
    fields = {
        "x": x,
        "row_idx": row_idx,
        "w1": w1,
        "w1_layout": spec.w1_layout,
        "b1": b1,
        "w2": w2,
        "w2_layout": spec.w2_layout,
        "b2": b2,
        "probs": probs,
        "y": y,
        "z": kept.z,
        "act": kept.act,
        "x_columnwise": kept.x_columnwise,
        "act_columnwise": kept.act_columnwise,
        "tail": spec.tail,
        "offsets": offsets,
        "num_groups": spec.num_groups,
        "capacity": spec.capacity,
        "activation": spec.activation,
        "layout": spec.glu_layout,
    }
    if spec.recipe.is_quantized:
        fields.update(spec.recipe.forward_fields)
        _give_x(fields, copies.x)
        _give_weight(fields, "w1", copies.w1.forward)
        _give_weight(fields, "w2", copies.w2.forward)
    fw.run_fields("grouped_mlp", fields)
    return y, kept


def mlp_backward(fw, spec, saved, grad_y, gathered, grads, beta_w1, beta_w2):
    """Writes the gradients that `grads` has arrays for; grad_y is [T, H] where `gathered`."""
    is_act_saved = saved.act is not None or saved.act_columnwise is not None
    fields = {
        "x": saved.x,
        "row_idx": saved.row_idx,
        "gathered_grad_y": int(gathered),
        "w1": saved.w1,
        "w1_layout": spec.w1_layout,
        "w2": saved.w2,
        "w2_layout": spec.w2_layout,
        "b2": saved.b2,
        "probs": saved.probs,
        "z": saved.z,
        "act": saved.act if grads.act is None else grads.act,
        "act_is_saved": int(is_act_saved),
        "grad_y": grad_y,
        "grad_z": grads.z,
        "grad_x": grads.x,
        "grad_probs": grads.probs,
        "grad_w1": grads.w1,
        "grad_w1_layout": spec.w1_layout,
        "grad_b1": grads.b1,
        "grad_w2": grads.w2,
        "grad_w2_layout": spec.w2_layout,
        "grad_b2": grads.b2,
        "beta_w1": beta_w1.value,
        "beta_w1_per_group": beta_w1.per_group,
        "beta_w2": beta_w2.value,
        "beta_w2_per_group": beta_w2.per_group,
        "offsets": saved.offsets,
        "num_groups": spec.num_groups,
        "capacity": spec.capacity,
        "activation": spec.activation,
        "layout": spec.glu_layout,
    }
    if spec.recipe.is_quantized:
        fields.update(
            spec.recipe.backward_fields,
            x_columnwise=saved.x_columnwise,
            act_columnwise=saved.act_columnwise or grads.act_columnwise,
            grad_z_columnwise=grads.z_columnwise,
        )
        _give_weight(fields, "w1", saved.w1_copy)
        _give_weight(fields, "w2", saved.w2_copy)
        through_w2 = (grads.x, grads.w1, grads.b1, grads.probs, grads.z, grads.z_columnwise)
        needs = any(g is not None for g in through_w2), grads.w2 is not None
        _give_grad_y(fw, "grouped_mlp_backward", fields, grad_y, *needs)
    fw.run_fields("grouped_mlp_backward", fields)


def moe_forward(
    fw,
    spec,
    out_dtype,
    x,
    topk_weights,
    w1,
    b1,
    w2,
    b2,
    offsets,
    gather_idx,
    scatter_idx,
    copies=NO_COPIES,
):
    """Experts' order, MLP and back: y [T, H], and the probs and what else a backward needs."""
    probs = fw.empty(topk_weights, (spec.capacity,), fw.float32)
    permute = {
        "topk_weights": topk_weights,
        "scatter_idx": scatter_idx,
        "probs": probs,
        "offsets": offsets,
        "num_groups": spec.num_groups,
        "capacity": spec.capacity,
    }
    fw.run_fields("permute", permute)
    arrays = (x, gather_idx, w1, b1, w2, b2, probs, offsets)
    rows, kept = mlp_forward(fw, spec, *arrays, copies=copies)
    y = fw.empty(x, (x.shape[0], spec.hidden), out_dtype)
    fw.run_fields("unpermute", {"rows": rows, "scatter_idx": scatter_idx, "y": y})
    return y, probs, kept


def _columns_of_x(fw, spec, x, copies):
    """Where a forward puts the column-wise copy of an x that is not quantised yet."""
    if not spec.saves_copy or copies.x is not None:
        return None
    return empty_columns(fw, spec, x, x.shape[1])


def _give_x(fields, copy):
    if copy is not None:
        fields["x"], fields["x_scales"] = copy


def _give_weight(fields, name, copy):
    """A copy stands in for the weight, of which only the layout is said then."""
    if copy is not None:
        fields[name], fields[f"{name}_quantized"] = [], copy


def _give_grad_y(fw, call, fields, grad_y, needs_rowwise, needs_columnwise):
    if not isinstance(grad_y, GroupedTensor):
        fields["grad_y"] = grad_y
        return
    check_groups(call, "grad_y", grad_y, fields["num_groups"], fields["offsets"])
    fields["grad_y"] = None
    for code, is_needed in ((ROWWISE, needs_rowwise), (COLUMNWISE, needs_columnwise)):
        if is_needed:
            copy = grad_y.copy_of(code, f"{call}: grad_y")
            fields[f"grad_y_{DIRECTIONS[code]}"] = pair(fw, copy, grad_y.element)
