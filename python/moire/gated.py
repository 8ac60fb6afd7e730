"""Gated activations, and conversions between layouts of gate and up, as stateless functions."""

from __future__ import annotations

import math
from typing import Optional, TypeVar

import numpy as np

from .arrays import Numpy, Torch, as_fp32, assign, framework_of, torch
from .autograd import Op, run
from .context import check_backward
from .dtypes import Array, Tensor
from .errors import invalid
from .grouped_tensor import GroupedTensor, follow
from .groups import Groups, as_groups
from .layouts import Activation, ActivationLike, GluLayout, GluLayoutLike, num_halves
from .recipes import DIRECTIONS
from .values import integer

# A type that the library knows for each element size, for what only moves bytes.
_WIDTHS = {1: "uint8", 2: "float16", 4: "int32", 8: "int64"}
Converted = TypeVar("Converted", Tensor, np.ndarray, GroupedTensor)


def glu(
    z: Array,
    probs: Optional[Array] = None,
    *,
    act: ActivationLike = "swiglu",
    layout: GluLayoutLike = "halves",
    groups: Optional[Groups] = None,
) -> Array:
    """act = glu(z) probs: [..., F] of z [..., 2F], or [..., F] if ungated, and probs [...]; in
    FP32, rounded once.

    With `groups`, z is [rows, 2F]; rows past the last group are not read, and zeros in the result.
    """
    fw = framework_of("glu", {"z": z}, {"probs": probs})
    if groups is None and z.ndim not in (0, 2):
        *leading, columns = z.shape
        if probs is not None and list(probs.shape) != leading:
            found = f"probs is {list(probs.shape)} but z is {list(z.shape)}"
            raise invalid(f"glu: {found}, must be {leading}")
        probs = None if probs is None else probs.reshape(-1)
        flat = glu(z.reshape(math.prod(leading), columns), probs, act=act, layout=layout)
        return flat.reshape(*leading, flat.shape[1])
    activation = Activation.of(act, "glu: act").fields
    layout = GluLayout.of(layout, "glu: layout").fields
    if z.ndim != 2 or z.shape[1] % num_halves(layout) != 0:
        wanted = "2F" if num_halves(layout) == 2 else "F"
        raise invalid(f"glu: z is {list(z.shape)}, must be [rows, {wanted}]")
    probs = as_fp32(fw, "glu", "probs", probs)
    fields = {"z": z, "probs": probs, "activation": activation, "layout": layout}
    if groups is not None:
        as_groups("glu", groups).give(fields, z, z.shape[0])
    return run(_GLU, fw, fields)


def convert_glu(
    tensor: Converted, from_layout: GluLayoutLike, to_layout: GluLayoutLike, dim: int = 0
) -> Converted:
    """A new contiguous tensor, the 2F of dimension `dim` in another gate/up layout; any strides.

    Layouts are what GluLayout.of takes: "halves", a block size, a GluLayout. Elements of 1, 2, 4 or
    8 bytes, or a GroupedTensor, whose scales move with its data: exact, and an error where a block
    of scales along `dim` would be torn apart.
    """
    call = "convert_glu"
    from_layout = GluLayout.of(from_layout, f"{call}: from_layout")
    to_layout = GluLayout.of(to_layout, f"{call}: to_layout")
    return _converted(call, tensor, from_layout, to_layout, dim)


def interleave_glu_tensor(tensor: Converted, interleave_size: int, dim: int = 0) -> Converted:
    """Two halves to blocks of this size, as Transformer Engine's (dim=1 of packed [E, 2F, H])."""
    call = "interleave_glu_tensor"
    block = GluLayout(integer(f"{call}: interleave_size", interleave_size, 1))
    return _converted(call, tensor, GluLayout(), block, dim)


def deinterleave_glu_tensor(tensor: Converted, interleave_size: int, dim: int = 0) -> Converted:
    """Blocks of `interleave_size` to two halves: the exact inverse of interleave_glu_tensor."""
    call = "deinterleave_glu_tensor"
    block = GluLayout(integer(f"{call}: interleave_size", interleave_size, 1))
    return _converted(call, tensor, block, GluLayout(), dim)


