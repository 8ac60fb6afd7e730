"""Recipes: which operands the products of a layer read, and what is kept of them; and the 8-bit
formats: how many elements share a scale, which type scales have, and their shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Optional, Union

from .dtypes import DTYPES, Dtype
from .errors import invalid
from .values import choice, flag, pickled, wrong

ROWWISE, COLUMNWISE = 0, 1
DIRECTIONS = ("rowwise", "columnwise")
ELEMENTS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


class Format(NamedTuple):
    """mxfp8: blocks of 32 along the contracted dimension, E8M0 scales. fp8_block: blocks of 128,
    FP32 scales. fp8_tile: tiles of 128 x 128 of weights, one copy for both directions.
    """

    name: str
    scaling: int  # moire_scaling of moire.h
    block: int
    scale_dtype: str  # uint8 holds E8M0

    @property
    def is_tiled(self):
        return self.name == "fp8_tile"

    def scales_shape(self, direction, shape, num_groups):
        """Of data [rows, k] in `num_groups` groups, or of [G, n, k]."""
        *outer, n, k = shape
        if self.is_tiled:
            return (*outer, self.blocks(n), self.blocks(k))
        if direction == ROWWISE:
            return (*outer, n, self.blocks(k))
        if outer:
            return (*outer, self.blocks(n), k)
        return (n // self.block + num_groups, k)

    def has_blocks_along(self, direction, dim, ndim):
        """Whether elements along `dim` share scales."""
        if self.is_tiled:
            return dim >= ndim - 2
        return dim == (ndim - 1 if direction == ROWWISE else ndim - 2)

    def blocks(self, size):
        """Of so many elements."""
        return (size + self.block - 1) // self.block


FORMATS = {
    "mxfp8": Format("mxfp8", 1, 32, "uint8"),
    "fp8_block": Format("fp8_block", 2, 128, "float32"),
    "fp8_tile": Format("fp8_tile", 3, 128, "float32"),
}


_QUANTIZED = ("mxfp8", "mxfp8_fast", "fp8_block")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NAMES = ("as_stored", *_DTYPES, *_QUANTIZED)
_KEPT = ("input", "quantized")
_RECIPES_OF = {
    "gradient_element": _QUANTIZED,
    "save": _QUANTIZED,
    "fractional_scales": ("fp8_block",),
    "emulate_accumulation": ("mxfp8_fast", "fp8_block"),
    "dequantized_weights": ("mxfp8",),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How products are computed.

    name   as_stored; bf16, fp16, fp32: as stored, and the operands are of that type;
           mxfp8: FP8 operands with a power-of-two scale per 32 elements, exact products;
           mxfp8_fast: the same bytes, folded to a scale per 128 where FP8 tensor cores sum;
           fp8_block: FP32 scales per 128 elements, weights in tiles of 128 x 128 (DeepSeek-V3)

    Of the 8-bit ones (moire/functional.py says what they read):
    gradient_element       e4m3, or e5m2 for the copies of gradients
    save                   what a forward keeps of x for the weight gradient: the "input" itself, by
                           reference, or its "quantized" column-wise copy; None: the input where
                           rows are gathered from it (row_idx, moe), else the copy
    fractional_scales      fp8_block: scales need not be powers of two
    dequantized_weights    mxfp8: modules keep weights as the BF16 numbers that codes decode to,
                           where a device would decode them at each call: 4 bytes a parameter
    emulate_accumulation   mxfp8_fast, fp8_block on a CPU: sums as Hopper's tensor cores do; slow
    """

    name: str = "as_stored"
    gradient_element: str = "e4m3"
    save: Optional[str] = None
    fractional_scales: bool = False
    emulate_accumulation: bool = False
    dequantized_weights: bool = False

    def __post_init__(self):
        choice("Recipe: name", self.name, _NAMES)
        choice("Recipe: gradient_element", self.gradient_element, ELEMENTS)
        if self.save is not None:
            choice("Recipe: save", self.save, _KEPT)
        for option, names in _RECIPES_OF.items():
            value, default = getattr(self, option), type(self).__dict__[option]
            if default is False:
                flag(f"Recipe: {option}", value)
            if value != default and self.name not in names:
                found = f"{option} is {value!r} but name is {self.name!r}"
                raise invalid(f"Recipe: {found}, needs {' or '.join(names)}")
        object.__setattr__(self, "is_quantized", self.name in _QUANTIZED)

    def __repr__(self):
        options = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)[1:]]
        said = [f", {name}={value!r}" for name, value, default in options if value != default]
        return f"Recipe({self.name!r}{''.join(said)})"

    def __setstate__(self, state):
        self.__init__(**pickled("Recipe", state, [f.name for f in dataclasses.fields(self)]))

    @classmethod
    def of(cls, recipe: RecipeLike, name: str = "Recipe.of: recipe") -> Recipe:
        """A Recipe as it is or by its name; None is as_stored. `name` is for error messages."""
        if isinstance(recipe, cls):
            return recipe
        if (recipe is None or isinstance(recipe, str)) and recipe in _BY_NAME:
            return _BY_NAME[recipe]
        raise wrong(name, recipe, f"one of {', '.join(_NAMES)} or a moire.Recipe")

    @classmethod
    def of_quantize(cls, recipe: RecipeLike, name: str) -> Recipe:
        """One of the 8-bit recipes."""
        found = cls.of(recipe, name)
        if not found.is_quantized:
            raise invalid(f"{name} is {found.name!r}, must be one of {', '.join(_QUANTIZED)}")
        return found

    @property
    def format(self) -> Format:
        """Of activations and gradients."""
        return FORMATS["fp8_block" if self.name == "fp8_block" else "mxfp8"]

    @property
    def weight_format(self) -> Format:
        return FORMATS["fp8_tile" if self.name == "fp8_block" else "mxfp8"]

    @property
    def may_use_cores(self) -> bool:
        """Whether FP8 tensor cores may make its sums."""
        return self.name in ("mxfp8_fast", "fp8_block") and not self.emulate_accumulation

    def between(self, fw: Any, dtype: Dtype) -> Dtype:
        """What an MLP's z is stored in, where x is of `dtype`: BF16 in 8 bits, whatever x is."""
        return fw.dtype("bfloat16") if self.is_quantized else dtype

    def saves_copy(self, is_gathered: bool) -> bool:
        """Whether a forward keeps a column-wise copy of x."""
        save = self.save or ("input" if is_gathered else "quantized")
        return self.is_quantized and save == "quantized"

    @property
    def fields(self) -> dict[str, int]:
        """Those of moire.h, of all entries: each takes what it has a field for."""
        if not self.is_quantized:
            return {}
        return {
            "recipe": 1 + _QUANTIZED.index(self.name),
            "gradient_dtype": DTYPES[ELEMENTS[self.gradient_element]],
            "emulate_accumulation": int(self.emulate_accumulation),
            "fractional_scales": int(self.fractional_scales),
            "dequantized": int(self.dequantized_weights),
        }

    def check_operands(self, call: str, dtype: Dtype) -> None:
        """That operands of `dtype` are what the recipe's name says."""
        needed = _DTYPES.get(self.name)
        if needed is not None and (found := str(dtype).removeprefix("torch.")) != needed:
            raise invalid(f"{call}: recipe {self.name!r} needs {needed} operands, found {found}")


RecipeLike = Union[Recipe, str, None]
_BY_NAME = {None: Recipe(), **{name: Recipe(name) for name in _NAMES}}
