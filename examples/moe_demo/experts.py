"""The MoE layer, twice: as plain PyTorch does it well, and as moire does it.

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
        splits = topk_idx.flatten().bincount(minlength=len(self.router)).tolist()
        rows = x.to(self.dtype).index_select(0, order // self.top_k)
        probs = topk_weights.flatten().index_select(0, order).to(self.dtype)[:, None]
        w1s, w2s = self.w1.to(self.dtype).unbind(), self.w2.to(self.dtype).unbind()
        outputs = []
        for part, prob, w1, w2 in zip(rows.split(splits), probs.split(splits), w1s, w2s):
            if len(part):
                gate, up = F.linear(part, w1).chunk(2, -1)
                outputs.append(F.linear(F.silu(gate) * up * prob, w2))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        y = torch.cat(outputs).index_select(0, back).view(len(x), self.top_k, -1).sum(1)
        return y.to(x.dtype)


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
    if recipe.experts == "pytorch":
        return PyTorchMoE(config, recipe.dtype)
    return MoireMoE(config, recipe.dtype, recipe.products)
