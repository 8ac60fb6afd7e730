"""What each function runs, forward and backward, as calls of the C entries on either kind of array.

`fw` is arrays.Numpy or arrays.Torch. Nothing is cast and nothing is differentiated here:
autograd.py and functional.py do that around it. NumPy users who need gradients call the backward
functions of this module themselves.
"""

from typing import Any, NamedTuple

TAILS = ("zero", "untouched")


class LinearSpec(NamedTuple):
    """What a grouped linear layer is, besides its arrays."""

    num_groups: Any
    capacity: Any
    layout: int  # of the weight
    tail: int = 0
    compute_dtype: Any = None

    def groups(self, offsets):
        return {"offsets": offsets, "num_groups": self.num_groups, "capacity": self.capacity}


class MlpSpec(NamedTuple):
    """What a grouped MLP is, besides its arrays."""

    num_groups: Any
    capacity: Any
    w1_layout: int
    w2_layout: int
    num_w1: int  # how many of the arrays are W1's
    hidden: Any
    width: Any  # F
    activation: tuple
    glu_layout: tuple
    tail: int = 0
    saves: bool = False  # z is kept for a backward
    saves_act: bool = False  # and act: memory for time
    compute_dtype: Any = None

    def groups(self, offsets):
        return {"offsets": offsets, "num_groups": self.num_groups, "capacity": self.capacity}

    def operands(self, fw, arrays):
        """(W1, W2), each a list, in the type that they are multiplied in."""
        cast = [fw.cast(t, self.compute_dtype) for t in arrays]
        return cast[: self.num_w1], cast[self.num_w1 :]

    def common(self, offsets):
        return {
            **self.groups(offsets),
            "activation": self.activation,
            "layout": self.glu_layout,
            "w1_layout": self.w1_layout,
            "w2_layout": self.w2_layout,
        }


class MlpSaved(NamedTuple):
    """What the backward of a grouped MLP reads: all by reference but z (and act, if kept)."""

    x: Any
    row_idx: Any
    w1: list
    w2: list
    b2: Any
    probs: Any
    offsets: Any
    z: Any
    act: Any


class MlpGrads(NamedTuple):
    """Outputs of the backward, each an array to write into or None."""

    x: Any = None
    w1: Any = None
    b1: Any = None
    w2: Any = None
    b2: Any = None
    probs: Any = None
    z: Any = None
    act: Any = None


class Beta(NamedTuple):
    """0 overwrites a gradient, 1 accumulates; per group where a uint8 array is given."""

    value: int = 0
    per_group: Any = None


def linear_forward(fw, spec, x, row_idx, w, bias, scale, offsets, out=None):
    out_features = w[0].shape[-2 if spec.layout == 0 else -1]
    y = fw.empty(x, (spec.capacity, out_features), x.dtype) if out is None else out
    fw.run(
        "grouped_linear",
        x=x,
        row_idx=row_idx,
        w=w,
        w_layout=spec.layout,
        bias=bias,
        scale=scale,
        y=y,
        tail=spec.tail,
        **spec.groups(offsets),
    )
    return y


def linear_wgrad(fw, groups, layout, x, x_idx, grad_y, grad_y_idx, grad_w, beta):
    """dW = beta dW + dy^T x, or its transpose for [G, in, out] weights: the delayed weight
    gradient.
    """
    a, a_idx, b, b_idx = (
        (grad_y, grad_y_idx, x, x_idx) if layout == 0 else (x, x_idx, grad_y, grad_y_idx)
    )
    fw.run(
        "grouped_gemm_wgrad",
        a=a,
        a_row_idx=a_idx,
        b=b,
        b_row_idx=b_idx,
        d=grad_w,
        beta=beta.value,
        beta_per_group=beta.per_group,
        **groups,
    )


def mlp_forward(fw, spec, x, row_idx, w1, b1, w2, b2, probs, offsets, out=None):
    """y, and z and act where the spec says that they are saved."""
    rows = spec.capacity
    z = fw.empty(x, (rows, 2 * spec.width), x.dtype) if spec.saves else None
    act = fw.empty(x, (rows, spec.width), x.dtype) if spec.saves and spec.saves_act else None
    y = fw.empty(x, (rows, spec.hidden), x.dtype) if out is None else out
    fw.run(
        "grouped_mlp",
        x=x,
        row_idx=row_idx,
        w1=w1,
        b1=b1,
        w2=w2,
        b2=b2,
        probs=probs,
        z=z,
        act=act,
        y=y,
        tail=spec.tail,
        **spec.common(offsets),
    )
    return y, z, act


def mlp_backward(fw, spec, saved, grad_y, gathered, grads, beta_w1, beta_w2):
    """Writes the gradients that `grads` has arrays for; grad_y is [T, H] where `gathered`."""
    fw.run(
        "grouped_mlp_backward",
        x=saved.x,
        row_idx=saved.row_idx,
        gathered_grad_y=int(gathered),
        w1=saved.w1,
        w2=saved.w2,
        b2=saved.b2,
        probs=saved.probs,
        z=saved.z,
        act=saved.act if grads.act is None else grads.act,
        act_is_saved=int(saved.act is not None),
        grad_y=grad_y,
        grad_z=grads.z,
        grad_x=grads.x,
        grad_probs=grads.probs,
        grad_w1=grads.w1,
        grad_w1_layout=spec.w1_layout,
        grad_b1=grads.b1,
        grad_w2=grads.w2,
        grad_w2_layout=spec.w2_layout,
        grad_b2=grads.b2,
        beta_w1=beta_w1.value,
        beta_w1_per_group=beta_w1.per_group,
        beta_w2=beta_w2.value,
        beta_w2_per_group=beta_w2.per_group,
        **spec.common(offsets=saved.offsets),
    )


def moe_forward(
    fw, spec, out_dtype, x, topk_weights, w1, b1, w2, b2, offsets, gather_idx, scatter_idx
):
    """Experts' order, MLP and back: y [T, H], and the probs, z and act that a backward needs."""
    probs = fw.empty(topk_weights, (spec.capacity,), fw.float32)
    fw.run(
        "permute",
        topk_weights=topk_weights,
        scatter_idx=scatter_idx,
        probs=probs,
        **spec.groups(offsets),
    )
    rows, z, act = mlp_forward(fw, spec, x, gather_idx, w1, b1, w2, b2, probs, offsets)
    y = fw.empty(x, (x.shape[0], spec.hidden), out_dtype)
    fw.run("unpermute", rows=rows, scatter_idx=scatter_idx, y=y)
    return y, probs, z, act
