"""Into 8 bits and back: moire.quantize, and what the methods of GroupedTensor run.

Shapes of scales are those of moire.h; docs/numerics.md defines every byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import numpy as np

from . import gradient_edge, grouped_tensor
from .arrays import Numpy, check_rank, framework_of
from .context import is_explaining
from .errors import invalid
from .formats import COLUMNWISE, DIRECTIONS, ELEMENTS, ROWWISE, check_element
from .groups import Groups, as_groups, is_readable
from .hints import Array
from .layouts import GluLayout, GluLayoutLike
from .recipes import Recipe, RecipeLike
from .values import flag


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
) -> grouped_tensor.GroupedTensor:
    """A GroupedTensor of x in 8 bits, in one direction or both, in one pass.

    x [rows, k] is ragged, divided by `groups` (None: one group); with row_idx [rows], x is [T, k]
    and row i of the result is x[row_idx[i]]. x [G, n, k], or a list of G matrices of one shape, are
    weights: uniform, and with fp8_block in tiles, which serve both directions. A list of matrices
    that differ in their rows becomes one ragged tensor. `layout` tags where gate and up lie.
    Gradients pass straight through to a ragged x.
    """
    call = "quantize"
    recipe = Recipe.of_quantize(recipe, f"{call}: recipe")
    element = check_element(f"{call}: element", element)
    wanted = flag(f"{call}: rowwise", rowwise), flag(f"{call}: columnwise", columnwise)
    if not any(wanted):
        raise invalid(f"{call}: rowwise and columnwise are both False, needs at least one")
    fw, x, shape, groups = _source(call, x, groups, row_idx)
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
    result = grouped_tensor.GroupedTensor(
        form,
        rowwise=copies[ROWWISE],
        columnwise=copies[COLUMNWISE],
        groups=groups,
        layout=None if layout is None else GluLayout.of(layout, f"{call}: layout"),
        dtype=first.dtype,
        element=element,
        fractional_scales=recipe.fractional_scales,
    )
    quantize_into(call, result, x, row_idx)
    return result


def _source(call, x, groups, row_idx):
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
    """[data, scales] of one direction, not yet written."""
    data = fw.empty(like, shape, fw.dtype(ELEMENTS[element]))
    scales = form.scales_shape(direction, shape, num_groups)
    return [data, fw.empty(like, scales, fw.dtype(form.scale_dtype))]


def pair(fw, copy, element):
    """[data, scales] as the C entries take a moire_quantized."""
    return copy and [fw.views.fp8(copy[0], ELEMENTS[element]), copy[1]]


def quantize_into(call, target, x, row_idx=None):
    """x into the copies that `target` has."""
    fw, x, shape, _ = _source(call, x, target.groups if target.ndim == 2 else None, row_idx)
    if shape != target.shape:
        raise invalid(f"{call}: x is {list(shape)}, must be {list(target.shape)}")
    is_ragged = target.ndim == 2
    gradient_edge.check_target(call, target, is_ragged and fw is not Numpy and x.requires_grad)
    copies = {name: pair(fw, getattr(target, name), target.element) for name in DIRECTIONS}
    values = {"scaling": target.form.scaling, **copies}
    values["fractional_scales"] = int(target.fractional_scales)
    if not is_ragged:
        matrices = x if isinstance(x, list) else [x]
        fw.run("quantize_weight", source=[fw.detached(a) for a in matrices], **values)
    else:
        values.update(ragged_fields(target, x))
        fw.run("quantize", source=fw.detached(x), row_idx=row_idx, **values)
    for copy in copies.values():
        for array in copy or ():
            fw.written(array)
    if is_ragged:
        gradient_edge.set_source(target, x, row_idx)


def requantized(tensor, source):
    """[data, scales] of the direction that `source` is not."""
    fw, shape, groups = tensor._fw, tensor.shape, tensor.num_groups
    copy = tensor.copy_of(source)
    made = empty_copy(fw, copy.data, tensor.form, tensor.element, 1 - source, shape, groups)
    fw.run(
        "requantize",
        source=pair(fw, copy, tensor.element),
        scaling=tensor.form.scaling,
        direction=source,
        fractional_scales=int(tensor.fractional_scales),
        target=pair(fw, made, tensor.element),
        **ragged_fields(tensor, copy.data),
    )
    return made


def dequantized(tensor, source, dtype):
    fw, copy = tensor._fw, tensor.copy_of(source)
    target = fw.empty(copy.data, tensor.shape, dtype)
    fw.run(
        "dequantize",
        source=pair(fw, copy, tensor.element),
        scaling=tensor.form.scaling,
        direction=source,
        target=target,
        **ragged_fields(tensor, copy.data),
    )
    return target


def check_groups(call, name, tensor, num_groups, offsets):
    """That a ragged tensor was quantised for the groups of a call; values are read on a CPU only,
    outside of graphs.
    """
    groups = tensor.groups
    if groups is None and not tensor.has_columnwise:
        return
    if tensor.num_groups != num_groups:
        raise invalid(
            f"{call}: {name} was quantised for {tensor.num_groups} groups, but groups has "
            f"{num_groups}"
        )
    if groups is None or groups.offsets is offsets or is_explaining():
        return
    if not (is_readable(groups.offsets) and is_readable(offsets)):
        return
    for g, (was, now) in enumerate(zip(np.asarray(groups.offsets), np.asarray(offsets))):
        if was != now:
            raise invalid(
                f"{call}: {name} was quantised for other groups: offsets[{g}] was {was}, and is "
                f"{now} now"
            )


def ragged_fields(tensor, like):
    """The fields of groups, where there are any."""
    groups = tensor.groups
    if groups is None:
        return {}
    size = {"num_groups": groups.num_groups, "capacity": tensor.shape[0]}
    return {"offsets": groups.offsets_for(like), **size}
