"""A weight in the form that a device's products read (moire_prepared_weight in moire.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from .arrays import COMPUTE_DTYPES, Torch
from .dtypes import DTYPES, Array
from .errors import invalid
from .grouped_storage import source_of
from .invoke import prepared_form
from .layouts import WEIGHT_LAYOUTS, check_weight_layout
from .recipes import Recipe, RecipeLike
from .values import flag, shown

_ALIGNMENT = 64  # bytes
_TYPES = {DTYPES[name] for name in COMPUTE_DTYPES}


class PreparedWeight:
    """A weight [G, out, in], or a list of G matrices, as the products of a recipe read it on its
    device: memory of `nbytes`, opaque, at an address that stays. Layers take it as a weight, or
    beside one as w_quantized, in place of a GroupedTensor. It is good until the weight changes,
    which nobody tells it: quantize_(weight) makes it again.

    forward_only: without what a gradient of x needs.
    """

    layout = None  # of gate and up, where WeightCache was given one

    def __init__(
        self,
        weight: Union[Array, Sequence[Array]],
        recipe: RecipeLike = "mxfp8",
        *,
        weight_layout: str = "out_in",
        forward_only: bool = False,
    ) -> None:
        call = "PreparedWeight"
        self.recipe = Recipe.of_quantize(recipe, f"{call}: recipe")
        self.forward_only = flag(f"{call}: forward_only", forward_only)
        layout = WEIGHT_LAYOUTS.index(check_weight_layout(call, weight_layout))
        self.has_rowwise = layout == 0 or not forward_only
        self.has_columnwise = layout != 0 or not forward_only
        fw, w, self.shape = self._source(call, weight)
        if fw.code(w[0]) not in _TYPES:
            found = shown(w[0]) if len(w) == 1 else f"a list of {shown(w[0])}"
            raise invalid(f"{call}: weight is {found}, needs float32, bfloat16 or float16")
        self.dtype, self.device = w[0].dtype, getattr(w[0], "device", "cpu")
        self._fields = {**self.recipe.fields, "forward_only": int(forward_only), "w_layout": layout}
        shape = [len(range(size)) for size in self.shape]  # a compiler then holds to these numbers
        like = fw.device(w[0]), fw.code(w[0]), shape
        size, self.form = prepared_form(fw, *like, self._fields)
        self.memory = _memory(fw, w[0], size)
        self._write(fw, w)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def quantize_(self, weight: Union[Array, Sequence[Array]]) -> PreparedWeight:
        """Of new values of the weight, in the same memory."""
        fw, w, _ = self._source("quantize_", weight)
        self._write(fw, w)
        fw.written(self.memory)
        return self

    def _source(self, call, weight):
        fw, w, shape, _ = source_of(call, weight, None, None)
        if len(shape) != 3:
            raise invalid(f"{call}: weight is {list(shape)}, needs [groups, out, in] or a list")
        return fw, [fw.detached(a) for a in (w if isinstance(w, list) else [w])], shape

    def _write(self, fw, w):
        fields = {**self._fields, "w": w, "prepared": self.memory, "prepared_form": self.form}
        fw.run("prepare_weight", fields)


def _memory(fw, like, size):
    """Aligned as moire.h has it, which all is that Torch gives out."""
    if fw is Torch:
        return fw.empty(like, (size,), fw.dtype("uint8"))
    memory = fw.empty(like, (size + _ALIGNMENT,), fw.dtype("uint8"))
    start = -fw.address(memory) % _ALIGNMENT
    return memory[start : start + size]
