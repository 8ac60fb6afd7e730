"""Router and MoE: a whole mixture-of-experts layer."""

from __future__ import annotations

from typing import Callable, Optional, Union

import torch
import torch.distributed as dist

from ..arrays import Torch, check_array, check_rank
from ..communicator import Communicator
from ..dtypes import Device
from ..errors import invalid
from ..expert_parallel import ExpertParallel, ranks_of
from ..micro_batches import stream_beside
from ..routing import check_choice, router
from ..values import flag, integer, wrong
from .linear import OfLayers, parameter_options
from .mlp import GroupedMLP, Routed


def _check_tokens(call, x, hidden):
    check_array(Torch, call, "x", x, "as the parameters are")
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise invalid(f"{call}: x is {list(x.shape)}, must be [..., {hidden}]")


class Router(torch.nn.Module):
    """Linear scores in FP32, then the k best experts of each token and their weights (see
    moire.router).

    expert_bias: a buffer [E] added for the choice only (DeepSeek-V3's load balancing), zeros at
    first.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        k: int,
        *,
        kind: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_bias: bool = False,
        device: Optional[Device] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        hidden = integer("Router: hidden", hidden, 1)
        num_experts = integer("Router: num_experts", num_experts, 1)
        check_choice("Router", num_experts, k, kind, normalize, scale)
        self.k, self.kind, self.normalize, self.scale = k, kind, normalize, scale
        self.hidden, self.num_experts = hidden, num_experts
        options = parameter_options("Router", device, dtype)
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden, **options))
        bias = None
        if flag("Router: expert_bias", expert_bias):
            bias = torch.zeros(num_experts, device=options["device"], dtype=torch.float32)
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.expert_bias is not None:
            torch.nn.init.zeros_(self.expert_bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H]: (topk_idx [T, k], topk_weights [T, k] FP32)."""
        _check_tokens("Router", x, self.weight.shape[1])
        check_rank("Router", "x", x, 2)
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            logits = torch.nn.functional.linear(x.float(), self.weight.float())
        options = {"kind": self.kind, "normalize": self.normalize, "scale": self.scale}
        return router(logits, self.k, expert_bias=self.expert_bias, **options)

    def extra_repr(self) -> str:
        of = f"{self.hidden}, {self.num_experts}, k={self.k}"
        return f"{of}, {self.kind}, normalize={self.normalize}"


class MoE(OfLayers, torch.nn.Module):
    """Router, experts (a GroupedMLP) and, beside them, an optional shared expert: any module of x.

    router   any module that returns (topk_idx, topk_weights) for x [T, H]
    group    the ranks that have the experts, a torch.distributed process group, a
             moire.Communicator or, with more to say, a moire.ExpertParallel: `experts` are those of
             this rank, the router's numbers are among all ranks'. Every parameter but the experts'
             has a copy on each rank, whose gradients the caller reduces (DDP, FSDP2)
    overlap  on GPUs the shared expert runs in a stream of its own, beside what moves tokens between
             ranks: a Communicator with few num_multiprocessors leaves it the others. Its backward
             runs there too
    micro_batches
             parts that a group's tokens are cut into, on all ranks: on GPUs those of one move, in a
             stream of their own, beside the experts of another
    """

    def __init__(
        self,
        experts: GroupedMLP,
        router: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        shared: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
        *,
        group: Optional[Union[ExpertParallel, Communicator, dist.ProcessGroup]] = None,
        overlap: bool = False,
        micro_batches: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(experts, GroupedMLP):
            raise wrong("MoE: experts", experts, "a GroupedMLP")
        for name, module in (("router", router), ("shared", shared)):
            if not callable(module) and not (name == "shared" and module is None):
                raise wrong(f"MoE: {name}", module, "a module of x")
        if group is not None and not isinstance(group, ExpertParallel):
            _, _, size = ranks_of("MoE", group)
            group = ExpertParallel(group, num_experts=size * experts.num_groups)
        if group is not None and experts.num_groups != group.num_local_experts:
            raise invalid(
                f"MoE: there are {experts.num_groups} experts but group has "
                f"{group.num_local_experts} on each rank"
            )
        there_are = experts.num_groups if group is None else group.num_experts
        if isinstance(router, Router) and (scores := router.weight.shape[0]) != there_are:
            raise invalid(f"MoE: the router scores {scores} experts but there are {there_are}")
        if flag("MoE: overlap", overlap) and shared is None:
            raise invalid("MoE: overlap is on, but there is no shared expert to run beside")
        if integer("MoE: micro_batches", micro_batches, 1) > 1 and group is None:
            raise invalid(f"MoE: micro_batches is {micro_batches}, but there is no group")
        self.experts, self.router, self.shared, self.group = experts, router, shared, group
        self.overlap, self.micro_batches = overlap, micro_batches

    def forward(
        self, x: torch.Tensor, *, is_first_microbatch: Optional[bool] = None
    ) -> torch.Tensor:
        """x [..., H], y [..., N]."""
        _check_tokens("MoE", x, self.experts.fc1.in_features)
        if not (self.overlap and x.is_cuda):
            y = self._routed(x, is_first_microbatch)
            return y if self.shared is None else y + self.shared(x)
        here = torch.cuda.current_stream(x.device)
        beside = stream_beside(here, "a shared expert")
        beside.wait_stream(here)
        x.record_stream(beside)
        try:
            with torch.cuda.stream(beside):
                of_shared = self.shared(x)
            y = self._routed(x, is_first_microbatch)
        finally:
            here.wait_stream(beside)
        of_shared.record_stream(here)
        return y + of_shared

    def _routed(self, x, is_first_microbatch):
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.router(tokens)
        choice = {"topk_idx": topk_idx, "topk_weights": topk_weights}
        routed = Routed(**choice, group=self.group, micro_batches=self.micro_batches)
        # What route() is, through whatever wraps them.
        y = self.experts(tokens, routed, is_first_microbatch=is_first_microbatch)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])
