"""Gradients of the smaller ops: activation, layouts, routing, and the grouped_mm of torch's
signature.
"""

import torch
from torch.autograd.function import once_differentiable

from .arrays import Torch as fw
from .gated import permuted


class GluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation, layout, groups, z, probs, offsets):
        act = z.new_empty(z.shape[0], z.shape[1] // 2)
        ctx.values = {"activation": activation, "layout": layout, **groups}
        fw.run("glu", z=z, probs=probs, act=act, offsets=offsets, **ctx.values)
        ctx.save_for_backward(z, probs, offsets)
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_act):
        z, probs, offsets = ctx.saved_tensors
        grad_z = z.new_empty(z.shape)
        grad_probs = probs.new_empty(probs.shape) if ctx.needs_input_grad[4] else None
        fw.run(
            "glu_backward",
            z=z,
            probs=probs,
            grad_act=grad_act,
            grad_z=grad_z,
            grad_probs=grad_probs,
            offsets=offsets,
            **ctx.values,
        )
        return None, None, None, grad_z if ctx.needs_input_grad[3] else None, grad_probs, None


class ConvertGluFunction(torch.autograd.Function):
    """A permutation; its gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx, source, dim, size, from_layout, to_layout):
        ctx.values = (dim, size, from_layout, to_layout)
        return permuted(fw, source, dim, size, from_layout, to_layout)

    @staticmethod
    def backward(ctx, grad):
        dim, size, from_layout, to_layout = ctx.values
        return (
            ConvertGluFunction.apply(grad, dim, size, to_layout, from_layout),
            None,
            None,
            None,
            None,
        )


class RouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k, expert_bias, kind, normalize, scale):
        topk_idx = fw.empty_indices(logits, (logits.shape[0], k), torch.int64)
        topk_weights = logits.new_empty(logits.shape[0], k, dtype=torch.float32)
        ctx.values = {"kind": kind, "normalize": normalize, "scale": scale}
        fw.run(
            "router",
            logits=logits,
            expert_bias=expert_bias,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            **ctx.values,
        )
        ctx.save_for_backward(logits, topk_idx)
        ctx.mark_non_differentiable(topk_idx)
        return topk_idx, topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx, _, grad_topk_weights):
        logits, topk_idx = ctx.saved_tensors
        grad = logits.new_empty(logits.shape)
        fw.run(
            "router_backward",
            logits=logits,
            topk_idx=topk_idx,
            grad_topk_weights=grad_topk_weights,
            grad_logits=grad,
            **ctx.values,
        )
        return grad, None, None, None, None, None


class PermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, groups, x, topk_weights, offsets, gather_idx, scatter_idx):
        rows = x.new_empty(gather_idx.shape[0], x.shape[1])
        probs = None if topk_weights is None else topk_weights.new_empty(gather_idx.shape)
        fw.run(
            "permute",
            x=x,
            gather_idx=gather_idx,
            rows=rows,
            topk_weights=topk_weights,
            scatter_idx=None if probs is None else scatter_idx,
            probs=probs,
            offsets=offsets,
            **groups,
        )
        ctx.shape = x.shape
        ctx.save_for_backward(scatter_idx)
        return rows, probs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_probs):
        (scatter_idx,) = ctx.saved_tensors
        grad_x = grad_rows.new_empty(ctx.shape)
        grad_weights = None
        if ctx.needs_input_grad[2]:
            grad_weights = grad_rows.new_empty(scatter_idx.shape, dtype=torch.float32)
        fw.run(
            "unpermute",
            rows=grad_rows,
            scatter_idx=scatter_idx,
            y=grad_x,
            probs=None if grad_weights is None else grad_probs,
            topk_weights=grad_weights,
        )
        return None, grad_x if ctx.needs_input_grad[1] else None, grad_weights, None, None, None


class UnpermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, groups, rows, weights, offsets, scatter_idx):
        y = rows.new_empty(scatter_idx.shape[0], rows.shape[1])
        fw.run("unpermute", rows=rows, scatter_idx=scatter_idx, weights=weights, y=y)
        ctx.groups = groups
        ctx.save_for_backward(rows, weights, offsets, scatter_idx)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        rows, weights, offsets, scatter_idx = ctx.saved_tensors
        grad_rows = rows.new_empty(rows.shape) if ctx.needs_input_grad[1] else None
        grad_weights = weights.new_empty(weights.shape) if ctx.needs_input_grad[2] else None
        fw.run(
            "unpermute_backward",
            grad_y=grad_y,
            rows=rows,
            scatter_idx=scatter_idx,
            weights=weights,
            grad_rows=grad_rows,
            grad_weights=grad_weights,
            offsets=offsets,
            **ctx.groups,
        )
        return None, grad_rows, grad_weights, None, None


class GroupedMmFunction(torch.autograd.Function):
    """d = a b_t with ragged rows of a (b_t of rank 3) or with a ragged contraction (b_t of rank
    2).
    """

    @staticmethod
    def forward(ctx, a, b_t, offsets, num_groups, out_dtype):
        ctx.num_groups = num_groups
        ctx.save_for_backward(a, b_t, offsets)
        if b_t.ndim == 3:
            return _ragged_rows(a, b_t, offsets, num_groups, out_dtype)
        return _ragged_contraction(a.t(), b_t, offsets, num_groups, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b_t, offsets = ctx.saved_tensors
        n, (needs_a, needs_b, *_) = ctx.num_groups, ctx.needs_input_grad
        grad = grad.to(a.dtype)
        grad_a = grad_b = None
        if b_t.ndim == 3:
            if needs_a:
                grad_a = _ragged_rows(grad, b_t.transpose(1, 2), offsets, n, a.dtype)
            if needs_b:
                grad_b = _ragged_contraction(a, grad, offsets, n, b_t.dtype)
        else:
            if needs_a:
                grad_a = _ragged_rows(b_t, grad.transpose(1, 2), offsets, n, a.dtype).t()
            if needs_b:
                grad_b = _ragged_rows(a.t(), grad, offsets, n, b_t.dtype)
        return grad_a, grad_b, None, None, None


def _ragged_rows(a, b_t, offsets, num_groups, dtype):
    """[rows, K] x [G, K, N]: a transposed view of [G, N, K] weights is used as it lies."""
    is_transposed = b_t.stride(-1) != 1
    d = a.new_empty(a.shape[0], b_t.shape[2], dtype=dtype)
    fw.run(
        "grouped_gemm",
        a=a,
        b=[b_t.transpose(1, 2) if is_transposed else b_t],
        b_layout=0 if is_transposed else 1,
        d=d,
        offsets=offsets,
        num_groups=num_groups,
        capacity=a.shape[0],
    )
    return d


def _ragged_contraction(a, b, offsets, num_groups, dtype):
    """[rows, M] and [rows, N] to [G, M, N]."""
    d = a.new_empty(num_groups, a.shape[1], b.shape[1], dtype=dtype)
    fw.run(
        "grouped_gemm_wgrad",
        a=a,
        b=b,
        d=[d],
        offsets=offsets,
        num_groups=num_groups,
        capacity=a.shape[0],
    )
    return d
