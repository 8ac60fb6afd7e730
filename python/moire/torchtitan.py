"""torchtitan's routed experts and their dispatch on moire, by its overrides:

    --override.imports moire.torchtitan.experts moire.torchtitan.dispatcher
    --override.imports 'moire.torchtitan.experts={"recipe": "mxfp8"}'

`experts` runs FC1, SwiGLU and FC2 of a rank's experts in one call, from BF16 as torchtitan does, or
in the recipe that is asked for; checkpoints have the keys and shapes that they had. `dispatcher`
sends a token once to each rank that has one of its experts; no host waits for a GPU there. Either
does without the other. Router, shared experts and parallelism are torchtitan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.tensor import DTensor

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import (
        BaseEPTokenDispatcher,
        LocalTokenDispatcher,
    )
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward
    from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts
except ImportError as e:
    raise ImportError(
        "moire.torchtitan: needs torchtitan >= 0.3 and what it needs: pip install torchtitan"
    ) from e

from .errors import unsupported
from .expert_parallel import ExpertParallel, Received
from .functional import grouped_mlp
from .groups import Groups
from .layouts import Activation, GluLayout
from .recipes import Recipe
from .routing import Plan, make_plan, permute, unpermute

_GATE_AND_UP = GluLayout(1)  # side by side, as torchtitan has them in one weight
_ALPHA, _OFFSET = 1.702, 1.0  # of GPT-OSS's activation


class Experts(FusedGroupedExperts):
    """w13 [E, F, 2, D] and w2_EDF in one call. `recipe` is a name of moire.Recipe; save_act and
    save_z are those of moire.grouped_mlp.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        recipe: Optional[str] = None
        save_act: bool = False
        save_z: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options = _options_of(config)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """x_RD [rows, D] in expert order, and how many rows each expert has, wherever they lie; the
        rows past the last are zeros.
        """
        w13, w2 = _local(self.w13), _local(self.w2_EDF)
        return _run(x_RD, w13.flatten(1, 2), w2, num_tokens_per_expert_E, **self.options)


class GptOssExperts(GptOssGroupedExperts):
    """Those of GPT-OSS: a clamped activation, and biases. Options are those of Experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        recipe: Optional[str] = None
        save_act: bool = False
        save_z: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        activation = Activation.clamped_swiglu(config.swiglu_limit, _ALPHA, _OFFSET)
        self.options = {**_options_of(config), "act": activation, "b2_scale": None}

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """As that of Experts."""
        w1, w2 = _local(self.mlp1_weight_EGD), _local(self.mlp2_weight_EDF)
        b1, b2 = _local(self.mlp1_bias_EG), _local(self.mlp2_bias_ED)
        parts = _size_of_tensor_parallelism(self.mlp1_weight_EGD)
        b2 = ScaleBiasForward.apply(b2, parts, b2.dtype)  # each adds it, and the sum is taken
        return _run(x_RD, w1, w2, num_tokens_per_expert_E, b1=b1, b2=b2, **self.options)


def _options_of(config):
    recipe = Recipe.of(config.recipe, "moire.torchtitan: recipe")
    return {"recipe": recipe, "save_act": config.save_act, "save_z": config.save_z}


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _size_of_tensor_parallelism(parameter):
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    return mesh.size(names.index("tp")) if "tp" in names else 1


def _run(x, w1, w2, splits, **options):
    groups = Groups(splits=splits, capacity=x.shape[0])
    options.update(layout=_GATE_AND_UP, compute_dtype=torch.bfloat16)
    return grouped_mlp(x, w1, w2, groups, **options)


@override(target=GroupedExperts.Config, description="Routed experts in one call of moire.")
def experts(cfg: GroupedExperts.Config, **options: Any) -> GroupedExperts.Config:
    """What --override.imports names; options are the fields that Experts.Config adds."""
    if type(cfg) is GroupedExperts.Config:
        cfg = fused_grouped_experts(cfg)  # initialisation and shards of w13
    made_of = {FusedGroupedExperts.Config: Experts, GptOssGroupedExperts.Config: GptOssExperts}
    if type(cfg) not in made_of:
        raise unsupported(
            f"moire.torchtitan.experts: found {type(cfg).__qualname__}, needs GroupedExperts, "
            "FusedGroupedExperts or GptOssGroupedExperts as torchtitan has them, without a "
            "converter; recipes of 8 bits are asked for by recipe"
        )
    made = derive(cfg, made_of[type(cfg)].Config, **options)
    _options_of(made)
    return made


class _Sent(NamedTuple):
    """What combine needs of a dispatch."""

    plan: Plan
    weights: torch.Tensor  # [T, k] of the tokens that were received, or of one's own
    received: Optional[Received]  # None where there are no other ranks


class TokenDispatcher(BaseEPTokenDispatcher):
    """moire.ExpertParallel over the mesh "ep", or without one the order by expert alone.

    max_rows, overflow and dispatch_format are those of ExpertParallel, whose max_tokens is the
    number of tokens of a call: torchtitan gives all ranks as many. On a GPU, max_rows is the
    memory that experts' rows take: without it, all that could come.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        max_rows: Optional[int] = None
        overflow: str = "refuse"
        dispatch_format: Optional[str] = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options = {
            name: getattr(config, name) for name in ("max_rows", "overflow", "dispatch_format")
        }
        self.groups: dict[int, ExpertParallel] = {}  # by tokens of a rank

    def init_buffer(self) -> None:
        self.groups.clear()

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, _Sent]:
        """(rows [R, D] of this rank's experts, how many each has, what combine takes)."""
        if self.ep_mesh is None:
            plan = make_plan(topk_expert_ids_TK, self.num_experts)
            x, sent = x_TD, _Sent(plan, topk_scores_TK, None)
        else:
            group = self._group(x_TD.shape[0])
            received = group.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
            x, sent = received.x, _Sent(received.plan, received.topk_weights, received)
        return permute(x, sent.plan), sent.plan.offsets.diff(), sent

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: _Sent, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """The experts' rows times their scores, summed for each token [T, D], in FP32."""
        y = unpermute(routed_output_RD, metadata.plan, weights=metadata.weights)
        if metadata.received is None:
            return y
        return self._group(x_TD.shape[0]).combine(y, metadata.received)

    def _group(self, tokens):
        if tokens not in self.groups:
            told = {"num_experts": self.num_experts, "max_tokens": max(tokens, 1)}
            ranks = self.ep_mesh.get_group()
            self.groups[tokens] = ExpertParallel(ranks, **told, **self.options)
        return self.groups[tokens]


@override(target=LocalTokenDispatcher.Config, description="Tokens to experts by moire.")
def dispatcher(cfg: LocalTokenDispatcher.Config, **options: Any) -> TokenDispatcher.Config:
    """What --override.imports names; options are the fields that TokenDispatcher.Config adds."""
    return derive(cfg, TokenDispatcher.Config, **options)
