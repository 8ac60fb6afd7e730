"""Where the gradient of a GroupedTensor goes: straight through, to what its values were made of."""

from typing import Any, NamedTuple

from .arrays import Numpy
from .errors import invalid
from .views import torch

if torch is not None:
    from torch.compiler import is_compiling


class Edge(NamedTuple):
    """What stands for a GroupedTensor in autograd. Memory is shared with views and with whoever
    took an array, so an edge is right only while the arrays are those that it was made for.
    """

    tensor: Any  # of its shape, without memory; the gradient of this is that of the source
    versions: dict  # of the arrays by name, once they were written


def set_source(target, x, row_idx=None):
    """`target` was written from x, or from its rows `row_idx`."""
    target._edge = None
    if target._fw is not Numpy and torch.is_grad_enabled() and x.requires_grad:
        target._edge = _edge(target, x, row_idx)


def set_copied(target, source):
    """`target` has the values of `source` in memory of its own; `source` is what live() returned
    before that was written.
    """
    target._edge = None if source is None else _edge(target, source)


def set_view(target, source, rows):
    """`target` shows rows of `source`; `rows` is the part of source's edge, or None."""
    target._is_view = True
    target._edge = rows if rows is None else Edge(rows, source._edge.versions)


def live(call, tensor):
    """What stands for `tensor` in autograd where a gradient may be wanted, or None."""
    edge = tensor._edge
    if edge is None or not torch.is_grad_enabled():
        return None
    for name, array in tensor.arrays():
        # Of a direction that requantize added there is no version.
        if was_written(array, edge.versions.get(name)):
            raise invalid(
                f"{call}: {name} of a GroupedTensor that passes a gradient on was overwritten "
                f"through a view or as an array, so the gradient is no longer its source's; "
                f"overwrite the whole with quantize_ or copy_, or take detach()"
            )
    return edge.tensor


def check_target(call, target, wants_gradient):
    """That what is written into `target` may bring a gradient along."""
    if wants_gradient and target._is_view and torch.is_grad_enabled():
        raise invalid(
            f"{call}: the values want a gradient, but go into a view of one group, and the whole "
            f"would not pass it on; write the whole, or detach() the values"
        )


def stand_in(call, tensor, dtype):
    """An array of the shape of a GroupedTensor, whose gradient goes where the tensor came from."""
    source = live(call, tensor)
    if source is None:
        return tensor._fw.stand_in(tensor._any.data, tensor.shape, dtype)
    return source if source.dtype == dtype else _stand_in(source, tensor, dtype)


def dequantized(tensor, values):
    """`values` of dequantize, which pass their gradient on."""
    source = live("dequantize", tensor)
    if source is None:
        return values
    from .autograd_ops import DequantizeFunction

    groups = tensor.groups
    offsets = None if groups is None else groups.offsets_for(values)
    return DequantizeFunction.apply(source, values, offsets)


def converted(target, source, dim, size, from_layout, to_layout):
    """`target` is `source`, as live() returned it, with gate and up in another layout."""
    if source is not None:
        from .autograd_ops import ConvertGluStandInFunction

        values = (dim, size, from_layout, to_layout)
        moved = ConvertGluStandInFunction.apply(source, *values)
        target._edge = Edge(moved, _versions(target))


def _edge(target, x, row_idx=None):
    return Edge(_stand_in(x, target, x.dtype, row_idx), _versions(target))


def _stand_in(x, tensor, dtype, row_idx=None):
    from .autograd_ops import StandInFunction

    return StandInFunction.apply(x, row_idx, tensor._any.data, tensor.shape, dtype)


def _versions(tensor):
    return {name: version_of(array) for name, array in tensor.arrays()}


def version_of(array):
    """Torch's count of the writes into an array; None where nobody counts, as in a graph."""
    if array is None or is_compiling() or array.is_inference():
        return None
    return array._version


def was_written(array, since):
    """Whether it was, as far as anybody counted, `since` version_of() said that."""
    now = version_of(array)
    return now != since and None not in (now, since)
