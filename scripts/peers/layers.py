"""The whole layer: router, order by expert, experts, and the sum back to tokens."""

import moire
import torch

from .case import Case, grouped_mm, no_grad
from .mlps import compiled_act


def cases(tensors):
    s = tensors.shape
    flop = 6 * s.tokens * s.top_k * s.hidden * s.width
    x = tensors.normal(s.tokens, s.hidden, scale=0.2, requires_grad=True)
    router = tensors.normal(s.experts, s.hidden, scale=0.02, requires_grad=True)
    w1, w2 = tensors.weights(requires_grad=True)
    grad_y = tensors.normal(s.tokens, s.hidden, scale=0.2)
    theirs = torch_layer(s)

    def ours():
        topk_idx, weights = moire.router(x @ router.t(), s.top_k, normalize=True)
        return [moire.moe(x, w1, w2, topk_idx, weights)]

    both = {"moire": ours, "torch": lambda: [theirs(x, w1, w2, *choose(x, router, s.top_k))]}

    def check():
        """Of the same choices: torch and moire order equal logits differently."""
        topk_idx, weights = choose(x, router, s.top_k)
        yield moire.moe(x, w1, w2, topk_idx, weights), theirs(x, w1, w2, topk_idx, weights)

    forward = {name: no_grad(run) for name, run in both.items()}
    operands = {"kind": "layer", "x": x, "router": router, "w1": w1, "w2": w2, "top_k": s.top_k}
    given = {**operands, "grad_y": None}
    yield Case("layer forward", flop, forward, check=no_grad(lambda: list(check())), operands=given)

    def with_backward(run):
        return lambda: torch.autograd.grad(run()[0], [x, router, w1, w2], grad_y)

    def gradients():
        (pair,) = check()
        leaves = [x, router, w1, w2]
        both = [torch.autograd.grad(y, leaves, grad_y, retain_graph=True) for y in pair]
        return list(zip(*both))

    run = {name: with_backward(forward) for name, forward in both.items()}
    options = {"keeps": tuple(both.items()), "operands": {**operands, "grad_y": grad_y}}
    yield Case("layer forward+backward", 3 * flop, run, check=gradients, **options)


def choose(x, router, k):
    values, topk_idx = (x @ router.t()).topk(k, dim=-1)
    return topk_idx, values.softmax(-1, dtype=torch.float32)


def torch_layer(shape, dynamic=False):
    """Plain PyTorch as fast as it goes: a sort, grouped_mm, compiled activation and combine."""
    gm, act, k = grouped_mm(), compiled_act(dynamic), shape.top_k

    @torch.compile(dynamic=dynamic)
    def combine(rows, inverse):
        return rows[inverse].view(-1, k, rows.shape[-1]).float().sum(1).to(rows.dtype)

    def layer(x, w1, w2, topk_idx, weights):
        order = topk_idx.flatten().argsort(stable=True)
        # torch.bincount would wait for the GPU.
        counts = torch.zeros(shape.experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, topk_idx.flatten(), counts.new_ones(topk_idx.numel()))
        ends = counts.cumsum(0, dtype=torch.int32)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        z = gm(x[order // k], w1.transpose(1, 2), offs=ends)
        probs = weights.flatten()[order]
        return combine(gm(act(z, probs), w2.transpose(1, 2), offs=ends), inverse)

    return layer
