"""Plain PyTorch in double: the same formulas as moire's functions, one group at a time, and how
close is close enough.

Inputs are decoded exactly from their stored type, so that only moire's own rounding is judged.
"""

import torch

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# Ragged tables: no rows at all, empty groups first, in the middle and last, tile breakers, one
# group.
SPLITS = {
    "no_rows": [0, 0, 0],
    "one_group": [17],
    "empty_first": [0, 5, 9],
    "empty_middle": [7, 0, 0, 3],
    "empty_last": [4, 8, 0],
    "all_in_one": [0, 33, 0, 0],
    "breakers": [1, 31, 32, 33],
}


def draw(generator, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def double(t):
    """A leaf in double of the same values, or None."""
    return None if t is None else t.detach().double().requires_grad_()


def gate_and_up(z, layout=(0, "gate_first")):
    block, order = layout
    if order == "ungated":
        return z, 1
    first, second = z.unflatten(-1, (-1, 2, block or z.shape[-1] // 2)).unbind(-2)
    halves = first.flatten(-2), second.flatten(-2)
    return halves if order == "gate_first" else halves[::-1]


def clamped(t, low, high):
    """t within its limits, with the gradient of t at a limit, as docs/semantics.md defines it;
    torch's clamp has that gradient up to 2.14, and 0 there since 2.15.
    """
    if low is not None:
        t = torch.where(t < low, low, t)
    return torch.where(t > high, high, t)


def glu(z, probs, act="swiglu", layout=(0, "gate_first"), limit=7.0, alpha=1.702, offset=1.0):
    a, b = gate_and_up(z, layout)
    if act == "swiglu":
        y = torch.nn.functional.silu(a) * b
    elif act == "geglu_tanh":
        y = torch.nn.functional.gelu(a, approximate="tanh") * b
    elif act in ("reglu", "reglu2"):
        y = torch.relu(a) ** (1 if act == "reglu" else 2) * b
    else:
        a = clamped(a, None, limit)
        b = 1 if layout[1] == "ungated" else clamped(b, -limit, limit) + offset
        y = a * torch.sigmoid(alpha * a) * b
    return y if probs is None else y * probs[:, None]


def linear(x, w, splits, bias=None, scale=None):
    """x [rows, in] in expert order; w [G, out, in]; rows past the last group give zeros."""
    y = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
    parts, start = [], 0
    for g, n in enumerate(splits):
        part = x[start : start + n] @ w[g].T
        if bias is not None:
            s = 1 if scale is None else scale[start : start + n, None]
            part = part + s * bias[g]
        parts.append(part)
        start += n
    return torch.cat([*parts, y[start:]])


def mlp(
    x, w1, w2, splits, probs=None, b1=None, b2=None, b2_scale="probs", round_to=None, **glu_options
):
    """round_to: the type that z and act are stored in (the definition has them rounded)."""
    z = _rounded(linear(x, w1, splits, b1), round_to)
    act = _rounded(glu(z, probs, **glu_options), round_to)
    return linear(act, w2, splits, b2, probs if isinstance(b2_scale, str) else b2_scale)


class _Round(torch.autograd.Function):
    """Rounds values to a type; its gradient is rounded the same way, as stored gradients are."""

    @staticmethod
    def forward(ctx, t, dtype):
        ctx.dtype = dtype
        return t.to(dtype).double()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).double(), None


def _rounded(t, dtype):
    return t if dtype is None else _Round.apply(t, dtype)


def assert_close(found, wanted, dtype, terms, steps=1, name="result", summand=None):
    """found is within rounding of `wanted` (double): a bound from the type and the sum, not a
    constant.

    An inner product of `terms` products in FP32 is off by at most (terms + 8) 2^-24 of the sum of
    its magnitudes, here bounded by the root mean square of the tensor times sqrt(terms); a result
    stored in `dtype` adds half a unit in the last place per stored intermediate (`steps`), each of
    which may be the largest of its row. A `summand` of `wanted` that was stored before it was added
    counts with its own magnitude, for the result may be smaller.
    """
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape, (
        f"{name} is {list(found.shape)}, must be {list(wanted.shape)}"
    )
    if found.numel() == 0:
        return
    size = wanted.pow(2).mean().sqrt() + wanted.abs()
    if summand is not None:
        size = torch.maximum(size, wanted.abs() + summand.detach().double().abs())
    fp32 = steps * (terms + 8) * UNIT[torch.float32] * terms**0.5
    storage = steps * UNIT[dtype] if dtype != torch.float32 else 0.0
    bound = size * (fp32 + storage)
    wrong = ~((found - wanted).abs() <= bound)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}{list(at)}: got {found[at].item()}, want {wanted[at].item()} within "
            f"{bound[at].item():.2e}; "
            f"{int(wrong.sum())} of {wrong.numel()} differ"
        )
