"""Sequential, which runs any chain of modules and fuses what it can, and fuse, which makes the one
module of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import torch

from ..context import note_not_fused
from ..functional import grouped_mlp
from ..operands import Operand
from ..values import wrong
from .linear import GroupedLinear, OfLayers, Splits, as_groups
from .mlp import GroupedMLP, ScaledGLU, fused_options, why_not_fused


class Sequential(OfLayers, torch.nn.Sequential):
    """Modules one after the other. GroupedLinear, ScaledGLU, GroupedLinear next to each other that
    fit run as the one call that a GroupedMLP of them would make; why others do not, explain() says,
    and inside strict() a ScaledGLU that runs on its own is an error.

    splits (or moire.Groups) go to every module of moire.nn that takes them, and probs to every
    activation and, where it has biases, to the GroupedLinear behind it (unless it was built with
    scale_bias=False). Other modules get x only.
    """

    def forward(
        self,
        x: Operand[torch.Tensor],
        splits: Optional[Splits] = None,
        probs: Optional[torch.Tensor] = None,
        *,
        is_first_microbatch: Optional[bool] = None,
    ) -> torch.Tensor:
        groups = None if splits is None else as_groups(splits)
        modules = list(self)
        for at, count in _steps(modules):
            if count == 3:
                options = fused_options(*modules[at : at + 3], is_first_microbatch)
                x = grouped_mlp(x, groups=groups, probs=probs, **options)
                continue
            before = modules[at - 1] if at > 0 else None
            x = _run_alone(modules[at], before, x, groups, probs, is_first_microbatch)
        return x


def _steps(modules):
    """(place of the first module, how many run as one call), of all of them. It says what is not
    fused, so that strict() raises before anything has run.
    """
    steps, at, count = [], 0, 1
    while at < len(modules):
        if isinstance(modules[at], ScaledGLU):
            reason = why_not_fused(modules[max(at - 1, 0) : at + 2])
            if count == 3:
                reason = f"module {at - 1} is in the fused call before it"
            note_not_fused(f"Sequential: module {at}, a ScaledGLU, with its neighbours", reason)
        begins = isinstance(modules[at], GroupedLinear)
        count = 3 if begins and why_not_fused(modules[at : at + 3]) is None else 1
        steps.append((at, count))
        at += count
    return steps


def _run_alone(module, before, x, groups, probs, is_first_microbatch):
    options = {"is_first_microbatch": is_first_microbatch}
    if isinstance(module, GroupedLinear):
        is_scaled = module.has_bias and module.scale_bias and isinstance(before, ScaledGLU)
        return module(x, groups, scale=probs if is_scaled else None, **options)
    if isinstance(module, ScaledGLU):
        return module(x, probs, groups)
    if isinstance(module, (GroupedMLP, Sequential)):
        return module(x, groups, probs, **options)
    return module(x)


def fuse(
    modules: Union[torch.nn.Sequential, torch.nn.ModuleList, Sequence[torch.nn.Module]],
) -> GroupedMLP:
    """Sequential(GroupedLinear, ScaledGLU, GroupedLinear) as one GroupedMLP on the same parameters,
    or an error.
    """
    if not isinstance(modules, (torch.nn.Sequential, torch.nn.ModuleList, list, tuple)):
        needs = "a Sequential or a list of GroupedLinear, ScaledGLU, GroupedLinear"
        raise wrong("fuse: modules", modules, needs)
    return GroupedMLP.of(*modules)