def _converted(call, tensor, from_layout, to_layout, dim):
    is_quantized = isinstance(tensor, GroupedTensor)
    fw = tensor._fw if is_quantized else framework_of(call, {"tensor": tensor})
    if tensor.ndim == 0:
        raise invalid(f"{call}: tensor has rank 0, must have at least 1")
    dim = integer(f"{call}: dim", dim, -tensor.ndim, tensor.ndim - 1) % tensor.ndim
    if is_quantized and tensor.ndim == 3 and dim == 0:
        raise invalid(
            f"{call}: dim is 0, the groups of a GroupedTensor {list(tensor.shape)}; gate and up "
            "lie along dim=1 or dim=2"
        )
    size = tensor.shape[dim]
    multiple = math.lcm(*(2 * max(layout.block, 1) for layout in (from_layout, to_layout)))
    if size % multiple != 0:
        raise invalid(
            f"{call}: tensor has size {size} along dim {dim}, must be a multiple of {multiple}"
        )
    if is_quantized:
        return _converted_quantized(call, tensor, from_layout, to_layout, dim)
    values = (dim, from_layout.fields, to_layout.fields)
    if fw is Numpy:
        return permuted(fw, *values, tensor)
    return ConvertGluFunction.apply(tensor, *values)


def _converted_quantized(call, tensor, from_layout, to_layout, dim):
    """Data and scales move alike, where a block of scales stays whole."""
    if tensor.layout not in (None, from_layout):
        raise invalid(f"{call}: from_layout is '{from_layout}', but tensor is in '{tensor.layout}'")
    if dim == 0 and not tensor.all_same_shape:
        raise invalid(f"{call}: dim is 0, the ragged rows, which are not gate and up")
    fw, size, layouts = tensor._fw, tensor.shape[dim], (from_layout, to_layout)
    source, copies, fields = tensor.carrier(call), [], [layout.fields for layout in layouts]
    for direction, copy in enumerate((tensor.rowwise, tensor.columnwise)):
        if copy is not None:
            of_scales, used = layouts, size
            if tensor.form.has_blocks_along(direction, dim, tensor.ndim):
                used = size // tensor.form.block
                of_scales = [_in_blocks(call, tensor, at, size, direction) for at in layouts]
            scale_fields = [layout.fields for layout in of_scales]
            data = permuted(fw, dim, *fields, copy.data)
            copy = data, _permuted_scales(fw, dim, scale_fields, copy.scales, used)
        copies.append(copy)
    result = tensor.like(*copies, groups=tensor.groups, layout=to_layout)
    return follow(source, lambda _: (permuted, (Torch, dim, *reversed(fields))), result)


def _permuted_scales(fw, dim, fields, scales, used):
    """Behind the blocks of a 2-D tensor's rows is a row of scales that is nobody's, zeros."""
    moved = permuted(fw, dim, *fields, scales[:used] if dim == 0 else scales)
    if moved.shape == scales.shape:
        return moved
    padded = fw.empty(scales, scales.shape, scales.dtype)
    assign(padded[:used], moved)
    assign(padded[used:], scales[used:])
    return padded


def _in_blocks(call, tensor, layout, size, direction):
    """The layout of scales along a dimension of which `block` elements share one."""
    block = tensor.form.block
    if (layout.block or size // 2) % block != 0:
        raise invalid(
            f"{call}: {DIRECTIONS[direction]} scales cover {block} elements along that dimension, "
            f"which '{layout}' would tear apart; it needs blocks that are multiples of {block}, or "
            f"quantise the converted tensor"
        )
    return GluLayout(layout.block // block, layout.order)


def permuted(fw, dim, from_layout, to_layout, source):
    """Through the library as [outer, size, inner], or [outer, size], of a type of its width."""
    outer, size, inner = source.shape[:dim], source.shape[dim], source.shape[dim + 1 :]
    shape = (math.prod(outer), size, *([math.prod(inner)] if inner else []))
    flat, width = fw.contiguous(source.reshape(shape)), _WIDTHS.get(source.itemsize)
    flat = flat if width is None else flat.view(fw.dtype(width))
    target = fw.empty(flat, flat.shape, flat.dtype)
    fields = {"source": flat, "target": target, "dim": 1, "from_": from_layout, "to_": to_layout}
    fw.run("convert_glu", fields)
    return target.view(source.dtype).reshape(source.shape)


def _activated(fw, fields, how):
    z, halves = fields["z"], num_halves(fields["layout"])
    return {"act": fw.empty(z, (z.shape[0], z.shape[1] // halves), z.dtype)}


_GLU = Op("glu", "glu_backward", _activated, always=("z",))


if torch is not None:

    class ConvertGluFunction(torch.autograd.Function):
        """A permutation; its gradient is the inverse permutation."""

        @staticmethod
        def forward(ctx, source, dim, from_layout, to_layout):
            ctx.values = (dim, to_layout, from_layout)
            return permuted(Torch, dim, from_layout, to_layout, source)

        @staticmethod
        def backward(ctx, grad):
            check_backward([grad])
            return ConvertGluFunction.apply(grad, *ctx.values), None, None, None
