"""Three modules in a row, GroupedLinear, ScaledGLU, GroupedLinear, as one fused call on their
parameters: GroupedMLP; Sequential, which finds them in any chain; and fuse, which makes it of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from ..context import note_not_fused
from ..errors import invalid, unsupported
from ..functional import grouped_mlp, moe
from ..gated import glu
from ..layouts import Activation, ActivationLike, GluLayout, GluLayoutLike, num_halves
from ..operands import Operand
from ..routing import Plan
from ..values import described, flag, integer, wrong
from ..wgrad import FRESH
from .linear import GroupedLinear, OfLayers, Splits, WithoutExtraState, as_groups


class ScaledGLU(WithoutExtraState):
    """act = glu(z) probs; `layout` is how gate and up lie along the 2F columns of z, if at all."""

    def __init__(self, act: ActivationLike = "swiglu", layout: GluLayoutLike = "halves") -> None:
        super().__init__()
        self.act = Activation.of(act, "ScaledGLU: act")
        self.layout = GluLayout.of(layout, "ScaledGLU: layout")

    def forward(
        self, z: torch.Tensor, probs: Optional[torch.Tensor] = None, splits: Optional[Splits] = None
    ) -> torch.Tensor:
        groups = None if splits is None else as_groups(splits)
        return glu(z, probs, act=self.act, layout=self.layout, groups=groups)

    def extra_repr(self) -> str:
        return f"{self.act.kind}, {self.layout}"


class ScaledSwiGLU(ScaledGLU):
    """Transformer Engine's name of a ScaledGLU: SwiGLU of two halves, or of interleaved blocks."""

    def __init__(self, *, glu_interleave_size: Optional[int] = None) -> None:
        name = "ScaledSwiGLU: glu_interleave_size"
        super().__init__("swiglu", GluLayout.of(glu_interleave_size, name))


