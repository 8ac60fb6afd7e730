"""Modules whose parameters FSDP2 shards: gathered where it sees the forward, refused elsewhere."""

import moire
import pytest
import torch
from moire import nn
from ranks import alone_in_gloo

fsdp = pytest.importorskip("torch.distributed.fsdp")
fully_shard = getattr(fsdp, "fully_shard", None)

SPLITS = [2, 0, 3]


@pytest.fixture
def mesh():
    if fully_shard is None or not torch.distributed.is_gloo_available():
        pytest.skip("this Torch has no FSDP2 on a CPU")
    with alone_in_gloo():
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("packed", [True, False])
def test_a_sharded_mlp_trains(generator, mesh, packed):
    x = torch.randn(5, 8, generator=generator)
    plain, mlp = (nn.GroupedMLP(3, 8, 6, packed=packed, bias=True) for _ in range(2))
    mlp.load_state_dict(plain.state_dict())
    fully_shard(mlp, mesh=mesh)
    for module in (plain, mlp):
        module(x, SPLITS).sin().sum().backward()
    for mine, reference in zip(mlp.parameters(), plain.parameters()):
        assert torch.equal(mine.grad.full_tensor(), reference.grad)


@pytest.mark.parametrize("packed", [True, False])
def test_weights_in_8_bits_follow_the_steps_of_a_sharded_mlp(generator, mesh, packed):
    """Gathering writes into parameters and counts nothing; steps and shards say it."""
    x = torch.randn(5, 64, generator=generator)
    plain, mlp = (nn.GroupedMLP(3, 64, 32, packed=packed, recipe="mxfp8") for _ in range(2))
    mlp.load_state_dict(plain.state_dict())
    fully_shard(mlp, mesh=mesh)
    losses = {plain: [], mlp: []}
    for module, found in losses.items():
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        for _ in range(3):
            loss = sum(module(x, SPLITS).square().mean() for _ in range(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[mlp] == losses[plain] and len(set(losses[plain])) == 3


@pytest.mark.parametrize("part", [lambda p: p, lambda p: p.to_local()], ids=["whole", "local"])
def test_weights_in_8_bits_follow_what_is_written_into_shards(generator, mesh, part):
    """Scales of 8-bit blocks double exactly. Memory of a gathered weight is soon the same again."""
    x = torch.randn(5, 64, generator=generator)
    layer = nn.GroupedLinear(3, 64, 64, recipe="mxfp8")
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    with torch.no_grad():
        wanted = layer(x, SPLITS)
        for _ in range(9):
            part(layer.weight).mul_(2)
            wanted = wanted * 2
            assert torch.equal(layer(x, SPLITS), wanted)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_weights_in_8_bits_follow_what_is_written_under_fsdp1(
    generator, mesh, packed, use_orig_params
):
    x, device = torch.randn(5, 64, generator=generator), torch.device("cpu")
    layer = nn.GroupedLinear(3, 64, 64, packed=packed, recipe="mxfp8")
    parallel = fsdp.FullyShardedDataParallel(
        layer, use_orig_params=use_orig_params, device_id=device
    )
    with torch.no_grad():
        wanted = parallel(x, SPLITS)
        for _ in range(3):
            for p in parallel.parameters():
                p.mul_(2)
            wanted = wanted * 2
            assert torch.equal(parallel(x, SPLITS), wanted)


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_weight_gradients_of_shards_come_with_the_backward(generator, mesh, option):
    """Delayed they were lost in this step, and reduced in the next; shards have no main_grad."""
    x = torch.randn(5, 8, generator=generator)
    mlp = nn.GroupedMLP(3, 8, 6, **{option: True})
    fully_shard(mlp, mesh=mesh)
    with pytest.raises(moire.Unsupported, match=f"GroupedLinear: {option} is on, but FSDP2 "):
        mlp(x, SPLITS)
    with torch.no_grad():
        assert mlp(x, SPLITS).shape == (5, 8)


@pytest.mark.parametrize("packed", [True, False])
def test_a_layer_whose_forward_is_passed_by_is_refused(generator, mesh, packed):
    x = torch.randn(5, 8, generator=generator)
    mlp = nn.GroupedMLP(3, 8, 6, packed=packed)
    fully_shard(mlp.fc1, mesh=mesh)
    with pytest.raises(moire.Unsupported, match=r"fc1 has hooks.*fully_shard\) to the GroupedMLP"):
        mlp(x, SPLITS)


def test_a_moe_layer_whose_experts_are_sharded_trains(generator, mesh):
    x = torch.randn(5, 8, generator=generator)
    plain, layer = (nn.MoE(nn.GroupedMLP(3, 8, 6), nn.Router(8, 3, 2)) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    fully_shard(layer.experts, mesh=mesh)
    fully_shard(layer, mesh=mesh)
    for module in (plain, layer):
        module(x).sin().sum().backward()
    for mine, reference in zip(layer.parameters(), plain.parameters()):
        assert torch.equal(mine.grad.full_tensor(), reference.grad)


def test_routing_weights_stay_as_they_are(generator, mesh, monkeypatch):
    """Of experts whose mixed precision rounds what their forward is called with."""
    seen, whole = [], nn.mlp.moe
    monkeypatch.setattr(nn.mlp, "moe", lambda x, **of: (seen.append(of), whole(x, **of))[1])
    layer = nn.MoE(nn.GroupedMLP(3, 8, 6), nn.Router(8, 3, 2))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(layer.experts, mesh=mesh, mp_policy=policy)
    layer(torch.randn(5, 8, generator=generator))
    assert [of["topk_weights"].dtype for of in seen] == [torch.float32]


def test_a_chain_runs_sharded_layers_one_by_one(generator, mesh):
    x = torch.randn(5, 8, generator=generator)
    mlp = nn.GroupedMLP(3, 8, 6)
    chain = nn.Sequential(mlp.fc1, mlp.activation, mlp.fc2)
    wanted = chain(x, SPLITS)
    fully_shard(mlp.fc1, mesh=mesh)
    assert torch.equal(chain(x, SPLITS), wanted)
    assert "has hooks" in moire.explain(chain, x, SPLITS).not_fused[0]


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10),
    reason="DTensors take a GroupedTensor since torch 2.10",
)
def test_quantised_weights_are_gathered_from_one_rank(generator, mesh):
    x = torch.randn(5, 64, generator=generator)
    torch.manual_seed(1)
    plain = nn.GroupedMLP(3, 64, 64, primary="mxfp8")
    wanted = plain(x, [2, 0, 3])
    fully_shard(plain, mesh=mesh)
    assert torch.equal(plain(x, [2, 0, 3]), wanted)
