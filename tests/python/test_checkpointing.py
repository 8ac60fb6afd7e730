"""torch.utils.checkpoint around layers and chains: gradients are the bits of a run without it."""

import pytest
import torch
import truth
from moire import nn
from torch.utils import checkpoint as checkpoints

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 40, 32
SPLITS = [33, 0, 7]


def linear(**options):
    return nn.GroupedLinear(E, H, H, bias=True, **options)


def mlp(**options):
    return nn.GroupedMLP(E, H, F, bias=True, **options)


def moe(**options):
    return nn.MoE(mlp(**options), nn.Router(H, E, 2))


def fused(**options):
    made = mlp(**options)
    return nn.Sequential(made.fc1, made.activation, made.fc2, torch.nn.Tanh(), linear(**options))


def gradients(layer, run, *parts):
    for p in layer.parameters():
        p.grad = None
    parts = [x.clone().requires_grad_() for x in parts]
    y = torch.cat([run(layer, x) for x in parts])
    y.sin().sum().backward()
    if hasattr(layer, "backward_dw"):
        layer.backward_dw()
    return [y, *(x.grad for x in parts), *(p.grad for p in layer.parameters())]


def call(layer, x):
    return layer(x) if isinstance(layer, nn.MoE) else layer(x, SPLITS)


def reentrant(layer, x):
    return checkpoints.checkpoint(lambda t: call(layer, t), x, use_reentrant=True)


def without_reentering(layer, x):
    return checkpoints.checkpoint(lambda t: call(layer, t), x, use_reentrant=False)


def selective(layer, x):
    create = getattr(checkpoints, "create_selective_checkpoint_contexts", None)
    if create is None:
        pytest.skip("this Torch has no selective checkpoints")

    def keep_tanh(ctx, op, *args, **kwargs):
        policy = checkpoints.CheckpointPolicy
        saves = op in (torch.ops.aten.tanh.default, torch.ops.aten.mm.default)
        saves = saves or op.namespace == "moire"  # which is computed again all the same
        return policy.MUST_SAVE if saves else policy.PREFER_RECOMPUTE

    return checkpoints.checkpoint(
        lambda t: call(layer, t), x, use_reentrant=False, context_fn=lambda: create(keep_tanh)
    )


@pytest.mark.parametrize("run", [reentrant, without_reentering, selective])
@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_block"])
@pytest.mark.parametrize("make", [linear, mlp, fused, moe])
@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_gradients_are_the_bits_of_a_run_without_it(generator, make, recipe, run, options):
    torch.manual_seed(5)
    layer, x = make(recipe=recipe, **options), truth.draw(generator, sum(SPLITS), H)
    wanted = gradients(layer, call, x)
    for mine, reference in zip(gradients(layer, run, x), wanted):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("run", [reentrant, without_reentering])
def test_main_grad_is_added_to_once(generator, run):
    layer, x = mlp(accumulate_into_main_grad=True), truth.draw(generator, sum(SPLITS), H)
    found = []
    for go in (call, run):
        for p in layer.parameters():
            p.main_grad = torch.ones(p.shape)
        gradients(layer, go, x)
        found.append([p.main_grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("run", [reentrant, without_reentering])
def test_a_delayed_layer_may_run_twice_in_one_pass(generator, run):
    layer, x = mlp(delay_wgrad_compute=True), truth.draw(generator, 2 * sum(SPLITS), H)
    wanted = gradients(layer, call, *x.split(sum(SPLITS)))
    found = gradients(layer, run, *x.split(sum(SPLITS)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
