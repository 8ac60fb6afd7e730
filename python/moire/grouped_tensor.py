"""GroupedTensor, a ragged or uniform batch of matrices in 8 bits with its scales; and quantize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

from . import grouped_storage
from .arrays import Numpy, Torch, assign, check_array, version_of, was_written
from .autograd import followed, of_decoded, of_parts, through, to_source
from .context import restored_after_explaining
from .dtypes import AnyArray, Array, Dtype, TorchDevice, torch
from .errors import invalid
from .grouped_interchange import Interchangeable
from .grouped_storage import Copy, Kind, checked, empty_copy, parts_of, source_of
from .groups import Groups, as_groups
from .layouts import GluLayout, GluLayoutLike
from .recipes import COLUMNWISE, DIRECTIONS, ELEMENTS, ROWWISE, Recipe, RecipeLike
from .values import choice, flag, integer, torch_device, wrong


class GroupedTensor(Interchangeable):
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
    dtype                of the values (float32): what dequantize returns and layers compute in

    On Torch arrays it is a torch.Tensor too (grouped_torch.py), unless torch.compile makes it
    inside a graph: there, and on NumPy arrays, it is of this class itself.
    """

    kind_name = "a GroupedTensor"
    _kind_of_torch = None  # the subclass that is a torch.Tensor, where there is one

    def __new__(
        cls,
        format: str,
        *,
        rowwise: Optional[tuple[AnyArray, AnyArray]] = None,
        columnwise: Optional[tuple[AnyArray, AnyArray]] = None,
        groups: Optional[Groups] = None,
        layout: Optional[GluLayoutLike] = None,
        dtype: Optional[Dtype] = None,
        element: Optional[str] = None,
        fractional_scales: bool = False,
    ) -> GroupedTensor:
        given = ({"rowwise": rowwise, "columnwise": columnwise}, groups, layout, dtype, element)
        kind, copies, groups = checked("GroupedTensor", format, *given, fractional_scales)
        return made(kind, *copies, groups)

    def hold(
        self, kind: Kind, rowwise: Any, columnwise: Any, groups: Optional[Groups]
    ) -> GroupedTensor:
        """Itself, which held nothing, with these."""
        self.kind, self._fw, self.form, self.element = kind, kind.fw, kind.form, kind.element
        self._layout, self.fractional_scales = kind.layout, kind.fractional_scales
        self.layout_fields = kind.layout and kind.layout.fields
        self.rowwise, self.columnwise, self._groups_of_memory = rowwise, columnwise, [groups]
        self._versions, self._whole = {}, None
        return self

    # ---- what it is

    @property
    def format(self) -> str:
        """Its name; `form` has what it means."""
        return self.form.name

    @property
    def layout(self) -> Optional[GluLayout]:
        return self._layout

    @property
    def groups(self) -> Optional[Groups]:
        """Of its rows: those of the memory, which detach() shows as well."""
        return self._groups_of_memory[0]

    @groups.setter
    def groups(self, groups: Optional[Groups]) -> None:
        self._groups_of_memory[0] = groups

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
        return self._views([group % self.num_groups])[0]

    def __iter__(self) -> Iterator[GroupedTensor]:
        return iter(self.split())

    def split(self) -> list[GroupedTensor]:
        """All groups, as by t[g]. Offsets of ragged rows are read for it."""
        return self._views(range(self.num_groups))

    def _views(self, groups):
        if self.ndim == 3:
            bounds = range(self.num_groups + 1)
        else:
            bounds = [0, self.shape[0]] if self.groups is None else self.groups.offsets.tolist()
        parts = [slice(bounds[g], bounds[g + 1]) for g in groups]
        views = [self.rows(group, rows) for group, rows in zip(groups, parts)]
        back = of_parts, (tuple(self.shape), parts)
        follow(self.carrier("GroupedTensor: group"), lambda _: back, *views)
        whole = self.detach() if self._whole is None else self._whole  # its versions, not its graph
        for view in views:
            view._whole, view._versions = whole, self._versions
        return views

    def rows(self, group: int, rows: slice) -> GroupedTensor:
        """Those of one group of ragged rows, or matrices of a uniform tensor."""
        blocks = rows
        if self.ndim == 2:
            start = rows.start // self.form.block + group
            blocks = slice(start, start + (rows.stop - rows.start) // self.form.block + 1)
        return self.like(
            self.rowwise and (self.rowwise.data[rows], self.rowwise.scales[rows]),
            self.columnwise and (self.columnwise.data[rows], self.columnwise.scales[blocks]),
        )

    def like(
        self, rowwise: Any, columnwise: Any, groups: Optional[Groups] = None, **changes: Any
    ) -> GroupedTensor:
        """The same kind of tensor, but for `changes` of it, on other (data, scales), or None."""
        copies = (copy and Copy(*copy) for copy in (rowwise, columnwise))
        return made(self.kind._replace(**changes), *copies, groups)

    def mapped(
        self, function: Any, groups: Optional[Groups] = None, **changes: Any
    ) -> GroupedTensor:
        """The same on what `function` makes of each array; these groups, or its own."""
        copies = [copy and tuple(map(function, copy)) for copy in (self.rowwise, self.columnwise)]
        return self.like(*copies, self.groups if groups is None else groups, **changes)

    # ---- gradients

    def carrier(self, call: str) -> Optional[Any]:
        """What autograd knows as this tensor, where a gradient may be wanted; or None."""
        carrier = self._carrier
        if carrier is None or not carrier.requires_grad or not torch.is_grad_enabled():
            return None
        for name, array in self.arrays():
            # Of a direction that requantize added there is no version.
            if was_written(array, self._versions.get(name)):
                raise invalid(
                    f"{call}: {name} of a GroupedTensor that passes a gradient on was overwritten "
                    f"through a view or as an array, so the gradient is no longer its source's; "
                    f"overwrite the whole with quantize_ or copy_, or take detach()"
                )
        return carrier

    def stand_in(self, call: str, dtype: Dtype) -> Any:
        """For autograd an array of this `dtype`, not to be read: gradients go to its source."""
        source = self.carrier(call)
        if source is not None and source.dtype == dtype:
            return source
        stand_in = self._fw.stand_in(self._any.data, tuple(self.shape), dtype)
        return stand_in if source is None else followed(source, *through(source), stand_in)[0]

    def about_to_write(self, call: str, wants_gradient: bool = False) -> None:
        """That a call may overwrite it with values that may bring a gradient along."""
        restored_after_explaining(self, "groups", "_history")
        if wants_gradient and self._whole is not None:
            raise invalid(
                f"{call}: the values want a gradient, but go into a view of one group, and the "
                f"whole would not pass it on; write the whole, or detach() the values"
            )

    def written(self) -> GroupedTensor:
        """Itself; it was overwritten, so that its gradient goes nowhere."""
        self._carrier, self._versions = None, {}
        return self

    _history = None  # all that changes with its gradient, to be set again

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
        call, given = "quantize_", self.groups
        if groups is not None:
            given = as_groups(call, groups)
            self.check_same(call, "groups", given.num_groups, self.num_groups)
        of_rows = given if self.ndim == 2 else None
        fw, x, shape, _ = source_of(call, x, of_rows, row_idx)
        self.check_same(call, "x", list(shape), list(self.shape))
        return self._take_values(call, fw, x, given, row_idx)

    def _take_values(self, call, fw, x, groups, row_idx, is_new=False):
        """Itself with the values of x, as source_of of grouped_storage returned it, in its memory,
        which nobody has seen before where it `is_new`.
        """
        is_linked = fw is Torch and self.ndim == 2 and torch.is_grad_enabled() and x.requires_grad
        if not is_new:
            self.about_to_write(call, is_linked)
        grouped_storage.write(fw, self, x, groups, row_idx)
        if not is_new:
            fw.written(*(array for _, array in self.arrays()))
            self.written().groups = groups
        return follow(x if is_linked else None, lambda x: to_source(row_idx, x), self)

    def requantize(self) -> GroupedTensor:
        """Adds the direction that is missing: the decoded values, quantised again."""
        if not self.form.is_tiled and (self.rowwise is None or self.columnwise is None):
            source = ROWWISE if self.columnwise is None else COLUMNWISE
            restored_after_explaining(self, *DIRECTIONS)
            setattr(self, DIRECTIONS[1 - source], grouped_storage.requantized(self, source))
        return self

    def dequantize(self, dtype: Optional[Dtype] = None, *, direction: Optional[str] = None) -> Any:
        """data * scale, rounded once to `dtype`; the tail is zeros. From the row-wise copy where
        there is one, unless `direction` says.
        """
        read = None
        if dtype is not None:
            dtype = self._fw.compute_dtype("dequantize: dtype", dtype)
        if direction is not None:
            read = DIRECTIONS.index(choice("dequantize: direction", direction, DIRECTIONS))
            self.copy_of(read, "dequantize")
        source = self.carrier("dequantize")
        values = grouped_storage.dequantized(self, read, dtype)
        if source is None:
            return values
        offsets = None if self.groups is None else self.groups.offsets_for(values)
        return followed(source, of_decoded, (self.dtype, offsets), values)[0]

    def copy_(self, other: GroupedTensor, non_blocking: bool = False) -> GroupedTensor:
        """Bytes and groups of `other`, which has the same format, shape and directions."""
        call = "copy_"
        if not isinstance(other, GroupedTensor):
            raise wrong(f"{call}: other", other, "a moire.GroupedTensor")
        self._check_alike(call, other)
        source = other.carrier(call)
        self.about_to_write(call, source is not None)
        self._take_bytes(other, non_blocking)
        return follow(source, through, self.written())

    def _check_alike(self, call, other, hint="; give its dequantize()"):
        ours = self._traits()
        if (form := other.format) != self.format:
            raise invalid(f"{call}: format is {form}, must be {self.format}{hint}")
        for name, found in other._traits().items():
            if name != "layout" or None not in (found, ours[name]):  # which not all are tagged with
                self.check_same(call, name, found, ours[name])
        for name, array in other.arrays():
            check_array(self._fw, call, name, array)

    def _traits(self):
        names = ("element", "num_groups", "layout", "fractional_scales")
        traits = {"shape": tuple(self.shape), **{name: getattr(self, name) for name in names}}
        for name in DIRECTIONS:
            traits[name] = "absent" if getattr(self, name) is None else "present"
        return traits

    def _take_bytes(self, other, non_blocking):
        for (_, to), (_, array) in zip(self.arrays(), other.arrays()):
            assign(to, array, non_blocking)
        groups, is_near = other.groups, other.device == self.device
        self.groups = groups if groups is None or is_near else groups.to(self.device, non_blocking)

    def zero_(self) -> GroupedTensor:
        self.about_to_write("zero_")
        return self.filled_with_zeros().written()

    def filled_with_zeros(self) -> GroupedTensor:
        for _, array in self.arrays():
            assign(array.view(self._fw.dtype("uint8")), 0)
            self._fw.written(array)  # which Torch does not count of such views in inference mode
        return self

    @staticmethod
    def check_same(call: str, name: str, found: object, needed: object) -> None:
        if found != needed:
            raise invalid(f"{call}: {name} is {found}, must be {needed}")

    # ---- copies

    def clone(self) -> GroupedTensor:
        return follow(self.carrier("clone"), through, self.mapped(self._fw.copy))

    def detach(self) -> GroupedTensor:
        """The same memory, without a gradient for what it was quantised from."""
        view = self.mapped(self._fw.detached)
        view._groups_of_memory, view._whole = self._groups_of_memory, self._whole
        return view

    def to(
        self,
        device: Optional[Any] = None,
        dtype: Optional[Dtype] = None,
        non_blocking: bool = False,
    ) -> GroupedTensor:
        """On another device, or standing for values of another type, of which the bytes are the
        same (Torch); the object itself where it is so already.
        """
        if self._fw is Numpy:
            if (device, dtype) == ("cpu", None):
                return self
            raise invalid("GroupedTensor.to: the arrays are NumPy's, which are on the CPU")
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        first = self._any.data
        place = first.device if device is None else torch_device("GroupedTensor.to: device", device)
        if first.to(place) is first and dtype in (None, self.dtype):
            return self
        return follow(self.carrier("to"), through, self.moved(place, dtype, non_blocking))

    def moved(
        self, device: Optional[TorchDevice], dtype: Optional[Dtype], non_blocking: bool = False
    ) -> GroupedTensor:
        """A copy there, of this type, or of its own, without a gradient."""
        device = device or self.device
        dtype = self._fw.compute_dtype("GroupedTensor.to: dtype", dtype or self.dtype)
        groups = None if self.groups is None else self.groups.to(device, non_blocking)
        copied = lambda array: array.to(device, non_blocking=non_blocking, copy=True)  # noqa: E731
        return self.mapped(copied, groups, dtype=dtype)

    def __deepcopy__(self, memo: Any) -> GroupedTensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of a view, which Torch would pickle with all the memory that it looks into, what it shows.
        return self._reduced(self._fw.with_memory_of_its_own)

    def _reduced(self, own):
        as_bytes, state = self._fw.dtype("uint8"), {}
        for name, array in self.state_dict().items():  # data as bytes: Torch cannot pickle FP8
            state[name] = own(array.view(as_bytes) if name.endswith("data") else array)
        return _unpickled, (state, self.tags())


def follow(source: Optional[Any], back_to: Any, *targets: GroupedTensor) -> Any:
    """The first of `targets`, which were written from the tensor `source`: back_to(source) says how
    it gets their gradients (autograd.py). None wants none.
    """
    if source is not None and targets:
        are_tensors, carriers = isinstance(targets[0], torch.Tensor), targets
        if not are_tensors:  # in a graph arrays without memory stand for them
            carriers = [t._fw.stand_in(t._any.data, t.shape, t.dtype) for t in targets]
        carriers = followed(source, *back_to(source), *carriers, in_place=are_tensors)
        for target, carrier in zip(targets, carriers):
            if not are_tensors:
                target._carrier = carrier
            target._versions = {name: version_of(array) for name, array in target.arrays()}
    return targets[0] if targets else None


def made(kind: Kind, rowwise: Any, columnwise: Any, groups: Optional[Groups]) -> GroupedTensor:
    """A GroupedTensor of Copies that are known to be right."""
    if kind.fw is Torch and not torch.compiler.is_dynamo_compiling():
        return GroupedTensor._kind_of_torch.of(kind, rowwise, columnwise, groups)
    plain = object.__new__(GroupedTensor)
    plain.shape = tuple((rowwise or columnwise).data.shape)
    plain.dtype, plain._carrier = kind.dtype, None
    return plain.hold(kind, rowwise, columnwise, groups)


def quantize(
    x: Union[Array, Sequence[Array]],
    groups: Optional[Groups] = None,
    recipe: RecipeLike = "mxfp8",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    element: str = "e4m3",
    row_idx: Optional[Array] = None,
    layout: Optional[GluLayoutLike] = None,
) -> GroupedTensor:
    """A GroupedTensor of x in 8 bits, in one direction or both, in one pass.

    x [rows, k] is ragged, divided by `groups` (None: one group); with row_idx [rows], x is [T, k]
    and row i of the result is x[row_idx[i]]. x [G, n, k], or a list of G matrices of one shape, are
    weights: uniform, and with fp8_block in tiles, which serve both directions. A list of matrices
    that differ in their rows becomes one ragged tensor. `layout` tags where gate and up lie.
    Gradients pass straight through to a ragged x.
    """
    call = "quantize"
    recipe = Recipe.of_quantize(recipe, f"{call}: recipe")
    element = choice(f"{call}: element", element, ELEMENTS)
    wanted = flag(f"{call}: rowwise", rowwise), flag(f"{call}: columnwise", columnwise)
    if not any(wanted):
        raise invalid(f"{call}: rowwise and columnwise are both False, needs at least one")
    fw, x, shape, groups = source_of(call, x, groups, row_idx)
    is_uniform = len(shape) == 3
    form = recipe.weight_format if is_uniform else recipe.format
    if form.is_tiled:
        wanted = (True, False)
    first = x[0] if isinstance(x, list) else x
    num_groups = shape[0] if is_uniform else 1 if groups is None else groups.num_groups
    copies = [
        empty_copy(fw, first, form, element, direction, shape, num_groups) if want else None
        for direction, want in enumerate(wanted)
    ]
    dtype = fw.compute_dtype(f"{call}: x", first.dtype)
    layout = None if layout is None else GluLayout.of(layout, f"{call}: layout")
    kind = Kind(fw, form, element, dtype, layout, recipe.fractional_scales)
    return made(kind, *copies, groups)._take_values(call, fw, x, groups, row_idx, is_new=True)


def _unpickled(state, tags, *leaf):
    tensor = GroupedTensor.from_state_dict(state, tags)
    return tensor.as_leaf(*leaf) if leaf else tensor


if torch is not None:
    # Plain values, so that torch.load(weights_only=True) takes them.
    torch.serialization.add_safe_globals([_unpickled])
