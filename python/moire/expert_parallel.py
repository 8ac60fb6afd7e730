"""Experts spread over the ranks of a torch.distributed process group.

A token goes once to each rank that holds one of its experts (`dispatch`), runs through those, and
the ranks' partial sums are added in rank order (`combine`). Everything has a size that the host
knows: each pair of ranks has a window of `max_tokens` rows in which the sender alone decides the
places, so no counts are exchanged, nothing overflows and no host waits for a GPU.

    dispatch   x [T, H], topk_idx [T, k], topk_weights [T, k]
               -> Received: x [R C, H], topk_weights [R C, k] and the plan of the choices that are
                  this rank's experts, for R ranks and C = max_tokens
    combine    y [R C, H] of received.x -> y [T, H], the sum over ranks, in rank order, in FP32

Each is the other's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from . import functional
from .arrays import Torch, as_fp32, check_array, check_rank
from .errors import invalid
from .routing import Plan, make_plan
from .values import described, integer


class Received(NamedTuple):
    """What a rank has after `dispatch`: rows of all ranks, those of rank r from r C on."""

    x: torch.Tensor  # [R C, H]; rows that nobody sent are zeros
    topk_idx: torch.Tensor  # [R C, k] int32: experts of this rank, from 0, -1 elsewhere
    topk_weights: torch.Tensor  # [R C, k] FP32, 0 elsewhere
    plan: Plan  # of topk_idx, with room for max_rows
    places: Any  # of this rank's own tokens at the others: what `combine` reads


class ExpertParallel:
    """num_experts experts over the ranks of a process group (None: the default one), as many on
    each: rank r has those from r num_experts / R on.

    max_tokens   C, the most tokens that a rank dispatches in a call, the same number on all ranks;
                 None: the ranks agree on it at each dispatch, for which the host waits
    max_rows     the most (token, expert) pairs that the experts of a rank get in a call; None: all
                 there may be, R C k, or on a CPU as many as there are. More are an error, on a GPU
                 at moire.check()

    Memory of a call and rank: R C rows of x sent, as many received, and of y again; what the
    experts make has max_rows rows.
    """

    def __init__(
        self,
        process_group: Optional[dist.ProcessGroup] = None,
        *,
        num_experts: int,
        max_tokens: Optional[int] = None,
        max_rows: Optional[int] = None,
    ) -> None:
        call = "ExpertParallel"
        if not (dist.is_available() and dist.is_initialized()):
            raise invalid(
                f"{call}: torch.distributed has no process group, needs init_process_group"
            )
        if process_group is None:
            process_group = dist.group.WORLD
        if not isinstance(process_group, dist.ProcessGroup):
            raise invalid(
                f"{call}: process_group is {described(process_group)}, must be one that this rank "
                "belongs to"
            )
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.num_experts = integer(f"{call}: num_experts", num_experts, 1)
        if self.num_experts % self.size:
            raise invalid(
                f"{call}: num_experts is {num_experts}, must be a multiple of the {self.size} ranks"
            )
        self.max_tokens, self.max_rows = (
            None if most is None else integer(f"{call}: {name}", most, 1, 2**31 - 1)
            for name, most in (("max_tokens", max_tokens), ("max_rows", max_rows))
        )
        self._agree(call)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.size

    @property
    def first_expert(self) -> int:
        """The number, among all, of this rank's first expert."""
        return self.rank * self.num_local_experts

    def __repr__(self) -> str:
        return (
            f"ExpertParallel(rank {self.rank} of {self.size}, experts {self.first_expert} to "
            f"{self.first_expert + self.num_local_experts - 1} of {self.num_experts}, "
            f"max_tokens={self.max_tokens})"
        )

    def _agree(self, call):
        """An error on every rank where one was told something else than the first."""
        ours = {"num_experts": self.num_experts, "max_tokens": self.max_tokens}
        told = [None] * self.size
        dist.all_gather_object(told, ours, group=self.process_group)
        for rank, theirs in enumerate(told):
            for name, value in theirs.items():
                if value != told[0][name]:
                    raise invalid(
                        f"{call}: {name} is {told[0][name]} on rank 0 but {value} on rank {rank}, "
                        "must be equal on all ranks"
                    )

    @torch.compiler.disable
    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> Received:
        """Each token of x [T, H] to the ranks of its experts topk_idx [T, k] (numbers among all of
        them; -1 or num_experts drops the choice) with its topk_weights [T, k]. T may differ between
        ranks, and be 0; all ranks call it together. Gradients flow to x and topk_weights.
        """
        call = "dispatch"
        for name, array, rank in (("x", x, 2), ("topk_idx", topk_idx, 2)):
            check_array(Torch, call, name, array)
            check_rank(call, name, array, rank)
        topk_weights = as_fp32(Torch, call, "topk_weights", topk_weights)
        if topk_idx.shape != topk_weights.shape or topk_idx.shape[0] != x.shape[0]:
            raise invalid(
                f"{call}: topk_idx is {list(topk_idx.shape)} and topk_weights "
                f"{list(topk_weights.shape)}, must both be [T, k] with T = {x.shape[0]}"
            )
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise invalid(f"{call}: topk_idx is {topk_idx.dtype}, needs int32 or int64")
        places = _Places(self, topk_idx.detach(), self._window(call, x))
        x, idx, topk_weights = _Dispatch.apply(places, x, topk_weights)
        rows = self.max_rows
        if rows is None and not idx.is_cuda:
            rows = int((idx >= 0).sum())
        plan = make_plan(idx, self.num_local_experts, capacity=rows)
        return Received(x, idx, topk_weights, plan, places)

    @torch.compiler.disable
    def combine(self, y: torch.Tensor, received: Received) -> torch.Tensor:
        """y_t [T, H] of the tokens that this rank dispatched: the sum of what the ranks computed of
        them, y [R C, H] on each, in rank order, in FP32, rounded once. Gradients flow to y.
        """
        call = "combine"
        check_array(Torch, call, "y", y)
        check_rank(call, "y", y, 2)
        if not isinstance(received, Received):
            raise invalid(
                f"{call}: received is {described(received)}, must be what dispatch returns"
            )
        rows = received.topk_idx.shape[0]
        if y.shape[0] != rows:
            raise invalid(f"{call}: y is {list(y.shape)}, must have the {rows} rows of received.x")
        return _Combine.apply(received.places, y)

    def _window(self, call, x):
        """C of this call."""
        if self.max_tokens is None:
            tokens = torch.tensor([x.shape[0]], device=x.device)
            dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self.process_group)
            return max(int(tokens), 1)
        if x.shape[0] > self.max_tokens:
            raise invalid(
                f"{call}: x has {x.shape[0]} tokens, must have at most max_tokens = "
                f"{self.max_tokens}"
            )
        return self.max_tokens

    def _exchange(self, rows):
        """rows [R C, ...], of which C go to each rank: those that came from each."""
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        # As bytes, which every process group carries.
        into, sent = (t.view(-1).view(torch.uint8) for t in (received, rows))
        dist.all_to_all_single(into, sent, group=self.process_group)
        return received


