"""Gradients of the ragged ops: each autograd.Function is forward and backward of one function of
functional.py.

Every gradient is optional, incoming gradients may have any strides, and weights may be of a wider
type than the operands (`compute_dtype`): they are cast once in the forward, and their gradients are
computed in their own type. An 8-bit recipe casts no weights: it quantises them as they are, or
reads the copies that the call was given.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from . import context, steps
from .arrays import Torch as fw
from .straight_through import rows_to_tokens
from .wgrad import FreshGradients, check_memory


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, sink, grad_x_out, copies, *tensors):
        x, row_idx, scatter_idx, bias, scale, offsets, out, *weights = tensors
        w = [fw.cast(t, spec.compute_dtype) for t in weights]
        y, made = steps.linear_forward(
            fw, spec, x, row_idx, w, bias, scale, offsets, out, copies=copies
        )
        ctx.spec, ctx.sink, ctx.grad_x_out = spec, sink or FreshGradients, grad_x_out
        ctx.x, ctx.weights = (x.shape, x.dtype), [(t.shape, t.dtype) for t in weights]
        needs_w = any(ctx.needs_input_grad[11:])
        given = {
            "row_idx": row_idx,
            "scatter_idx": scatter_idx,
            "bias": bias,
            "scale": scale,
            "offsets": offsets,
            "w": w,
        }
        own = {}
        _keep_x(given, own, needs_w, x, copies, made)
        _keep_copy(given, "w", copies.w1)
        keep(ctx, given, own)
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        tensors, spec, sink, needs = kept_by(ctx), ctx.spec, ctx.sink, ctx.needs_input_grad
        kept = tensors.get
        bias, scale, offsets = kept("bias"), kept("scale"), kept("offsets")
        needs_w = needs[11:]
        columns = _columns_of_x(spec, kept, any(needs_w))
        ((grad_w, beta),) = _destinations(ctx, tensors, grad_y, (sink, ctx.weights, needs_w))
        grads = steps.LinearGrads(
            x=_grad_rows(ctx, grad_y) if needs[4] else None,
            w=grad_w,
            bias=bias.new_empty(bias.shape) if needs[7] else None,
            scale=scale.new_empty(scale.shape) if needs[8] else None,
        )
        saved = steps.LinearSaved(
            kept("x"), kept("row_idx"), kept("w"), bias, scale, offsets, columns, kept("w_copy")
        )
        steps.linear_backward(fw, spec, saved, grad_y, grads, beta)
        if sink.delayed:
            operands = steps.Wgrad(saved.x, saved.row_idx, columns, grad_y)
            _defer(sink, spec, offsets, spec.layout, operands, needs_w)
        returned = _returned(sink, grad_w, needs_w)
        grad_x = _back_to_tokens(grads.x, kept("row_idx"), kept("scatter_idx"), ctx.x)
        of_tensors = (grad_x, None, None, grads.bias, grads.scale, None, None)
        return (None, None, None, None, *of_tensors, *returned)


class MlpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, sinks, grad_x_out, copies, *tensors):
        x, row_idx, scatter_idx, probs, b1, b2, offsets, out, *weights = tensors
        w1, w2 = spec.operands(fw, weights)
        arrays = (x, row_idx, w1, b1, w2, b2, probs, offsets, out)
        y, made = steps.mlp_forward(fw, spec, *arrays, copies=copies)
        given = (row_idx, scatter_idx, probs, b1, b2, offsets)
        needs_w1 = any(ctx.needs_input_grad[12 : 12 + spec.num_w1])
        _keep_mlp(ctx, spec, sinks, copies, needs_w1, x, (w1, w2), weights, given, made)
        ctx.grad_x_out = grad_x_out
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        tensors, needs = kept_by(ctx), ctx.needs_input_grad
        kept = tensors.get
        wanted = MlpWanted(needs[4], *needs[7:10], needs[12:])
        grads, of_weights = _mlp_backward(ctx, tensors, wanted, grad_y, gathered=False)
        grad_x = _back_to_tokens(grads.x, kept("row_idx"), kept("scatter_idx"), ctx.x)
        of_tensors = (grad_x, None, None, grads.probs, grads.b1, grads.b2, None, None)
        return (None, None, None, None, *of_tensors, *of_weights)


class MoeFunction(torch.autograd.Function):
    """Experts' order, MLP and back: no permuted copy of x or of the incoming gradient is kept."""

    @staticmethod
    def forward(ctx, spec, sinks, out_dtype, copies, *tensors):
        x, topk_weights, b1, b2, offsets, gather_idx, scatter_idx, *weights = tensors
        w1, w2 = spec.operands(fw, weights)
        plan = (offsets, gather_idx, scatter_idx)
        y, probs, made = steps.moe_forward(
            fw, spec, out_dtype, x, topk_weights, w1, b1, w2, b2, *plan, copies=copies
        )
        given = (gather_idx, scatter_idx, probs, b1, b2, offsets)
        needs_w1 = any(ctx.needs_input_grad[11 : 11 + spec.num_w1])
        _keep_mlp(ctx, spec, sinks, copies, needs_w1, x, (w1, w2), weights, given, made)
        ctx.grad_x_out = None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        tensors, needs = kept_by(ctx), ctx.needs_input_grad
        kept = tensors.get
        scatter_idx, (x_shape, x_dtype) = kept("scatter_idx"), ctx.x
        wanted = MlpWanted(*needs[4:8], needs[11:])
        grad_y = fw.cast(grad_y, x_dtype)
        grads, of_weights = _mlp_backward(ctx, tensors, wanted, grad_y, gathered=True)
        grad_x = grad_y.new_empty(x_shape) if needs[4] else None
        grad_topk_weights = kept("probs").new_empty(scatter_idx.shape) if needs[5] else None
        if needs[4] or needs[5]:
            fw.run(
                "unpermute",
                rows=grads.x,
                scatter_idx=scatter_idx,
                y=grad_x,
                probs=grads.probs,
                topk_weights=grad_topk_weights,
            )
        of_tensors = (grad_x, grad_topk_weights, grads.b1, grads.b2, None, None, None)
        return (None, None, None, None, *of_tensors, *of_weights)


