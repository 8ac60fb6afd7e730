"""Weight gradients that DistributedDataParallel does not get, because they go to main_grad or come
in backward_dw: refused, or reduced by the caller where those weights are left out of it.
"""

import copy
import inspect
import re

import moire
import pytest
import torch
import torch.distributed as dist
from moire import nn
from ranks import NEEDS_GLOO, alone_in_gloo, in_gloo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = NEEDS_GLOO
RANKS, E, H, F = 2, 3, 8, 6
SPLITS = [2, 0, 3]
EXPERTS = re.compile(r"\.experts\.")
ELSEWHERE = {
    "delay_wgrad_compute": {"delay_wgrad_compute": True},
    "accumulate_into_main_grad": {"accumulate_into_main_grad": True},
}


@pytest.fixture
def one_rank():
    with alone_in_gloo():
        yield


def made(**options):
    torch.manual_seed(3)
    module = nn.GroupedMLP(E, H, F, bias=True, **options)
    for p in module.parameters():
        p.main_grad = torch.zeros_like(p)
    return module


def left_out(module, *, which=re.compile("weight$")):
    """Data parallelism without the parameters of these names."""
    names = [n for n, _ in module.named_parameters() if which.search(n)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return DistributedDataParallel(module)


@pytest.mark.parametrize("option", ELSEWHERE)
def test_weights_that_it_would_reduce_are_refused(generator, one_rank, option):
    """Their .grad was zeros, or the rank's own."""
    x = torch.randn(5, H, generator=generator)
    module = made(**ELSEWHERE[option])
    parallel = DistributedDataParallel(module)
    needs = f"GroupedLinear: {option} is on, but DistributedDataParallel reduces"
    with pytest.raises(moire.Unsupported, match=needs):
        parallel(x, SPLITS)
    with torch.no_grad():
        wanted = parallel(x, SPLITS)
    with parallel.no_sync():  # reduces nothing
        assert torch.equal(parallel(x, SPLITS), wanted)
    assert torch.equal(module(x, SPLITS), wanted)  # not its forward
    module.requires_grad_(False).fc1.bias.requires_grad_()
    assert torch.equal(parallel(x, SPLITS), wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_they_are_refused_where_a_checkpoint_runs_them_in_the_backward(
    generator, one_rank, use_reentrant
):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = made(delay_wgrad_compute=True)

        def forward(self, x):
            return checkpoint(self.experts, x, SPLITS, use_reentrant=use_reentrant)

    parallel = DistributedDataParallel(Model())
    x = torch.randn(5, H, generator=generator, requires_grad=True)
    with pytest.raises(moire.Unsupported, match="DistributedDataParallel reduces"):
        parallel(x).sum().backward()


def step(parallel, x):
    parallel(x, SPLITS).sin().sum().backward()  # which has to live until then


def reduces_in_hooks(rank):
    """What the guide says to do gives the gradients of data parallelism that has them all."""
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(rank))
    plain = made()
    step(DistributedDataParallel(plain), x)
    module = made(delay_wgrad_compute=True)
    for layer in (module.fc1, module.fc2):

        def reduce(p=layer.weight):
            dist.all_reduce(p.grad.div_(RANKS))

        layer.register_wgrad_accumulation_and_reduce_hooks(reduce)
    step(left_out(module), x)
    module.backward_dw()
    into = made(accumulate_into_main_grad=True)
    step(left_out(into), x)
    for layer in (into.fc1, into.fc2):
        assert layer.weight.grad is None
        layer.weight.grad = layer.weight.main_grad.div_(RANKS)
        dist.all_reduce(layer.weight.grad)
    for found in (module, into):
        for mine, wanted in zip(found.parameters(), plain.parameters()):
            assert torch.equal(mine.grad, wanted.grad)


def as_ddp(model, layer):
    return left_out(model, which=EXPERTS)


def as_fsdp2(model, layer):
    fully_shard = getattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard", None)
    if fully_shard is None or "ignored_params" not in inspect.signature(fully_shard).parameters:
        return None
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    return fully_shard(model, mesh=mesh, ignored_params=set(layer.experts.parameters()))


def experts_of_ranks_are_left_out(rank):
    """As the guide to PyTorch does it: the others' gradients are means over ranks, the experts' own
    are those of all tokens.
    """
    torch.manual_seed(3)
    every, router = nn.GroupedMLP(RANKS * E, H, F), nn.Router(H, RANKS * E, k=2)
    alone, x = (
        torch.nn.Sequential(torch.nn.Linear(H, H), nn.MoE(every, router)),
        torch.randn(2, 5, H),
    )
    alone(x).square().sum().backward()
    for way in (as_ddp, as_fsdp2):
        layer = nn.MoE(nn.GroupedMLP(E, H, F), copy.deepcopy(router), group=dist.group.WORLD)
        own = slice(rank * E, (rank + 1) * E)
        with torch.no_grad():
            for mine, all_of_it in zip(layer.experts.parameters(), every.parameters()):
                mine.copy_(all_of_it[own])
        model = way(torch.nn.Sequential(copy.deepcopy(alone[0]), layer), layer)
        if model is None:  # an older Torch
            continue
        model.zero_grad()
        model(x[rank]).square().sum().backward()
        for mine, all_of_it in zip(layer.experts.parameters(), every.parameters()):
            assert torch.allclose(mine.grad, all_of_it.grad[own], atol=1e-6)
        copies = [p for n, p in model.named_parameters() if not EXPERTS.search(n)]
        wanted = (*alone[0].parameters(), *router.parameters())
        for mine, of_all in zip(copies, wanted, strict=True):
            grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            assert torch.allclose(RANKS * grad, of_all.grad, atol=1e-6)


def test_two_ranks(tmp_path):
    args = RANKS, str(tmp_path / "store"), (reduces_in_hooks, experts_of_ranks_are_left_out)
    torch.multiprocessing.spawn(in_gloo, args, nprocs=RANKS)