class _Places:
    """Where the tokens of one rank lie in its windows at the others."""

    def __init__(self, group, topk_idx, window):
        tokens, ranks, local = topk_idx.shape[0], group.size, group.num_local_experts
        self.exchange, self.rows = group._exchange, ranks * window
        ranks = torch.arange(ranks, device=topk_idx.device)[:, None]
        owner = topk_idx.div(local, rounding_mode="floor")  # no rank where the choice is dropped
        self.is_owner = owner[:, None] == ranks  # [T, R, k]
        # From 1 at the owner, 0 elsewhere.
        self.local = (topk_idx[:, None] - (ranks * local - 1)) * self.is_owner
        is_sent = self.is_owner.any(-1)  # [T, R]
        counted = is_sent.t().contiguous().cumsum(1).t()  # along rows of memory, which is faster
        place = counted + (ranks[:, 0] * window - 1)
        # Unsent tokens go to a row behind the windows.
        self.place = torch.where(is_sent, place, self.rows).view(-1)  # [T R]
        self.row_of = torch.where(is_sent, place, -1).to(torch.int32)  # [T, R]
        token = torch.arange(tokens, device=topk_idx.device).repeat_interleave(group.size)
        token_of = token.new_full((self.rows + 1,), -1).scatter_(0, self.place, token)
        self.token_of = token_of[:-1, None].to(torch.int32)  # [R C, 1]

    def spread(self, x):
        """x [T, H] into the windows, and through them to their ranks; zeros are nobody's rows."""
        rows = x.new_empty(self.rows, x.shape[1])
        functional.call("unpermute", rows=x, scatter_idx=self.token_of, y=rows)
        return self.exchange(rows)

    def gather(self, rows):
        """The other way: y [T, H], sums over ranks in rank order, in FP32, rounded once."""
        y = rows.new_empty(self.row_of.shape[0], rows.shape[1])
        functional.call("unpermute", rows=self.exchange(rows), scatter_idx=self.row_of, y=y)
        return y

    def spread_choices(self, topk_weights):
        """(topk_idx [R C, k], topk_weights [R C, k]) of the tokens that came."""
        k = topk_weights.shape[1]
        weights = torch.where(self.is_owner, topk_weights[:, None], 0.0).view(torch.int32)
        sent = torch.cat((self.local.to(torch.int32), weights), -1)
        windows = sent.new_zeros(self.rows + 1, 2 * k)
        windows.index_copy_(0, self.place, sent.view(-1, 2 * k))
        came = self.exchange(windows[:-1])
        return came[:, :k] - 1, came[:, k:].contiguous().view(torch.float32)

    def gather_weights(self, rows):
        """rows [R C, k] of the tokens that were sent: [T, k], each choice from its one owner."""
        back = torch.nn.functional.pad(self.exchange(rows), (0, 0, 0, 1))
        parts = back.index_select(0, self.place).view(self.is_owner.shape)
        return torch.where(self.is_owner, parts, 0.0).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places, x, topk_weights):
        ctx.places = places
        topk_idx, topk_weights = places.spread_choices(topk_weights)
        ctx.mark_non_differentiable(topk_idx)
        return places.spread(x.contiguous()), topk_idx, topk_weights

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights):
        places = ctx.places
        return None, places.gather(grad_x), places.gather_weights(grad_weights)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places, y):
        ctx.places = places
        return places.gather(y)

    @staticmethod
    def backward(ctx, grad_y):
        return None, ctx.places.spread(grad_y.contiguous())
