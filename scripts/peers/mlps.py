"""The MLP of the experts on rows in expert order, forward, and with the backward."""

import moire
import torch
import torch.nn.functional as F
from moire.wgrad import ParameterGradients

from .case import Case, grouped_mm, no_grad

ADDED = "moire, FP32 added"


def sinks(w1, w2):
    """grouped_mlp's wgrad: gradients of both are added to FP32 main_grads, which they get here."""
    for w in (w1, w2):
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        w.grad_added_to_main_grad = False  # so that autograd gets something for it
    return tuple(ParameterGradients(True, False).of_call("grouped_mlp", w, None) for w in (w1, w2))


def compiled_act(dynamic=False):
    """SwiGLU times the probabilities, in FP32, as one kernel; compiled anew for each shape unless
    `dynamic`."""

    @torch.compile(dynamic=dynamic)
    def act(z, probs):
        a, b = z.chunk(2, dim=-1)
        return (F.silu(a.float()) * b.float() * probs[:, None]).to(z.dtype)

    return act


def cases(tensors):
    s = tensors.shape
    flop = 6 * s.rows * s.hidden * s.width
    x = tensors.normal(s.rows, s.hidden, requires_grad=True)
    w1, w2 = tensors.weights(requires_grad=True)
    probs = tensors.uniform(s.rows, requires_grad=True)
    grad_y = tensors.normal(s.rows, s.hidden)
    groups = moire.Groups.of_offsets(tensors.offsets, s.rows)
    gm, act = grouped_mm(), compiled_act()
    leaves = [x, w1, w2, probs]

    def ours(wgrad=None):
        return [moire.grouped_mlp(x, w1, w2, groups, probs=probs, wgrad=wgrad)]

    def theirs():
        z = gm(x, w1.transpose(1, 2), offs=tensors.ends)
        return [gm(act(z, probs), w2.transpose(1, 2), offs=tensors.ends)]

    def loop():
        parts, start = [], 0
        for e, count in enumerate(tensors.splits):
            if count:
                rows = slice(start, start + count)
                a, b = F.linear(x[rows], w1[e]).chunk(2, -1)
                parts.append(F.linear(F.silu(a) * b * probs[rows, None].to(a.dtype), w2[e]))
            start += count
        return [torch.cat(parts)]

    both = {"moire": ours, "torch": theirs, "loop": loop}
    operands = {"kind": "mlp", "tensors": tensors, "x": x, "w1": w1, "w2": w2, "probs": probs}
    forward = {name: no_grad(run) for name, run in both.items()}
    yield Case("mlp forward", flop, forward, operands={**operands, "grad_y": None})

    def with_backward(forward):
        return lambda: torch.autograd.grad(forward()[0], leaves, grad_y)

    run = {name: with_backward(forward) for name, forward in both.items()}
    added = sinks(w1, w2)
    run[ADDED] = with_backward(lambda: ours(added))

    def check_added():
        for w in (w1, w2):
            w.main_grad.zero_()
        run[ADDED]()
        wanted = run["torch"]()
        return [(w.main_grad, g) for w, g in zip((w1, w2), wanted[1:3])]

    keeps = (("moire", ours), ("torch", theirs))
    operands = {**operands, "kind": "mlp backward", "grad_y": grad_y}
    options = {"keeps": keeps, "operands": operands, "check_added": check_added}
    yield Case("mlp forward+backward", 3 * flop, run, **options)
