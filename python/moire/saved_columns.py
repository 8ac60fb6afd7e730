"""How the column-wise copy of x lies that a forward keeps for the weight gradient: as `quantize`
has it, or transposed, where a GPU's FP8 tensor cores will read it so (docs/numerics.md §7).
"""

import functools

from . import context as contexts
from ._abi import ffi, lib
from .arrays import Torch, torch
from .dtypes import DTYPES
from .invoke import ENTRIES, describe
from .recipes import ELEMENTS
from .values import dtype_name
from .wgrad import Beta

_X = "e4m3"
_SUMMED = ("float32", "bfloat16")  # what gradients are stored in
# Rows a group in the mean: each group is filled up to a multiple of 128, up to half as much again.
_FEW_ROWS = 256


def lie_transposed(fw, fields, w, sizes, recipe):
    """Whether they do, for the gradient of this weight of (out, in). Not where a compiler looks."""
    if fw is not Torch or not recipe.may_use_cores or torch.compiler.is_compiling():
        return False
    now, offsets = contexts.settings_now(), fields["offsets"]
    place = fw.place(offsets.device)
    if not fw.is_plain(offsets) or (place[0] == "cpu" and now.plan_for is None):
        return False
    num_groups, capacity = counts = fields["num_groups"], fields["capacity"]
    are_known = all(type(count) is int for count in (*sizes, *counts))
    if not are_known or capacity < _FEW_ROWS * num_groups:
        return False
    if fields[w][0].dtype == torch.float16:
        return False
    key = place, now.implementation, now.plan_for
    return _cores_sum(*key, recipe.gradient_element, fields[f"{w}_layout"], *sizes, *counts)


@functools.lru_cache(maxsize=1024)
def _cores_sum(place, implementation, plan_for, element, layout, out, inner, num_groups, capacity):
    """Whether calls there, by the settings named, sum the gradient of [groups, out, in] weights
    over such rows on FP8 tensor cores, of operands that lie transposed: asked of the library.
    """
    entry, rows = ENTRIES["grouped_gemm_wgrad"], _rows(capacity, num_groups)
    args = ffi.new(entry.pointer)
    args.struct_size, args.accumulation = entry.struct_size, lib.MOIRE_ACCUMULATE_FAST
    args.groups.num_groups, args.groups.capacity = num_groups, capacity
    operands = [(out, element), (inner, _X)]
    if layout != 0:
        operands.reverse()
    for name, (columns, of_operand) in zip("ab", operands):
        describe(getattr(args, name), DTYPES[ELEMENTS[of_operand]], columns, rows)
        scales = getattr(args, f"{name}_scales")
        describe(scales, DTYPES["float32"], rows // 128, columns)
    args.d.layout, context = layout, contexts.current(*place)
    for dtype in _SUMMED:
        shape = num_groups, *(columns for columns, _ in operands)
        describe(args.d.tensor, DTYPES[dtype], *shape)
        if entry.workspace(context, args, ffi.new("size_t *")) != 0:
            return False
    return True


def sums_apart(to):
    """Of {weight: (arrays, beta)} those in memory of a caller's that FP8 tensor cores cannot store
    to: FP32 arrays to overwrite instead, for add_sums.
    """
    return {
        w: ([torch.empty(a.shape, dtype=torch.float32, device=a.device) for a in arrays], Beta())
        for w, (arrays, _) in to.items()
        if arrays is not None and not all(_is_stored_to(array) for array in arrays)
    }


def _is_stored_to(array):
    return dtype_name(array) in _SUMMED and array.data_ptr() % 16 == 0  # bytes, as TMA has it


def add_sums(to, sums):
    """arrays = beta arrays + sums, added in FP32 and rounded once, as kernels do."""
    for w, (of_weight, _) in sums.items() if not contexts.is_explaining() else ():
        arrays, beta = to[w]
        for i, (array, added) in enumerate(zip(arrays, of_weight)):
            if beta.per_group is not None:
                array.copy_(torch.where(beta.per_group[i] != 0, array + added, added))
            elif beta.value != 0:
                array.add_(added)
            else:
                array.copy_(added)


def _rows(capacity, num_groups):
    """Each group's begin at a multiple of 128."""
    return 128 * (capacity // 128 + num_groups)


def empty_transposed(fw, fields, like, columns):
    """[data, scales] for a column-wise copy of [capacity, columns] that lies so."""
    rows = _rows(fields["capacity"], fields["num_groups"])
    data = fw.empty(like, (columns, rows), fw.dtype(ELEMENTS[_X]))
    return [data, fw.empty(like, (rows // 128, columns), fw.float32)]
