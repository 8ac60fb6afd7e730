"""Routing, as stateless functions on Torch tensors or NumPy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union, overload

import numpy as np

from .arrays import as_fp32, check_array, check_rank, empty_indices, framework_of
from .autograd import Op, run
from .dtypes import DTYPES, AnyArray, Array
from .errors import invalid
from .groups import Groups, is_readable
from .tapes import replayed
from .values import choice, dtype_name, flag, integer, number, wrong

_MOST_GROUPS = 2**30
_INDEX_TYPES = (DTYPES["int32"], DTYPES["int64"])
_ROUTER_KINDS = ("softmax", "sigmoid")


class Plan(NamedTuple):
    """Where each (token, choice) goes: rows sorted by expert, within one in the order of tokens."""

    offsets: Any  # [G + 1] int64
    gather_idx: Any  # [capacity] int32: row -> token, -1 in the tail
    scatter_idx: Any  # [T, k] int32: choice -> row, -1 where dropped

    @property
    def groups(self) -> Groups:
        """The groups of tensors in expert order."""
        return Groups.of_offsets(self.offsets, self.gather_idx.shape[0])

    def fields(self) -> dict[str, Any]:
        """Those of moire.h."""
        sizes = {"num_groups": self.offsets.shape[0] - 1, "capacity": self.gather_idx.shape[0]}
        return {**self._asdict(), **sizes}


_PLAN_NAMES = tuple(f"plan.{name}" for name in Plan._fields)


@replayed
def router(
    logits: Array,
    k: int,
    *,
    kind: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    expert_bias: Optional[Array] = None,
) -> tuple[Array, Array]:
    """(topk_idx [T, k] int64, topk_weights [T, k] FP32) of logits [T, E], by falling score.

    Scores are FP32 softmax or sigmoid; expert_bias [E] moves the choice only; ties go to the lowest
    index. With `normalize` a token's weights sum to `scale`. Weights pass gradients to the logits.
    """
    fw = framework_of("router", {"logits": logits}, {"expert_bias": expert_bias})
    num_experts = check_rank("router", "logits", logits, 2).shape[1]
    k, how = check_choice("router", num_experts, k, kind, normalize, scale)
    expert_bias = as_fp32(fw, "router", "expert_bias", expert_bias)
    return run(_ROUTER, fw, {"logits": logits, "expert_bias": expert_bias, **how}, k)


def check_choice(call, num_experts, k, kind, normalize, scale):
    """(k, its other fields of moire.h) for a router of `num_experts`."""
    k = integer(f"{call}: k", k, 1)
    if k > num_experts:
        raise invalid(f"{call}: k is {k}, must be at most the {num_experts} experts")
    kind = _ROUTER_KINDS.index(choice(f"{call}: kind", kind, _ROUTER_KINDS))
    scale = number(f"{call}: scale", scale)
    if scale == 0:  # in moire.h it would mean the default, 1
        raise invalid(f"{call}: scale is 0, must not be: every weight would be 0")
    normalize = int(flag(f"{call}: normalize", normalize))
    return k, {"kind": kind, "normalize": normalize, "scale": scale}


@replayed
def make_plan(topk_idx: AnyArray, num_groups: int, *, capacity: Optional[int] = None) -> Plan:
    """The order by expert and back of topk_idx [T, k], each in 0 ... num_groups - 1; -1 or
    num_groups drops it.

    capacity is how many rows tensors in expert order have: T * k unless said.
    """
    fw = framework_of("make_plan", {"topk_idx": topk_idx})
    if topk_idx.ndim != 2:
        raise invalid(f"make_plan: topk_idx is {list(topk_idx.shape)}, must be [T, k]")
    tokens, k = topk_idx.shape
    num_groups = integer("make_plan: num_groups", num_groups, 0, _MOST_GROUPS)
    capacity = tokens * k if capacity is None else integer("make_plan: capacity", capacity)
    plan = Plan(
        empty_indices(fw, topk_idx, (num_groups + 1,), fw.int64),
        empty_indices(fw, topk_idx, (capacity,), fw.int32),
        empty_indices(fw, topk_idx, (tokens, k), fw.int32),
    )
    fw.run("permute_plan", {"topk_idx": topk_idx, "num_groups": num_groups, **plan._asdict()})
    return plan


@overload
def permute(x: Array, plan: Plan, *, topk_weights: None = None) -> Array: ...


@overload
def permute(x: Array, plan: Plan, *, topk_weights: Array) -> tuple[Array, Array]: ...


def permute(
    x: Array, plan: Plan, *, topk_weights: Optional[Array] = None
) -> Union[Array, tuple[Array, Array]]:
    """Rows of x [T, H] in expert order [capacity, H]; with topk_weights [T, k] also each row's
    weight, (rows, probs).
    """
    fw = framework_of("permute", {"x": x}, {"topk_weights": topk_weights})
    check_rank("permute", "x", x, 2)
    plan = as_plan(fw, "permute", plan)
    topk_weights = as_fp32(fw, "permute", "topk_weights", topk_weights)
    rows, probs = run(_PERMUTE, fw, {"x": x, "topk_weights": topk_weights, **plan.fields()})
    return rows if topk_weights is None else (rows, probs)


@replayed
def unpermute(rows: Array, plan: Plan, *, weights: Optional[Array] = None) -> Array:
    """y_t = sum over j of (weights[t, j]) rows[scatter_idx[t, j]]: [T, H], FP32, rounded once."""
    fw = framework_of("unpermute", {"rows": rows}, {"weights": weights})
    check_rank("unpermute", "rows", rows, 2)
    plan = as_plan(fw, "unpermute", plan)
    weights = as_fp32(fw, "unpermute", "weights", weights)
    return run(_UNPERMUTE, fw, {"rows": rows, "weights": weights, **plan.fields()})


def as_plan(fw, call, plan):
    """A plan of arrays of kind `fw`."""
    if not isinstance(plan, Plan):
        raise wrong(f"{call}: plan", plan, "what moire.make_plan returns")
    for name, array, rank in zip(_PLAN_NAMES, plan, (1, 1, 2)):
        check_array(fw, call, name, array)
        check_rank(call, name, array, rank)
    return plan


def check_inverse(fw, call, x, row_idx, scatter_idx, offsets):
    """That scatter_idx [T, k] names each row in use once, and for the token of row_idx: read on a
    CPU only, outside of graphs, as every check of values is.
    """
    if scatter_idx is None:
        return
    if row_idx is None:
        raise invalid(f"{call}: scatter_idx is given but row_idx is absent, needs both or neither")
    check_rank(call, "scatter_idx", scatter_idx, 2)
    fw.check_beside(call, x=x, scatter_idx=scatter_idx)  # which the forward does not read
    if scatter_idx.shape[0] != x.shape[0]:
        raise invalid(
            f"{call}: scatter_idx is {list(scatter_idx.shape)}, must be [T, k] with T = "
            f"{x.shape[0]} as x has"
        )
    for name, array in (("row_idx", row_idx), ("scatter_idx", scatter_idx)):
        if fw.code(array) not in _INDEX_TYPES:
            raise invalid(f"{call}: {name} is {dtype_name(array)}, needs int32 or int64")
    if not all(is_readable(a) for a in (row_idx, scatter_idx, offsets)):
        return
    taken, named = (np.asarray(fw.contiguous(array)) for array in (row_idx, scatter_idx))
    used = int(offsets[-1])
    choices = np.flatnonzero(named >= 0)
    rows = named.reshape(-1)[choices]
    if len(rows) != used or used > len(taken) or (rows >= used).any():
        raise invalid(
            f"{call}: scatter_idx names {len(rows)} rows up to {rows.max(initial=-1)}, must name "
            f"each of the {used} rows of the groups once"
        )
    tokens = np.full(used, -1)
    tokens[rows] = choices // named.shape[1]
    for row in np.flatnonzero(tokens != taken[:used])[:1]:
        gives = "no token" if tokens[row] < 0 else f"token {tokens[row]}"
        raise invalid(
            f"{call}: scatter_idx gives row {row} to {gives} but row_idx takes it from token "
            f"{taken[row]}; it must be the inverse of row_idx, as a plan's is"
        )


def _chosen(fw, fields, k):
    logits = fields["logits"]
    shape = (logits.shape[0], k)
    topk_idx = empty_indices(fw, logits, shape, fw.int64)
    return {"topk_idx": topk_idx, "topk_weights": fw.empty(logits, shape, fw.float32)}


def _permuted(fw, fields, how):
    x, weights, idx = fields["x"], fields.get("topk_weights"), fields["gather_idx"]
    made = {"rows": fw.empty(x, (*idx.shape, x.shape[1]), x.dtype)}
    if weights is not None:
        made["probs"] = fw.empty(weights, idx.shape, fw.float32)
    return made


def _unpermuted(fw, fields, how):
    rows = fields["rows"]
    shape = (fields["scatter_idx"].shape[0], rows.shape[1])
    return {"y": fw.empty(rows, shape, rows.dtype)}


_ROUTER = Op("router", "router_backward", _chosen, fixed=("topk_idx",))
_PERMUTE = Op(
    "permute",
    "unpermute",
    _permuted,
    saved=("scatter_idx",),
    always=("x", "topk_weights"),
    words={
        "grad_rows": "rows",
        "grad_x": "y",
        "grad_probs": "probs",
        "grad_topk_weights": "topk_weights",
    },
)
_UNPERMUTE = Op("unpermute", "unpermute_backward", _unpermuted, others=("gather_idx",))
