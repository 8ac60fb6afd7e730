"""What a GroupedTensor holds, data and scales of one direction or both, and the calls that write
and read them. Nothing is differentiated here; a `tensor` is a GroupedTensor.

Shapes of scales are those of moire.h; docs/numerics.md defines every byte.
"""

from typing import Any, NamedTuple, Optional

import numpy as np

from .arrays import check_rank, framework_of
from .errors import invalid
from .groups import Groups, as_groups, is_readable
from .layouts import GluLayout
from .recipes import COLUMNWISE, DIRECTIONS, ELEMENTS, FORMATS, ROWWISE, Format
from .values import choice, flag, shown, wrong

_NAMES = {4: "e4m3", 5: "e5m2"}  # by moire_dtype


class Copy(NamedTuple):
    """The data and scales of one direction: value = data * scale."""

    data: Any
    scales: Any


class Kind(NamedTuple):
    """What a GroupedTensor is besides its arrays and groups: this never changes."""

    fw: Any
    form: Format
    element: str
    dtype: Any
    layout: Optional[GluLayout] = None
    fractional_scales: bool = False


def parts_of(name):
    """The names of data and scales of one direction."""
    return f"{name}.data", f"{name}.scales"


def checked(call, format, copies, groups, layout, dtype, element, fractional_scales):
    """(Kind, Copies by direction, Groups) of what a caller gave; `copies` is a dict of pairs."""
    form, arrays = FORMATS[choice(f"{call}: format", format, FORMATS)], {}
    for name, copy in copies.items():
        if copy is not None and not (isinstance(copy, (tuple, list)) and len(copy) == 2):
            raise wrong(f"{call}: {name}", copy, "(data, scales)")
        arrays.update({} if copy is None else dict(zip(parts_of(name), copy)))
    if not arrays:
        raise invalid(f"{call}: rowwise and columnwise are both absent, needs at least one")
    fw = framework_of(call, arrays)
    groups = None if groups is None else as_groups(call, groups)
    layout = None if layout is None else GluLayout.of(layout, f"{call}: layout")
    dtype = fw.float32 if dtype is None else fw.compute_dtype(f"{call}: dtype", dtype)
    fractional_scales = flag(f"{call}: fractional_scales", fractional_scales)
    if element is not None:
        element = choice(f"{call}: element", element, ELEMENTS)
    name, data = next(iter(arrays.items()))
    num_groups, shape = _num_groups(call, name, data, form, groups), tuple(data.shape)
    found = []
    for direction, copy in enumerate(copies.values()):
        if copy is not None:
            data, element = _as_fp8(call, fw, parts_of(DIRECTIONS[direction])[0], copy[0], element)
            copy = _checked_copy(call, fw, form, direction, shape, num_groups, data, copy[1])
        found.append(copy)
    return Kind(fw, form, element, dtype, layout, fractional_scales), found, groups


def _num_groups(call, name, data, form, groups):
    if data.ndim not in (2, 3):
        raise invalid(
            f"{call}: {name} is {list(data.shape)}, must be ragged [rows, k] or uniform "
            f"[G, n, k]: every matrix has the same k, and other ragged shapes have no one form"
        )
    if data.ndim == 3:
        if groups is not None:
            raise invalid(f"{call}: groups are given, but {name} is uniform, {list(data.shape)}")
        return data.shape[0]
    if form.is_tiled:
        raise invalid(f"{call}: format is 'fp8_tile', but {name} is ragged; tiles are uniform")
    if groups is None:
        return 1
    if groups.rows(data.shape[0]) != data.shape[0]:
        raise invalid(
            f"{call}: {name} has {data.shape[0]} rows, but groups have a capacity of "
            f"{groups.capacity}"
        )
    groups.check_rows(call, data.shape[0])
    return groups.num_groups


def _as_fp8(call, fw, name, data, element):
    """The data as FP8, and which: as its type says, or `element` where it is bytes."""
    found = _NAMES.get(fw.code(data))
    if found is None and data.dtype == fw.dtype("uint8"):
        if element is None:
            raise invalid(f"{call}: {name} is uint8, needs element='e4m3' or 'e5m2' beside it")
        return data.view(fw.dtype(ELEMENTS[element])), element
    if found is None:
        raise invalid(f"{call}: {name} is {shown(data)}, needs float8_e4m3fn or float8_e5m2")
    if element not in (None, found):
        raise invalid(
            f"{call}: {name} is {found}, but the other direction or element= is "
            f"{element}; mixed formats are two tensors"
        )
    return data, found


def _checked_copy(call, fw, form, direction, shape, num_groups, data, scales):
    if direction == COLUMNWISE and form.is_tiled:
        raise invalid(f"{call}: columnwise is given, but tiles serve both directions: rowwise")
    data_name, scales_name = parts_of(DIRECTIONS[direction])
    if tuple(data.shape) != shape:
        raise invalid(f"{call}: {data_name} is {list(data.shape)}, needs {list(shape)}")
    wanted, dtype = form.scales_shape(direction, shape, num_groups), fw.dtype(form.scale_dtype)
    if str(scales.dtype).endswith("float8_e8m0fnu"):
        scales = scales.view(fw.dtype("uint8"))
    if tuple(scales.shape) != wanted or scales.dtype != dtype:
        raise invalid(
            f"{call}: {scales_name} is {shown(scales)}, needs {form.scale_dtype} "
            f"{list(wanted)} ({form.name}, {DIRECTIONS[direction]}, {num_groups} groups)"
        )
    return Copy(data, scales)


