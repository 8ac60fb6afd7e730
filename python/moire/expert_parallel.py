"""Experts spread over ranks: those of a torch.distributed process group, or of a Communicator.

A token goes once to each rank that holds one of its experts (`dispatch`), runs through those, and
the ranks' partial sums are added in rank order (`combine`). Everything has a size that the host
knows: each pair of ranks has room for C tokens, in which the sender alone decides the places, so no
counts are exchanged and no host waits for a GPU.

    dispatch   x [T, H], topk_idx [T, k], topk_weights [T, k]
               -> Received: x [R C, H], topk_weights [R C, k] and the plan of the choices that are
                  this rank's experts, for R ranks and C = max_tokens
    combine    y [R C, H] of received.x -> y [T, H], the sum over ranks, in rank order, in FP32

Each is the other's gradient. How rows travel is one of two classes of travel.py, with the same
methods, in all-to-alls of torch.distributed, or by moire_dispatch and moire_combine over windows,
which have some more.

moire.moe(..., group=) is dispatch, this rank's experts, and combine. Over windows that is one
function of autograd, an op like other layers', so that rows stay where they lie: y, and gradients
of what came, are made in the window, and gradients of y are read there. Of what came for the
forward there is a copy, for the backward.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack

from . import process_groups
from .arrays import Torch, as_fp32, check_array, check_rank
from .communicator import Communicator, OfThisProcess
from .context import check_backward, is_explaining
from .errors import invalid, unsupported
from .groups import is_readable
from .layers import Moe, features
from .micro_batches import Moves, SumOfParts
from .process_groups import want, wanting
from .recipes import FORMATS
from .routing import Plan, make_plan
from .travel import OVERFLOW, OverProcessGroup, OverWindows, check_choices
from .values import choice, described, integer, tensors_of
from .wgrad import FRESH

DISPATCH_FORMATS = ("mxfp8", "fp8_block")


class Received(NamedTuple):
    """What a rank has after `dispatch`: rows of all ranks, those of rank r from r C on."""

    x: torch.Tensor  # [R C, H]; rows that nobody sent are zeros
    topk_idx: torch.Tensor  # [R C, k] int32: experts of this rank, from 0, -1 elsewhere
    topk_weights: torch.Tensor  # [R C, k] FP32, 0 elsewhere
    plan: Plan  # of topk_idx, with room for max_rows
    places: Any  # of this rank's own tokens at the others: what `combine` reads


class ExpertParallel(OfThisProcess):
    """num_experts experts over the ranks of a process group (None: the default one) or of a
    Communicator, as many on each: rank r has those from r num_experts / R on.

    max_tokens   C, the most tokens that a rank sends to another in a call, the same number on all
                 ranks; None: the most that a rank has, on which the ranks agree at each dispatch,
                 for which the host waits
    overflow     where a rank has more for another: "refuse" is an error, of a Communicator on all
                 ranks, while of a process group no rank may have more than C in all; "drop" sends
                 the first C, and the others get nothing of that rank's experts and no gradient
    max_rows     the most (token, expert) pairs that the experts of a rank get in a call; None: all
                 there may be, R C k, or on a CPU as many as there are. Of more, "drop" leaves out
                 those of the last rows received; else they are this rank's error, on a GPU at
                 moire.check()
    dispatch_format
                 how rows travel to the experts, tokens and in the backward gradients of y: None, as
                 they are; "mxfp8" or "fp8_block", as E4M3 codes with their scales, little more than
                 half of BF16's bytes, which the receiver decodes to their dtype: everything is as
                 if quantize and dequantize had rounded them before. Rows of combine are not rounded

    Memory of a call and rank: R C rows of x sent, as many received, and of y again; what the
    experts make has max_rows rows. Of a Communicator's window a call takes R C rows with, in
    dispatch, 8 bytes for each of their choices. Of a call in n micro_batches a part has C / n and
    max_rows / n, rounded up, and a window has two parts.
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
        self.overflow = choice(f"{call}: overflow", overflow, OVERFLOW)
        if dispatch_format is not None:
            choice(f"{call}: dispatch_format", dispatch_format, DISPATCH_FORMATS)
        self.dispatch_format = dispatch_format
        if not self.has_windows:  # where there are, each call compares what the ranks were told
            process_groups.agree(call, self.group, overflow=overflow, **self._told())

    def _told(self):
        names = "num_experts", "max_tokens", "dispatch_format"
        return {name: getattr(self, name) for name in names}

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
        topk_weights = self._checked(call, x, topk_idx, topk_weights)
        capacity, wants = self._capacity(call, x, topk_idx, want(x, topk_weights), {})
        places, x = self._places(x, topk_idx, capacity), wanting(wants, x, topk_weights)
        x, idx, topk_weights = _Dispatch.apply(places, x, topk_weights)
        return Received(x, idx, topk_weights, self._plan(idx), places)

    def _checked(self, call, x, topk_idx, topk_weights):
        """The weights in FP32, of arguments that are right."""
        for name, array, rank in (("x", x, 2), ("topk_idx", topk_idx, 2)):
            check_array(Torch, call, name, array)
            check_rank(call, name, array, rank)
        Torch.compute_dtype(f"{call}: the type of x", x.dtype)
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
        if is_readable(topk_idx):  # all of it, before anything is said to other ranks
            check_choices(topk_idx.detach(), self.num_experts)
        return topk_weights

    def _places(self, x, topk_idx, capacity, *half):
        """Where the tokens go; half: of a window, the one for them."""
        way = OverWindows if self.has_windows else OverProcessGroup
        with _mode_of(x):
            form = FORMATS.get(self.dispatch_format) if x.shape[1] else None
            return way(self, topk_idx.detach(), capacity, form, *half)

    def _plan(self, idx, parts=1):
        """Of choices [R C, k] as they came, of one of so many parts of a call."""
        rows = self.max_rows and -(-self.max_rows // parts)
        if rows is not None and self.overflow == "drop":
            idx = idx.where((idx >= 0).view(-1).cumsum(0).view(idx.shape) <= rows, -1)
        elif is_readable(idx):
            came = int((idx >= 0).sum())
            rows = came if rows is None else rows
            if came > rows:
                raise invalid(
                    f"ExpertParallel: {came} (token, expert) pairs came to the experts of rank "
                    f"{self.rank}, needs at most {rows}, by max_rows={self.max_rows}"
                )
        return make_plan(idx, self.num_local_experts, capacity=rows)

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
        Torch.compute_dtype(f"{call}: the type of y", y.dtype)
        if self._tells(y):
            ours = {"y.dtype": y.dtype, "y.shape[0]": rows, "y.shape[1]": y.shape[1]}
            y = wanting(self._compare(call, y, (0, want(y)), ours)[1], y)
        return _Combine.apply(received.places, y, None)[0]

    def check_experts(self, given: Any, **of_choices: Any) -> None:
        """That a call moire.moe(..., group=self) with these weights (Operands) can be one: what is
        wrong should not be found when others wait for the second half.
        """
        x, experts = given.x, given.weight_shape("w1")
        hidden = features(given.fields, "w1")[1]
        if experts[0] != self.num_local_experts or (x.ndim == 2 and x.shape[1] != hidden):
            raise invalid(
                f"moe: x is {list(x.shape)} and w1 has {experts[0]} experts of {hidden} inputs, "
                f"must be [T, H] and {self.num_local_experts} of H, as group has on each rank"
            )
        for name, array in of_choices.items():
            if array is not None:
                raise unsupported(
                    f"moe: {name} is of this rank's choices, but with group experts get others'; "
                    "needs dispatch and combine of the group around a moe of what came"
                )

    @torch.compiler.disable
    def run_experts(
        self,
        given: Any,
        choices: tuple[torch.Tensor, ...],
        wgrad: Any,
        compute_dtype: Any,
        run: Any,
        parts: int,
    ) -> torch.Tensor:
        """y of such a call: run(given, *choices, plan, wgrad, way) runs the experts on given.x,
        which is what this rank received, in compute_dtype.
        """
        call, x, topk_idx = "moe", given.x, choices[0]
        topk_weights = self._checked(call, x, *choices)
        wants, ours = 0, {}
        if self._tells(x, self.max_tokens is None):
            none = given.of(x.detach()[:0])
            none.give_x(compute_dtype)
            ours = {"y.dtype": none.result or none.fields["x"].dtype}
            ours.update({"y.shape[1]": features(given.fields, "w2")[0], "micro_batches": parts})
            wants = 2 * want(x, topk_weights) or want(*dict(tensors_of(given.fields)).values())
        capacity, wants = self._capacity(call, x, topk_idx, wants, ours)
        x = wanting(wants == 2, x, topk_weights)
        if parts > 1:
            whole, capacity = (x, topk_idx, topk_weights), -(-capacity // parts)
            return self._run_in_parts(given, whole, capacity, wants, wgrad, run, parts)
        places = self._places(x, topk_idx, capacity)
        if not self.has_windows:
            x, idx, topk_weights = _Dispatch.apply(places, x, topk_weights)
            way = _OnWhatCame(places, _CAME)
            y = run(given.of(x), idx, topk_weights, self._plan(idx), wgrad, way)
            return _Combine.apply(places, wanting(wants, y), None)[0]
        rest = _rest_of(given.recipe, torch.is_grad_enabled())
        with torch.no_grad():
            rows, idx, weights = places.spread(x.contiguous(), topk_weights, rest)
        given = given.of(rows)
        given.fields.update(x_sent=x, topk_weights_sent=topk_weights)
        return run(given, idx, weights, self._plan(idx), wgrad, _OnWhatCame(places, _EXPERTS))

    def _run_in_parts(self, given, whole, capacity, wants, wgrad, run, count):
        """In so many parts: micro_batches.py has the picture."""
        sizes = [len(part) for part in whole[0].tensor_split(count)]
        parts = list(zip(*(_Split.apply(sizes, tensor) for tensor in whole)))
        wgrad = [SumOfParts(sink, count) for sink in wgrad or (FRESH, FRESH)]
        moves, found = Moves(given.x), []

        def dispatch(part):
            x, idx, weights = parts[part]
            with moves.beside(x, idx, weights):
                places = self._places(x, idx, capacity, part % 2)
                x, idx, weights = _Dispatch.apply(places, x, weights)
                plan = self._plan(idx, count)
                return moves.mark(x, weights, *plan), places, given.of(x), (idx, weights, plan)

        try:
            ahead = dispatch(0)
            for part in range(count):
                mark, places, came, choices = ahead
                ahead = dispatch(part + 1) if part + 1 < count else None
                moves.wait(mark)
                way = _OnWhatCame(places, _ROWS if self.has_windows else _CAME)
                y = run(came, *choices, wgrad, way)
                with moves.beside(y):
                    found.append(_Combine.apply(places, wanting(wants, y), None)[0])
        finally:
            moves.wait(moves.mark(*found))
        return Torch.concatenate(found)

    def _tells(self, x, waits=False):
        """Whether ranks compare a call with such an x, for which each host waits for the others:
        that of a GPU where it `waits` anyway. Windows compare all calls; what is explained, or has
        no values, is nobody else's business.
        """
        has_values = not (x.is_meta or hasattr(x, "fake_mode") or is_explaining())
        return has_values and (x.is_cpu or waits) and self.size > 1 and not self.has_windows

    def _capacity(self, call, x, topk_idx, wants, ours):
        """C of this call, of which ranks compare `ours` as well; and what any of them wants."""
        most, tokens = self.max_tokens, x.shape[0]
        if self.has_windows:
            return max(_most(self, x), 1) if most is None else most, wants
        if self._tells(x, most is None):
            sizes = {"x.shape[1]": x.shape[1], "topk_idx.shape[1]": topk_idx.shape[1]}
            ours = {"x.dtype": x.dtype, **sizes, **ours}
            tokens, wants = self._compare(call, x, (tokens, wants), ours)
        if self.overflow == "refuse" and most is not None and tokens > most:
            raise invalid(f"{call}: a rank has {tokens} tokens, needs at most max_tokens = {most}")
        return max(tokens, 1) if most is None else most, wants

    def _compare(self, call, x, counts, ours):
        """The most of each count that a rank has, of ranks that make the same call; or an error on
        all.
        """

        def tell(record):
            return self._exchange(torch.tensor(record, device=x.device).expand(self.size, -1))

        return process_groups.compare(call, counts, {**self._told(), **ours}, tell)

    def _exchange(self, rows):
        """rows [R C, ...], of which C go to each rank: those that came from each."""
        rows = rows.contiguous()
        if is_explaining() or rows.is_meta:  # nobody has to wait for that
            return rows
        sent = rows.view(-1).view(torch.uint8)  # as bytes, which every process group carries
        if _len_torch_dispatch_stack() == 0:
            received = torch.empty_like(sent)
            with process_groups.naming_lost("ExpertParallel", self.group):
                dist.all_to_all_single(received, sent, group=self.group)
        else:  # a mode that saves results, as selective checkpointing does, is told of this one
            # Its import tells FakeTensors what comes of it; torch 2.4 does not import it itself.
            from torch.distributed import _functional_collectives  # noqa: F401

            splits, functional = [len(sent) // self.size] * self.size, torch.ops._c10d_functional
            name = self.group.group_name
            received = functional.all_to_all_single(sent, splits, splits, name)
            received = functional.wait_tensor(received)
        return received.view(rows.dtype).view(rows.shape)


def ranks_of(call, group):
    """(the group, rank, size) of a Communicator or a process group, None for the default one."""
    if isinstance(group, Communicator):
        return group, group.rank, group.size
    return process_groups.ranks_of(call, group, ", or a moire.Communicator")


def _mode_of(x):
    """What makes new tensors fake as well beside a FakeTensor."""
    return getattr(x, "fake_mode", contextlib.nullcontext())


def _most(group, x):
    """The largest number of tokens of a rank of a Communicator."""
    if is_explaining():
        return x.shape[0]
    # A token that says it goes to the first expert of each rank.
    everyone = torch.arange(group.size, device=x.device)[None] * group.num_local_experts
    told = x.new_full((1, 1), x.shape[0], dtype=torch.int32)  # for a copy the host would wait
    told = OverWindows(group, everyone, 1).spread(told.view(torch.float32))[0]
    return int(told.view(torch.int32).max())


class _Split(torch.autograd.Function):
    """Of Torch's own, autocast rounds the gradient, or refuses it, where backward() runs in it."""

    @staticmethod
    def forward(ctx, sizes, tensor):
        return tensor.split(sizes)

    @staticmethod
    def backward(ctx, *grads):
        return None, Torch.concatenate(grads)


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
        check_backward([grad_x, grad_weights])
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
        check_backward([grad_y, grad_weights])
        x, *choices = _Dispatch.apply(ctx.places, grad_y, grad_weights)
        return None, x, choices[1] if choices else None


class _OnWhatCame(NamedTuple):
    """Experts on rows that came from all ranks, by an op that knows of it."""

    places: Any
    op: Moe

    @torch.compiler.disable
    def run(self, given, *options):
        self.places.y_dtype = given.result
        return given.run(self.op, *options, self.places)


class _Came(Moe):
    """moe on what came from all ranks, of which the backward keeps what nobody else has."""

    def kept(self, fields, made, how):
        kept = super().kept(fields, made, how)
        if "x" in kept:
            made["x"] = kept["x"]  # explain() takes it for the caller's else
        return kept


class _Rows(_Came):
    """The same in windows, from which rows go. They travel no wider than x did, whatever the
    experts compute in.
    """

    def _of_tokens(self, fw, how, like, shape, dtype):
        """In the window, from which they go, if they go as they are."""
        if dtype.itemsize > how.route.dtype.itemsize:
            return super()._of_tokens(fw, how, like, shape, dtype)
        return how.route.empty_rows(shape, dtype)


class _Experts(_Rows):
    """Then what was made goes back, and gradients of x and topk_weights are those of x_sent and
    topk_weights_sent: one op, which leaves rows where they lie.
    """

    def forward(self, fw, fields, how):
        made = super().forward(fw, fields, how)
        (y,) = how.route.gather(fw.cast(made["y"], how.route.y_dtype))
        return {**made, "y": y}

    def gradients(self, fw, fields, how, needs, likes):
        route, (_, dtype) = how.route, likes["x_sent"]
        rest = _rest_of(how.recipe, bool(fields.get("to", ((), ()))[1]))
        (fields["grad_y"],) = route.spread(fields["grad_y"].contiguous(), rest=rest)
        goes_back = needs["x_sent"] or needs["topk_weights_sent"]
        needs = {**needs, "x": goes_back, "topk_weights": goes_back}
        found = super().gradients(fw, fields, how, needs, likes)
        if goes_back:
            rows = found["x"] if dtype == torch.float32 else fw.cast(found["x"], dtype)
            back = route.gather(rows, found["topk_weights"], dtype)
            found["x_sent"], found["topk_weights_sent"] = back
        return {**found, "x": None, "topk_weights": None}


def _rest_of(recipe, is_kept):
    """What spread() leaves in rows that no expert reads. Those of 8 bits may be quantised with all
    others, as a row of tokens is, and NaN would be found.
    """
    if recipe.is_quantized:
        return "zeros"
    return "anything" if is_kept else "window"


_CAME, _ROWS, _EXPERTS = _Came(), _Rows(), _Experts("x_sent", "topk_weights_sent")
