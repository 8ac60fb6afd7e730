"""A small MLP of experts that delays or redirects its weight gradients, and a step of it."""

import torch
import truth
from moire import nn

E, H, F = 3, 12, 16
SPLITS = [4, 0, 5]
FORMS = [{"packed": True}, {"packed": False}, {"weight_layout": "in_out"}]


def make(generator, **options):
    torch.manual_seed(3)
    layer = nn.GroupedMLP(E, H, F, bias=True, **options)
    return layer, truth.draw(generator, 9, H), torch.rand(9, generator=generator)


def run(layer, x, probs, gathered=False):
    if gathered:
        topk_idx = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [2, -1]])
        return layer.route(x[:5], topk_idx, probs[:5, None].expand(5, 2)).sin().sum().backward()
    return layer(x, SPLITS, probs).sin().sum().backward()


def weights(layer):
    return [*layer.fc1._all("weight"), *layer.fc2._all("weight")]