def source_of(call, x, groups, row_idx):
    """(framework, an array or a list of matrices, shape of the result, groups)."""
    is_listed = isinstance(x, (list, tuple))
    if is_listed and len(x) == 0:
        raise invalid(f"{call}: x is an empty list, needs at least one matrix")
    arrays = {f"x[{i}]": array for i, array in enumerate(x)} if is_listed else {"x": x}
    fw = framework_of(call, arrays, {"row_idx": row_idx})
    if groups is not None:
        groups = as_groups(call, groups)
    if is_listed:
        x, groups = _listed(call, fw, arrays, groups)
    if isinstance(x, list):
        shape = (len(x), *x[0].shape)
    elif x.ndim not in (2, 3):
        raise invalid(f"{call}: x is {list(x.shape)}, must be [rows, k], [G, n, k] or a list")
    else:
        shape = tuple(x.shape)
    if len(shape) == 3:
        for name, value in (("groups", groups), ("row_idx", row_idx)):
            if value is not None:
                raise invalid(f"{call}: {name} is given, but x is uniform, {list(shape)}")
        return fw, x, shape, None
    rows = shape[0] if row_idx is None else check_rank(call, "row_idx", row_idx, 1).shape[0]
    if groups is not None:
        rows = groups.rows(rows)
        groups.check_rows(call, rows)
    return fw, x, (rows, shape[1]), groups


def _listed(call, fw, arrays, groups):
    """A list of alike matrices as it is; others below each other, as groups."""
    (first_name, first), *others = arrays.items()
    for name, array in arrays.items():
        check_rank(call, name, array, 2)
    for name, array in others:
        if array.shape[1] != first.shape[1]:
            both = array.shape[0] != first.shape[0]
            raise invalid(
                f"{call}: {name} is {list(array.shape)} but {first_name} is {list(first.shape)}; "
                f"{'all-different shapes are' if both else 'a ragged last dimension is'} not "
                f"supported: the matrices must have the same k"
            )
    if groups is not None:
        raise invalid(f"{call}: groups are given, but x is a list, which says them itself")
    matrices = list(arrays.values())
    if all(array.shape == first.shape for array in matrices):
        return matrices, None
    splits = fw.integers([array.shape[0] for array in matrices])
    return fw.concatenate(matrices), Groups(splits=splits)


def empty_copy(fw, like, form, element, direction, shape, num_groups):
    """The Copy of one direction, not yet written."""
    data = fw.empty(like, shape, fw.dtype(ELEMENTS[element]))
    scales = form.scales_shape(direction, shape, num_groups)
    return Copy(data, fw.empty(like, scales, fw.dtype(form.scale_dtype)))


def write(fw, tensor, x, groups, row_idx):
    """x, as source_of returned it, into the copies of `tensor`; the caller says it was written."""
    rowwise, columnwise = (copy and list(copy) for copy in (tensor.rowwise, tensor.columnwise))
    values = {"scaling": tensor.form.scaling, "rowwise": rowwise, "columnwise": columnwise}
    values["fractional_scales"] = int(tensor.fractional_scales)
    if tensor.ndim == 3:
        matrices = x if isinstance(x, list) else [x]
        fw.run("quantize_weight", {"source": [fw.detached(a) for a in matrices], **values})
    else:
        if groups is not None:
            groups.give(values, x, tensor.shape[0])
        fw.run("quantize", {**values, "source": fw.detached(x), "row_idx": row_idx})


def requantized(tensor, source):
    """The Copy of the direction that `source` is not."""
    fw, shape, groups = tensor._fw, tensor.shape, tensor.num_groups
    copy = tensor.copy_of(source)
    made = empty_copy(fw, copy.data, tensor.form, tensor.element, 1 - source, shape, groups)
    _convert("requantize", tensor, source, list(made))
    return made


def dequantized(tensor, source=None, dtype=None):
    """The values of one direction, row-wise where there is one, of this type or the tensor's."""
    if source is None:
        source = COLUMNWISE if tensor.rowwise is None else ROWWISE
    target = tensor._fw.empty(tensor.copy_of(source).data, tensor.shape, dtype or tensor.dtype)
    _convert("dequantize", tensor, source, target)
    return target


def _convert(entry, tensor, direction, target):
    copy = tensor.copy_of(direction)
    fields = {"source": list(copy), "target": target, "direction": direction}
    fields.update(scaling=tensor.form.scaling, fractional_scales=int(tensor.fractional_scales))
    if tensor.groups is not None:
        tensor.groups.give(fields, copy.data, tensor.shape[0])
    tensor._fw.run(entry, fields)


def check_groups(call, name, tensor, num_groups, offsets):
    """That a ragged tensor has a call's groups, which are read on a CPU only, outside of graphs."""
    groups = tensor.groups
    if groups is None and not tensor.has_columnwise:
        return
    if tensor.num_groups != num_groups:
        raise invalid(
            f"{call}: {name} was quantised for {tensor.num_groups} groups, but groups has "
            f"{num_groups}"
        )
    if groups is None or groups.offsets is offsets:
        return
    if not (is_readable(groups.offsets) and is_readable(offsets)):
        return
    for g, (was, now) in enumerate(zip(np.asarray(groups.offsets), np.asarray(offsets))):
        if was != now:
            raise invalid(
                f"{call}: {name} was quantised for other groups: offsets[{g}] was {was}, and is "
                f"{now} now"
            )
