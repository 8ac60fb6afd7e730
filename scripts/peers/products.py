"""The six bare products of the MLP: FC1, FC2, their gradients of rows and of weights."""

import torch

from .case import Case, grouped_mm

_LIMIT = 4e-3  # FP32 gradients beside BF16 ones: rounding alone is 1.7e-3


def cases(tensors):
    """One Case per product, made when it is its turn, so that only its tensors are in memory."""
    h, f = tensors.shape.hidden, tensors.shape.width
    yield _ragged_rows(tensors, "fc1", h, 2 * f, is_transposed=False)
    yield _ragged_rows(tensors, "fc2", f, h, is_transposed=False)
    yield _ragged_rows(tensors, "fc1 dgrad", 2 * f, h, is_transposed=True)
    yield _ragged_rows(tensors, "fc2 dgrad", h, f, is_transposed=True)
    yield _wgrad(tensors, "fc1 wgrad", 2 * f, h)
    yield _wgrad(tensors, "fc2 wgrad", h, f)


def _groups(tensors):
    s = tensors.shape
    return {"offsets": tensors.offsets, "num_groups": s.experts, "capacity": s.rows}


def _ragged_rows(tensors, name, k, n, is_transposed):
    """[rows, k] times the weights: [E, n, k], or in a dgrad [E, k, n]."""
    s, gm = tensors.shape, grouped_mm()
    a = tensors.normal(s.rows, k)
    w = tensors.normal(s.experts, *((k, n) if is_transposed else (n, k)), scale=k**-0.5)
    b = w if is_transposed else w.transpose(1, 2)  # [E, k, n], as torch multiplies

    def moire():
        d = a.new_empty(s.rows, n)
        transpose_b = int(is_transposed)
        torch.ops.moire.grouped_gemm(a=a, b=[w], transpose_b=transpose_b, d=d, **_groups(tensors))
        return [d]

    def loop():
        d, start = a.new_empty(s.rows, n), 0
        for e, count in enumerate(tensors.splits):
            if count:
                torch.mm(a[start : start + count], b[e], out=d[start : start + count])
            start += count
        return [d]

    run = {"moire": moire, "torch": lambda: [gm(a, b, offs=tensors.ends)], "loop": loop}
    operands = {"kind": "rows", "tensors": tensors, "a": a, "w": w, "n": n}
    operands["is_transposed"] = is_transposed
    return Case(f"gemm {name}", 2 * s.rows * k * n, run, operands=operands, limit=_LIMIT)


def _wgrad(tensors, name, m, n):
    """dW [E, m, n] = dy^T x, with ragged rows of both."""
    s, gm = tensors.shape, grouped_mm()
    dy, x = tensors.normal(s.rows, m), tensors.normal(s.rows, n)

    def moire():
        d = dy.new_empty(s.experts, m, n)
        torch.ops.moire.grouped_gemm_wgrad(a=dy, b=x, d=[d], **_groups(tensors))
        return [d]

    def loop():
        d, start = dy.new_empty(s.experts, m, n), 0
        for e, count in enumerate(tensors.splits):
            rows = slice(start, start + count)
            if count:
                torch.mm(dy[rows].t(), x[rows], out=d[e])
            else:
                d[e].zero_()
            start += count
        return [d]

    accumulated = torch.zeros(s.experts, m, n, device=dy.device)

    def moire_fp32():
        groups = _groups(tensors)
        torch.ops.moire.grouped_gemm_wgrad(a=dy, b=x, d=[accumulated], beta=1, **groups)
        return [accumulated]

    def torch_bf16():
        return [gm(dy.t(), x, offs=tensors.ends)]

    def added():
        accumulated.zero_()
        return list(zip(moire_fp32(), torch_bf16()))

    run = {"moire": moire, "torch": torch_bf16, "loop": loop, "moire, FP32 added": moire_fp32}
    options = {"check_added": added, "limit": _LIMIT}
    return Case(f"gemm {name}", 2 * s.rows * m * n, run, **options)
