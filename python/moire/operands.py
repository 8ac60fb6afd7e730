"""The operands of layers as calls take them: arrays, or GroupedTensors for a recipe of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

from .arrays import Numpy, Torch, check_array, check_rank, framework_of
from .errors import invalid
from .formats import COLUMNWISE, ROWWISE
from .grouped_storage import check_groups, pair
from .grouped_tensor import GroupedTensor
from .hints import Array
from .steps import Copies, WeightCopies
from .values import described
from .views import torch

_NO_COPIES = WeightCopies()
Operand = Union[Array, GroupedTensor]
WeightLike = Union[Array, Sequence[Array], GroupedTensor]


class Ragged(NamedTuple):
    """x of a call: an array, or what stands for a GroupedTensor (its shape, its gradient)."""

    fw: Any
    array: Any
    copy: Any  # the GroupedTensor, or None
    operands: Any  # dtype that operands are cast to, or None
    result: Any  # dtype that the result is cast back to, or None

    @classmethod
    def of(cls, call, x, compute_dtype, recipe, optional):
        copy = x if isinstance(x, GroupedTensor) else None
        array = x if copy is None else copy._any.data
        fw = framework_of(call, {"x": array}, optional)
        result = None if compute_dtype is None else x.dtype
        if compute_dtype is not None:
            compute_dtype = fw.compute_dtype(f"{call}: compute_dtype", compute_dtype)
        elif fw is Torch and not array.is_meta:
            device = "cpu" if array.is_cpu else "cuda" if array.is_cuda else array.device.type
            if torch.is_autocast_enabled(device):
                compute_dtype = torch.get_autocast_dtype(device)
        recipe.check_operands(call, x.dtype if compute_dtype is None else compute_dtype)
        check_rank(call, "x", x, 2)
        if copy is None:
            array = fw.cast(x, compute_dtype)
        else:
            check_recipe(call, "x", copy, recipe, recipe.format)
            array = copy.stand_in(f"{call}: x", compute_dtype or x.dtype)
        return cls(fw, array, copy, compute_dtype, result)

    def copies(self, call, groups, row_idx, needs_wgrad, w1, w2=_NO_COPIES):
        """The FP8 copies of x, which belong to `groups`, and those of the weights."""
        copy = self.copy
        if copy is None:
            return Copies(None, None, w1, w2)
        rowwise = pair(self.fw, copy.copy_of(ROWWISE, f"{call}: x"), copy.element)
        if row_idx is None:
            check_groups(call, "x", copy, groups.num_groups, groups.offsets)
        elif copy.has_columnwise or copy.groups is not None:
            raise invalid(
                f"{call}: row_idx is given beside an x that was quantised for groups or "
                f"column-wise; moire.quantize(x, groups, row_idx=row_idx) has the rows in order"
            )
        elif needs_wgrad:
            raise invalid(
                f"{call}: the weight gradient reads x column-wise in the order of the groups, but "
                f"x has only rows of tokens; quantise with row_idx=, groups and columnwise=True"
            )
        return Copies(rowwise, pair(self.fw, copy.columnwise, copy.element), w1, w2)


class Weights(NamedTuple):
    """The weights of G linear layers as every call takes them: one packed tensor or G matrices,
    their layout, and copies of 8 bits beside or instead of them.
    """

    arrays: list  # [] where there are only copies
    layout: int
    shape: tuple  # [G, out, in], or [G, in, out]
    copies: WeightCopies = _NO_COPIES

    @classmethod
    def of(cls, fw, call, name, weights, layout, recipe, quantized=None):
        if isinstance(weights, GroupedTensor):
            if quantized is not None:
                raise invalid(
                    f"{call}: {name} is quantised itself, so {name}_quantized is too much"
                )
            _check_weight_copy(fw, call, name, weights, recipe)
            return cls([], layout, weights.shape, _weight_copies(fw, call, name, weights, layout))
        arrays = _weight_arrays(fw, call, name, weights)
        shape = tuple(arrays[0].shape)
        if len(shape) == 2:
            shape = (len(arrays), *shape)
        if quantized is None:
            return cls(arrays, layout, shape)
        which = f"{name}_quantized"
        if not isinstance(quantized, GroupedTensor):
            raise invalid(f"{call}: {which} is {described(quantized)}, must be a GroupedTensor")
        _check_weight_copy(fw, call, which, quantized, recipe)
        if quantized.shape != shape:
            raise invalid(f"{call}: {which} is {list(quantized.shape)} but {name} is {list(shape)}")
        return cls(arrays, layout, shape, _weight_copies(fw, call, which, quantized, layout))

    @property
    def num_groups(self):
        return self.shape[0]

    @property
    def out_features(self):
        return self.shape[1 if self.layout == 0 else 2]

    @property
    def in_features(self):
        return self.shape[2 if self.layout == 0 else 1]

    def check_backward(self, call, name):
        """Without a master to quantise, a backward needs the copy of the other direction."""
        if not self.arrays and self.copies.backward is None:
            raise invalid(
                f"{call}: the gradient of x reads {name} in blocks along its outputs, which the "
                f"GroupedTensor does not have; quantise it in both directions"
            )


def _weight_arrays(fw, call, name, weights):
    if not isinstance(weights, (list, tuple)):
        check_array(fw, call, name, weights)
        if weights.ndim != 3:
            raise invalid(
                f"{call}: {name} is {list(weights.shape)}; needs [groups, out, in] or a list of "
                f"matrices"
            )
        return [weights]
    for i, array in enumerate(weights):
        which = f"{name}[{i}]"
        check_array(fw, call, which, array)
        if array.ndim != 2:
            raise invalid(
                f"{call}: {which} is {list(array.shape)}; a list holds one matrix per group"
            )
    if not weights:
        raise invalid(
            f"{call}: {name} is an empty list; with no groups, give a packed tensor [0, out, in]"
        )
    return list(weights)


def check_recipe(call, name, tensor, recipe, form):
    if not recipe.is_quantized or tensor.form != form:
        needs = f"which needs {form.name}" if recipe.is_quantized else "which reads no 8-bit copies"
        raise invalid(
            f"{call}: {name} is quantised as {tensor.form.name}, but the recipe is "
            f"{recipe.name!r}, {needs}"
        )


def _check_weight_copy(fw, call, name, tensor, recipe):
    check_array(fw, call, name, tensor._any.data)
    check_recipe(call, name, tensor, recipe, recipe.weight_format)
    check_rank(call, name, tensor, 3)


def _weight_copies(fw, call, name, tensor, layout):
    forward = ROWWISE if layout == 0 else COLUMNWISE
    has_both = tensor.has_rowwise and tensor.has_columnwise
    copies = [tensor.copy_of(forward, f"{call}: {name}")]
    copies.append(tensor.copy_of(1 - forward) if has_both else None)
    return WeightCopies(*(pair(fw, copy, tensor.element) for copy in copies))


def check_glu_layout(call, name, weights, layout):
    """That a tagged GroupedTensor has gate and up where the call says."""
    if isinstance(weights, GroupedTensor) and weights.layout not in (None, layout):
        raise invalid(
            f"{call}: {name} was quantised with gate and up in '{weights.layout}', but the layout "
            f"is '{layout}'"
        )


def needs_grad(fw, *arrays):
    """Whether autograd will want a gradient of any of these."""
    if fw is Numpy or not torch.is_grad_enabled():
        return False
    for t in arrays:  # noqa: SIM110 (a generator takes longer than the question)
        if t is not None and t.requires_grad:
            return True
    return False
