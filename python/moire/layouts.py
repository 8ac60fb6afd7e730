"""Values that say what shapes cannot: where gate and up lie, which activation, how weights lie."""

from __future__ import annotations

import dataclasses
import re
from typing import Union

import numpy as np

from .errors import invalid
from .values import choice, integer, number, pickled, wrong

_ORDERS = ("gate_first", "up_first", "ungated")
_WRITTEN = re.compile(
    r"ungated|(halves|interleaved blocks of (?P<block>\d+)), (?P<first>gate|up) first"
)
_ACTIVATIONS = ("swiglu", "clamped_swiglu", "geglu_tanh", "reglu", "reglu2")
# What an activation is called where there is no gate.
_ALONE = {"silu": "swiglu", "gelu_tanh": "geglu_tanh", "relu": "reglu", "relu2": "reglu2"}
WEIGHT_LAYOUTS = ("out_in", "in_out")  # in the order of moire_weight_layout


@dataclasses.dataclass(frozen=True)
class GluLayout:
    """How gate and up lie along 2F rows: `block` of the first, `block` of the second, repeated; 0 =
    two halves. The order "ungated", block 0, has F rows and no up. `fields` are those of moire.h.
    """

    block: int = 0
    order: str = "gate_first"

    def __post_init__(self):
        object.__setattr__(self, "block", integer("GluLayout: block", self.block))
        choice("GluLayout: order", self.order, _ORDERS)
        if self.order == "ungated" and self.block != 0:
            raise invalid(f"GluLayout: block is {self.block}, must be 0 of the order 'ungated'")
        object.__setattr__(self, "fields", (self.block, _ORDERS.index(self.order)))

    def __setstate__(self, state):
        self.__init__(**pickled("GluLayout", state, ("block", "order")))

    @classmethod
    def of(cls, layout: GluLayoutLike, name: str = "GluLayout.of: layout") -> GluLayout:
        """A GluLayout as it is, None or "halves" for two halves, an integer for interleaved blocks
        of that size, "ungated" for experts without a gate; `name` is what an error calls it.
        """
        if isinstance(layout, cls):
            return layout
        if (layout is None or isinstance(layout, str)) and layout in _LAYOUTS:
            return _LAYOUTS[layout]
        if isinstance(layout, (int, np.integer)) and not isinstance(layout, bool) and layout > 0:
            return cls(block=layout)
        needs = "'halves', a block size (1, 8, 32, ...), 'ungated' or a moire.GluLayout"
        raise wrong(name, layout, needs)

    @classmethod
    def parse(cls, text: str, name: str = "GluLayout.parse: text") -> GluLayout:
        """The layout of which str() is `text`, as tags have it."""
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            needs = "as in 'halves, gate first' or 'interleaved blocks of 8, up first'"
            raise wrong(name, text, needs)
        order = f"{found['first']}_first" if found["first"] else "ungated"
        return cls(int(found["block"] or 0), order)

    def check_width(self, call: str, size: int) -> None:
        """That `size` = 2F columns can be divided so."""
        multiple = num_halves(self.fields) * max(self.block, 1)
        if size % multiple != 0:
            found = f"the layout is {self}, but 2F is {size}"
            raise invalid(f"{call}: {found}, must be a multiple of {multiple}")

    def __str__(self):
        if self.order == "ungated":
            return self.order
        lies = "halves" if self.block == 0 else f"interleaved blocks of {self.block}"
        return f"{lies}, {self.order.replace('_', ' ')}"


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation: kind and, for clamped_swiglu, its limit, alpha and offset (GPT-OSS: 7, 1.702,
    1). Of an ungated layout, what it makes of its gate alone. `fields` are those of moire.h.
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
        if self.kind != "clamped_swiglu" and (unused := self.limit or self.alpha or self.offset):
            raise invalid(
                f"Activation: found {unused} beside {self.kind!r}, which has no constants"
            )
        kind = float(_ACTIVATIONS.index(self.kind))
        object.__setattr__(self, "fields", (kind, self.limit, self.alpha, self.offset))

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
        constants; "silu", "gelu_tanh", "relu" and "relu2" are what swiglu, geglu_tanh, reglu and
        reglu2 have for a gate. `name` is what an error calls it.
        """
        if isinstance(activation, cls):
            return activation
        if isinstance(activation, str) and activation in _BY_NAME:
            return _BY_NAME[activation]
        needs = f"one of {', '.join((*_ACTIVATIONS, *_ALONE))} or a moire.Activation"
        raise wrong(name, activation, needs)


def num_halves(layout):
    """Of z, each as wide as act: by the fields of its layout."""
    return 1 if layout[1] == _ORDERS.index("ungated") else 2


GluLayoutLike = Union[GluLayout, str, int, None]
ActivationLike = Union[Activation, str]
_LAYOUTS = {None: GluLayout(), "halves": GluLayout(), "ungated": GluLayout(order="ungated")}
_BY_NAME = {kind: Activation(kind) for kind in _ACTIVATIONS if kind != "clamped_swiglu"}
_BY_NAME["clamped_swiglu"] = Activation.clamped_swiglu()
_BY_NAME.update({name: _BY_NAME[kind] for name, kind in _ALONE.items()})


def check_weight_layout(call, layout):
    return choice(f"{call}: weight_layout", layout, WEIGHT_LAYOUTS)
