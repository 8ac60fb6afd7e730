"""A GroupedTensor outside of moire: as arrays by name and tags, for state_dicts and files, and its
MXFP8 scales in the layouts of other libraries (see moire_scale_layout of moire.h).
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Optional, TypeVar

from .arrays import COMPUTE_DTYPES, DEFAULT, assign, check_array, framework_of
from .dtypes import AnyArray
from .errors import invalid, unsupported
from .grouped_storage import parts_of
from .groups import Groups
from .layouts import GluLayout
from .recipes import DIRECTIONS, ROWWISE
from .values import choice, described, dtype_name, mapping, shown, wrong

_LAYOUTS = ("canonical", "dense", "padded", "swizzled")
_DENSE = 1
_PADDED_OUTER, _PADDED_BLOCKS = 128, 4
_Self = TypeVar("_Self", bound="Interchangeable")


class Interchangeable:
    """What a GroupedTensor is there, and how it comes back."""

    def tags(self) -> dict[str, str]:
        """What the arrays do not say, as strings; from_state_dict makes the tensor of both."""
        found = {"format": self.form.name, "element": self.element, "dtype": dtype_name(self)}
        if self.layout is not None:
            found.update(glu_block=str(self.layout.block), glu_order=self.layout.order)
        if self.fractional_scales:
            found["fractional_scales"] = "true"
        return found

    def state_dict(self) -> OrderedDict[str, Any]:
        """Arrays by name, and `tags` in the metadata of the dict, as a module's state_dict has."""
        state = OrderedDict(self.arrays())
        if self.groups is not None:
            state["groups.offsets"] = self.groups.offsets_for(self._any.data)
        state._metadata = OrderedDict({"": self.tags()})
        return state

    def load_state_dict(self: _Self, state: Mapping[str, Any]) -> _Self:
        """Takes a state_dict's bytes into its own memory; its tags, if any, must be the same."""
        call = "load_state_dict"
        tags = _tags_of(call, state) or self.tags()
        for name, ours in self.tags().items():
            self.check_same(call, name, tags.get(name, "absent"), ours)
        return self.copy_(self.from_state_dict(state, {**self.tags(), **tags}))

    @classmethod
    def from_state_dict(
        cls: type[_Self], state: Mapping[str, Any], tags: Optional[Mapping[str, str]] = None
    ) -> _Self:
        """A tensor on the arrays of a state_dict; `tags` where the dict's metadata has none."""
        call = "from_state_dict"
        tags = _tags_of(call, state, tags)
        if tags is None:
            raise invalid(f"{call}: the dict has no metadata, needs the tags beside it")
        known = {part for name in DIRECTIONS for part in parts_of(name)} | {"groups.offsets"}
        unknown = [name for name in state if name not in known]
        if unknown:
            raise invalid(f"{call}: found {described(unknown[0])}, which no GroupedTensor has")
        fw = framework_of(call, state) if state else DEFAULT
        copies, more = {}, {}
        for name in DIRECTIONS:
            present = [part for part in parts_of(name) if part in state]
            if len(present) == 1:
                raise invalid(f"{call}: has {present[0]} but not the other of {parts_of(name)}")
            if present:
                copies[name] = tuple(state[part] for part in present)
        for tag in ("dtype", "element", "format"):
            if tag not in tags:
                raise invalid(f"{call}: the tags have no {tag!r}")
        more["dtype"] = fw.dtype(choice(f"{call}: the tag 'dtype'", tags["dtype"], COMPUTE_DTYPES))
        if "glu_block" in tags:
            block = tags["glu_block"]
            if not re.fullmatch("[0-9]{1,18}", block):
                raise invalid(f"{call}: the tag 'glu_block' is {block!r}, must be a number")
            more["layout"] = GluLayout(int(block), tags.get("glu_order"))
        fractional = tags.get("fractional_scales", "false")
        choice(f"{call}: the tag 'fractional_scales'", fractional, ("true", "false"))
        if "groups.offsets" in state:
            rows = next((copy[0].shape[0] for copy in copies.values() if copy[0].ndim != 0), None)
            more["groups"] = Groups(offsets=state["groups.offsets"], capacity=rows)
        more.update(element=tags["element"], fractional_scales=fractional == "true")
        return cls(tags["format"], **copies, **more)

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


def _tags_of(call, state, tags=None):
    """The tags that are given, else those of a state_dict, else None."""
    mapping(f"{call}: state", state, "a dict of arrays by name")
    where = "tags"
    if tags is None:
        metadata = getattr(state, "_metadata", None)
        if metadata is None or "" not in mapping(f"{call}: the dict's metadata", metadata):
            return None
        where, tags = "the tags in the dict's metadata", metadata[""]
    for name, value in mapping(f"{call}: {where}", tags).items():
        if not isinstance(value, str):
            raise wrong(f"{call}: the tag {described(name)}", value, "a string")
    return tags


class _Scales:
    """The scales of one direction as a ragged matrix, which is what moire_convert_scales takes:
    uniform matrices are groups of equal size.
    """

    def __init__(self, call, tensor, layout, direction):
        self.fw, self.form, self.groups = tensor._fw, tensor.form, tensor.groups
        self.layout = _LAYOUTS.index(choice(f"{call}: layout", layout, _LAYOUTS[1:]))
        self.direction = DIRECTIONS.index(choice(f"{call}: direction", direction, DIRECTIONS))
        if tensor.form.name != "mxfp8":
            raise unsupported(
                f"{call}: format is {tensor.form.name}, whose FP32 scales have one layout only: "
                f"take them from .{DIRECTIONS[self.direction]}.scales"
            )
        self.own = tensor.copy_of(self.direction, call).scales
        *matrices, n, self.k = tensor.shape
        count = math.prod(matrices)
        if self.groups is None:
            self.groups = Groups(splits=self.fw.integers([n] * count))
        self.rows, self.splits = count * n, self.groups.splits.tolist()
        # Column-wise scales of uniform matrices have no gaps between the groups.
        self.own_layout = _DENSE if tensor.ndim == 3 and self.direction != ROWWISE else 0
        self.flat = self.own.reshape(-1, self.own.shape[-1])

    def shape(self, layout):
        """Of scales in `layout`: what these groups need."""
        is_rowwise, is_padded = self.direction == ROWWISE, layout > _DENSE
        if layout == 0 or (is_rowwise and not is_padded):  # which rows of the tail have as well
            return self.form.scales_shape(self.direction, (self.rows, self.k), len(self.splits))
        outer, blocks = (_PADDED_OUTER, _PADDED_BLOCKS) if is_padded else (1, 1)
        if is_rowwise:
            return (sum(_up(m, outer) for m in self.splits), _up(self.form.blocks(self.k), blocks))
        return (sum(_up(self.form.blocks(m), blocks) for m in self.splits), _up(self.k, outer))

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


def _up(size, multiple):
    return size + -size % multiple
