"""Gradients of the ragged ops: each autograd.Function is forward and backward of one function of
functional.py.

Every gradient is optional, incoming gradients may have any strides, and weights may be of a wider
type than the operands (`compute_dtype`): they are cast once in the forward, and their gradients are
computed in their own type.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from . import steps
from .arrays import Torch as fw
from .wgrad import FreshGradients


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, sink, grad_x_out, *tensors):
        x, row_idx, scatter_idx, bias, scale, offsets, out, *weights = tensors
        w = [fw.cast(t, spec.compute_dtype) for t in weights]
        y = steps.linear_forward(fw, spec, x, row_idx, w, bias, scale, offsets, out)
        ctx.spec, ctx.sink, ctx.grad_x_out = spec, sink or FreshGradients, grad_x_out
        ctx.weight_dtypes = [t.dtype for t in weights]
        ctx.save_for_backward(x, row_idx, scatter_idx, bias, scale, offsets, *w)
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, row_idx, scatter_idx, bias, scale, offsets, *w = ctx.saved_tensors
        spec, sink, needs = ctx.spec, ctx.sink, ctx.needs_input_grad
        grad_rows = _grad_rows(ctx, x) if needs[3] else None
        grad_bias = bias.new_empty(bias.shape) if needs[6] else None
        grad_scale = scale.new_empty(scale.shape) if needs[7] else None
        groups = spec.groups(offsets)
        of_w = (ctx.weight_dtypes, needs[10:])
        grad_w, beta, returned = _destination(sink, w, *of_w)
        if sink.delayed:
            sink.defer(_later_wgrad(groups, spec.layout, x, row_idx, grad_y, None), *of_w)
        # Beta belongs to the weight gradient; a bias gradient is always fresh, hence a call of its
        # own beside beta 1.
        fused = beta.value == 0 and beta.per_group is None
        fw.run(
            "grouped_linear_backward",
            x=x,
            row_idx=row_idx,
            w=w,
            w_layout=spec.layout,
            bias=bias,
            scale=scale,
            grad_y=grad_y,
            grad_x=grad_rows,
            grad_bias=grad_bias,
            grad_scale=grad_scale,
            grad_w=grad_w if fused else None,
            grad_w_layout=spec.layout,
            **groups,
        )
        if not fused:
            steps.linear_wgrad(fw, groups, spec.layout, x, row_idx, grad_y, None, grad_w, beta)
        grad_x = _back_to_tokens(grad_rows, row_idx, scatter_idx, x)
        of_tensors = (grad_x, None, None, grad_bias, grad_scale, None, None)
        return (None, None, None, *of_tensors, *returned)


class MlpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, sinks, grad_x_out, *tensors):
        x, row_idx, scatter_idx, probs, b1, b2, offsets, out, *weights = tensors
        w1, w2 = spec.operands(fw, weights)
        y, z, act = steps.mlp_forward(fw, spec, x, row_idx, w1, b1, w2, b2, probs, offsets, out)
        ctx.spec, ctx.sinks = spec, sinks or (FreshGradients, FreshGradients)
        ctx.grad_x_out = grad_x_out
        ctx.weight_dtypes = [t.dtype for t in weights]
        saved = (x, row_idx, scatter_idx, probs, b1, b2, offsets, z, act)
        ctx.save_for_backward(*saved, *w1, *w2)
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, row_idx, scatter_idx, probs, b1, b2, offsets, z, act, *w = ctx.saved_tensors
        spec, needs = ctx.spec, ctx.needs_input_grad
        w1, w2 = w[: spec.num_w1], w[spec.num_w1 :]
        saved = steps.MlpSaved(x, row_idx, w1, w2, b2, probs, offsets, z, act)
        wanted = MlpWanted(needs[3], *needs[6:9], needs[11:], b1)
        grads, of_weights = _mlp_backward(ctx, saved, wanted, grad_y, gathered=False)
        grad_x = _back_to_tokens(grads.x, row_idx, scatter_idx, x)
        of_tensors = (grad_x, None, None, grads.probs, grads.b1, grads.b2, None, None)
        return (None, None, None, *of_tensors, *of_weights)


class MoeFunction(torch.autograd.Function):
    """Experts' order, MLP and back: no permuted copy of x or of the incoming gradient is made."""

    @staticmethod
    def forward(ctx, spec, sinks, out_dtype, *tensors):
        x, topk_weights, b1, b2, offsets, gather_idx, scatter_idx, *weights = tensors
        w1, w2 = spec.operands(fw, weights)
        plan = (offsets, gather_idx, scatter_idx)
        y, probs, z, act = steps.moe_forward(
            fw, spec, out_dtype, x, topk_weights, w1, b1, w2, b2, *plan
        )
        ctx.spec, ctx.sinks = spec, sinks or (FreshGradients, FreshGradients)
        ctx.grad_x_out = None
        ctx.weight_dtypes = [t.dtype for t in weights]
        ctx.save_for_backward(x, probs, b1, b2, z, act, *plan, *w1, *w2)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, probs, b1, b2, z, act, offsets, gather_idx, scatter_idx, *w = ctx.saved_tensors
        spec, needs = ctx.spec, ctx.needs_input_grad
        w1, w2 = w[: spec.num_w1], w[spec.num_w1 :]
        saved = steps.MlpSaved(x, gather_idx, w1, w2, b2, probs, offsets, z, act)
        wanted = MlpWanted(*needs[3:7], needs[10:], b1)
        grad_y = fw.cast(grad_y, x.dtype)
        grads, of_weights = _mlp_backward(ctx, saved, wanted, grad_y, gathered=True)
        grad_x = x.new_empty(x.shape) if needs[3] else None
        grad_topk_weights = probs.new_empty(scatter_idx.shape) if needs[4] else None
        if needs[3] or needs[4]:
            fw.run(
                "unpermute",
                rows=grads.x,
                scatter_idx=scatter_idx,
                y=grad_x,
                probs=grads.probs,
                topk_weights=grad_topk_weights,
            )
        of_tensors = (grad_x, grad_topk_weights, grads.b1, grads.b2, None, None, None)
        return (None, None, None, *of_tensors, *of_weights)


