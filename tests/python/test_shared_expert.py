"""A shared expert beside the routed ones: the same numbers in a stream of its own."""

import moire
import torch
from moire import nn

TOKENS, HIDDEN, WIDTH, EXPERTS = 40, 64, 32, 4


def made(overlap):
    torch.manual_seed(5)
    shared = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, HIDDEN)
    )
    experts, router = nn.GroupedMLP(EXPERTS, HIDDEN, WIDTH), nn.Router(HIDDEN, EXPERTS, k=2)
    return nn.MoE(experts, router, shared, overlap=overlap)


def step(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    for p in layer.parameters():
        p.grad = None
    return [y.detach(), *grads]


def test_it_may_run_beside_them(device, generator):
    layers = [made(overlap) for overlap in (False, True)]
    for _ in range(5):  # memory that one stream frees is not taken while the other reads it
        x = torch.randn(2, TOKENS, HIDDEN, generator=generator)
        alone, beside = (step(layer, x) for layer in layers)
        assert all(torch.equal(a, b) for a, b in zip(alone, beside))
    y = layers[1](torch.zeros(0, HIDDEN))
    assert y.shape == (0, HIDDEN)
    moire.check()


def test_both_are_one_graph(device, generator):
    if device == "cpu":
        return
    layer = made(True)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step(layer, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(layer, x)
    for t in found:
        t.fill_(7)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
