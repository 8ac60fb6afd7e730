"""Weights in 8 bits over two ranks: FSDP2 gathers their bytes, DistributedDataParallel sums their
gradients; both have the bits of one rank.
"""

import moire
import pytest
import torch
import torch.distributed as dist
from moire import nn
from moire.grouped_torch import TorchGroupedTensor
from ranks import NEEDS_GLOO, in_gloo
from truth_fp8 import assert_same_bytes

RANKS, E, H, WIDTH = 2, 4, 64, 128
SPLITS = [5, 0, 9, 6]
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_ddp = pytest.mark.skipif(
    VERSION < (2, 7), reason="DistributedDataParallel broadcasts values before torch 2.7"
)
needs_fsdp2 = pytest.mark.skipif(
    VERSION < (2, 10), reason="DTensors take a GroupedTensor since torch 2.10"
)
pytestmark = NEEDS_GLOO


def made(recipe, seed=3, **options):
    torch.manual_seed(seed)
    return nn.GroupedMLP(E, H, WIDTH, primary=recipe, **options)


def inputs(step):
    return torch.randn(sum(SPLITS), H, generator=torch.Generator().manual_seed(step))


def step_masters(module, optimizer, masters, step):
    """A training step; the loss."""
    loss = module(inputs(step), SPLITS).square().mean()
    loss.backward()
    for master, parameter in zip(masters, module.parameters()):
        grad = parameter.grad
        master.grad = grad.to_local() if hasattr(grad, "to_local") else grad
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, module.parameters()):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            assert local.copy_(master) is local
    module.zero_grad()
    return loss.item()


def optimized(module):
    with torch.no_grad():
        local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
        masters = [p.dequantize(torch.float32) for p in local]
    return torch.optim.AdamW(masters, 1e-2), masters


def gathers_bytes(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    gathered, gather = [], TorchGroupedTensor.fsdp_pre_all_gather

    def noted(self, mesh, outer_size, outer_stride, module, mp_policy):
        arrays, more = gather(self, mesh, outer_size, outer_stride, module, mp_policy)
        gathered.append((self, arrays))
        return arrays, more

    TorchGroupedTensor.fsdp_pre_all_gather = noted
    for recipe in ("mxfp8", "mxfp8_fast", "fp8_block"):
        alone, sharded = made(recipe), made(recipe)
        fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
        losses, (one, all_) = {}, (optimized(alone), optimized(sharded))
        for module, of in ((alone, one), (sharded, all_)):
            losses[module] = [step_masters(module, *of, step) for step in range(3)]
        assert losses[alone] == losses[sharded] and len(set(losses[alone])) == 3, losses
        for mine, whole in zip(sharded.parameters(), alone.parameters()):
            with torch.no_grad():
                parts = whole.detach()[2 * rank], whole.detach()[2 * rank + 1]
                assert len(mine.to_local()) == 2
                for part, wanted in zip(mine.to_local().split(), parts):
                    assert_same_bytes(part, wanted)
    for shard, arrays in gathered:
        assert all(array.dtype == torch.uint8 for array in arrays)
        assert sum(array.numel() for array in arrays) == shard.nbytes < 2.1 * shard.numel()
    assert len(gathered) == 3 * 3 * 2 * 2  # recipes, steps, passes, weights
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = made("mxfp8")
    wanted = made("mxfp8")(inputs(0).bfloat16(), SPLITS)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    found = module(inputs(0), SPLITS)
    assert torch.equal(found, wanted) and module.fc1.weight.dtype == torch.bfloat16
    found.float().square().mean().backward()
    assert module.fc1.weight.grad.dtype == torch.float32


def loads_and_copies_as_dtensors(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    source, module = made("mxfp8", preserve_high_precision_init_val=True), made("mxfp8", seed=4)
    masters = [p.get_high_precision_init_val() for p in source.parameters()]
    wanted = source(inputs(0), SPLITS)
    for sharded in (source, module):
        fully_shard(sharded, mesh=mesh)
    module.load_state_dict(source.state_dict())
    assert torch.equal(module(inputs(0), SPLITS), wanted)
    module.reshard()  # a root stays whole until its backward
    with torch.no_grad():
        for parameter, master in zip(module.parameters(), masters):
            master = distribute_tensor(2 * master, mesh, [Shard(0)])
            assert parameter.copy_(master) is parameter
    twice = made("mxfp8")
    with torch.no_grad():
        for parameter, master in zip(twice.parameters(), masters):
            parameter.copy_(2 * master)
    assert torch.equal(module(inputs(0), SPLITS), twice(inputs(0), SPLITS))


def refuses_uneven_shares(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    layer = nn.GroupedLinear(3, H, H, primary="mxfp8")
    fully_shard(layer, mesh=mesh)
    with pytest.raises(moire.Unsupported, match="has 3 experts, of which 2 ranks cannot have as m"):
        layer(torch.ones(6, H), [1, 2, 3])


def sums_gradients_in_buckets(rank):
    alone, module = made("mxfp8"), made("mxfp8")
    parallel = torch.nn.parallel.DistributedDataParallel(module, init_sync=False)
    losses = {}
    for one in (alone, parallel):
        losses[one] = [step_masters(one, *optimized(one), step) for step in range(2)]
    assert losses[alone] == losses[parallel]


OF_FSDP2 = (gathers_bytes, loads_and_copies_as_dtensors, refuses_uneven_shares)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(OF_FSDP2, marks=needs_fsdp2, id="fsdp2"),
        pytest.param((sums_gradients_in_buckets,), marks=needs_ddp, id="ddp"),
    ],
)
def test_two_ranks(tmp_path, cases):
    args = RANKS, str(tmp_path / "store"), cases
    torch.multiprocessing.spawn(in_gloo, args, nprocs=RANKS)
