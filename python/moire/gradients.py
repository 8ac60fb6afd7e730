"""The backward passes as functions of their own: grouped_linear_backward and grouped_mlp_backward.

Autograd makes the same calls; these are for NumPy arrays, which have no autograd, and for an
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

from .arrays import as_fp32, check_rank, framework_of
from .errors import invalid
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE
from .grouped_storage import check_groups, pair
from .grouped_tensor import GroupedTensor
from .groups import Groups, as_groups
from .hints import Array
from .layers import copy_for_backward, features, requantized
from .layouts import ActivationLike, GluLayoutLike
from .operands import Operand, WeightLike, check_backward, check_recipe, gating, give_weight
from .raw import call
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
    optional = {"row_idx": row_idx, "bias": bias, "scale": scale}
    given = _Given("grouped_linear_backward", grad_y, x, groups, recipe, optional)
    given.wants = _wanted(given.call, wants, LinearGradients, optional)
    given.give_fp32("scale")
    given.give_weight("w", w, weight_layout, w_quantized, {"x"})
    given.needs_itself({"bias", "scale"})
    return LinearGradients(**given.run(by_rows={"x"}, by_columns={"w"}))


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
    optional = {"row_idx": row_idx, "z": z, "probs": probs, "b1": b1, "b2": b2}
    given = _Given("grouped_mlp_backward", grad_y, x, groups, recipe, optional)
    given.wants = _wanted(given.call, wants, MlpGradients, optional)
    given.give_fp32("probs")
    given.give_weight("w1", w1, weight_layout, w1_quantized, {"x"})
    given.give_weight("w2", w2, weight_layout, w2_quantized, {"x", "w1", "b1", "probs"})
    act, layout = gating(given.call, act, layout, w1, w1_quantized)
    given.fields.update(activation=act, layout=layout)
    given.needs_itself({"b2"} if b2 is None else {"b2", "probs"})
    if z is None:
        given.make_z()
    return MlpGradients(**given.run(by_rows={"x", "w1", "b1", "probs"}, by_columns={"w2"}))


class _Given:
    """What a backward was given, in `fields`; grad_y and x are arrays or GroupedTensors."""

    def __init__(self, call, grad_y, x, groups, recipe, optional):
        self.call, self.grad_y, self.x = call, grad_y, x
        self.recipe = Recipe.of(recipe, f"{call}: recipe")
        tensors = {"grad_y": grad_y, "x": x}
        arrays = {n: t._any.data if _is_quantized(t) else t for n, t in tensors.items()}
        self.fw, self.like = framework_of(call, arrays, optional), arrays["x"]
        groups, row_idx = as_groups(call, groups), optional["row_idx"]
        offsets = groups.offsets_for(self.like)
        for name, tensor in tensors.items():
            check_rank(call, name, tensor, 2)
            if _is_quantized(tensor):
                check_recipe(call, name, tensor, self.recipe, self.recipe.format)
                check_groups(call, name, tensor, groups.num_groups, offsets)
                arrays[name] = None
        if _is_quantized(x) and row_idx is not None:
            raise invalid(
                f"{call}: row_idx is given beside an x that is quantised; moire.quantize(x, "
                f"groups, row_idx=row_idx) has the rows in order"
            )
        rows = x if row_idx is None else check_rank(call, "row_idx", row_idx, 1)
        self.ragged = {"offsets": offsets, "num_groups": groups.num_groups}
        self.ragged["capacity"] = groups.rows(rows.shape[0])
        self.fields = {**arrays, **optional, **self.ragged, **self.recipe.backward_fields}
        self.listed = {}  # weights: whether they were given as lists

    def give_fp32(self, name):
        self.fields[name] = as_fp32(self.fw, self.call, name, self.fields[name])

    def give_weight(self, name, weights, layout, quantized, readers):
        """Gradients of the `readers` are products with it."""
        give_weight(self.fw, self.call, self.fields, name, weights, layout, self.recipe, quantized)
        self.listed[name] = isinstance(weights, (list, tuple))
        if self.wants & readers:
            check_backward(self.call, self.fields, name, self.recipe)

    def needs_itself(self, sums):
        """Gradients that are sums of grad_y itself, not of its copies."""
        for name in sorted(self.wants & sums):
            if _is_quantized(self.grad_y):
                raise invalid(
                    f"{self.call}: wants has {name!r}, a sum of grad_y itself, but grad_y is "
                    f"quantised; give the array"
                )

    def make_z(self):
        """FC1 again, rounded as the forward rounded it."""
        fw, fields = self.fw, self.fields
        copy, x, scales = fields.get("w1_quantized"), fields["x"], None
        if _is_quantized(self.x):
            x, scales = self._copy("x", ROWWISE)
        shape = (fields["capacity"], features(fields, "w1")[0])
        fields["z"] = fw.empty(self.like, shape, self.recipe.between(fw, self.x.dtype))
        call(
            "grouped_linear",
            x=x,
            x_scales=scales,
            row_idx=fields["row_idx"],
            w=fields["w1"] if copy is None else [],
            w_layout=fields["w1_layout"],
            w_quantized=copy,
            bias=fields["b1"],
            y=fields["z"],
            **self.ragged,
            **self.recipe.forward_fields,
        )

    def run(self, by_rows, by_columns):
        """The gradients by name. Those `by_rows` are products with grad_y row-wise, those
        `by_columns` with its other copy.
        """
        fields, found = self.fields, {name: self._empty(name) for name in self.wants}
        for name in self.listed:
            copy = fields[f"{name}_quantized"] = copy_for_backward(fields, name, self.recipe)
            fields.pop(f"{name}_copy", None)
            fields[name] = fields[name] if copy is None else []
            fields[f"grad_{name}_layout"] = fields[f"{name}_layout"]
        if _is_quantized(self.x) and self.wants & {"w", "w1"}:
            fields["x_columnwise"] = self._columns_of_x()
        for readers, direction in ((by_rows, ROWWISE), (by_columns, COLUMNWISE)):
            if _is_quantized(self.grad_y) and self.wants & readers:
                fields[f"grad_y_{DIRECTIONS[direction]}"] = self._copy("grad_y", direction)
        fields.pop("b1", None)  # was read for z
        call(self.call, **fields, **{f"grad_{name}": array for name, array in found.items()})
        packed = {
            n: found[n][0] for n, is_list in self.listed.items() if n in found and not is_list
        }
        return {**found, **packed}

    def _empty(self, name):
        fw, fields = self.fw, self.fields
        if name == "x":
            return fw.empty(self.like, (fields["capacity"], self.x.shape[1]), self.x.dtype)
        like = fields[name]
        if name not in self.listed:
            return fw.empty(like, like.shape, like.dtype)
        if not like:
            raise invalid(
                f"{self.call}: wants has {name!r}, but {name} is quantised and has no gradient; "
                f"give the weight itself, and its copies as {name}_quantized"
            )
        return [fw.empty(t, t.shape, t.dtype) for t in like]

    def _copy(self, name, direction):
        tensor = getattr(self, name)
        return pair(self.fw, tensor.copy_of(direction, f"{self.call}: {name}"), tensor.element)

    def _columns_of_x(self):
        if self.x.has_columnwise:
            return self._copy("x", COLUMNWISE)
        return requantized(self.fw, self.fields, self.recipe, self._copy("x", ROWWISE))


def _is_quantized(tensor):
    return isinstance(tensor, GroupedTensor)


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
