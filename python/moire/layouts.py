"""Values that say what shapes cannot: where gate and up lie, which activation, how weights lie."""

from __future__ import annotations

import dataclasses
import re
from typing import Union

import numpy as np

from .errors import invalid
from .values import choice, integer, number, pickled, wrong

_ORDERS = ("gate_first", "up_first")
_WRITTEN = re.compile(r"(halves|interleaved blocks of (?P<block>\d+)), (?P<first>gate|up) first")
_ACTIVATIONS = ("swiglu", "clamped_swiglu", "geglu_tanh")
WEIGHT_LAYOUTS = ("out_in", "in_out")


@dataclasses.dataclass(frozen=True)
class GluLayout:
    """How gate and up lie along 2F rows: `block` of the first, `block` of the second, repeated; 0 =
    two halves. `fields` are those of moire.h.
    """

    block: int = 0
    order: str = "gate_first"

    def __post_init__(self):
        object.__setattr__(self, "block", integer("GluLayout: block", self.block))
        choice("GluLayout: order", self.order, _ORDERS)
        object.__setattr__(self, "fields", (self.block, _ORDERS.index(self.order)))

    def __setstate__(self, state):
        self.__init__(**pickled("GluLayout", state, ("block", "order")))

    @classmethod
    def of(cls, layout: GluLayoutLike, name: str = "GluLayout.of: layout") -> GluLayout:
        """A GluLayout as it is, None or "halves" for two halves, an integer for interleaved blocks
        of that size; `name` is what an error calls it.
        """
        if isinstance(layout, cls):
            return layout
        if layout is None or (isinstance(layout, str) and layout == "halves"):
            return _HALVES
        if isinstance(layout, (int, np.integer)) and not isinstance(layout, bool) and layout > 0:
            return cls(block=layout)
        needs = "'halves', a block size (1, 8, 32, ...) or a moire.GluLayout"
        raise wrong(name, layout, needs)

    @classmethod
    def parse(cls, text: str, name: str = "GluLayout.parse: text") -> GluLayout:
        """The layout of which str() is `text`, as tags have it."""
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            needs = "as in 'halves, gate first' or 'interleaved blocks of 8, up first'"
            raise wrong(name, text, needs)
        return cls(int(found["block"] or 0), f"{found['first']}_first")

    def check_width(self, call: str, size: int) -> None:
        """That `size` = 2F columns can be divided so."""
        multiple = 2 * max(self.block, 1)
        if size % multiple != 0:
            found = f"the layout is {self}, but 2F is {size}"
            raise invalid(f"{call}: {found}, must be a multiple of {multiple}")

    def __str__(self):
        lies = "halves" if self.block == 0 else f"interleaved blocks of {self.block}"
        return f"{lies}, {self.order.replace('_', ' ')}"


@dataclasses.dataclass(frozen=True)
class Activation:
    """A gated activation: kind and, for clamped_swiglu, its limit, alpha and offset (GPT-OSS: 7,
    1.702, 1). `fields` are those of moire.h.
    """

    kind: str = "swiglu"
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    def __post_init__(self):
        choice("Activation: kind", self.kind, _ACTIVATIONS)
        for name in ("limit", "alpha", "offset"):
            object.__setattr__(self, name, number(f"Activation: {name}", getattr(self, name)))
        if self.kind == "clamped_swiglu" and not (self.limit > 0 and self.alpha > 0):
            found = f"limit is {self.limit} and alpha is {self.alpha}"
            raise invalid(f"Activation: {found}, must be positive (GPT-OSS: 7 and 1.702)")
        parameters = (self.limit, self.alpha, self.offset)
        kind = float(_ACTIVATIONS.index(self.kind))
        object.__setattr__(self, "fields", (kind, *parameters))

    def __setstate__(self, state):
        self.__init__(**pickled("Activation", state, ("kind", "limit", "alpha", "offset")))

    @classmethod
    def clamped_swiglu(
        cls, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0
    ) -> Activation:
        return cls("clamped_swiglu", limit, alpha, offset)

    @classmethod
    def of(cls, activation: ActivationLike, name: str = "Activation.of: activation") -> Activation:
        """An Activation as it is, or the one of that name; "clamped_swiglu" has GPT-OSS's
        constants. `name` is what an error calls it.
        """
        if isinstance(activation, cls):
            return activation
        if isinstance(activation, str) and activation in _ACTIVATIONS:
            return _BY_NAME[activation]
        needs = f"one of {', '.join(_ACTIVATIONS)} or a moire.Activation"
        raise wrong(name, activation, needs)


GluLayoutLike = Union[GluLayout, str, int, None]
ActivationLike = Union[Activation, str]
_HALVES = GluLayout()
_BY_NAME = {
    "swiglu": Activation("swiglu"),
    "clamped_swiglu": Activation.clamped_swiglu(),
    "geglu_tanh": Activation("geglu_tanh"),
}


def check_weight_layout(call, layout):
    return choice(f"{call}: weight_layout", layout, WEIGHT_LAYOUTS)


def weight_layout_code(call, layout):
    """The moire_weight_layout of that name."""
    return WEIGHT_LAYOUTS.index(check_weight_layout(call, layout))