class MlpWanted(NamedTuple):
    """Which gradients of a grouped MLP are asked for."""

    x: bool
    probs: bool
    b1: bool
    b2: bool
    weights: tuple


def keep(ctx, given, made):
    """Saves tensors, and lists of tensors, by name; `made` are the forward's own, the others are
    held by reference.
    """
    flat, counts = [], {}
    for tensors in (given, made):
        for name, value in tensors.items():
            if value is None:
                continue
            if type(value) in (
                list,
                tuple,
            ):  # torch.compile before 2.11 makes tuples of *starred names
                counts[name] = len(value)
                flat += value
            else:
                counts[name] = -1
                flat.append(value)
    ctx.counts = counts
    ctx.save_for_backward(*flat)
    context.note_saved(given, made)


def kept_by(ctx):
    """What keep() saved, by name, for a backward pass."""
    context.check_backward()
    tensors, found, at = ctx.saved_tensors, {}, 0
    for name, count in ctx.counts.items():
        if count < 0:
            found[name] = tensors[at]
            at += 1
        else:
            found[name] = list(tensors[at : at + count])
            at += count
    return found


def _keep_mlp(ctx, spec, sinks, copies, needs_w1, x, operands, weights, given, made):
    ctx.spec, ctx.sinks = spec, sinks or (FreshGradients, FreshGradients)
    ctx.x, ctx.weights = (x.shape, x.dtype), [(t.shape, t.dtype) for t in weights]
    (w1, w2), (row_idx, scatter_idx, probs, b1, b2, offsets) = operands, given
    given = {
        "row_idx": row_idx,
        "scatter_idx": scatter_idx,
        "probs": probs,
        "b1": b1,
        "b2": b2,
        "offsets": offsets,
        "w1": w1,
        "w2": w2,
    }
    own = {"z": made.z, "act": made.act, "act_columnwise": made.act_columnwise}
    _keep_x(given, own, needs_w1, x, copies, made)
    _keep_copy(given, "w1", copies.w1)
    _keep_copy(given, "w2", copies.w2)
    keep(ctx, given, own)


def _keep_x(given, own, needs_w, x, copies, made):
    """What a weight gradient needs of x: x, its column-wise copy, or the row-wise one, of which
    that is made.
    """
    if not needs_w:
        return
    if copies.x_columnwise is not None:
        given["x_given"] = copies.x_columnwise
    elif copies.x is not None:
        given["x_rowwise"] = copies.x
    elif made.x_columnwise is not None:
        own["x_columnwise"] = made.x_columnwise
    else:
        given["x"] = x


def _keep_copy(given, name, copies):
    """The copy for the backward stands in for the weight."""
    if copies.backward is not None:
        given[name], given[f"{name}_copy"] = [], copies.backward


def _columns_of_x(spec, kept, needs_w):
    if not needs_w or kept("x_rowwise") is None:
        return kept("x_columnwise") or kept("x_given")
    return steps.requantized(fw, spec, kept("x_rowwise"), kept("offsets"))


