"""Routing, and the activation and its layouts, as stateless functions on Torch tensors or NumPy
arrays.
"""

from typing import Any, NamedTuple

from .arrays import Numpy, framework_of
from .errors import invalid
from .groups import Groups

_ROUTER_KINDS = ("softmax", "sigmoid")


class Plan(NamedTuple):
    """Where every (token, choice) goes: rows sorted by expert, stable in token order within an
    expert.
    """

    offsets: Any  # [G + 1] int64
    gather_idx: Any  # [capacity] int32: row -> token, -1 in the tail
    scatter_idx: Any  # [T, k] int32: choice -> row, -1 where dropped

    @property
    def groups(self):
        """The groups of tensors in expert order."""
        return Groups.of_offsets(self.offsets, self.gather_idx.shape[0])


def router(logits, k, *, kind="softmax", normalize=False, scale=1.0, expert_bias=None):
    """(topk_idx [T, k] int64, topk_weights [T, k] FP32) of logits [T, E], experts in order of
    falling score.

    Scores are FP32 softmax or sigmoid; expert_bias [E] moves the choice only; ties go to the lowest
    index. With `normalize` the k weights of a token sum to `scale`. Gradients flow to the logits
    through the weights.
    """
    fw = framework_of("router", "logits", logits)
    if kind not in _ROUTER_KINDS:
        raise invalid(f"router: kind is {kind!r}, must be softmax or sigmoid")
    if logits.ndim != 2 or not isinstance(k, int) or not 1 <= k <= logits.shape[1]:
        raise invalid(
            f"router: logits is {list(logits.shape)} and k is {k!r}, must be [T, E] and 1 to E"
        )
    if float(scale) == 0:  # in moire.h it would mean the default, 1
        raise invalid("router: scale is 0, must not be: every weight would be 0")
    values = (_ROUTER_KINDS.index(kind), int(normalize), float(scale))
    expert_bias = fw.cast(expert_bias, fw.float32)
    if fw is not Numpy:
        from .autograd_ops import RouterFunction

        return RouterFunction.apply(logits, k, expert_bias, *values)
    topk_idx = fw.empty(logits, (logits.shape[0], k), fw.int64)
    topk_weights = fw.empty(logits, (logits.shape[0], k), fw.float32)
    outputs = {"topk_idx": topk_idx, "topk_weights": topk_weights}
    settings = dict(zip(("kind", "normalize", "scale"), values))
    fw.run("router", logits=logits, expert_bias=expert_bias, **settings, **outputs)
    return topk_idx, topk_weights


def make_plan(topk_idx, num_groups, *, capacity=None):
    """The order by expert and back of topk_idx [T, k], each in 0 ... num_groups - 1; -1 or
    num_groups drops it.

    capacity is how many rows tensors in expert order have: T * k unless said.
    """
    fw = framework_of("make_plan", "topk_idx", topk_idx)
    if topk_idx.ndim != 2:
        raise invalid(f"make_plan: topk_idx is {list(topk_idx.shape)}, must be [T, k]")
    tokens, k = topk_idx.shape
    offsets = fw.empty(topk_idx, (num_groups + 1,), fw.int64)
    gather_idx = fw.empty(topk_idx, (tokens * k if capacity is None else capacity,), fw.int32)
    scatter_idx = fw.empty(topk_idx, (tokens, k), fw.int32)
    outputs = {"offsets": offsets, "gather_idx": gather_idx, "scatter_idx": scatter_idx}
    fw.run("permute_plan", topk_idx=topk_idx, num_groups=num_groups, **outputs)
    return Plan(offsets, gather_idx, scatter_idx)


def permute(x, plan, *, topk_weights=None):
    """Rows of x [T, H] in expert order [capacity, H]; with topk_weights [T, k] also each row's
    weight, (rows, probs).
    """
    fw = framework_of("permute", "x", x)
    groups = _groups(plan)
    topk_weights = fw.cast(topk_weights, fw.float32)
    if fw is not Numpy:
        from .autograd_ops import PermuteFunction

        rows, probs = PermuteFunction.apply(groups, x, topk_weights, *plan)
        return rows if topk_weights is None else (rows, probs)
    rows = fw.empty(x, plan.gather_idx.shape + x.shape[1:], x.dtype)
    values = {"x": x, "gather_idx": plan.gather_idx, "rows": rows}
    if topk_weights is None:
        fw.run("permute", **values, offsets=plan.offsets, **groups)
        return rows
    probs = fw.empty(x, plan.gather_idx.shape, fw.float32)
    values.update(topk_weights=topk_weights, scatter_idx=plan.scatter_idx, probs=probs)
    fw.run("permute", **values, offsets=plan.offsets, **groups)
    return rows, probs


def unpermute(rows, plan, *, weights=None):
    """y_t = sum over j of (weights[t, j]) rows[scatter_idx[t, j]]: [T, H], FP32, rounded once."""
    fw = framework_of("unpermute", "rows", rows)
    weights = fw.cast(weights, fw.float32)
    if fw is not Numpy:
        from .autograd_ops import UnpermuteFunction

        return UnpermuteFunction.apply(_groups(plan), rows, weights, plan.offsets, plan.scatter_idx)
    y = fw.empty(rows, plan.scatter_idx.shape[:1] + rows.shape[1:], rows.dtype)
    fw.run("unpermute", rows=rows, scatter_idx=plan.scatter_idx, weights=weights, y=y)
    return y


def _groups(plan):
    if not isinstance(plan, Plan):
        raise invalid(
            f"permute: plan is a {type(plan).__name__}, must be what moire.make_plan returns"
        )
    return {"num_groups": plan.offsets.shape[0] - 1, "capacity": plan.gather_idx.shape[0]}
