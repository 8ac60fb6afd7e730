"""The grouped MLP of a mixture of experts as one PyTorch function, forward and backward."""

import moire
import torch

experts, hidden, width = 8, 64, 128
w1 = (torch.randn(experts, 2 * width, hidden) * hidden**-0.5).requires_grad_()  # gate, then up
w2 = (torch.randn(experts, hidden, width) * width**-0.5).requires_grad_()
x = torch.randn(100, hidden)  # rows sorted by expert
groups = moire.Groups(splits=[10, 0, 35, 5, 20, 1, 9, 20])  # any splits, no padding
probs = torch.rand(100)  # routing weight of each row

y = moire.grouped_mlp(x, w1, w2, groups, probs=probs)
y.square().mean().backward()
print(y.shape, w1.grad.shape)
print(moire.explain(moire.grouped_mlp, x, w1, w2, groups))  # what runs, and why nothing faster
