"""The MoE layer, three times: as a PyTorch loop over experts, with torch's grouped_mm, as moire's.

Same weights, same result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipes import Config, Recipe


class PyTorchMoE(nn.Module):
    """Top-k routing, then one F.linear per expert and matrix over the rows of that expert.

    Written to be as fast as PyTorch is this way: rows are sorted by expert once, the packed weights
    are unbound once (the gradient of w[e] would be a zero-filled copy of all of w, per expert), and
    the results are gathered back and summed.
    """

    def __init__(self, config: Config, dtype: str):
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.top_k = config.top_k
        self.router = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.w1 = nn.Parameter(torch.empty(config.experts, 2 * config.width, config.hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.router, self.w1, self.w2

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.router).softmax(-1)
        topk_weights, topk_idx = scores.topk(self.top_k, -1)
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)

        order = topk_idx.flatten().argsort(stable=True)  # row -> (token, choice)
        splits = topk_idx.flatten().bincount(minlength=len(self.router))
        rows = x.to(self.dtype).index_select(0, order // self.top_k)
        probs = topk_weights.flatten().index_select(0, order).to(self.dtype)[:, None]
        y = self.experts(rows, probs, splits, self.w1.to(self.dtype), self.w2.to(self.dtype))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y.index_select(0, back).view(len(x), self.top_k, -1).sum(1).to(x.dtype)

    def experts(self, rows: Tensor, probs: Tensor, splits: Tensor, w1: Tensor, w2: Tensor):
        counts, outputs = splits.tolist(), []
        parts = zip(rows.split(counts), probs.split(counts), w1.unbind(), w2.unbind())
        for part, prob, a, b in parts:
            if len(part):
                gate, up = F.linear(part, a).chunk(2, -1)
                outputs.append(F.linear(F.silu(gate) * up * prob, b))
        return torch.cat(outputs)


class GroupedMmMoE(PyTorchMoE):
    """The same with torch's grouped_mm (public since torch 2.10): all experts in one product."""

    def experts(self, rows: Tensor, probs: Tensor, splits: Tensor, w1: Tensor, w2: Tensor):
        multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
        ends = splits.cumsum(0).to(torch.int32)
        gate, up = multiply(rows, w1.transpose(1, 2), offs=ends).chunk(2, -1)
        return multiply(F.silu(gate) * up * probs, w2.transpose(1, 2), offs=ends)


class MoireMoE(nn.Module):
    """moire's layer with FP32 parameters; activations are cast to `dtype` at its edge, and products
    are those of a recipe of moire."""

    def __init__(self, config: Config, dtype: str, products: str):
        super().__init__()
        import moire.nn  # here: the PyTorch recipes run without moire

        experts = moire.nn.GroupedMLP(
            config.experts,
            config.hidden,
            config.width,
            compute_dtype=getattr(torch, dtype),
            recipe=products,
        )
        router = moire.nn.Router(config.hidden, config.experts, config.top_k)
        self.layer = moire.nn.MoE(experts, router)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.layer.router.weight,
            self.layer.experts.fc1.weight,
            self.layer.experts.fc2.weight,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def make_moe(recipe: Recipe, config: Config) -> nn.Module:
    if recipe.experts == "loop":
        return PyTorchMoE(config, recipe.dtype)
    if recipe.experts == "grouped_mm":
        return GroupedMmMoE(config, recipe.dtype)
    return MoireMoE(config, recipe.dtype, recipe.products)
