"""Values that say what shapes cannot: where gate and up lie, which activation, how weights lie,
which recipe.
"""

import dataclasses
from typing import NamedTuple

from .errors import invalid, unsupported

_ORDERS = ("gate_first", "up_first")
_ACTIVATIONS = ("swiglu", "clamped_swiglu", "geglu_tanh")
_WEIGHT_LAYOUTS = ("out_in", "in_out")
_RECIPE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_COMING_RECIPES = ("mxfp8", "mxfp8_fast", "fp8_block")


@dataclasses.dataclass(frozen=True)
class GluLayout:
    """How gate and up lie along 2F rows: `block` of the first, `block` of the second, repeated; 0 =
    two halves.
    """

    block: int = 0
    order: str = "gate_first"

    def __post_init__(self):
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 0:
            raise invalid(
                f"GluLayout: block is {self.block!r}, must be an integer: 0 (two halves) or more"
            )
        if self.order not in _ORDERS:
            raise invalid(
                f"GluLayout: order is {self.order!r}, must be one of {', '.join(_ORDERS)}"
            )

    @classmethod
    def of(cls, layout):
        """A GluLayout as it is, None or "halves" for two halves, an integer for interleaved blocks
        of that size.
        """
        if isinstance(layout, cls):
            return layout
        if layout is None or layout == "halves":
            return _HALVES
        if isinstance(layout, int) and not isinstance(layout, bool) and layout > 0:
            return cls(block=layout)
        raise invalid(
            f"layout is {layout!r}, must be 'halves', a block size (1, 8, 32, ...) or a "
            f"moire.GluLayout"
        )

    @property
    def fields(self):
        return (self.block, _ORDERS.index(self.order))

    def __str__(self):
        lies = "halves" if self.block == 0 else f"interleaved blocks of {self.block}"
        return f"{lies}, {self.order.replace('_', ' ')}"


@dataclasses.dataclass(frozen=True)
class Activation:
    """A gated activation: kind and, for clamped_swiglu, its limit, alpha and offset (GPT-OSS: 7,
    1.702, 1).
    """

    kind: str = "swiglu"
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    def __post_init__(self):
        if self.kind not in _ACTIVATIONS:
            raise invalid(
                f"Activation: kind is {self.kind!r}, must be one of {', '.join(_ACTIVATIONS)}"
            )

    @classmethod
    def clamped_swiglu(cls, limit=7.0, alpha=1.702, offset=1.0):
        return cls("clamped_swiglu", float(limit), float(alpha), float(offset))

    @classmethod
    def of(cls, activation):
        """An Activation as it is, or the one of that name; "clamped_swiglu" has GPT-OSS's
        constants.
        """
        if isinstance(activation, cls):
            return activation
        if activation in _ACTIVATIONS:
            return _BY_NAME[activation]
        raise invalid(
            f"act is {activation!r}, must be one of {', '.join(_ACTIVATIONS)} or a moire.Activation"
        )

    @property
    def fields(self):
        return (float(_ACTIVATIONS.index(self.kind)), self.limit, self.alpha, self.offset)


_HALVES = GluLayout()
_BY_NAME = {
    "swiglu": Activation("swiglu"),
    "clamped_swiglu": Activation.clamped_swiglu(),
    "geglu_tanh": Activation("geglu_tanh"),
}


class Weights(NamedTuple):
    """The weights of G linear layers as every call takes them: one packed tensor or G matrices, and
    their layout.
    """

    arrays: list
    layout: int

    @classmethod
    def of(cls, name, weights, layout):
        if layout not in _WEIGHT_LAYOUTS:
            raise invalid(
                f"weight_layout is {layout!r}, must be one of {', '.join(_WEIGHT_LAYOUTS)}"
            )
        arrays = list(weights) if isinstance(weights, (list, tuple)) else [weights]
        rank = 2 if isinstance(weights, (list, tuple)) else 3
        for i, array in enumerate(arrays):
            if array.ndim != rank:
                which = f"{name}[{i}]" if rank == 2 else name
                needs = (
                    "a list holds one matrix per group"
                    if rank == 2
                    else "needs [groups, out, in] or a list of matrices"
                )
                raise invalid(f"{which} is {list(array.shape)}; {needs}")
        if not arrays:
            raise invalid(
                f"{name} is an empty list; with no groups, give a packed tensor [0, out, in]"
            )
        return cls(arrays, _WEIGHT_LAYOUTS.index(layout))

    @property
    def num_groups(self):
        return self.arrays[0].shape[0] if self.arrays[0].ndim == 3 else len(self.arrays)

    @property
    def out_features(self):
        return self.arrays[0].shape[-2 if self.layout == 0 else -1]

    @property
    def in_features(self):
        return self.arrays[0].shape[-1 if self.layout == 0 else -2]


def check_recipe(call, recipe, dtype):
    """Accepts the recipes that this build runs on operands of `dtype`; anything else is an error
    that says so.
    """
    if recipe is None or recipe == "as_stored":
        return
    if recipe in _COMING_RECIPES:
        raise unsupported(
            f"{call}: recipe {recipe!r} is not in this build; it has as_stored, bf16, fp16 and fp32"
        )
    if recipe not in _RECIPE_DTYPES:
        raise invalid(f"{call}: recipe is {recipe!r}, must be as_stored, bf16, fp16 or fp32")
    found = str(dtype).removeprefix("torch.")
    if found != _RECIPE_DTYPES[recipe]:
        raise invalid(
            f"{call}: recipe {recipe!r} needs {_RECIPE_DTYPES[recipe]} operands, found {found}"
        )
