"""Layers under an 8-bit recipe, in double: every product reads decoded operands, forward and
backward written out, one group at a time. Operands come from truth_fp8, formulas from here.
"""

import torch
import truth
from truth_fp8 import round_trip, weight_round_trip

FORMS = {
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp8_fast": ("mxfp8", "mxfp8"),
    "fp8_block": ("fp8_block", "fp8_tile"),
}


class Operands:
    """What tensors become before a product of this recipe reads them."""

    def __init__(self, recipe, splits, element="e4m3"):
        self.form, self.weight_form = FORMS[recipe]
        self.splits, self.element = splits, element

    def rows(self, t, element="e4m3"):
        return round_trip(t, self.form, element, "rowwise", self.splits)

    def columns(self, t, element="e4m3"):
        return round_trip(t, self.form, element, "columnwise", self.splits)

    def gradient_rows(self, t):
        return self.rows(t, self.element)

    def gradient_columns(self, t):
        return self.columns(t, self.element)

    def weight(self, w, along):
        return weight_round_trip(w, self.weight_form, along)


def per_group(function, splits, rows, *arrays):
    """function(g, part of each array), below each other; zeros in the tail."""
    parts, start = [], 0
    for g, n in enumerate(splits):
        parts.append(function(g, *(a[start : start + n] for a in arrays)))
        start += n
    tail = torch.zeros(rows - start, parts[0].shape[1], dtype=torch.float64)
    return torch.cat([*parts, tail])


def products(splits, *arrays):
    """a_g^T b_g of each group."""
    parts = zip(*(a[: sum(splits)].split(splits) for a in arrays))
    return torch.stack([a.T @ b for a, b in parts])


def bias_sums(splits, t):
    return torch.stack([part.sum(0) for part in t[: sum(splits)].split(splits)])


def linear(ops, x, w, bias, scale, grad):
    """y and the gradients of x, w, bias and scale; w [G, out, in]."""
    rows, splits = x.shape[0], ops.splits
    bias, scale, grad64 = bias.double(), scale.double(), grad.double()
    x_rows, w_in, w_out = ops.rows(x), ops.weight(w, 2), ops.weight(w, 1)
    grad_rows = ops.gradient_rows(grad)
    used = sum(splits)
    groups = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor(splits))
    grad_scale = torch.zeros(rows, dtype=torch.float64)
    grad_scale[:used] = (grad64[:used] * bias[groups]).sum(1)
    y = per_group(lambda g, a, s: a @ w_in[g].T + s[:, None] * bias[g], splits, rows, x_rows, scale)
    return {
        "y": y,
        "x": per_group(lambda g, a: a @ w_out[g], splits, rows, grad_rows),
        "w": products(splits, ops.gradient_columns(grad), ops.columns(x)),
        "bias": bias_sums(splits, scale[:, None] * grad64),
        "scale": grad_scale,
    }


def mlp(ops, x, w1, w2, probs, b1, b2, grad, **glu_options):
    """y and every gradient; z, act and the gradients between are rounded to BF16."""
    rows, splits, storage = x.shape[0], ops.splits, torch.bfloat16
    used = sum(splits)
    b1, b2, probs64 = b1.double(), b2.double(), probs.double()
    w1_in, w2_in = ops.weight(w1, 2), ops.weight(w2, 2)
    z = per_group(lambda g, a: a @ w1_in[g].T + b1[g], splits, rows, ops.rows(x)).to(storage)
    z_leaf, p_leaf = z.double().requires_grad_(), probs64.clone().requires_grad_()
    act_exact = truth.glu(z_leaf, p_leaf, **glu_options)
    act = act_exact.detach().to(storage)
    act[used:] = 0
    y = per_group(
        lambda g, a, p: a @ w2_in[g].T + p[:, None] * b2[g], splits, rows, ops.rows(act), probs64
    )
    w1_out, w2_out = ops.weight(w1, 1), ops.weight(w2, 1)
    grad_act = per_group(lambda g, a: a @ w2_out[g], splits, rows, ops.gradient_rows(grad))
    grad_act = grad_act.to(storage).double()
    grad_z, grad_probs = torch.autograd.grad(act_exact, [z_leaf, p_leaf], grad_act)
    grad_z = grad_z.to(storage)
    groups = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor(splits))
    grad_probs[:used] += (grad.double()[:used] * b2[groups]).sum(1)
    return {
        "y": y,
        "x": per_group(lambda g, a: a @ w1_out[g], splits, rows, ops.gradient_rows(grad_z)),
        "w1": products(splits, ops.gradient_columns(grad_z), ops.columns(x)),
        "w2": products(splits, ops.gradient_columns(grad), ops.columns(act)),
        "probs": grad_probs,
        "b1": bias_sums(splits, grad_z.double()),
        "b2": bias_sums(splits, probs64[:, None] * grad.double()),
    }
