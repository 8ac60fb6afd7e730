"""torchtitan's routed experts and their dispatch on moire, by its overrides:

    --override.imports moire.torchtitan.experts moire.torchtitan.dispatcher
    --override.imports 'moire.torchtitan.experts={"recipe": "mxfp8"}'

`experts` runs FC1, SwiGLU and FC2 of a rank's experts in one call, from BF16 as torchtitan does, or
in the recipe that is asked for; models' checkpoints have the keys and shapes that they had.
`dispatcher` sends a token once to each rank that has one of its experts; no host waits for counts.
Either does without the other. Router, shared experts and parallelism are torchtitan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch

try:
    from torch.distributed.tensor import DTensor  # since torch 2.5
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import spmd_mesh_size
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
from .expert_parallel import DISPATCH_FORMATS, ExpertParallel, Received
from .functional import grouped_mlp
from .groups import Groups
from .layouts import Activation, GluLayout
from .recipes import Recipe
from .routing import Plan, make_plan, permute, unpermute
from .values import choice, flag, integer

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
        b2 = _part_of_sum(b2, self.mlp2_bias_ED)
        return _run(x_RD, w1, w2, num_tokens_per_expert_E, b1=b1, b2=b2, **self.options)


def _options_of(config):
    call = "moire.torchtitan.experts"
    recipe = Recipe.of(config.recipe, f"{call}: recipe")
    recipe.check_operands(call, torch.bfloat16)
    flags = {n: flag(f"{call}: {n}", getattr(config, n)) for n in ("save_act", "save_z")}
    return {"recipe": recipe, **flags}


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part_of_sum(bias, parameter):
    """What a rank adds of a bias that all ranks of the mesh "tp" add, whose sum is taken."""
    if not isinstance(parameter, DTensor):  # gradients are summed over these ranks as well
        parts = spmd_mesh_size("tp")
        return bias if parts == 1 else bias / parts
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    parts = mesh.size(names.index("tp")) if "tp" in names else 1
    return bias if parts == 1 else ScaleBiasForward.apply(bias, parts, bias.dtype)


def _run(x, w1, w2, splits, **options):
    options.update(layout=_GATE_AND_UP, compute_dtype=torch.bfloat16)
    return grouped_mlp(x, w1, w2, Groups(splits=splits), **options)


@override(target=GroupedExperts.Config, description="Routed experts in one call of moire.")
def experts(
    cfg: GroupedExperts.Config,
    *,
    recipe: Optional[str] = None,
    save_act: bool = False,
    save_z: bool = True,
) -> GroupedExperts.Config:
    """What --override.imports names; the options are those of Experts."""
    if type(cfg) is GroupedExperts.Config:
        cfg = fused_grouped_experts(cfg)  # initialisation and shards of w13
    made_of = {FusedGroupedExperts.Config: Experts, GptOssGroupedExperts.Config: GptOssExperts}
    if type(cfg) not in made_of:
        raise unsupported(
            f"moire.torchtitan.experts: found {type(cfg).__qualname__}, needs GroupedExperts, "
            "FusedGroupedExperts or GptOssGroupedExperts as torchtitan has them, without a "
            "converter; recipes of 8 bits are asked for by recipe"
        )
    options = {"recipe": recipe, "save_act": save_act, "save_z": save_z}
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

    max_tokens is the number of tokens of a call, of which torchtitan gives all ranks as many;
    dispatch_format is that of ExpertParallel. max_rows is the most rows that a rank's experts get,
    which on a GPU is the memory that theirs take; None: all that may come.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        max_rows: Optional[int] = None
        dispatch_format: Optional[str] = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.max_rows, self.dispatch_format = config.max_rows, config.dispatch_format
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
            group = self._group(x_TD)
            received = group.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
            x, sent = received.x, _Sent(received.plan, received.topk_weights, received)
        return permute(x, sent.plan), sent.plan.offsets.diff(), sent

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: _Sent, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """The experts' rows times their scores, summed for each token [T, D]."""
        y = unpermute(routed_output_RD, metadata.plan, weights=metadata.weights)
        if metadata.received is None:
            return y
        return self._group(x_TD).combine(y, metadata.received)

    @torch.compiler.disable(reason="moire.torchtitan.dispatcher over ranks is not compiled")
    def _group(self, x):
        tokens = x.shape[0]
        if tokens not in self.groups:
            ranks, rows = self.ep_mesh.get_group(), self.max_rows
            size = ranks.size()
            if rows is None and not x.is_cpu:  # where it is not read; a token's experts differ
                rows = max(tokens * size * min(self.top_k, self.num_experts // size), 1)
            told = {"num_experts": self.num_experts, "max_tokens": max(tokens, 1)}
            told.update(max_rows=rows, dispatch_format=self.dispatch_format)
            self.groups[tokens] = ExpertParallel(ranks, **told)
        return self.groups[tokens]


@override(target=LocalTokenDispatcher.Config, description="Tokens to experts by moire.")
def dispatcher(
    cfg: LocalTokenDispatcher.Config,
    *,
    max_rows: Optional[int] = None,
    dispatch_format: Optional[str] = None,
) -> TokenDispatcher.Config:
    """What --override.imports names; the options are those of TokenDispatcher."""
    call = "moire.torchtitan.dispatcher"
    if max_rows is not None:
        integer(f"{call}: max_rows", max_rows, 1, 2**31 - 1)
    if dispatch_format is not None:
        choice(f"{call}: dispatch_format", dispatch_format, DISPATCH_FORMATS)
    for name, instead in (
        ("pad_multiple", "experts without a converter, since rows are not padded"),
        ("non_blocking_capacity_factor", "max_rows of this override for it"),
    ):
        if getattr(cfg, name, None) is not None:
            raise unsupported(
                f"{call}: found {type(cfg).__qualname__} with {name} {getattr(cfg, name)}, needs "
                + instead
            )
    return derive(cfg, TokenDispatcher.Config, max_rows=max_rows, dispatch_format=dispatch_format)
