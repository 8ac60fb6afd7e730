"""Groups: the one description of a ragged batch, made once a step from whatever the caller has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from . import tapes
from .arrays import DEFAULT, check_rank, empty_indices, framework_of, on_device, torch
from .context import is_explaining
from .dtypes import AnyArray, Array, Device, Integers
from .errors import invalid
from .values import choice, flag, integer, integers, pickled, torch_device, wrong

_KINDS = ("splits", "ends", "offsets")


class Groups:
    """Group g owns rows offsets[g] to offsets[g + 1] - 1 of tensors that have `capacity` rows.

    Exactly one of these says how the batch is divided (a list, or a vector of int32 or int64):

        splits    [G] rows per group
        ends      [G] cumulative, without the leading zero (the offs of torch's grouped_mm)
        offsets   [G + 1] cumulative, with the leading zero

    capacity is the number of rows allocated; without it, a call takes the rows of the tensor that
    it is given. The splits are checked at once: a negative one, a decreasing end, a sum past the
    capacity name the group and the value. Splits on a GPU are checked there: what is wrong with
    them is raised by a later call, or by moire.check(). Splits on the host are copied to the GPU of
    the arrays that they divide by the first call that needs them there.
    """

    def __init__(
        self,
        *,
        splits: Optional[Integers] = None,
        ends: Optional[Integers] = None,
        offsets: Optional[Integers] = None,
        capacity: Optional[int] = None,
    ) -> None:
        given = {k: v for k, v in zip(_KINDS, (splits, ends, offsets)) if v is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise invalid(f"Groups: needs exactly one of splits, ends and offsets, found {found}")
        ((kind, values),) = given.items()
        (self.offsets,) = _derived("Groups", kind, kind, values, (OffsetsOutput(),), capacity)
        self.num_groups, self.capacity, self._copies = self.offsets.shape[0] - 1, capacity, {}

    @classmethod
    def of_offsets(cls, offsets: AnyArray, capacity: Optional[int] = None) -> Groups:
        """Over int64 offsets that are right already (a plan's), neither copied nor checked here."""
        framework_of("Groups.of_offsets", {"offsets": offsets})
        check_rank("Groups.of_offsets", "offsets", offsets, 1)
        if capacity is not None:
            capacity = integer("Groups.of_offsets: capacity", capacity)
        return cls.over(offsets, capacity)

    @classmethod
    def over(cls, offsets: AnyArray, capacity: Optional[int] = None) -> Groups:
        """As of_offsets, of a vector that is known to be one."""
        if offsets.shape[0] == 0:
            raise invalid("Groups.of_offsets: offsets is empty, must have at least the leading 0")
        groups = cls.__new__(cls)
        groups.offsets, groups.capacity = offsets, capacity
        groups._copies = None  # the offsets are the caller's, who may write into them
        groups.num_groups = offsets.shape[0] - 1
        return groups

    def rows(self, found: int) -> int:
        """The capacity of a call whose ragged tensors have `found` rows."""
        return found if self.capacity is None else self.capacity

    def check_rows(self, call: str, rows: int) -> None:
        """That the groups end within so many rows, where the offsets say so without a wait."""
        if is_readable(self.offsets) and (end := int(self.offsets[-1])) > rows:
            raise invalid(f"{call}: the groups end at row {end}, past the {rows} rows of the data")

    def give(self, fields: dict[str, Any], like: Array, rows: int) -> None:
        """Those of moire.h to a call on arrays like this one; the ragged have `rows` rows."""
        fields["offsets"], fields["num_groups"] = self.offsets_for(like), self.num_groups
        fields["capacity"] = self.rows(rows)

    def offsets_for(self, array: Array) -> Array:
        """The offsets as an array like this, on its device; memory is shared if it can be."""
        offsets = self.offsets
        if isinstance(array, np.ndarray):
            return offsets if isinstance(offsets, np.ndarray) else self._on_cpu().numpy()
        if isinstance(offsets, np.ndarray):
            offsets = torch.from_numpy(offsets)
        device = array.device
        if offsets.device == device:
            return offsets
        if offsets.is_meta:
            return self._on_cpu().to(device)
        if self._copies is None or torch.compiler.is_compiling():
            return offsets.to(device)
        if device not in self._copies:
            self._copies[device] = offsets.to(device)
        return self._copies[device]

    def _on_cpu(self):
        if self.offsets.is_cpu:
            return self.offsets
        raise invalid(
            f"Groups: the offsets are on {self.offsets.device}, must be on the CPU or on the "
            f"device of the arrays that they divide"
        )

    def to(self, device: Device, non_blocking: bool = False) -> Groups:
        """The same groups with Torch offsets on `device`; on a CPU, which reads them, at once."""
        target = torch_device("Groups.to: device", device)
        offsets = on_device(torch.as_tensor(self.offsets), target, non_blocking)
        return Groups.of_offsets(offsets, self.capacity)

    @property
    def splits(self) -> AnyArray:
        """[G] rows per group, on the device of the offsets."""
        return self.offsets[1:] - self.offsets[:-1]

    def __getstate__(self):
        return {**self.__dict__, "_copies": self._copies and {}}

    def __setstate__(self, state):
        state = pickled("Groups", state, ("offsets", "capacity", "_copies"))
        copies = None if state.pop("_copies") is None else {}
        read = Groups.of_offsets(**state)
        if read.offsets.dtype != framework_of("Groups", {"offsets": read.offsets}).int64:
            raise invalid(f"Groups: offsets in the pickle are {read.offsets.dtype}, must be int64")
        if is_readable(read.offsets):
            Groups(**state)  # raises where the values are no offsets
        self.__dict__.update(read.__dict__, _copies=copies)

    def __len__(self) -> int:
        return self.num_groups

    def __repr__(self) -> str:
        return f"moire.Groups(num_groups={self.num_groups}, capacity={self.capacity})"


class OffsetsOutput(NamedTuple):
    """An array that splits_to_offsets makes: the offsets times `multiplier` (elements, bytes, tiles
    of a row), [G + 1], or [G] without the leading zero; int64 or int32.
    """

    multiplier: int = 1
    leading_zero: bool = True
    dtype: str = "int64"


def splits_to_offsets(
    splits: Integers,
    outputs: Sequence[OffsetsOutput] = (OffsetsOutput(),),
    *,
    kind: str = "splits",
    capacity: Optional[int] = None,
) -> tuple[AnyArray, ...]:
    """All these arrays of one launch, where the splits are. `kind` says what `splits` holds:
    "splits", "ends" or "offsets"; that, capacity, and when values are checked, are as in Groups,
    which is what the layers take.
    """
    kind = choice("splits_to_offsets: kind", kind, _KINDS)
    return _derived("splits_to_offsets", "splits", kind, splits, outputs, capacity)


def _derived(call, name, kind, values, outputs, capacity):
    capacity = -1 if capacity is None else integer(f"{call}: capacity", capacity)
    if isinstance(values, (list, tuple, range)):
        values = DEFAULT.integers(integers(f"{call}: {name}", values))
    fw = framework_of(call, {name: values})
    check_rank(call, name, values, 1)
    num_groups = values.shape[0] - int(kind == "offsets")
    if num_groups < 0:
        raise invalid(f"{call}: {name} is empty, must have at least the leading zero")
    arrays, multipliers, has_none = [], [], []
    for i, output in enumerate(outputs):
        called = f"{call}: outputs[{i}]"
        if not isinstance(output, OffsetsOutput):
            raise wrong(called, output, "a moire.OffsetsOutput")
        multipliers.append(integer(f"{called}.multiplier", output.multiplier, 1))
        has_none.append(int(not flag(f"{called}.leading_zero", output.leading_zero)))
        dtype = fw.dtype(choice(f"{called}.dtype", output.dtype, ("int64", "int32")))
        arrays.append(empty_indices(fw, values, (num_groups + 1 - has_none[-1],), dtype))
    fields = {"splits": values, "kind": _KINDS.index(kind), "capacity": capacity}
    numbers = {"outputs_multiplier": multipliers, "outputs_no_leading_zero": has_none}
    fw.run("splits_to_offsets", {**fields, **numbers, "outputs": arrays})
    return tuple(arrays)


def as_groups(call, groups):
    if isinstance(groups, Groups):
        return groups
    needs = "moire.Groups(splits=...), (ends=...) or (offsets=...)"
    raise wrong(
        f"{call}: groups", groups, f"{needs}: which of them a tensor holds is never guessed"
    )


def is_readable(array):
    """Whether values can be read here and now: they mean something, and no device is waited for."""
    if is_explaining():
        return False
    if isinstance(array, np.ndarray):
        return True
    if torch.compiler.is_compiling() or type(array) is not torch.Tensor or not array.is_cpu:
        return False
    tapes.spoil()  # they are read next
    return True
