"""The shapes, and the tensors of one of them that every peer gets."""

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    name: str
    experts: int
    hidden: int
    width: int  # F
    tokens: int
    top_k: int
    rows: int  # of the products and the MLP; the layer routes tokens * top_k


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mixtral-8x7b", 8, 4096, 14336, 8192, 2, 16384),
        Shape("dsv3-ep8", 32, 7168, 2048, 4096, 8, 32768),
        Shape("qwen3-30b-a3b", 128, 2048, 768, 8192, 8, 65536),
        Shape("olmoe-1b-7b", 64, 2048, 1024, 8192, 8, 65536),
        Shape("gpt-oss-120b", 128, 2880, 2880, 8192, 4, 32768),
    )
}
TINY = Shape("tiny", 4, 64, 32, 96, 2, 192)  # to see that everything runs


def ragged_splits(experts, rows, seed=0, multiple=1):
    """Rows per expert, uniform in [0.25, 1.25] of a common measure, neither aligned nor padded; or
    multiples of some number, for peers that need them."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(experts, generator=generator) + 0.25
    splits = (share / share.sum() * rows).long() // multiple * multiple
    splits[-1] += rows - splits.sum()
    return splits


class Tensors:
    """Of one shape: normal values, weights scaled so that every product has unit variance."""

    def __init__(self, shape, device, multiple=1):
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.splits = ragged_splits(shape.experts, shape.rows, 0, multiple).tolist()
        ends = torch.tensor(self.splits).cumsum(0)
        self.ends = ends.to(device, torch.int32)  # torch's offs
        self.offsets = torch.cat([ends.new_zeros(1), ends]).to(device)  # moire's, int64

    def normal(self, *size, scale=1.0, requires_grad=False):
        values = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        values.normal_(generator=self.generator).mul_(scale)
        return values.requires_grad_(requires_grad)

    def uniform(self, *size, requires_grad=False):
        values = torch.rand(size, device=self.device, generator=self.generator)
        return values.requires_grad_(requires_grad)

    def weights(self, requires_grad=False):
        """W1 [E, 2F, H] and W2 [E, H, F]."""
        e, h, f = self.shape.experts, self.shape.hidden, self.shape.width
        w1 = self.normal(e, 2 * f, h, scale=h**-0.5, requires_grad=requires_grad)
        return w1, self.normal(e, h, f, scale=f**-0.5, requires_grad=requires_grad)
