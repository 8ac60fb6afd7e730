"""Modules: GroupedLinear, ScaledGLU, GroupedMLP, Router, MoE; fuse, and convert_state_dict.

Every forward that is ragged takes `splits`: rows per expert, in a list or a tensor, or Groups.
"""

from __future__ import annotations

from .checkpoint import convert_optimizer_state_dict, convert_state_dict
from .linear import GroupedLinear
from .mlp import GroupedMLP, ScaledGLU, ScaledSwiGLU, Sequential, fuse
from .moe import MoE, Router

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "MoE",
    "Router",
    "ScaledGLU",
    "ScaledSwiGLU",
    "Sequential",
    "convert_optimizer_state_dict",
    "convert_state_dict",
    "fuse",
]


def __dir__() -> list[str]:
    return __all__
