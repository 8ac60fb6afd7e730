"""What other libraries ask of a parameter that is a GroupedTensor: Megatron's optimizers what it
began as, FSDP2 what it gathers, which are bytes and scales.

FSDP2 splits a parameter, copies the part of its rank into zeros that it asks for, narrows those and
keeps them as a DTensor; the hooks give it what travels, and make the whole again of what came.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from .errors import unsupported
from .grouped_tensor import GroupedTensor

_aten = torch.ops.aten


def has_no_form(name):
    return unsupported(
        f"{name}: a GroupedTensor cannot be shown otherwise, for its scales lie as they do; "
        f"dequantize() gives values that can"
    )


class _WhereKept:
    """A method that tensors have of which a first value was kept: Megatron's optimizers go by
    whether it is there.
    """

    def __init__(self, method):
        self._method = method

    def __get__(self, tensor, cls=None):
        if getattr(tensor, "_init_value", None) is None:
            raise AttributeError(f"{self._method.__name__}: of this tensor nothing was preserved")
        return functools.partial(self._method, tensor)


class Trained(GroupedTensor):
    """By the names of Transformer Engine's tensors, and of torch.distributed.fsdp.fully_shard."""

    _init_value = None  # [what a module keeps], [None] once it is cleared

    @_WhereKept
    def get_high_precision_init_val(self) -> Optional[torch.Tensor]:
        """On the CPU what it was first quantised from, until it is cleared; else None."""
        return self._init_value[0]

    @_WhereKept
    def clear_high_precision_init_val(self) -> None:
        self._init_value = [None]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The arrays of this rank's experts, as bytes."""
        if outer_size[0] % mesh.size() != 0:
            raise unsupported(
                f"fully_shard: a weight in 8 bits has {outer_size[0]} experts, of which "
                f"{mesh.size()} ranks cannot have as many each; shard it over ranks that can"
            )
        return tuple(array.view(torch.uint8) for _, array in self.arrays()), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """All experts on the memory that was gathered into, which is the same each time."""
        if out is not None:
            return None
        if len(gathered) < len(list(self.arrays())):  # of one rank Torch passes on the first alone
            return self.mapped(torch.Tensor.detach, dtype=param_dtype), ()
        arrays = iter(gathered)
        return self.mapped(lambda mine: next(arrays).view(mine.dtype), dtype=param_dtype), ()


class _Flat(torch.Tensor):
    """What view(-1) gives: FSDP2 keeps it and reads nothing, and there is nothing to read."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise has_no_form("view")


def _view(tensor, shape):
    if tuple(shape) in ((-1,), (tensor.numel(),)):
        like = {"dtype": tensor.dtype, "device": tensor.device}
        return torch.Tensor._make_wrapper_subclass(_Flat, (tensor.numel(),), **like)
    if tuple(shape) != tuple(tensor.shape):
        raise has_no_form("view")
    return tensor.detach()


def _as_strided(tensor, shape, strides, offset=None):
    as_it_lies = (1,) if len(shape) == 1 else tensor.stride()
    if tuple(strides) != as_it_lies or offset:
        raise has_no_form("as_strided")
    return _view(tensor, shape)


def _slice(tensor, dim=0, start=None, end=None, step=1):
    if (tensor.ndim, dim, step) != (3, 0, 1):
        raise has_no_form("slice")
    return tensor.rows(0, slice(start, end))


def _split(tensor, size, dim=0):
    return [_slice(tensor, dim, at, at + size) for at in range(0, tensor.shape[0], size)]


def _new_zeros(tensor, shape, dtype=None, device=None, **options):
    """Of as many experts, where nothing else is asked for; else an array."""
    if (tensor.ndim, *shape[1:], dtype, device) != (3, *tensor.shape[1:], None, None):
        return torch.zeros(shape, dtype=dtype or tensor.dtype, device=device or tensor.device)
    made = tensor.mapped(lambda array: array.new_empty((shape[0], *array.shape[1:])))
    return made.zero_()


def _empty_like(tensor, dtype=None, device=None, **options):
    """On the device that to_empty names, for modules that had no memory; else an array."""
    if device is None:
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    return tensor.mapped(lambda array: torch.empty_like(array, device=device))


OPERATIONS = {
    _aten.empty_like.default: _empty_like,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.as_strided.default: _as_strided,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.new_zeros.default: _new_zeros,
}
