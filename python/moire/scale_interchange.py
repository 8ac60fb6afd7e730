"""MXFP8 scales in the layouts of other libraries (see moire_scale_layout of moire.h), out of a
GroupedTensor and into one.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from .arrays import assign, check_array
from .dtypes import AnyArray
from .errors import invalid, unsupported
from .groups import Groups
from .recipes import DIRECTIONS, ROWWISE, check_direction
from .values import choice, shown

_LAYOUTS = ("canonical", "dense", "padded", "swizzled")
_DENSE = 1
_Self = TypeVar("_Self", bound="Interchangeable")
_PADDED_OUTER, _PADDED_BLOCKS = 128, 4


class Interchangeable:
    """The two ways of a GroupedTensor."""

    def export_scales(self, layout: str = "dense", direction: str = "rowwise") -> Any:
        """MXFP8 scales of one direction as others keep them (uint8, E8M0):

        dense     row-wise [rows, blocks]; column-wise the groups' blocks without gaps
        padded    of each group [rows or columns, blocks], zero-padded to multiples of 128 and 4
        swizzled  the same in tiles of 128 x 4, as Blackwell's tensor cores read them
        """
        scales = _Scales("export_scales", self, layout, direction)
        target = scales.fw.empty(scales.own, scales.shape(scales.layout), scales.own.dtype)
        scales.convert(scales.flat, scales.own_layout, target, scales.layout)
        return target

    def import_scales(
        self: _Self, scales: AnyArray, layout: str = "dense", direction: str = "rowwise"
    ) -> _Self:
        """Takes scales that export_scales could have returned; returns the object itself."""
        call = "import_scales"
        ours = _Scales(call, self, layout, direction)
        self.about_to_write(call)
        check_array(ours.fw, call, "scales", scales, "as the tensor's are")
        wanted = ours.shape(ours.layout)
        if tuple(scales.shape) != wanted or scales.dtype != ours.own.dtype:
            raise invalid(
                f"{call}: scales is {shown(scales)}, needs uint8 {list(wanted)} "
                f"({layout}, {direction})"
            )
        # What is converted has to be contiguous: elsewhere through a copy.
        target = ours.fw.contiguous(ours.flat)
        ours.convert(scales, ours.layout, target, ours.own_layout)
        if not ours.fw.is_contiguous(ours.own):
            assign(ours.own, target.reshape(ours.own.shape))
        ours.fw.written(ours.own)
        return self.written()


class _Scales:
    """The scales of one direction as a ragged matrix, which is what moire_convert_scales takes:
    uniform matrices are groups of equal size.
    """

    def __init__(self, call, tensor, layout, direction):
        self.fw, self.call = tensor._fw, call
        self.layout = _LAYOUTS.index(choice(f"{call}: layout", layout, _LAYOUTS[1:]))
        self.direction = check_direction(f"{call}: direction", direction)
        if tensor.form.name != "mxfp8":
            raise unsupported(
                f"{call}: format is {tensor.form.name}, whose FP32 scales have one layout only: "
                f"take them from .{DIRECTIONS[self.direction]}.scales"
            )
        self.block = tensor.form.block
        self.own = tensor.copy_of(self.direction, call).scales
        *matrices, n, self.k = tensor.shape
        count, self.groups = math.prod(matrices), tensor.groups
        if self.groups is None:
            self.groups = Groups(splits=[n] * count)
        self.rows, self.splits = count * n, self.groups.splits.tolist()
        # Column-wise scales of uniform matrices have no gaps between the groups.
        is_dense = tensor.ndim == 3 and self.direction != ROWWISE
        self.own_layout = _DENSE if is_dense else 0
        self.flat = self.own.reshape(-1, self.own.shape[-1])

    def shape(self, layout):
        """Of scales in `layout`: what these groups need."""
        blocks, is_padded = _ceil(self.k, self.block), layout > _DENSE
        if layout == 0:
            assert self.direction != ROWWISE
            return (self.rows // self.block + len(self.splits), self.k)
        if self.direction == ROWWISE:
            if not is_padded:
                return (self.rows, blocks)
            rows = sum(_up(m, _PADDED_OUTER) for m in self.splits)
            return (rows, _up(blocks, _PADDED_BLOCKS))
        blocks = [_ceil(m, self.block) for m in self.splits]
        if not is_padded:
            return (sum(blocks), self.k)
        return (sum(_up(b, _PADDED_BLOCKS) for b in blocks), _up(self.k, _PADDED_OUTER))

    def convert(self, source, from_layout, target, to_layout):
        """One side of moire_convert_scales has to be canonical."""
        if from_layout == to_layout:
            assign(target, source)
            return
        if 0 not in (from_layout, to_layout):
            between = self.fw.empty(source, self.shape(0), source.dtype)
            self.convert(source, from_layout, between, 0)
            source, from_layout = between, 0
        fields = {"source": source, "target": target, "from_": from_layout, "to_": to_layout}
        fields.update(direction=self.direction, k=self.k)
        self.groups.give(fields, source, self.rows)
        self.fw.run("convert_scales", fields)


def _ceil(size, block):
    return (size + block - 1) // block


def _up(size, multiple):
    return _ceil(size, multiple) * multiple
