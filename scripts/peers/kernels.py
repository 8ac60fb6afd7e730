"""The seven kernels of an MLP's forward and backward, each beside a bare cuBLAS product of as many
FLOP: the same rows, columns and contraction with a single weight, nothing ragged, no epilogue.
"""

from typing import Any, NamedTuple

import moire
import torch
from moire import invoke
from moire.arrays import Torch

_SWIGLU = moire.Activation.of("swiglu", "kernels").fields


class Kernel(NamedTuple):
    name: str
    flop: int
    run: Any  # moire's, into tensors made before
    bare: Any
    is_part: bool = True  # of forward and backward with BF16 gradients


class Layer:
    """The tensors of one MLP, all at once; its kernels' outputs are the inputs of those behind."""

    def __init__(self, tensors):
        s = self.shape = tensors.shape
        self.rows = {"offsets": tensors.offsets, "num_groups": s.experts, "capacity": s.rows}
        self.x, self.grad_y = tensors.normal(s.rows, s.hidden), tensors.normal(s.rows, s.hidden)
        self.w1, self.w2 = tensors.weights()
        self.probs = tensors.uniform(s.rows)
        empty = self.x.new_empty
        self.z, self.act = empty(s.rows, 2 * s.width), empty(s.rows, s.width)
        self.grad_z, self.act_again = torch.empty_like(self.z), torch.empty_like(self.act)
        self.y, self.grad_x = torch.empty_like(self.x), torch.empty_like(self.x)
        self.grad_probs = torch.empty_like(self.probs)
        self.grad_w1, self.grad_w2 = torch.empty_like(self.w1), torch.empty_like(self.w2)
        self.added1, self.added2 = (torch.zeros_like(w, dtype=torch.float32) for w in self.weights)
        for kernel in self.kernels():
            kernel.run()

    @property
    def weights(self):
        return self.w1, self.w2

    def kernels(self):
        s = self.shape
        fc2 = 2 * s.rows * s.hidden * s.width
        w1, w2 = self.w1[0], self.w2[0]

        def bare_wgrads():
            return self.grad_y.t() @ self.act, self.grad_z.t() @ self.x

        return [
            Kernel("FC1 + GLU", 2 * fc2, self.fc1_glu, lambda: self.x @ w1.t()),
            Kernel("FC2", fc2, self.fc2, lambda: self.act @ w2.t()),
            Kernel("FC2 dgrad + GLU backward", fc2, self.fc2_dgrad, lambda: self.grad_y @ w2),
            Kernel("FC1 dgrad", 2 * fc2, self.fc1_dgrad, lambda: self.grad_z @ w1),
            Kernel("FC2 wgrad", fc2, self.fc2_wgrad, lambda: self.grad_y.t() @ self.act),
            Kernel("FC1 wgrad", 2 * fc2, self.fc1_wgrad, lambda: self.grad_z.t() @ self.x),
            Kernel("both wgrads, FP32 added", 3 * fc2, self.wgrads_added, bare_wgrads, False),
        ]

    def fc1_glu(self):
        tensors = {"a": self.x, "b": [self.w1], "probs": self.probs, "z": self.z, "act": self.act}
        self._call("grouped_gemm_glu", **tensors, activation=_SWIGLU, tail=1)

    def fc2(self):
        self._call("grouped_gemm", a=self.act, b=[self.w2], d=self.y)

    def fc2_dgrad(self):
        self._call(
            "grouped_gemm_glu_backward",
            grad_y=self.grad_y,
            w2=[self.w2],
            z=self.z,
            probs=self.probs,
            grad_z=self.grad_z,
            act=self.act_again,
            grad_probs=self.grad_probs,
            activation=_SWIGLU,
        )

    def fc1_dgrad(self):
        options = {"transpose_b": 1, "d": self.grad_x}
        self._call("grouped_gemm", a=self.grad_z, b=[self.w1], **options)

    def fc2_wgrad(self):
        self._wgrad(self.grad_y, self.act, self.grad_w2)

    def fc1_wgrad(self):
        self._wgrad(self.grad_z, self.x, self.grad_w1)

    def wgrads_added(self):
        self._wgrad(self.grad_y, self.act, self.added2, beta=1)
        self._wgrad(self.grad_z, self.x, self.added1, beta=1)

    def _wgrad(self, a, b, d, beta=0):
        self._call("grouped_gemm_wgrad", a=a, b=b, d=[d], beta=beta)

    def _call(self, name, **values):
        invoke.invoke(name, {**values, **self.rows}, Torch)

    def differs_from_mlp(self):
        """Names of what is not, bit for bit, what moire.grouped_mlp computes of the same tensors:
        these are then not its kernels."""
        leaves = [t.requires_grad_() for t in (self.x, self.w1, self.w2, self.probs)]
        groups = moire.Groups.of_offsets(self.rows["offsets"], self.shape.rows)
        y = moire.grouped_mlp(*leaves[:3], groups, probs=self.probs)
        gradients = torch.autograd.grad(y, leaves, self.grad_y)
        for leaf in leaves:
            leaf.requires_grad_(False)
        ours = [self.y, self.grad_x, self.grad_w1, self.grad_w2, self.grad_probs]
        names = ["y", "grad_x", "grad_w1", "grad_w2", "grad_probs"]
        found = zip(names, ours, [y.detach(), *gradients])
        return [name for name, a, b in found if not torch.equal(a, b)]
