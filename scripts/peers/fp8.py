"""moire's FP8 tensor cores beside other libraries': two products of 8-bit operands, and the MLP
with its backward in the recipe fp8_block: weights prepared, or quantised at each call, and FP32
gradients added. Others need splits in multiples of 128 (--multiple 128). torch, which has no such
blocks for ragged rows, computes in BF16: the products of what the codes decode to, and the MLP of
what was not quantised. Products are compared with a dense one of FP8, too.
"""

from functools import partial

import moire
import torch

from . import mlps
from .case import Case, grouped_mm

_RECIPE = "fp8_block"
_SUMS = 1e-2  # tensor cores keep about 13 bits, then BF16 (docs/numerics.md)
_QUANTISED = 1e-1  # three products of E4M3 operands, one after the other


def cases(tensors):
    h, f = tensors.shape.hidden, tensors.shape.width
    yield _product(tensors, "fc1", h, 2 * f)
    yield _product(tensors, "fc2", f, h)
    yield _mlp(tensors)


def _product(tensors, name, k, n):
    s, gm = tensors.shape, grouped_mm()
    groups = moire.Groups.of_offsets(tensors.offsets, s.rows)
    a = moire.quantize(tensors.normal(s.rows, k), groups, _RECIPE)
    w = moire.quantize(tensors.normal(s.experts, n, k, scale=k**-0.5), recipe=_RECIPE)
    rows, weights = (t.dequantize(torch.bfloat16) for t in (a, w))

    def ours():
        d = rows.new_empty(s.rows, n)
        torch.ops.moire.grouped_gemm(
            a=a.rowwise.data,
            a_scales=a.rowwise.scales,
            b=[w.rowwise.data],
            b_scales=w.rowwise.scales,
            accumulation=1,
            d=d,
            offsets=tensors.offsets,
            num_groups=s.experts,
            capacity=s.rows,
        )
        return [d]

    run = {"moire": ours, "torch": lambda: [gm(rows, weights.transpose(1, 2), offs=tensors.ends)]}
    operands = {"kind": "fp8 rows", "tensors": tensors, "a": a, "w": w, "n": n}
    return Case(
        f"fp8 {name}",
        2 * s.rows * k * n,
        run,
        operands=operands,
        limit=_SUMS,
        dense=torch.float8_e4m3fn,
    )


def _mlp(tensors):
    """The last case of mlps.py, with moire's recipe and its own limit."""
    *_, case = mlps.cases(tensors)
    x, w1, w2, probs, grad_y = (case.operands[k] for k in ("x", "w1", "w2", "probs", "grad_y"))
    groups = moire.Groups.of_offsets(tensors.offsets, tensors.shape.rows)
    prepared = [moire.PreparedWeight(w.detach(), _RECIPE) for w in (w1, w2)]

    def ours(copies=prepared, wgrad=None):
        given = dict(w1_quantized=copies[0], w2_quantized=copies[1], wgrad=wgrad)
        y = moire.grouped_mlp(x, w1, w2, groups, probs=probs, recipe=_RECIPE, **given)
        return torch.autograd.grad(y, [x, w1, w2, probs], grad_y)

    run = {
        "moire": ours,
        "moire, at each call": partial(ours, (None, None)),
        mlps.ADDED: partial(ours, wgrad=mlps.sinks(w1, w2)),
        "torch": case.run["torch"],
    }
    operands = {**case.operands, "kind": "fp8 mlp"}
    return Case("fp8 mlp forward+backward", case.flop, run, operands=operands, limit=_QUANTISED)
