"""A byte-level transformer.

Attention, norms and embeddings are PyTorch's; every feed-forward layer is the MoE layer it gets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipes import Config


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; x [batch, heads, length, size], cos and sin [length, size / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    def __init__(self, config: Config, moe: nn.Module):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = moe

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.moe_norm(x).flatten(0, 1)).view_as(x)


class ByteModel(nn.Module):
    """bytes [batch, length] to logits [batch, length, 256].

    `make_moe` makes each layer's MoE: [tokens, hidden] to the same.
    """

    def __init__(self, config: Config, make_moe: Callable[[], nn.Module]):
        super().__init__()
        # Of a byte and of the two before it: what so few tell is learned from the first step on.
        # Left to attention, it is learned once that finds them, by chance early or late, and runs
        # that differ by rounding alone end 1 % apart.
        self.embeddings = nn.ModuleList(nn.Embedding(256, config.hidden) for _ in range(3))
        self.blocks = nn.ModuleList(Block(config, make_moe()) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, 256, bias=False)
        size = config.hidden // config.heads
        frequency = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(config.context)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, bytes_: Tensor) -> Tensor:
        length = bytes_.shape[1]
        x = sum(e(F.pad(bytes_, (i, 0))[:, :length]) for i, e in enumerate(self.embeddings))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))

    def moe_layers(self) -> list[nn.Module]:
        return [block.moe for block in self.blocks]


def initialise(model: ByteModel, seed: int) -> None:
    """The same numbers for every recipe, drawn in one order, whatever the layers are made of."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * len(model.blocks)) ** -0.5

    def draw(parameter: Tensor, std: float) -> None:
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    for embedding in model.embeddings:
        draw(embedding.weight, 0.5)
    draw(model.head.weight, model.head.in_features**-0.5)
    for block in model.blocks:
        hidden = block.attention.qkv.in_features
        draw(block.attention.qkv.weight, hidden**-0.5)
        draw(block.attention.out.weight, hidden**-0.5 * depth)
        router, w1, w2 = block.moe.weights()
        draw(router, hidden**-0.5)
        draw(w1, hidden**-0.5)
        draw(w2, w2.shape[-1] ** -0.5 * depth)
