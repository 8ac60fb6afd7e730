"""How rows travel between ranks: in all-to-alls of torch.distributed, or by moire_dispatch and
moire_combine over windows. Of either there is an object for each dispatch, which knows the places
of one rank's tokens: spread() takes rows there, gather() back.
"""

import torch

from . import functional
from .context import is_explaining, settings
from .recipes import ELEMENTS, ROWWISE

OVERFLOW = ("refuse", "drop")  # moire_overflow


def check_choices(topk_idx, num_experts):
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


class OverWindows:
    """Where the tokens of one rank lie in the windows of a Communicator's ranks.

    A window, or a half of it, is used from its beginning in each call, and emptied after it: what a
    layer keeps for its backward is not in it.
    """

    def __init__(self, group, topk_idx, capacity, form=None, half=None):
        """form: of rows that travel in 8 bits."""
        tokens, self.rows, self.form = topk_idx.shape[0], group.size * capacity, form
        self.half = half
        self.ranks, self.overflow, self.nobody = group.group, OVERFLOW.index(group.overflow), None
        self.dtype = self.y_dtype = None  # of rows that went; what y is cast to before it does
        self.choices = {"topk_idx": topk_idx.clone(), "num_experts": group.num_experts}
        self.places = topk_idx.new_empty(tokens, group.size, dtype=torch.int32)
        self.counts = topk_idx.new_empty(group.size, dtype=torch.int64)
        made = {"places": self.places, "counts": self.counts}
        self._call("dispatch_plan", **self.choices, **made, capacity=capacity)

    def _call(self, name, **fields):
        with settings(communicator=self.ranks):
            functional.call(name, **fields)

    def spread(self, x, topk_weights=None, rest="zeros"):
        """x [T, H] to the ranks: (rows [R C, H], a copy) and, where weights [T, k] are given,
        (topk_idx, topk_weights [R C, k]) as well. `rest` are rows that are nobody's: "zeros",
        "anything", or that in the "window", where all rows stay then (in 8 bits they are decoded
        beside it).
        """
        self.dtype = self.dtype or x.dtype
        fields = {"places": self.places, "counts": self.counts, "overflow": self.overflow}
        parts = (x,) if self.form is None else _encoded(x, self.form)
        sent = dict(zip(("x", "x_scales"), parts))
        received = {f"{k}_recv": ((self.rows, v.shape[1]), v.dtype) for k, v in sent.items()}
        if topk_weights is not None:
            fields.update(self.choices, topk_weights=topk_weights)
            shape = self.rows, topk_weights.shape[1]
            received.update(topk_idx_recv=(shape, torch.int32))
            received.update(topk_weights_recv=(shape, torch.float32))
        into = self.ranks.divide(*received.values(), half=self.half)
        if topk_weights is not None and x.is_cuda:
            into[-2].fill_(-1)  # a call that fails there is found later, and nobody sent anything
        self._call("dispatch", **fields, **sent, **dict(zip(received, into)))
        rows, choices, own = into[: len(sent)], into[len(sent) :], None
        self.overflow = OVERFLOW.index("drop")  # what is refused has been: gradients go as rows do
        if choices:
            self.nobody = (choices[0] < 0).all(1, keepdim=True)
        nothing_came = is_explaining()  # and memory that nobody touches costs nothing
        if self.form is not None:
            own = _decoded(*rows, self.form, x.dtype)
            if rest == "zeros" and self.nobody is not None and not nothing_came:
                own.masked_fill_(self.nobody, 0)
        elif nothing_came:
            own = None if rest == "window" else torch.empty_like(rows[0])
        elif rest == "zeros" and self.nobody is not None:
            own = rows[0].where(~self.nobody, 0)  # one pass over the rows
        elif rest != "window":
            own = rows[0].clone()
        return (rows[0] if own is None else own), *(part.clone() for part in choices)

    def empty_rows(self, shape, dtype):
        """Memory at the beginning of the window, from which gather() takes it as it lies."""
        return self.ranks.divide((shape, dtype), half=self.half)[0]

    def gather(self, rows, topk_weights=None, dtype=None):
        """The other way, of rows [R C, H] and weights [R C, k]: (y [T, H], the sums over ranks in
        rank order, in FP32, rounded once) and the weights [T, k], each from the one rank of its
        choice.
        """
        sent = {"rows": rows}
        made = {"y": rows.new_empty(self.places.shape[0], rows.shape[1], dtype=dtype)}
        fields = {"places": self.places}
        if topk_weights is not None:
            sent["topk_weights_recv"] = topk_weights
            made["topk_weights"] = topk_weights.new_empty(self.choices["topk_idx"].shape)
            fields.update(self.choices)
        shapes = ((part.shape, part.dtype) for part in sent.values())
        parts = self.ranks.divide(*shapes, half=self.half)
        for part, values in zip(parts, sent.values()):
            if part.data_ptr() != values.data_ptr() and not is_explaining():
                part.copy_(values)
        self._call("combine", **fields, **dict(zip(sent, parts)), **made)
        return tuple(made.values())


class OverProcessGroup:
    """Where the tokens of one rank of a process group lie among the rows that it sends."""

    def __init__(self, group, topk_idx, capacity, form=None, half=None):
        tokens, ranks, local = topk_idx.shape[0], group.size, group.num_local_experts
        self.exchange, self.rows, self.form = group._exchange, ranks * capacity, form
        check_choices(topk_idx, group.num_experts)
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
