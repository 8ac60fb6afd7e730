"""moire.quantize: a GroupedTensor of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from .dtypes import Array
from .errors import invalid
from .grouped_storage import Copy, Kind, empty_copy, source_of
from .grouped_tensor import GroupedTensor, made
from .groups import Groups
from .layouts import GluLayout, GluLayoutLike
from .recipes import Recipe, RecipeLike, check_element
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
    element = check_element(f"{call}: element", element)
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
        Copy(*empty_copy(fw, first, form, element, direction, shape, num_groups)) if want else None
        for direction, want in enumerate(wanted)
    ]
    dtype = fw.compute_dtype(f"{call}: x", first.dtype)
    layout = None if layout is None else GluLayout.of(layout, f"{call}: layout")
    kind = Kind(fw, form, element, dtype, layout, recipe.fractional_scales)
    return made(kind, *copies, groups).take_values(call, fw, x, groups, row_idx, is_new=True)