def _mlp_backward(ctx, tensors, wanted, grad_y, gathered):
    """(gradients written, gradients to return for the weights); delayed ones go to their sinks."""
    spec, (sink1, sink2), n, kept = ctx.spec, ctx.sinks, ctx.spec.num_w1, tensors.get
    needs1, needs2 = wanted.weights[:n], wanted.weights[n:]
    later1, later2 = sink1.delayed and any(needs1), sink2.delayed and any(needs2)
    to = (sink1, ctx.weights[:n], needs1), (sink2, ctx.weights[n:], needs2)
    (grad_w1, beta1), (grad_w2, beta2) = _destinations(ctx, tensors, grad_y, *to)
    saved = _mlp_saved(spec, kept, any(needs1))
    b1, b2, probs = kept("b1"), saved.b2, saved.probs
    grads = steps.MlpGrads(
        x=_grad_rows(ctx, grad_y) if wanted.x else None,
        w1=grad_w1,
        b1=b1.new_empty(b1.shape) if wanted.b1 else None,
        w2=grad_w2,
        b2=b2.new_empty(b2.shape) if wanted.b2 else None,
        probs=probs.new_empty(probs.shape) if wanted.probs else None,
        **_for_later(spec, saved, later1, later2),
    )
    steps.mlp_backward(fw, spec, saved, grad_y, gathered, grads, beta1, beta2)
    if later2:
        act_columns = saved.act_columnwise or grads.act_columnwise
        act = saved.act if grads.act is None else grads.act
        grad_y_idx = saved.row_idx if gathered else None
        operands = steps.Wgrad(act, None, act_columns, grad_y, grad_y_idx)
        _defer(sink2, spec, saved.offsets, spec.w2_layout, operands, needs2)
    if later1:
        x = (saved.x, saved.row_idx, saved.x_columnwise)
        operands = steps.Wgrad(*x, grads.z, grad_y_columnwise=grads.z_columnwise)
        _defer(sink1, spec, saved.offsets, spec.w1_layout, operands, needs1)
    return grads, [*_returned(sink1, grad_w1, needs1), *_returned(sink2, grad_w2, needs2)]


def _mlp_saved(spec, kept, needs_w1):
    return steps.MlpSaved(
        x=kept("x"),
        row_idx=kept("row_idx"),
        w1=kept("w1"),
        w2=kept("w2"),
        b2=kept("b2"),
        probs=kept("probs"),
        offsets=kept("offsets"),
        z=kept("z"),
        act=kept("act"),
        x_columnwise=_columns_of_x(spec, kept, needs_w1),
        act_columnwise=kept("act_columnwise"),
        w1_copy=kept("w1_copy"),
        w2_copy=kept("w2_copy"),
    )


def _for_later(spec, saved, later1, later2):
    """What a backward makes for weight gradients that are delayed: grad_z and the activation, or
    their column-wise copies.
    """
    z, is_act_saved = saved.z, saved.act is not None or saved.act_columnwise is not None
    makes_act = later2 and not is_act_saved
    if not spec.recipe.is_quantized:
        act = z.new_empty(spec.capacity, spec.width) if makes_act else None
        return {"z": z.new_empty(z.shape) if later1 else None, "act": act}
    element, columns = spec.recipe.gradient_element, z.shape[1]
    return {
        "z_columnwise": steps.empty_columns(fw, spec, z, columns, element) if later1 else None,
        "act_columnwise": steps.empty_columns(fw, spec, z, spec.width) if makes_act else None,
    }


def _grad_rows(ctx, grad_y):
    """The gradient of x in expert order: the caller's buffer, or a fresh one."""
    if ctx.grad_x_out is not None:
        fw.written(ctx.grad_x_out)
        return ctx.grad_x_out
    shape, dtype = ctx.x
    return grad_y.new_empty(ctx.spec.capacity, shape[1], dtype=dtype)


def _destinations(ctx, tensors, grad_y, *layers):
    """Where the weight gradients of each (sink, weights, needs) are written now, and beta: nowhere
    if they are delayed.
    """
    found = [
        (None, steps.Beta()) if sink.delayed else sink.destination(grad_y, weights, needs)
        for sink, weights, needs in layers
    ]
    written = [(sink, to, needs) for (sink, _, needs), (to, _) in zip(layers, found)]
    check_memory(written, {**tensors, "grad_y": grad_y, "grad_x_out": ctx.grad_x_out})
    return found


def _returned(sink, written, needs):
    """What autograd gets for the weights, after the gradients were written."""
    return [None] * len(needs) if sink.delayed else sink.returned(written, needs)


def _defer(sink, spec, offsets, layout, operands, needs):
    groups = spec.groups(offsets)

    def run(grad_w, beta):
        steps.wgrad(fw, spec.recipe, groups, layout, operands, grad_w, beta)

    names = ("x", "row_idx", "x", "grad_y", "row_idx", "grad_y", "offsets")
    named = zip(names, (*operands, offsets))
    sink.defer(run, {name: operand for name, operand in named if operand is not None}, needs)


def _back_to_tokens(grad_rows, row_idx, scatter_idx, x):
    """The gradient of gathering x, of which shape and type are given."""
    if grad_rows is None or row_idx is None:
        return grad_rows
    shape, dtype = x
    if scatter_idx is None:
        return rows_to_tokens(grad_rows, row_idx, shape, dtype)
    grad_x = grad_rows.new_empty(shape, dtype=dtype)
    fw.run("unpermute", rows=grad_rows, scatter_idx=scatter_idx, y=grad_x)
    return grad_x
