"""GroupedTensor: a ragged or uniform batch of matrices in 8 bits with its scales, as one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

from . import gradient_edge, quantization, scale_interchange
from .arrays import Numpy, check_array, framework_of, torch
from .context import restored_after_explaining
from .errors import invalid
from .formats import (
    COLUMNWISE,
    DIRECTIONS,
    ELEMENTS,
    ROWWISE,
    Format,
    check_direction,
    check_element,
    check_format,
)
from .grouped_state import Stateful, parts_of
from .groups import Groups, as_groups
from .hints import AnyArray, Array, Device, Dtype, TorchDevice
from .layouts import GluLayout, GluLayoutLike
from .values import described, flag, integer, pickled, torch_device

_PICKLED = ("form", "groups", "layout", "dtype", "element", "fractional_scales")
_NAMES = {code: name for name, code in (("e4m3", 4), ("e5m2", 5))}


class Copy(NamedTuple):
    """The data and scales of one direction: value = data * scale."""

    data: Any
    scales: Any


class GroupedTensor(Stateful):
    """Matrices in 8 bits: ragged [rows, k], divided by `groups`, or uniform [G, n, k].

    Made by moire.quantize, or from parts:

    format               "mxfp8", "fp8_block" or (uniform only) "fp8_tile"; see moire.h
    rowwise, columnwise  (data, scales) whose blocks of scales lie along the rows, or down the
                         columns, where they start anew with each group; one or both. Data is
                         FP8, or uint8 with `element` named; E8M0 scales are uint8. Tiles serve
                         both directions and are given as rowwise
    groups               of ragged rows; None: one group, all rows
    layout               GluLayout, where this is a gated FC1's weight or output: a tag, checked
                         where it is used
    dtype                the type that the values stand for (float32): what dequantize returns, and
                         layers compute in
    """

    def __init__(
        self,
        format: Union[str, Format],
        *,
        rowwise: Optional[tuple[AnyArray, AnyArray]] = None,
        columnwise: Optional[tuple[AnyArray, AnyArray]] = None,
        groups: Optional[Groups] = None,
        layout: Optional[GluLayoutLike] = None,
        dtype: Optional[Dtype] = None,
        element: Optional[str] = None,
        fractional_scales: bool = False,
    ) -> None:
        call = "GroupedTensor"
        self.form = check_format(f"{call}: format", format)
        if rowwise is None and columnwise is None:
            raise invalid(f"{call}: rowwise and columnwise are both absent, needs at least one")
        given = {"rowwise": rowwise, "columnwise": columnwise}
        arrays = {}
        for name, copy in given.items():
            if copy is not None and not (isinstance(copy, (tuple, list)) and len(copy) == 2):
                raise invalid(f"{call}: {name} is {described(copy)}, must be (data, scales)")
            arrays.update({} if copy is None else dict(zip(parts_of(name), copy)))
        self._fw = framework_of(call, arrays)
        self.groups = None if groups is None else as_groups(call, groups)
        self.layout = None if layout is None else GluLayout.of(layout, f"{call}: layout")
        self.dtype = self._fw.float32
        if dtype is not None:
            self.dtype = self._fw.compute_dtype(f"{call}: dtype", dtype)
        self.fractional_scales = flag(f"{call}: fractional_scales", fractional_scales)
        self.element = None if element is None else check_element(f"{call}: element", element)
        self._edge, self._is_view = None, False
        self._check_shape(call, *next(iter(arrays.items())))
        self.rowwise = self._checked(call, ROWWISE, rowwise)
        self.columnwise = self._checked(call, COLUMNWISE, columnwise)

    def _check_shape(self, call, name, data):
        if data.ndim not in (2, 3):
            raise invalid(
                f"{call}: {name} is {list(data.shape)}, must be ragged [rows, k] or uniform "
                f"[G, n, k]: every matrix has the same k, and other ragged shapes have no one form"
            )
        self.shape = tuple(data.shape)
        if data.ndim == 3 and self.groups is not None:
            raise invalid(f"{call}: groups are given, but {name} is uniform, {list(data.shape)}")
        if data.ndim == 2 and self.form.is_tiled:
            raise invalid(f"{call}: format is 'fp8_tile', but {name} is ragged; tiles are uniform")
        if self.groups is not None and self.groups.rows(data.shape[0]) != data.shape[0]:
            raise invalid(
                f"{call}: {name} has {data.shape[0]} rows, but groups have a capacity of "
                f"{self.groups.capacity}"
            )
        if self.groups is not None:
            self.groups.check_rows(call, data.shape[0])

    def _checked(self, call, direction, copy):
        """One direction's copy, if it is given, with FP8 data."""
        if copy is None:
            return None
        if direction == COLUMNWISE and self.form.is_tiled:
            raise invalid(f"{call}: columnwise is given, but tiles serve both directions: rowwise")
        data, scales = copy
        data_name, scales_name = parts_of(DIRECTIONS[direction])
        data = self._as_fp8(call, data_name, data)
        if tuple(data.shape) != self.shape:
            raise invalid(f"{call}: {data_name} is {list(data.shape)}, needs {list(self.shape)}")
        wanted = self.form.scales_shape(direction, self.shape, self.num_groups)
        dtype = self._fw.dtype(self.form.scale_dtype)
        if str(scales.dtype).endswith("float8_e8m0fnu"):
            scales = self._fw.as_bytes(scales)
        if tuple(scales.shape) != wanted or scales.dtype != dtype:
            raise invalid(
                f"{call}: {scales_name} is {_named(scales)}, needs {self.form.scale_dtype} "
                f"{list(wanted)} ({self.form.name}, {DIRECTIONS[direction]}, "
                f"{self.num_groups} groups)"
            )
        return Copy(data, scales)

    def _as_fp8(self, call, name, data):
        found = _NAMES.get(self._fw.views.code(data))
        if found is None and data.dtype == self._fw.dtype("uint8"):
            if self.element is None:
                raise invalid(f"{call}: {name} is uint8, needs element='e4m3' or 'e5m2' beside it")
            found = self.element
            data = data.view(self._fw.dtype(ELEMENTS[found]))
        if found is None:
            raise invalid(f"{call}: {name} is {_named(data)}, needs float8_e4m3fn or float8_e5m2")
        if self.element not in (None, found):
            raise invalid(
                f"{call}: {name} is {found}, but the other direction or element= is "
                f"{self.element}; mixed formats are two tensors"
            )
        self.element = found
        return data

    # ---- what it is

    @property
    def format(self) -> str:
        """Its name; `form` has what it means."""
        return self.form.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_groups(self) -> int:
        if self.ndim == 3:
            return self.shape[0]
        return 1 if self.groups is None else self.groups.num_groups

    @property
    def all_same_shape(self) -> bool:
        """Whether one shape says that of every matrix. Rows divided by groups are ragged, whatever
        the splits are now: they may lie on a GPU, and nobody waits for them here.
        """
        return self.ndim == 3 or self.groups is None

    @property
    def has_rowwise(self) -> bool:
        return self.rowwise is not None

    @property
    def has_columnwise(self) -> bool:
        return self.columnwise is not None or self.form.is_tiled

    @property
    def device(self) -> Union[TorchDevice, str]:
        return "cpu" if self._fw is Numpy else self._any.data.device

    @property
    def nbytes(self) -> int:
        """Of data and scales."""
        return sum(array.nbytes for _, array in self.arrays())

    @property
    def _any(self):
        return self.rowwise or self.columnwise

    def copy_of(self, direction: int, reader: str = "this") -> Copy:
        """The Copy of ROWWISE or COLUMNWISE, or an error that says who needs it."""
        copy = self.rowwise if direction == ROWWISE or self.form.is_tiled else self.columnwise
        if copy is None:
            raise invalid(
                f"{reader}: the GroupedTensor has no {DIRECTIONS[direction]} copy; quantise with "
                f"{DIRECTIONS[direction]}=True, or call requantize() once"
            )
        return copy

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """(name, array) of all that it holds."""
        for name in DIRECTIONS:
            copy = getattr(self, name)
            if copy is not None:
                yield from zip(parts_of(name), copy)

    def __len__(self) -> int:
        return self.num_groups

    def __repr__(self) -> str:
        has = " and ".join(name for name in DIRECTIONS if getattr(self, name) is not None)
        return f"moire.GroupedTensor({self.form.name}, {self.element}, {list(self.shape)}, {has})"

    # ---- views of one matrix each

    def __getitem__(self, group: int) -> GroupedTensor:
        """One group as a GroupedTensor on the same memory: [rows of the group, k], or [1, n, k]."""
        group = integer("GroupedTensor: group", group, -self.num_groups, self.num_groups - 1)
        group, bounds, edge = group % self.num_groups, self._bounds(), self._edge
        rows = edge and edge.tensor[bounds[group] : bounds[group + 1]]
        return self._group(group, bounds, rows)

    def __iter__(self) -> Iterator[GroupedTensor]:
        return iter(self.split())

    def split(self) -> list[GroupedTensor]:
        """All groups, as by t[g]. Offsets of ragged rows are read for it."""
        bounds, edge = self._bounds(), self._edge
        rows = [None] * self.num_groups
        if edge is not None:
            sizes = [end - start for start, end in zip(bounds, bounds[1:])]
            rows = edge.tensor.split([*sizes, self.shape[0] - sum(sizes)])
        return [self._group(group, bounds, rows[group]) for group in range(self.num_groups)]

    def _bounds(self):
        if self.ndim == 3:
            return range(self.num_groups + 1)
        return [0, self.shape[0]] if self.groups is None else self.groups.offsets.tolist()

    def _group(self, group, bounds, edge_rows):
        rows = blocks = slice(bounds[group], bounds[group + 1])
        if self.ndim == 2:
            start = rows.start // self.form.block + group
            blocks = slice(start, start + (rows.stop - rows.start) // self.form.block + 1)
        view = self.like(
            self.rowwise and Copy(self.rowwise.data[rows], self.rowwise.scales[rows]),
            self.columnwise and Copy(self.columnwise.data[rows], self.columnwise.scales[blocks]),
        )
        gradient_edge.set_view(view, self, edge_rows)
        return view

    def like(
        self,
        rowwise: Optional[tuple[AnyArray, AnyArray]],
        columnwise: Optional[tuple[AnyArray, AnyArray]],
        groups: Optional[Groups] = None,
        layout: Optional[GluLayout] = None,
    ) -> GroupedTensor:
        """The same kind of tensor on other arrays."""
        return GroupedTensor(
            self.form,
            rowwise=rowwise,
            columnwise=columnwise,
            groups=groups,
            layout=layout or self.layout,
            dtype=self.dtype,
            element=self.element,
            fractional_scales=self.fractional_scales,
        )

    def _mapped(self, function, groups):
        copies = [copy and Copy(*map(function, copy)) for copy in (self.rowwise, self.columnwise)]
        return self.like(*copies, groups)

    # ---- values: each in-place operation returns the object itself

    def quantize_(
        self,
        x: Union[Array, Sequence[Array]],
        groups: Optional[Groups] = None,
        *,
        row_idx: Optional[Array] = None,
    ) -> GroupedTensor:
        """New values in the same memory: x as moire.quantize took it, of the same shapes. `groups`
        takes the place of those it had.
        """
        if groups is not None:
            groups = as_groups("quantize_", groups)
            self.check_same("quantize_", "groups", groups.num_groups, self.num_groups)
        restored_after_explaining(self, "groups", "_edge")
        before = self.groups
        self.groups = before if groups is None else groups
        try:
            quantization.quantize_into("quantize_", self, x, row_idx)
        except Exception:
            self.groups = before
            raise
        return self

    def requantize(self) -> GroupedTensor:
        """Adds the direction that is missing: the decoded values, quantised again."""
        if not self.form.is_tiled and (self.rowwise is None or self.columnwise is None):
            source = ROWWISE if self.columnwise is None else COLUMNWISE
            restored_after_explaining(self, *DIRECTIONS)
            copy = Copy(*quantization.requantized(self, source))
            if source == ROWWISE:
                self.columnwise = copy
            else:
                self.rowwise = copy
        return self

    def dequantize(self, dtype: Optional[Dtype] = None, *, direction: Optional[str] = None) -> Any:
        """data * scale, rounded once to `dtype`; the tail is zeros. From the row-wise copy where
        there is one, unless `direction` says.
        """
        if dtype is not None:
            dtype = self._fw.compute_dtype("dequantize: dtype", dtype)
        source = COLUMNWISE if self.rowwise is None else ROWWISE
        if direction is not None:
            source = check_direction("dequantize: direction", direction)
        self.copy_of(source, "dequantize")
        values = quantization.dequantized(self, source, dtype or self.dtype)
        return gradient_edge.dequantized(self, values)

    def copy_(self, other: GroupedTensor) -> GroupedTensor:
        """Bytes and groups of `other`, which has the same format, shape and directions."""
        call = "copy_"
        if not isinstance(other, GroupedTensor):
            raise invalid(f"{call}: other is {described(other)}, must be a moire.GroupedTensor")
        for name in ("format", "element", "shape", "num_groups", "layout", "fractional_scales"):
            self.check_same(call, name, getattr(other, name), getattr(self, name))
        for name in DIRECTIONS:
            found, needed = (
                "absent" if getattr(t, name) is None else "present" for t in (other, self)
            )
            self.check_same(call, name, found, needed)
        for name, array in other.arrays():
            check_array(self._fw, call, name, array)
        source = gradient_edge.live(call, other)
        gradient_edge.check_target(call, self, source is not None)
        for (_, to), (_, array) in zip(self.arrays(), other.arrays()):
            self._fw.assign(to, array)
        restored_after_explaining(self, "groups", "_edge")
        self.groups = other.groups
        gradient_edge.set_copied(self, source)
        return self

    def zero_(self) -> GroupedTensor:
        restored_after_explaining(self, "_edge")
        self._edge = None
        for _, array in self.arrays():
            self._fw.assign(self._fw.as_bytes(array), 0)
        return self

    @staticmethod
    def check_same(call: str, name: str, found: object, needed: object) -> None:
        if found != needed:
            raise invalid(f"{call}: {name} is {found}, must be {needed}")

    # ---- copies

    def clone(self) -> GroupedTensor:
        source = gradient_edge.live("clone", self)
        copy = self._mapped(self._fw.copy, self.groups)
        gradient_edge.set_copied(copy, source)
        return copy

    def detach(self) -> GroupedTensor:
        """The same memory, without a gradient for what it was quantised from."""
        return self._mapped(self._fw.detached, self.groups)

    def to(self, device: Device) -> GroupedTensor:
        """On another device (Torch); the object itself where it is there already."""
        if self._fw is Numpy:
            raise invalid("GroupedTensor.to: the arrays are NumPy's, which are on the CPU")
        if isinstance(device, torch.dtype):
            raise invalid(
                f"GroupedTensor.to: device is {device}, must be a device; values of another type "
                f"are what dequantize(dtype) returns"
            )
        device = torch_device("GroupedTensor.to: device", device)
        (_, first), *_ = self.arrays()
        if first.to(device) is first:
            return self
        source = gradient_edge.live("to", self)
        groups = None if self.groups is None else self.groups.to(device)
        moved = self._mapped(lambda array: array.to(device), groups)
        gradient_edge.set_copied(moved, source)
        return moved

    def __deepcopy__(self, memo):
        return self.clone()

    def __getstate__(self):
        # Data as bytes: Torch cannot pickle FP8 storage. Of a view, which Torch would pickle with
        # all the memory that it looks into, only what it shows.
        own, bytes_of = self._fw.with_memory_of_its_own, self._fw.as_bytes
        copies = {name: getattr(self, name) for name in DIRECTIONS}
        copies = {
            name: c and Copy(own(bytes_of(c.data)), own(c.scales)) for name, c in copies.items()
        }
        return {**{name: getattr(self, name) for name in _PICKLED}, **copies}

    def __setstate__(self, state):
        state = pickled("GroupedTensor", state, (*_PICKLED, *DIRECTIONS))
        self.__init__(state.pop("form"), **state)

    # ---- scales of other libraries

    def export_scales(self, layout: str = "dense", direction: str = "rowwise") -> Any:
        """MXFP8 scales of one direction as others keep them (uint8, E8M0):

        dense     row-wise [rows, blocks]; column-wise the groups' blocks without gaps
        padded    of each group [rows or columns, blocks], zero-padded to multiples of 128 and 4
        swizzled  the same in tiles of 128 x 4, as Blackwell's tensor cores read them
        """
        return scale_interchange.exported(self, layout, direction)

    def import_scales(
        self, scales: AnyArray, layout: str = "dense", direction: str = "rowwise"
    ) -> GroupedTensor:
        """Takes scales that export_scales could have returned; returns the object itself."""
        scale_interchange.take(self, scales, layout, direction)
        return self


def _named(array):
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


if torch is not None:
    # Plain values, so that torch.load(weights_only=True) takes them.
    torch.serialization.add_safe_globals([GroupedTensor, Copy, Format, Groups, GluLayout])
