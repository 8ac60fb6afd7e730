"""ScaledGLU and GroupedMLP: three modules in a row as one fused call on their parameters."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..errors import invalid, unsupported
from ..functional import grouped_mlp, moe
from ..gated import glu
from ..layouts import Activation, ActivationLike, GluLayout, GluLayoutLike, num_halves
from ..operands import Operand
from ..routing import Plan
from ..values import described, flag, integer
from ..wgrad import FreshGradients
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


class GroupedMLP(OfLayers, torch.nn.Module):
    """All experts of a mixture: fc1 (gate and up), gated activation times probs, fc2, in one fused
    call.

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
        outputs = num_halves(self.activation.layout.fields) * width
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
        for name, module in self._modules.items():
            if has_hooks(module):
                raise unsupported(
                    f"GroupedMLP: {name} has hooks, which one call for all three would pass by; "
                    f"give them (or fully_shard) to the GroupedMLP, or make it a Sequential"
                )
        options = fused_options(self.fc1, self.activation, self.fc2, is_first_microbatch)
        return {**options, "save_act": self.save_act, "save_z": self.save_z}

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
        return grouped_mlp(x, groups=as_groups(splits), probs=probs, **ours, **options)

    def route(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        plan: Optional[Plan] = None,
        group: Any = None,
        is_first_microbatch: Optional[bool] = None,
    ) -> torch.Tensor:
        """x [T, H] through the experts topk_idx [T, k], or a plan's, weighted: [T, N]. Of an
        ExpertParallel, these are this rank's experts.
        """
        routed = {"topk_idx": topk_idx, "topk_weights": topk_weights, "plan": plan, "group": group}
        return moe(x, **routed, **self._options(is_first_microbatch))


def fused_options(fc1, activation, fc2, is_first_microbatch):
    """What these modules say of one call of grouped_mlp or moe."""
    both = (layer.operands(is_first_microbatch) for layer in (fc1, fc2))
    (w1, copies1, sink1), (w2, copies2, sink2) = both
    sinks = sink1 or FreshGradients, sink2 or FreshGradients
    return {
        "w1": w1,
        "w2": w2,
        "b1": fc1.biases(),
        "b2": fc2.biases(),
        "b2_scale": "probs" if fc2.scale_bias else None,
        "act": activation.act,
        "layout": activation.layout,
        "recipe": fc1.recipe,
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
    for module, wanted in zip(modules, (GroupedLinear, ScaledGLU, GroupedLinear)):
        if not isinstance(module, wanted):
            return f"found {described(module)} where a {wanted.__name__} has to be"
        if type(module).forward is not wanted.forward or "forward" in vars(module):
            return f"{described(module)} has a forward of its own"
        if has_hooks(module):
            return f"{described(module)} has hooks, which one call for all three would pass by"
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


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module):
    return any(getattr(module, hooks) for hooks in _HOOKS)
