"""The 8-bit formats: how many elements share a scale, which type scales have, and their shapes."""

from typing import NamedTuple

from .values import choice

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
            return (*outer, self._blocks(n), self._blocks(k))
        if direction == ROWWISE:
            return (*outer, n, self._blocks(k))
        if outer:
            return (*outer, self._blocks(n), k)
        return (n // self.block + num_groups, k)

    def has_blocks_along(self, direction, dim, ndim):
        """Whether elements along `dim` share scales."""
        if self.is_tiled:
            return dim >= ndim - 2
        return dim == (ndim - 1 if direction == ROWWISE else ndim - 2)

    def _blocks(self, size):
        return (size + self.block - 1) // self.block


FORMATS = {
    "mxfp8": Format("mxfp8", 1, 32, "uint8"),
    "fp8_block": Format("fp8_block", 2, 128, "float32"),
    "fp8_tile": Format("fp8_tile", 3, 128, "float32"),
}


def check_format(name, value):
    if isinstance(value, Format) and FORMATS.get(value.name) == value:
        return value
    return FORMATS[choice(name, value, tuple(FORMATS))]


def check_element(name, value):
    return choice(name, value, tuple(ELEMENTS))


def check_direction(name, value):
    return DIRECTIONS.index(choice(name, value, DIRECTIONS))
