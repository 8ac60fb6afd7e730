"""Backward passes that fail elsewhere, and weight gradients that were left to backward_dw."""

import pytest
import torch
import truth
from moire import nn
from samples_mlp import SPLITS, E, F, H
from torch.utils.checkpoint import checkpoint

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


CALLS = {
    "as it is": lambda call, x: call(x),
    "checkpointed": lambda call, x: checkpoint(call, x, use_reentrant=False),
    # Whose backward is a pass of its own, which succeeds within the one that fails.
    "reentrant": lambda call, x: checkpoint(call, x, use_reentrant=True),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("retained", [False, True])
def test_a_pass_that_failed_leaves_nothing(generator, how, retained):
    """Whether the next is of its graph or of another: no later backward_dw is one pass late."""
    plain, layer = (nn.GroupedLinear(E, H, F, delay_wgrad_compute=later) for later in (False, True))
    plain.load_state_dict(layer.state_dict())
    x, reasons = truth.draw(generator, 9, H), []

    def loss(module, scale):
        t = Failing.apply((scale * x).requires_grad_(), reasons)
        return CALLS[how](lambda u: module(u, SPLITS), t).sin().sum()

    for scale in (1.0, 0.5, 0.25):
        loss(plain, scale).backward()
        reasons.append("elsewhere")
        failing, before = loss(layer, scale), layer.weight.grad
        with pytest.raises(RuntimeError, match="elsewhere"):
            failing.backward(retain_graph=retained)
        if not retained:
            layer.backward_dw()  # there is nothing to do
            assert layer.weight.grad is before
        (failing if retained else loss(layer, scale)).backward()
        layer.backward_dw()
        assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_operands_of_a_pass_that_failed_are_free_for_the_next(generator):
    layer = nn.GroupedLinear(E, H, F, delay_wgrad_compute=True)
    x = truth.draw(generator, 9, H).requires_grad_()
    with pytest.raises(RuntimeError, match="elsewhere"):
        layer(Failing.apply(x, ["elsewhere"]), SPLITS).sum().backward()
    layer(x, SPLITS)
    assert not layer._wgrad.queue.waiting


@pytest.mark.parametrize("reasons", [[], ["elsewhere"]])
def test_backward_dw_may_be_called_inside_the_pass(generator, reasons):
    """By a hook, which cannot know how the pass ends."""
    plain, layer = (nn.GroupedLinear(E, H, F, delay_wgrad_compute=later) for later in (False, True))
    plain.load_state_dict(layer.state_dict())
    x = truth.draw(generator, 9, H).requires_grad_()
    plain(x, SPLITS).sin().sum().backward()
    given = Failing.apply(x, reasons)
    given.register_hook(lambda grad: layer.backward_dw())
    loss, fails = layer(given, SPLITS).sin().sum(), bool(reasons)
    try:
        loss.backward()
    except RuntimeError as e:
        assert fails and "elsewhere" in str(e)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
