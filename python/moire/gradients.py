"""The backward passes as functions of their own: grouped_linear_backward and grouped_mlp_backward.

Autograd makes the same calls; these are for NumPy arrays, which have no autograd, and for an
incoming gradient that is in 8 bits already, which autograd has no way to pass on.

grad_y [rows, out] is the gradient of y in expert order: an array of the type of x, or, with a
recipe of 8 bits, a GroupedTensor of the call's groups. Row-wise, it gives the gradient of x,
column-wise that of the weight. x and the weights are what the forward was given, a GroupedTensor
where it was one. `wants` names the gradients; they come back under these names, the others are
None. That of x is in expert order, in the type of x, one row per row of grad_y, also where rows
were gathered (row_idx); those of weights, biases, scale and probs are as these are. All are new.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Optional

from .arrays import check_rank
from .dtypes import Array, no_grad
from .errors import invalid
from .grouped_tensor import GroupedTensor
from .groups import Groups
from .layers import LINEAR, MLP
from .layouts import ActivationLike, GluLayoutLike
from .operands import BiasScale, Operand, Operands, WeightCopies, WeightLike, own_scale
from .recipes import RecipeLike
from .values import choice, wrong


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
    b2_scale: Any = None


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
    w_quantized: Optional[WeightCopies] = None,
    wants: Collection[str] = ("x", "w"),
) -> LinearGradients:
    """The gradients of y = grouped_linear(x, w, groups, ...) that `wants` names, of "x", "w",
    "bias" and "scale", as a LinearGradients.

    Those of bias and scale are sums of grad_y itself, which is an array then. For the gradient of w
    an x in 8 bits is read column-wise, and requantised if it has only rows.
    """
    call, optional = "grouped_linear_backward", {"bias": bias, "scale": scale}
    wants = _wanted(call, wants, LinearGradients, optional)
    with no_grad():
        given = Operands(call, x, recipe, {"row_idx": row_idx, **optional}, grad_y=grad_y)
        _give(given, grad_y, groups, wants, {"bias", "scale"})
        given.give_weight("w", w, weight_layout, w_quantized)
        given.give_fp32("scale")
        return LinearGradients(**given.gradients(LINEAR, grad_y, wants, {}))


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
    b2_scale: BiasScale = "probs",
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    row_idx: Optional[Array] = None,
    weight_layout: str = "out_in",
    recipe: RecipeLike = None,
    w1_quantized: Optional[WeightCopies] = None,
    w2_quantized: Optional[WeightCopies] = None,
    wants: Collection[str] = ("x", "w1", "w2"),
) -> MlpGradients:
    """The gradients of y = grouped_mlp(x, w1, w2, groups, ...) that `wants` names, of "x", "w1",
    "b1", "w2", "b2", "probs" and "b2_scale", as an MlpGradients.

    z [rows, 2F] = grouped_linear(x, w1, groups, bias=b1), in BF16 with a recipe of 8 bits, is made
    again where it is not given. The gradients of b2 and of what scales it are sums of grad_y
    itself, which is an array then.
    """
    call, optional = "grouped_mlp_backward", {"probs": probs, "b1": b1, "b2": b2}
    optional["b2_scale"] = own_scale(b2_scale)
    wants = _wanted(call, wants, MlpGradients, optional)
    is_by_probs = b2 is not None and isinstance(b2_scale, str)
    sums = {"b2", "probs"} if is_by_probs else {"b2", "b2_scale"}
    with no_grad():
        given = Operands(call, x, recipe, {"row_idx": row_idx, "z": z, **optional}, grad_y=grad_y)
        _give(given, grad_y, groups, wants, sums)
        given.give_experts((w1, w2), (w1_quantized, w2_quantized), weight_layout, act, layout)
        given.give_fp32("probs")
        given.give_b2_scale(b2_scale)
        return MlpGradients(**given.gradients(MLP, grad_y, wants, {"z": given.fields.pop("z")}))


def _give(given, grad_y, groups, wants, sums):
    """x, grad_y and the groups; of `sums` the gradients are sums of grad_y itself."""
    call, is_quantized = given.call, isinstance(grad_y, GroupedTensor)
    check_rank(call, "grad_y", grad_y, 2)
    given.put_x()
    given.give_groups(groups)
    for name in sorted(sums.intersection(wants)) if is_quantized else ():
        raise invalid(
            f"{call}: wants has {name!r}, a sum of grad_y itself, but grad_y is quantised; give "
            f"the array"
        )


def _wanted(call, wants, gradients, given):
    """The set of names; what is optional has a gradient where it is given."""
    names = gradients._fields
    needs = f"a tuple of names of {', '.join(names)}"
    if not isinstance(wants, (tuple, list, set, frozenset)):
        raise wrong(f"{call}: wants", wants, needs)
    if not wants:
        raise invalid(f"{call}: wants is empty, must be {needs}")
    for name in wants:
        choice(f"{call}: wants", name, names)
        if name in given and given[name] is None:
            raise invalid(f"{call}: wants has {name!r}, but {name} is absent")
    return frozenset(wants)
