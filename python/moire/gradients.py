"""The backward passes as functions of their own: grouped_linear_backward and grouped_mlp_backward.

Autograd calls the same steps; these are for NumPy arrays, which have no autograd, and for an
incoming gradient that is in 8 bits already, which autograd has no way to pass on.

grad_y [rows, out] is the gradient of y in expert order: an array of the type of x, or, with a
recipe of 8 bits, a GroupedTensor of the call's groups. Row-wise, it gives the gradient of x,
column-wise that of the weight. x and the weights are what the forward was given, a GroupedTensor
where it was one. `wants` names the gradients; they come back under these names, the others are
None. That of x is in expert order, in the type of x, one row per row of grad_y, also where rows
were gathered (row_idx); those of weights, biases, scale and probs are as these are. No gradient is
accumulated into anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Optional

from . import steps
from .arrays import as_fp32, check_rank, framework_of
from .errors import invalid
from .formats import COLUMNWISE, ROWWISE
from .functional import gating_of
from .grouped_storage import check_groups, pair
from .grouped_tensor import GroupedTensor
from .groups import Groups, as_groups
from .hints import Array
from .layouts import ActivationLike, GluLayoutLike, weight_layout_code
from .operands import Operand, WeightLike, Weights, check_recipe
from .recipes import Recipe, RecipeLike
from .values import choice, described


class LinearGradients(NamedTuple):
    """Of grouped_linear: arrays, of a listed weight a list; None where it was not asked for."""

    x: Any = None
    w: Any = None
    bias: Any = None
    scale: Any = None


class MlpGradients(NamedTuple):
    """Of grouped_mlp: arrays, of a listed weight a list; None where it was not asked for."""

    x: Any = None
    w1: Any = None
    b1: Any = None
    w2: Any = None
    b2: Any = None
    probs: Any = None


def grouped_linear_backward(
    grad_y: Operand[Array],
    x: Operand[Array],
    w: WeightLike[Array],
    groups: Groups,
    *,
    bias: Optional[Array] = None,
    scale: Optional[Array] = None,
    row_idx: Optional[Array] = None,
    weight_layout: str = "out_in",
    recipe: RecipeLike = None,
    w_quantized: Optional[GroupedTensor] = None,
    wants: Collection[str] = ("x", "w"),
) -> LinearGradients:
    """The gradients of y = grouped_linear(x, w, groups, ...) that `wants` names, of "x", "w",
    "bias" and "scale", as a LinearGradients.

    Those of bias and scale are sums of grad_y itself, which is an array then. For the gradient of w
    an x in 8 bits is read column-wise, and requantised if it has only rows.
    """
    call = "grouped_linear_backward"
    optional = {"bias": bias, "scale": scale}
    ragged = _Ragged.of(call, grad_y, x, groups, row_idx, recipe, optional)
    fw, recipe = ragged.fw, ragged.recipe
    wants = _wanted(call, wants, LinearGradients, optional)
    layout = weight_layout_code(call, weight_layout)
    weights = Weights.of(fw, call, "w", w, layout, recipe, w_quantized)
    if "x" in wants:
        weights.check_backward(call, "w")
    if ragged.grad_y_is_quantized and wants & {"bias", "scale"}:
        raise _needs_itself(call, sorted(wants & {"bias", "scale"})[0])
    bias, scale = _plain(fw, bias), _plain(fw, as_fp32(fw, call, "scale", scale))
    spec = steps.LinearSpec(
        *(ragged.num_groups, ragged.capacity, layout, weights.out_features), recipe=recipe
    )
    saved = steps.LinearSaved(
        *(ragged.x, ragged.row_idx, [_plain(fw, t) for t in weights.arrays], bias, scale),
        *(ragged.offsets, ragged.columns(spec, "w" in wants), weights.copies.backward),
    )
    grads = steps.LinearGrads(
        x=ragged.empty_grad_x() if "x" in wants else None,
        w=_empty_weights(fw, call, "w", weights) if "w" in wants else None,
        bias=fw.empty(bias, bias.shape, bias.dtype) if "bias" in wants else None,
        scale=fw.empty(scale, scale.shape, scale.dtype) if "scale" in wants else None,
    )
    steps.linear_backward(fw, spec, saved, ragged.grad_y, grads, steps.Beta())
    return LinearGradients(grads.x, _as_given(grads.w, w), grads.bias, grads.scale)


def grouped_mlp_backward(
    grad_y: Operand[Array],
    x: Operand[Array],
    w1: WeightLike[Array],
    w2: WeightLike[Array],
    groups: Groups,
    *,
    z: Optional[Array] = None,
    probs: Optional[Array] = None,
    b1: Optional[Array] = None,
    b2: Optional[Array] = None,
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    row_idx: Optional[Array] = None,
    weight_layout: str = "out_in",
    recipe: RecipeLike = None,
    w1_quantized: Optional[GroupedTensor] = None,
    w2_quantized: Optional[GroupedTensor] = None,
    wants: Collection[str] = ("x", "w1", "w2"),
) -> MlpGradients:
    """The gradients of y = grouped_mlp(x, w1, w2, groups, ...) that `wants` names, of "x", "w1",
    "b1", "w2", "b2" and "probs", as an MlpGradients.

    z [rows, 2F] = grouped_linear(x, w1, groups, bias=b1), in BF16 with a recipe of 8 bits, is made
    again where it is not given. The gradient of b2, and that of probs where there is b2, are sums
    of grad_y itself, which is an array then.
    """
    call = "grouped_mlp_backward"
    optional = {"z": z, "probs": probs, "b1": b1, "b2": b2}
    ragged = _Ragged.of(call, grad_y, x, groups, row_idx, recipe, optional)
    fw, recipe = ragged.fw, ragged.recipe
    wants = _wanted(call, wants, MlpGradients, optional)
    code = weight_layout_code(call, weight_layout)
    first = Weights.of(fw, call, "w1", w1, code, recipe, w1_quantized)
    second = Weights.of(fw, call, "w2", w2, code, recipe, w2_quantized)
    activation, glu_layout = gating_of(call, ((w1, w1_quantized),), act, layout)
    if wants & {"x", "w1", "b1", "probs"}:
        second.check_backward(call, "w2")
    if "x" in wants:
        first.check_backward(call, "w1")
    sums = {"b2"} if b2 is None else {"b2", "probs"}
    if ragged.grad_y_is_quantized and wants & sums:
        raise _needs_itself(call, sorted(wants & sums)[0])
    b1, b2 = _plain(fw, b1), _plain(fw, b2)
    probs = _plain(fw, as_fp32(fw, call, "probs", probs))
    arrays = [[_plain(fw, t) for t in weights.arrays] for weights in (first, second)]
    if z is None:
        z = _made_again(ragged, arrays[0], first, b1)
    spec = steps.MlpSpec(
        *(ragged.num_groups, ragged.capacity, code, code, len(arrays[0])),
        *(second.out_features, second.in_features, activation.fields, glu_layout.fields),
        recipe=recipe,
    )
    saved = steps.MlpSaved(
        *(ragged.x, ragged.row_idx, *arrays, b2, probs, ragged.offsets, _plain(fw, z), None),
        x_columnwise=ragged.columns(spec, "w1" in wants),
        w1_copy=first.copies.backward,
        w2_copy=second.copies.backward,
    )
    grads = steps.MlpGrads(
        x=ragged.empty_grad_x() if "x" in wants else None,
        w1=_empty_weights(fw, call, "w1", first) if "w1" in wants else None,
        b1=fw.empty(b1, b1.shape, b1.dtype) if "b1" in wants else None,
        w2=_empty_weights(fw, call, "w2", second) if "w2" in wants else None,
        b2=fw.empty(b2, b2.shape, b2.dtype) if "b2" in wants else None,
        probs=fw.empty(probs, probs.shape, probs.dtype) if "probs" in wants else None,
    )
    beta = steps.Beta()
    steps.mlp_backward(fw, spec, saved, ragged.grad_y, False, grads, beta, beta)
    of_weights = _as_given(grads.w1, w1), grads.b1, _as_given(grads.w2, w2), grads.b2
    return MlpGradients(grads.x, *of_weights, grads.probs)


class _Ragged(NamedTuple):
    """grad_y and x of a call, either of them an array or a GroupedTensor."""

    fw: Any
    call: str
    recipe: Recipe
    grad_y: Any
    x: Any  # None where x is a GroupedTensor
    x_copy: Any  # that GroupedTensor
    x_like: Any  # an array of where new ones belong
    x_shape: tuple
    x_dtype: Any
    row_idx: Any
    num_groups: int
    capacity: int
    offsets: Any

    @classmethod
    def of(cls, call, grad_y, x, groups, row_idx, recipe, optional):
        recipe = Recipe.of(recipe, f"{call}: recipe")
        arrays = {
            name: t._any.data if isinstance(t, GroupedTensor) else t
            for name, t in (("grad_y", grad_y), ("x", x))
        }
        fw = framework_of(call, arrays, {**optional, "row_idx": row_idx})
        groups = as_groups(call, groups)
        offsets = groups.offsets_for(arrays["x"])
        for name, tensor in (("grad_y", grad_y), ("x", x)):
            check_rank(call, name, tensor, 2)
            if isinstance(tensor, GroupedTensor):
                check_recipe(call, name, tensor, recipe, recipe.format)
                check_groups(call, name, tensor, groups.num_groups, offsets)
        copy = x if isinstance(x, GroupedTensor) else None
        if copy is not None and row_idx is not None:
            raise invalid(
                f"{call}: row_idx is given beside an x that is quantised; moire.quantize(x, "
                f"groups, row_idx=row_idx) has the rows in order"
            )
        if row_idx is not None:
            check_rank(call, "row_idx", row_idx, 1)
        rows = x if row_idx is None else row_idx
        return cls(
            *(fw, call, recipe),
            grad_y if isinstance(grad_y, GroupedTensor) else fw.detached(grad_y),
            *(None if copy is not None else fw.detached(x), copy, arrays["x"], x.shape, x.dtype),
            *(row_idx, groups.num_groups, groups.rows(rows.shape[0]), offsets),
        )

    @property
    def grad_y_is_quantized(self):
        return isinstance(self.grad_y, GroupedTensor)

    def empty_grad_x(self):
        return self.fw.empty(self.x_like, (self.capacity, self.x_shape[1]), self.x_dtype)

    def rows(self):
        """x row-wise, where it is a GroupedTensor."""
        if self.x_copy is None:
            return None
        copy = self.x_copy.copy_of(ROWWISE, f"{self.call}: x")
        return pair(self.fw, copy, self.x_copy.element)

    def columns(self, spec, is_needed):
        """x column-wise, where it is a GroupedTensor."""
        if self.x_copy is None or not is_needed:
            return None
        if self.x_copy.has_columnwise:
            return pair(self.fw, self.x_copy.copy_of(COLUMNWISE), self.x_copy.element)
        return steps.requantized(self.fw, spec, self.rows(), self.offsets)


def _wanted(call, wants, gradients, given):
    """The set of names; what is optional has a gradient where it is given."""
    names = gradients._fields
    if not isinstance(wants, (tuple, list, set, frozenset)) or not wants:
        found = "empty" if isinstance(wants, (tuple, list, set, frozenset)) else described(wants)
        raise invalid(f"{call}: wants is {found}, must be a tuple of names of {', '.join(names)}")
    for name in wants:
        choice(f"{call}: wants", name, names)
        if name in given and given[name] is None:
            raise invalid(f"{call}: wants has {name!r}, but {name} is absent")
    return frozenset(wants)


def _needs_itself(call, name):
    return invalid(
        f"{call}: wants has {name!r}, a sum of grad_y itself, but grad_y is quantised; give the "
        f"array"
    )


def _plain(fw, array):
    """Without its history in autograd."""
    return None if array is None else fw.detached(array)


def _empty_weights(fw, call, name, weights):
    if not weights.arrays:
        raise invalid(
            f"{call}: wants has {name!r}, but {name} is quantised and has no gradient; give the "
            f"weight itself, and its copies as {name}_quantized"
        )
    return [fw.empty(t, t.shape, t.dtype) for t in weights.arrays]


def _as_given(grads, weights):
    """A list for a list, the one array for a packed tensor."""
    return grads if grads is None or isinstance(weights, (list, tuple)) else grads[0]


def _made_again(ragged, w1, weights, b1):
    """z, rounded as the forward rounded it."""
    fw, recipe = ragged.fw, ragged.recipe
    dtype = recipe.between(fw, ragged.x_dtype)
    z = fw.empty(ragged.x_like, (ragged.capacity, weights.out_features), dtype)
    spec = steps.LinearSpec(
        *(ragged.num_groups, ragged.capacity, weights.layout, weights.out_features), recipe=recipe
    )
    copies = steps.Copies(x=ragged.rows(), w1=weights.copies)
    x = ragged.x_like if ragged.x is None else ragged.x
    arrays = (x, ragged.row_idx, w1, b1, None, ragged.offsets, z)
    return steps.linear_forward(fw, spec, *arrays, copies=copies)[0]