class Routed:
    """What route() gives a call of the module in the place of splits: what casts or moves a call's
    tensors (FSDP2's mixed precision) does not see these.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options


class GroupedMLP(OfLayers, torch.nn.Module):
    """All experts of a mixture as one fused call: fc1, gated activation times probs, fc2.

    hidden, width    H and F: fc1 is [E, 2F, H], fc2 [E, N, F]
    out_features     N, the width of the result; None: H
    layout           how gate and up lie along fc1's 2F outputs, or "ungated", of F; a tag in the
                     state_dict, checked on load
    save_act         keep the activation for the backward: memory for time
    save_z           keep z, fc1's output, for it; False: it makes z again, time for memory
    linear_options   the other arguments of both GroupedLinear: bias, scale_bias (fc2's alone),
                     packed, dtype, compute_dtype, ...
    """

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        width: int,
        *,
        act: ActivationLike = "swiglu",
        layout: GluLayoutLike = "halves",
        out_features: Optional[int] = None,
        save_act: bool = False,
        save_z: bool = True,
        **linear_options: Any,
    ) -> None:
        super().__init__()
        hidden, width = integer("GroupedMLP: hidden", hidden), integer("GroupedMLP: width", width)
        self.activation = ScaledGLU(act, layout)
        layout = self.activation.layout
        outputs = num_halves(layout.fields) * width
        self.fc1 = GroupedLinear(num_groups, hidden, outputs, glu_layout=layout, **linear_options)
        out = hidden if out_features is None else integer("GroupedMLP: out_features", out_features)
        self.fc2 = GroupedLinear(num_groups, width, out, **linear_options)
        self.save_act = flag("GroupedMLP: save_act", save_act)
        self.save_z = flag("GroupedMLP: save_z", save_z)

    @classmethod
    def of(cls, *modules: torch.nn.Module) -> GroupedMLP:
        """The fused module on their parameters, or an error that says why they do not fit."""
        reason = why_not_fused(modules)
        if reason is not None:
            raise invalid(f"fuse: {reason}")
        mlp = cls.__new__(cls)
        torch.nn.Module.__init__(mlp)
        mlp.fc1, mlp.activation, mlp.fc2 = modules
        mlp.save_act, mlp.save_z = False, True
        mlp.fc1.glu_layout = mlp.activation.layout
        return mlp

    @property
    def num_groups(self) -> int:
        return self.fc1.num_groups

    def _options(self, is_first_microbatch):
        ours = self._modules  # sooner than by Module.__getattr__
        for name, wanted in _PARTS.items():
            if (reason := why_not_passed_by(ours[name], wanted)) is not None:
                raise unsupported(
                    f"GroupedMLP: {name} has {reason}, which one call for all three would pass by; "
                    "give that (or fully_shard) to the GroupedMLP, or make it a Sequential"
                )
        options = fused_options(ours["fc1"], ours["activation"], ours["fc2"], is_first_microbatch)
        options.update(save_act=self.save_act, save_z=self.save_z)
        return options

    def forward(
        self,
        x: Operand[torch.Tensor],
        splits: Splits,
        probs: Optional[torch.Tensor] = None,
        *,
        is_first_microbatch: Optional[bool] = None,
        **options: Any,
    ) -> torch.Tensor:
        """x [rows, H] in expert order, probs [rows]: [rows, N]; options are row_idx, scatter_idx,
        out, grad_x_out and tail of moire.grouped_mlp.
        """
        ours = self._options(is_first_microbatch)
        if isinstance(splits, Routed):
            return moe(x, **splits.options, **ours)
        return grouped_mlp(x, groups=as_groups(splits), probs=probs, **ours, **options)

    def route(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        plan: Optional[Plan] = None,
        group: Any = None,
        micro_batches: int = 1,
        is_first_microbatch: Optional[bool] = None,
    ) -> torch.Tensor:
        """x [T, H] through the experts topk_idx [T, k], or a plan's, weighted: [T, N]. Of an
        ExpertParallel, these are this rank's experts; micro_batches as in moire.moe. It calls the
        module with these: hooks have their part.
        """
        routed = {"topk_idx": topk_idx, "topk_weights": topk_weights, "plan": plan, "group": group}
        routed = Routed(**routed, micro_batches=micro_batches)
        return self(x, routed, is_first_microbatch=is_first_microbatch)


def fused_options(fc1, activation, fc2, is_first_microbatch):
    """What these modules say of one call of grouped_mlp or moe."""
    if (recipe := fc1.recipe) is not fc2.recipe and recipe != fc2.recipe:
        raise invalid(f"GroupedMLP: fc1 has {recipe}, fc2 {fc2.recipe}; assign GroupedMLP.recipe")
    if (
        fc1.weight_layout != fc2.weight_layout
        or fc1.compute_dtype != fc2.compute_dtype
        or fc1.glu_layout not in (None, activation.layout)
    ) and (reason := why_not_fused((fc1, activation, fc2))) is not None:
        raise invalid(f"GroupedMLP: {reason}")
    w1, copies1, sink1 = fc1.operands(is_first_microbatch)
    w2, copies2, sink2 = fc2.operands(is_first_microbatch)
    sinks = sink1 or FRESH, sink2 or FRESH
    return {
        "w1": w1,
        "w2": w2,
        "b1": fc1.biases() if fc1.has_bias else None,
        "b2": fc2.biases() if fc2.has_bias else None,
        "b2_scale": "probs" if fc2.scale_bias else None,
        "act": activation.act,
        "layout": activation.layout,
        "recipe": recipe,
        "weight_layout": fc1.weight_layout,
        "compute_dtype": fc1.compute_dtype,
        "w1_quantized": copies1,
        "w2_quantized": copies2,
        "wgrad": sinks if sink1 or sink2 else None,
    }


def why_not_fused(modules):
    """Why a list of modules is not one grouped MLP; None where it is."""
    if len(modules) != 3:
        return f"has {len(modules)} modules, needs GroupedLinear, ScaledGLU, GroupedLinear"
    for module, wanted in zip(modules, _PARTS.values()):
        if not isinstance(module, wanted):
            return f"found {described(module)} where a {wanted.__name__} has to be"
        if (reason := why_not_passed_by(module, wanted)) is not None:
            return f"{described(module)} has {reason}, which one call for all three would pass by"
    fc1, activation, fc2 = modules
    width = fc2.in_features
    if fc1.num_groups != fc2.num_groups:
        return f"the first layer has {fc1.num_groups} groups but the second has {fc2.num_groups}"
    halves = num_halves(activation.layout.fields)
    if fc1.out_features != halves * width:
        needs = f"{halves} x {width} ('{activation.layout}') for the second layer's inputs"
        return f"the first layer has {fc1.out_features} outputs, needs {needs}"
    if fc1.glu_layout not in (None, activation.layout):
        layouts = f"is '{fc1.glu_layout}', the activation's '{activation.layout}'"
        return f"the weight's gate/up layout {layouts}"
    for name in ("weight_layout", "compute_dtype", "recipe"):
        ours, theirs = getattr(fc1, name), getattr(fc2, name)
        if ours != theirs:
            return f"the layers' {name} are {ours!r} and {theirs!r}, must be equal"
    return None


def why_not_passed_by(module, wanted):
    """What such a module has that a call which takes its parameters alone leaves out, or None."""
    if type(module).forward is not wanted.forward or "forward" in vars(module):
        return "a forward of its own"
    return "hooks" if has_hooks(module) else None


def has_hooks(module):
    of_forward = module._forward_hooks or module._forward_pre_hooks
    return bool(of_forward or module._backward_hooks or module._backward_pre_hooks)


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
    if isinstance(module, OfLayers):
        return module(x, is_first_microbatch=options["is_first_microbatch"])
    return module(x)


_PARTS = {"fc1": GroupedLinear, "activation": ScaledGLU, "fc2": GroupedLinear}
_BUFFERS, _TAKING_BUFFERS = ("out", "tail", "grad_x_out"), (GroupedLinear, GroupedMLP, Sequential)


def fuse(
    modules: Union[torch.nn.Sequential, torch.nn.ModuleList, Sequence[torch.nn.Module]],
) -> GroupedMLP:
    """A chain of GroupedLinear, ScaledGLU, GroupedLinear as one GroupedMLP on its parameters."""
    if not isinstance(modules, (torch.nn.Sequential, torch.nn.ModuleList, list, tuple)):
        needs = "a Sequential or a list of GroupedLinear, ScaledGLU, GroupedLinear"
        raise wrong("fuse: modules", modules, needs)
    return GroupedMLP.of(*modules)
