"""A backward whose incoming gradient is in FP8 already, as it comes out of an FP8 exchange."""

import moire
import torch

experts, hidden, width = 8, 64, 128
groups = moire.Groups(splits=[10, 0, 35, 5, 20, 1, 9, 20])
x, grad_y = torch.randn(100, hidden), torch.randn(100, hidden)
w1, w2 = torch.randn(experts, 2 * width, hidden) * 0.1, torch.randn(experts, hidden, width) * 0.1

quantized = moire.quantize(grad_y, groups, "mxfp8", columnwise=True)
found = moire.grouped_mlp_backward(quantized, x, w1, w2, groups, recipe="mxfp8")

leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
moire.grouped_mlp(*leaves, groups, recipe="mxfp8").backward(grad_y)
wanted = [t.grad for t in leaves]
print([torch.equal(a, b) for a, b in zip((found.x, found.w1, found.w2), wanted)])
