"""Experts spread over ranks: those of a torch.distributed process group, or of a Communicator.

A token goes once to each rank that holds one of its experts (`dispatch`), runs through those, and
the ranks' partial sums are added in rank order (`combine`). Everything has a size that the host
knows: each pair of ranks has room for C tokens, in which the sender alone decides the places, so no
counts are exchanged and no host waits for a GPU.

    dispatch   x [T, H], topk_idx [T, k], topk_weights [T, k]
               -> Received: x [R C, H], topk_weights [R C, k] and the plan of the choices that are
                  this rank's experts, for R ranks and C = max_tokens
    combine    y [R C, H] of received.x -> y [T, H], the sum over ranks, in rank order, in FP32

Each is the other's gradient. How rows travel is one of two classes below, with the same methods: in
all-to-alls of torch.distributed, or by moire_dispatch and moire_combine over windows.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist

from . import functional, process_groups
from .arrays import Torch, as_fp32, check_array, check_rank
from .communicator import Communicator
from .context import is_explaining, settings
from .errors import invalid, unsupported
from .groups import is_readable
from .recipes import ELEMENTS, FORMATS, ROWWISE
from .routing import Plan, make_plan
from .values import choice, described, integer

_OVERFLOW = ("refuse", "drop")  # moire_overflow
_DISPATCH_FORMATS = ("mxfp8", "fp8_block")


class Received(NamedTuple):
    """What a rank has after `dispatch`: rows of all ranks, those of rank r from r C on."""

    x: torch.Tensor  # [R C, H]; rows that nobody sent are zeros
    topk_idx: torch.Tensor  # [R C, k] int32: experts of this rank, from 0, -1 elsewhere
    topk_weights: torch.Tensor  # [R C, k] FP32, 0 elsewhere
    plan: Plan  # of topk_idx, with room for max_rows
    places: Any  # of this rank's own tokens at the others: what `combine` reads


class ExpertParallel:
    """num_experts experts over the ranks of a process group (None: the default one) or of a
    Communicator, as many on each: rank r has those from r num_experts / R on.

    max_tokens   C, the most tokens that a rank sends to another in a call, the same number on all
                 ranks; None: the most that a rank has, on which the ranks agree at each dispatch,
                 for which the host waits
    overflow     where a rank has more for another: "refuse" is an error, of a Communicator on all
                 ranks, while of a process group no rank may have more than C in all; "drop" sends
                 the first C, and the others get nothing of that rank's experts and no gradient
    max_rows     the most (token, expert) pairs that the experts of a rank get in a call; None: all
                 there may be, R C k, or on a CPU as many as there are. More are an error, on a GPU
                 at moire.check()
    dispatch_format
                 how rows travel to the experts, tokens and in the backward gradients of y: None, as
                 they are; "mxfp8" or "fp8_block", as E4M3 codes with their scales, little more than
                 half of BF16's bytes, which the receiver decodes to their dtype: everything is as
                 if quantize and dequantize had rounded them before. Rows of combine are not rounded

    Memory of a call and rank: R C rows of x sent, as many received, and of y again; what the
    experts make has max_rows rows. Of a Communicator's window a call takes R C rows with, in
    dispatch, 8 bytes for each of their choices.
    """

    def __init__(
        self,
        group: Optional[Union[dist.ProcessGroup, Communicator]] = None,
        *,
        num_experts: int,
        max_tokens: Optional[int] = None,
        max_rows: Optional[int] = None,
        overflow: str = "refuse",
        dispatch_format: Optional[str] = None,
    ) -> None:
        call = "ExpertParallel"
        self.group, self.rank, self.size = ranks_of(call, group)
        self.num_experts = integer(f"{call}: num_experts", num_experts, 1)
        if self.num_experts % self.size:
            raise invalid(
                f"{call}: num_experts is {num_experts}, must be a multiple of the {self.size} ranks"
            )
        self.max_tokens, self.max_rows = (
            None if most is None else integer(f"{call}: {name}", most, 1, 2**31 - 1)
            for name, most in (("max_tokens", max_tokens), ("max_rows", max_rows))
        )
        self.overflow = choice(f"{call}: overflow", overflow, _OVERFLOW)
        if dispatch_format is not None:
            choice(f"{call}: dispatch_format", dispatch_format, _DISPATCH_FORMATS)
        self.dispatch_format = dispatch_format
        if not self.has_windows:  # where there are, each call compares what the ranks were told
            told = {"num_experts": self.num_experts, "max_tokens": self.max_tokens}
            process_groups.agree(call, self.group, **told, dispatch_format=dispatch_format)

    @property
    def has_windows(self) -> bool:
        return isinstance(self.group, Communicator)

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
            f"max_tokens={self.max_tokens}, dispatch_format={self.dispatch_format})"
        )

    def __copy__(self) -> ExpertParallel:
        return self

    def __deepcopy__(self, memo: dict) -> ExpertParallel:
        """A copied model is on the same ranks."""
        return self

    def __reduce__(self):
        raise unsupported(
            "ExpertParallel: its ranks are of this process and cannot be pickled; save the "
            "state_dict of the layer, and build it anew"
        )

    @torch.compiler.disable
    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> Received:
        """Each token of x [T, H] to the ranks of its experts topk_idx [T, k] (numbers among all of
        them; -1 or num_experts drops the choice; others are an error, which on a GPU the next call
        or moire.check() raises, and go nowhere) with its topk_weights [T, k]. T may differ between
        ranks, and be 0; all ranks call it together. Gradients flow to x and topk_weights.
        FakeTensors are for process groups alone: windows hold values.
        """
        call = "dispatch"
        for name, array, rank in (("x", x, 2), ("topk_idx", topk_idx, 2)):
            check_array(Torch, call, name, array)
            check_rank(call, name, array, rank)
        topk_weights = as_fp32(Torch, call, "topk_weights", topk_weights)
        Torch.check_beside(call, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        if self.has_windows and hasattr(x, "fake_mode"):
            raise unsupported(
                f"{call}: x is a FakeTensor, without values, but a Communicator's windows hold "
                "values; needs a process group, and moire.explain says what windows need"
            )
        if self.has_windows and x.device != self.group.window.device:
            raise invalid(
                f"{call}: x is on {x.device}, must be on {self.group.window.device}, as the "
                "communicator's window is"
            )
        if topk_idx.shape != topk_weights.shape or topk_idx.shape[0] != x.shape[0]:
            raise invalid(
                f"{call}: topk_idx is {list(topk_idx.shape)} and topk_weights "
                f"{list(topk_weights.shape)}, must both be [T, k] with T = {x.shape[0]}"
            )
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise invalid(f"{call}: topk_idx is {topk_idx.dtype}, needs int32 or int64")
        way = _OverWindows if self.has_windows else _OverTorch
        with _mode_of(x):
            form = FORMATS.get(self.dispatch_format) if x.shape[1] else None
            places = way(self, topk_idx.detach(), self._capacity(call, x), form)
        x, idx, topk_weights = _Dispatch.apply(places, x, topk_weights)
        rows = self.max_rows
        if rows is None and is_readable(idx) and not is_explaining():
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
        Torch.check_beside(call, y=y, received=received.x)
        return _Combine.apply(received.places, y, None)[0]

    def _capacity(self, call, x):
        """C of this call."""
        if self.max_tokens is None:
            return max(_most(self, x), 1)
        is_refused = self.overflow == "refuse" and not self.has_windows
        if is_refused and x.shape[0] > self.max_tokens:
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
        dist.all_to_all_single(into, sent, group=self.group)
        return received


def ranks_of(call, group):
    """(the group, rank, size) of a Communicator or a process group, None for the default one."""
    if isinstance(group, Communicator):
        return group, group.rank, group.size
    return process_groups.ranks_of(call, group, ", or a moire.Communicator")


def _mode_of(x):
    """What makes new tensors fake as well beside a FakeTensor."""
    return getattr(x, "fake_mode", contextlib.nullcontext())


def _most(group, x):
    """The largest number of tokens of a rank."""
    if not group.has_windows:
        tokens = torch.tensor([x.shape[0]], device=x.device)
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=group.group)
        return int(tokens)
    if is_explaining():
        return x.shape[0]
    # A token that says it goes to the first expert of each rank.
    everyone = torch.arange(group.size, device=x.device)[None] * group.num_local_experts
    told = x.new_full((1, 1), x.shape[0], dtype=torch.int32)  # for a copy the host would wait
    told = _OverWindows(group, everyone, 1).spread(told.view(torch.float32))[0]
    return int(told.view(torch.int32).max())


def _check_choices(topk_idx, num_experts):
    """That each is an expert's or nobody's, in the words of dispatch_plan, here of one rank. On a
    GPU the next call or moire.check() raises it.
    """
    tokens = topk_idx.shape[0]
    made = {"places": topk_idx.new_empty(tokens, 1, dtype=torch.int32)}
    made["counts"] = topk_idx.new_empty(1, dtype=torch.int64)
    choices = {"topk_idx": topk_idx, "num_experts": num_experts, "capacity": max(tokens, 1)}
    functional.call("dispatch_plan", **choices, **made)


def _encoded(x, form):
    """The codes of x and their scales."""
    codes = x.new_empty(x.shape, dtype=getattr(torch, ELEMENTS["e4m3"]))
    scales = x.new_empty(
        form.scales_shape(ROWWISE, x.shape, 1), dtype=getattr(torch, form.scale_dtype)
    )
    functional.call("quantize", source=x, rowwise=(codes, scales), scaling=form.scaling)
    return codes, scales


def _decoded(codes, scales, form, dtype):
    rows = codes.new_empty(codes.shape, dtype=dtype)
    fields = {"source": (codes, scales), "scaling": form.scaling, "direction": ROWWISE}
    functional.call("dequantize", **fields, target=rows)
    return rows


class _OverWindows:
    """Where the tokens of one rank lie in the windows of a Communicator's ranks.

    A window is used from its beginning in each call, and emptied after it: what a layer keeps for
    its backward is not in it.
    """

    def __init__(self, group, topk_idx, capacity, form=None):
        """form: of rows that travel in 8 bits."""
        tokens, self.rows, self.form = topk_idx.shape[0], group.size * capacity, form
        self.ranks, self.overflow, self.nobody = group.group, _OVERFLOW.index(group.overflow), None
        self.choices = {"topk_idx": topk_idx.clone(), "num_experts": group.num_experts}
        self.places = topk_idx.new_empty(tokens, group.size, dtype=torch.int32)
        self.counts = topk_idx.new_empty(group.size, dtype=torch.int64)
        made = {"places": self.places, "counts": self.counts}
        self._call("dispatch_plan", **self.choices, **made, capacity=capacity)

    def _call(self, name, **fields):
        with settings(communicator=self.ranks):
            functional.call(name, **fields)

    def spread(self, x, topk_weights=None):
        """x [T, H] to the ranks: (rows [R C, H], zeros where they are nobody's) and, where weights
        [T, k] are given, (topk_idx, topk_weights [R C, k]) as well.
        """
        fields = {"places": self.places, "counts": self.counts, "overflow": self.overflow}
        parts = (x,) if self.form is None else _encoded(x, self.form)
        sent = dict(zip(("x", "x_scales"), parts))
        received = {f"{k}_recv": ((self.rows, v.shape[1]), v.dtype) for k, v in sent.items()}
        if topk_weights is not None:
            fields.update(self.choices, topk_weights=topk_weights)
            shape = self.rows, topk_weights.shape[1]
            received.update(topk_idx_recv=(shape, torch.int32))
            received.update(topk_weights_recv=(shape, torch.float32))
        into = self.ranks.divide(*received.values())
        if topk_weights is not None and x.is_cuda:
            into[-2].fill_(-1)  # a call that fails there is found later, and nobody sent anything
        self._call("dispatch", **fields, **sent, **dict(zip(received, into)))
        rows, choices = into[: len(sent)], into[len(sent) :]
        self.overflow = _OVERFLOW.index("drop")  # what is refused has been: gradients go as rows do
        if choices:
            self.nobody = (choices[0] < 0).all(1, keepdim=True)
        rows = rows[0].clone() if self.form is None else _decoded(*rows, self.form, x.dtype)
        if self.nobody is not None:
            rows.masked_fill_(self.nobody, 0)
        return rows, *(part.clone() for part in choices)

    def gather(self, rows, topk_weights=None):
        """The other way, of rows [R C, H] and weights [R C, k]: (y [T, H], the sums over ranks in
        rank order, in FP32, rounded once) and the weights [T, k], each from the one rank of its
        choice.
        """
        sent = {"rows": rows}
        made = {"y": rows.new_empty(self.places.shape[0], rows.shape[1])}
        fields = {"places": self.places}
        if topk_weights is not None:
            sent["topk_weights_recv"] = topk_weights
            made["topk_weights"] = topk_weights.new_empty(self.choices["topk_idx"].shape)
            fields.update(self.choices)
        parts = self.ranks.divide(*((part.shape, part.dtype) for part in sent.values()))
        for part, values in zip(parts, sent.values()):
            part.copy_(values)
        self._call("combine", **fields, **dict(zip(sent, parts)), **made)
        return tuple(made.values())


class _OverTorch:
    """Where the tokens of one rank of a process group lie among the rows that it sends."""

    def __init__(self, group, topk_idx, capacity, form=None):
        tokens, ranks, local = topk_idx.shape[0], group.size, group.num_local_experts
        self.exchange, self.rows, self.form = group._exchange, ranks * capacity, form
        _check_choices(topk_idx, group.num_experts)
        ranks = torch.arange(ranks, device=topk_idx.device)[:, None]
        owner = topk_idx.div(local, rounding_mode="floor")  # no rank where the choice is dropped
        self.is_owner = owner[:, None] == ranks  # [T, R, k]
        # From 1 at the owner, 0 elsewhere.
        self.local = (topk_idx[:, None] - (ranks * local - 1)) * self.is_owner
        is_sent = self.is_owner.any(-1)  # [T, R]
        counted = is_sent.t().contiguous().cumsum(1).t()  # along rows of memory, which is faster
        is_sent = is_sent & (counted <= capacity)
        place = counted + (ranks[:, 0] * capacity - 1)
        # Unsent tokens go to a row behind the others.
        self.place = torch.where(is_sent, place, self.rows).view(-1)  # [T R]
        self.row_of = torch.where(is_sent, place, -1).to(torch.int32)  # [T, R]
        token = torch.arange(tokens, device=topk_idx.device).repeat_interleave(group.size)
        token_of = token.new_full((self.rows + 1,), -1).scatter_(0, self.place, token)
        self.token_of = token_of[:-1, None].to(torch.int32)  # [R C, 1]

    def spread(self, x, topk_weights=None):
        choices = () if topk_weights is None else self._spread_choices(topk_weights)
        if self.form is not None:
            return self._spread_encoded(x), *choices
        rows = x.new_empty(self.rows, x.shape[1])
        functional.call("unpermute", rows=x, scatter_idx=self.token_of, y=rows)
        return self.exchange(rows), *choices

    def _spread_encoded(self, x):
        """Scales and codes of a row are one row of bytes, each part up to a multiple of 16."""
        pad, parts = torch.nn.functional.pad, _encoded(x, self.form)
        sent = [pad(part.view(torch.uint8), (0, 0, 0, 1)) for part in parts]  # the last of zeros
        codes, scales = (pad(part, (0, -part.shape[1] % 16)) for part in sent)
        token = self.token_of[:, 0]
        token = torch.where(token < 0, x.shape[0], token)
        came = self.exchange(torch.cat((scales, codes), 1).index_select(0, token))
        codes = came[:, scales.shape[1] :][:, : x.shape[1]].view(parts[0].dtype)
        scales = came[:, : sent[1].shape[1]].view(parts[1].dtype)
        return _decoded(codes, scales, self.form, x.dtype)

    def gather(self, rows, topk_weights=None):
        y = rows.new_empty(self.row_of.shape[0], rows.shape[1])
        functional.call("unpermute", rows=self.exchange(rows), scatter_idx=self.row_of, y=y)
        return (y,) if topk_weights is None else (y, self._gather_weights(topk_weights))

    def _spread_choices(self, topk_weights):
        k = topk_weights.shape[1]
        weights = torch.where(self.is_owner, topk_weights[:, None], 0.0).view(torch.int32)
        sent = torch.cat((self.local.to(torch.int32), weights), -1)
        into = sent.new_zeros(self.rows + 1, 2 * k)
        into.index_copy_(0, self.place, sent.view(self.place.shape[0], 2 * k))
        came = self.exchange(into[:-1])
        return came[:, :k] - 1, came[:, k:].contiguous().view(torch.float32)

    def _gather_weights(self, rows):
        back = torch.nn.functional.pad(self.exchange(rows), (0, 0, 0, 1))
        parts = back.index_select(0, self.place).view(self.is_owner.shape)
        return torch.where(self.is_owner, parts, 0.0).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places, x, topk_weights):
        ctx.places = places
        with _mode_of(x):
            x, *choices = places.spread(x.contiguous(), topk_weights)
        ctx.mark_non_differentiable(*choices[:1])
        return x, *choices

    @staticmethod
    def backward(ctx, grad_x, _=None, grad_weights=None):
        grads = _Combine.apply(ctx.places, grad_x, grad_weights)
        return (None, *grads, None)[:3]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places, y, topk_weights):
        ctx.places = places
        with _mode_of(y):
            return places.gather(y.contiguous(), topk_weights)

    @staticmethod
    def backward(ctx, grad_y, grad_weights=None):
        x, *choices = _Dispatch.apply(ctx.places, grad_y, grad_weights)
        return None, x, choices[1] if choices else None