class MlpWanted(NamedTuple):
    """Which gradients of a grouped MLP are asked for."""

    x: bool
    probs: bool
    b1: bool
    b2: bool
    weights: tuple
    bias1: Any  # b1 itself: the backward needs nothing of it but its shape


def _mlp_backward(ctx, saved, wanted, grad_y, gathered):
    """(gradients written, gradients to return for the weights); delayed ones go to their sinks."""
    spec, (sink1, sink2), n = ctx.spec, ctx.sinks, ctx.spec.num_w1
    of_w1 = (ctx.weight_dtypes[:n], wanted.weights[:n])
    of_w2 = (ctx.weight_dtypes[n:], wanted.weights[n:])
    later1, later2 = sink1.delayed and any(of_w1[1]), sink2.delayed and any(of_w2[1])
    grad_w1, beta1, returned1 = _destination(sink1, saved.w1, *of_w1)
    grad_w2, beta2, returned2 = _destination(sink2, saved.w2, *of_w2)
    x, z, b1 = saved.x, saved.z, wanted.bias1
    act = z.new_empty(spec.capacity, spec.width) if later2 and saved.act is None else None
    grads = steps.MlpGrads(
        x=_grad_rows(ctx, x) if wanted.x else None,
        w1=grad_w1,
        b1=b1.new_empty(b1.shape) if wanted.b1 else None,
        w2=grad_w2,
        b2=saved.b2.new_empty(saved.b2.shape) if wanted.b2 else None,
        probs=saved.probs.new_empty(saved.probs.shape) if wanted.probs else None,
        z=z.new_empty(z.shape) if later1 else None,
        act=act,
    )
    steps.mlp_backward(fw, spec, saved, grad_y, gathered, grads, beta1, beta2)
    groups = spec.groups(saved.offsets)
    if later2:
        kept = saved.act if act is None else act
        grad_y_idx = saved.row_idx if gathered else None
        sink2.defer(_later_wgrad(groups, spec.w2_layout, kept, None, grad_y, grad_y_idx), *of_w2)
    if later1:
        sink1.defer(_later_wgrad(groups, spec.w1_layout, x, saved.row_idx, grads.z, None), *of_w1)
    return grads, [*returned1, *returned2]


def _grad_rows(ctx, x):
    """The gradient of x in expert order: the caller's buffer, or a fresh one."""
    if ctx.grad_x_out is not None:
        return ctx.grad_x_out
    return x.new_empty(ctx.spec.capacity, x.shape[1])


def _destination(sink, weights, dtypes, needs):
    """Where weight gradients are written now: nowhere if they are delayed."""
    if sink.delayed:
        return None, steps.Beta(), [None] * len(weights)
    return sink.destination(weights, dtypes, needs)


def _later_wgrad(groups, layout, x, x_idx, grad_y, grad_y_idx):
    def run(grad_w, beta):
        steps.linear_wgrad(fw, groups, layout, x, x_idx, grad_y, grad_y_idx, grad_w, beta)

    return run


def _back_to_tokens(grad_rows, row_idx, scatter_idx, x):
    """The gradient of gathering x: rows in expert order summed back to the rows of x, in FP32,
    rounded once.
    """
    if grad_rows is None or row_idx is None:
        return grad_rows
    if scatter_idx is not None:
        grad_x = x.new_empty(x.shape)
        fw.run("unpermute", rows=grad_rows, scatter_idx=scatter_idx, y=grad_x)
        return grad_x
    # Rows of the tail are zeros, wherever their index points.
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if x.shape[0] != 0:
        total.index_add_(0, row_idx.clamp(0, x.shape[0] - 1), grad_rows.float())
    return total.to(x.dtype)
