"""Backward passes that fail elsewhere, and weight gradients that were left to backward_dw."""

import pytest
import torch
import truth
from moire import nn
from samples_mlp import SPLITS, E, F, H

pytestmark = pytest.mark.usefixtures("device")


class Failing(torch.autograd.Function):
    """x, with a backward that fails once for each of `reasons`."""

    @staticmethod
    def forward(ctx, x, reasons):
        ctx.reasons = reasons
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.reasons:
            raise RuntimeError(ctx.reasons.pop())
        return grad, None


MODULES = {
    "linear": lambda delayed: nn.GroupedLinear(E, H, F, delay_wgrad_compute=delayed),
    "mlp": lambda delayed: nn.GroupedMLP(E, H, F, delay_wgrad_compute=delayed),
    "moe": lambda delayed: nn.MoE(MODULES["mlp"](delayed), nn.Router(H, E, 2)),
}


@pytest.fixture(params=MODULES)
def pair(request, generator):
    """(a module, one like it that leaves weight gradients for later, a loss of either)."""
    plain, later = MODULES[request.param](False), MODULES[request.param](True)
    plain.load_state_dict(later.state_dict())
    x = truth.draw(generator, 9, H)
    splits = () if request.param == "moe" else (SPLITS,)

    def loss(module, scale, reasons=()):
        t = Failing.apply((scale * x).requires_grad_(), list(reasons))
        return module(t, *splits).sin().sum()

    return plain, later, loss


def grads(module):
    return [layer.weight.grad for layer in module.modules() if isinstance(layer, nn.GroupedLinear)]


def fail(module, loss):
    with pytest.raises(RuntimeError, match="elsewhere"):
        loss(module, 2.0, ["elsewhere"]).backward()


def test_what_a_failed_pass_left_can_be_dropped(pair):
    plain, later, loss = pair
    for scale in (1.0, 0.5):
        fail(later, loss)
        later.drop_backward_dw()
        later.backward_dw()  # there is nothing to do
        loss(plain, scale).backward()
        loss(later, scale).backward()
        later.backward_dw()
        assert all(map(torch.equal, grads(later), grads(plain)))


def test_it_waits_until_then(pair):
    """With what passes before and behind it left, each for a call of its own."""
    plain, later, loss = pair
    loss(later, 1.0).backward()
    fail(later, loss)
    loss(later, 0.5).backward()
    for scale in (1.0, 2.0, 0.5):
        loss(plain, scale).backward()
        later.backward_dw()
        assert all(map(torch.equal, grads(later), grads(plain)))


def test_hooks_that_failed_are_dropped_too(generator):
    layer, done, fails = MODULES["linear"](True), [], [True]
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: fails and [][fails.pop()])
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: done.append(True))
    x = truth.draw(generator, 9, H).requires_grad_()
    layer(x, SPLITS).sum().backward()
    with pytest.raises(IndexError):
        layer.backward_dw()
    layer.drop_backward_dw()
    layer.backward_dw()
    assert not done
    layer(x, SPLITS).sum().backward()
    layer.backward_dw()
    assert done == [True]


def test_of_a_layer_that_leaves_nothing_it_drops_nothing():
    MODULES["linear"](False).drop_backward_dw()
