"""Sequential, which runs any chain of modules and fuses what it can, and fuse, which makes the one
module of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from ..context import note_not_fused
from ..errors import invalid
from ..functional import grouped_mlp
from ..operands import Operand
from ..values import described, wrong
from .linear import GroupedLinear, OfLayers, Splits, as_groups
from .mlp import GroupedMLP, ScaledGLU, fused_options, has_hooks, why_not_fused


class Sequential(OfLayers, torch.nn.Sequential):
    """Modules one after the other. GroupedLinear, ScaledGLU, GroupedLinear next to each other that
    fit run as the one call that a GroupedMLP of them would make; why others do not, explain() says,
    and inside strict() a ScaledGLU that runs on its own is an error.

    splits (or moire.Groups) go to every module of moire.nn that takes them, and probs to every
    activation and, where it has biases, to the GroupedLinear behind it (unless it was built with
    scale_bias=False). Other modules get x only. out and tail, as in moire.grouped_linear, are for
    the last module, grad_x_out for the first. A chain in a chain is its modules in their places.
    """

    def forward(
        self,
        x: Operand[torch.Tensor],
        splits: Optional[Splits] = None,
        probs: Optional[torch.Tensor] = None,
        *,
        is_first_microbatch: Optional[bool] = None,
        **buffers: Any,
    ) -> torch.Tensor:
        groups = None if splits is None else as_groups(splits)
        modules = _flat(self)
        places = {name: 0 if name == "grad_x_out" else len(modules) - 1 for name in buffers}
        for name, at in places.items():
            if not modules:
                raise invalid(f"Sequential: {name} is given, but the chain has no modules")
            if not isinstance(modules[at], _TAKING_BUFFERS) or name not in _BUFFERS:
                found = f"{name} is given, but module {at} is {described(modules[at])}"
                raise invalid(f"Sequential: {found}, which has none")
        for at, count in _steps(modules):
            given = {n: buffers[n] for n, place in places.items() if at <= place < at + count}
            if count == 3:
                given.update(fused_options(*modules[at : at + 3], is_first_microbatch))
                x = grouped_mlp(x, groups=groups, probs=probs, **given)
                continue
            given["is_first_microbatch"] = is_first_microbatch
            x = _run_alone(modules, at, x, groups, probs, given)
        return x


def _flat(chain):
    """The modules of a chain, and in the place of a chain among them those of that."""
    modules = []
    for module in chain:
        is_chain = type(module).forward in (Sequential.forward, torch.nn.Sequential.forward)
        stays = has_hooks(module) or "forward" in vars(module)
        modules += _flat(module) if is_chain and not stays else [module]
    return modules


def _steps(modules):
    """(place of the first module, how many run as one call), of all of them. It says what is not
    fused, so that strict() raises before anything has run.
    """
    steps, at, count = [], 0, 1
    while at < len(modules):
        if isinstance(modules[at], ScaledGLU):
            scaled = f"the bias of module {at - 1} is scaled by probs, behind an activation"
            reason = why_not_fused(modules[max(at - 1, 0) : at + 2]) or scaled
            if count == 3:
                reason = f"module {at - 1} is in the fused call before it"
            note_not_fused(f"Sequential: module {at}, a ScaledGLU, with its neighbours", reason)
        is_scaled = _is_scaled(modules, at)
        if is_scaled and not isinstance(modules[at], GroupedLinear):
            found = f"module {at} is a chain with hooks or a forward of its own"
            begin = "begins with a bias that probs scale, behind the activation before it"
            raise invalid(f"Sequential: {found} and {begin}; both must be in one chain")
        begins = isinstance(modules[at], GroupedLinear) and not is_scaled
        count = 3 if begins and why_not_fused(modules[at : at + 3]) is None else 1
        steps.append((at, count))
        at += count
    return steps


def _is_scaled(modules, at):
    """Whether probs scale the bias of the GroupedLinear there, or of the chain's first there."""
    layer, before = _edge(modules[at], 0), _edge(modules[at - 1], -1)
    is_behind = at > 0 and isinstance(before, ScaledGLU) and isinstance(layer, GroupedLinear)
    return is_behind and layer.has_bias and layer.scale_bias


def _edge(module, at):
    """The module, or the first (0) or last (-1) of a chain."""
    while isinstance(module, torch.nn.Sequential) and len(module) != 0:
        module = module[at]
    return module


def _run_alone(modules, at, x, groups, probs, options):
    module = modules[at]
    if isinstance(module, GroupedLinear):
        return module(x, groups, scale=probs if _is_scaled(modules, at) else None, **options)
    if isinstance(module, ScaledGLU):
        return module(x, probs, groups)
    if isinstance(module, (GroupedMLP, Sequential)):
        return module(x, groups, probs, **options)
    return module(x)


_BUFFERS, _TAKING_BUFFERS = ("out", "tail", "grad_x_out"), (GroupedLinear, GroupedMLP, Sequential)


def fuse(
    modules: Union[torch.nn.Sequential, torch.nn.ModuleList, Sequence[torch.nn.Module]],
) -> GroupedMLP:
    """A chain of GroupedLinear, ScaledGLU, GroupedLinear as one GroupedMLP on its parameters."""
    if not isinstance(modules, (torch.nn.Sequential, torch.nn.ModuleList, list, tuple)):
        needs = "a Sequential or a list of GroupedLinear, ScaledGLU, GroupedLinear"
        raise wrong("fuse: modules", modules, needs)
    return GroupedMLP.of(*modules)
