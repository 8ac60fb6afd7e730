"""Where the gradient of a GroupedTensor goes: straight through, to what its values were made of.

A GroupedTensor is written first, by calls that autograd does not see, and then follows its source:
autograd turns its gradient into that of the source by `back`, a function that holds neither of
them. Nothing is saved, or it would be freed: a tensor that two losses share has two backwards.
"""

from functools import partial

from .arrays import version_of, was_written
from .dtypes import torch

if torch is not None:
    from torch.autograd.function import once_differentiable

    class _Follow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, back, in_place, source, *targets):
            ctx.back = back
            ctx.set_materialize_grads(False)
            if not in_place:
                return tuple(target.view_as(target) for target in targets)
            ctx.mark_dirty(*targets)
            return targets

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            if all(grad is None for grad in grads):
                return (None,) * (3 + len(grads))
            return None, None, ctx.back(*grads), *(None for _ in grads)


def followed(back, source, *targets, in_place=False):
    """The tensors `targets`, or views of them, whose gradients go to `source`."""
    return _Follow.apply(back, in_place, source, *targets)


def through(source):
    """The `back` of a copy: type and device are those of the source again."""
    return partial(_through, source.dtype, source.device)


def _through(dtype, device, grad):
    return grad.to(device, dtype)


def to_source(row_idx, x):
    """The `back` of x, or of its rows `row_idx`."""
    if row_idx is None:
        return through(x)
    return partial(_to_tokens, row_idx, version_of(row_idx), (x.shape, x.dtype, x.device))


def _to_tokens(row_idx, version, like, grad):
    shape, dtype, device = like
    if was_written(row_idx, version):
        raise RuntimeError(
            "quantize: row_idx was modified by an inplace operation after the call, and its "
            "gradient goes by it; give the call a row_idx that stays"
        )
    return rows_to_tokens(grad.to(device), row_idx, shape, dtype)


def rows_to_tokens(grad_rows, row_idx, shape, dtype):
    """The gradient of gathering x: rows in expert order summed back to the rows of x, in FP32,
    rounded once.
    """
    if row_idx is None:
        return grad_rows.to(dtype)
    # Rows of the tail are zeros, wherever their index points.
    total = torch.zeros(shape, dtype=torch.float32, device=grad_rows.device)
    if shape[0] != 0:
        total.index_add_(0, row_idx.clamp(0, shape[0] - 1), grad_rows.float())
    return total.to(dtype)


def of_values(dtype, offsets):
    """The `back` of values that were decoded: those past the last group were zeros."""
    return partial(_of_values, dtype, offsets)


def _of_values(dtype, offsets, grad):
    grad = grad.to(dtype)
    if offsets is None:
        return grad
    rows = torch.arange(grad.shape[0], device=grad.device)
    return grad.masked_fill((rows >= offsets[-1])[:, None], 0)


def of_parts(shape, parts):
    """The `back` of some slices `parts` along the first dimension, none of which overlap."""
    return partial(_of_parts, shape, parts)


def _of_parts(shape, parts, *grads):
    (like, *_) = (grad for grad in grads if grad is not None)
    whole = like.new_zeros(shape)
    for part, grad in zip(parts, grads):
        if grad is not None:
            whole[part] = grad
    return whole
