"""Experts that train on FP8 products: FP32 masters, MXFP8 operands, no padding of any split."""

import moire
import torch

experts, hidden, width = 8, 64, 128
mlp = moire.nn.GroupedMLP(experts, hidden, width, recipe="mxfp8", compute_dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(mlp.parameters())
x = torch.randn(100, hidden)  # rows sorted by expert
splits = [10, 0, 35, 5, 20, 1, 9, 20]
for _ in range(3):
    loss = mlp(x, splits).square().mean()
    loss.backward()  # weight gradients in FP32, as the masters are
    optimizer.step()  # the next forward quantises the weights again, once for both passes
    optimizer.zero_grad()

# The same operand by hand: quantised once, in both directions, read by as many layers as like it.
groups = moire.Groups(splits=splits)
quantized = moire.quantize(x, groups, "mxfp8", columnwise=True)
w = mlp.fc1.weight.detach()
y = moire.grouped_linear(quantized, w, groups, recipe="mxfp8", compute_dtype=torch.bfloat16)
print(quantized, y.shape)
print(quantized[2].dequantize().sub(x[10:45]).abs().max())  # expert 2, a view of the same bytes
print(moire.explain(mlp, x, splits))  # what runs, and what is saved for the backward
