"""moire.torchtitan against torchtitan's own experts and dispatch, on a CPU."""

import contextlib
import copy
import dataclasses
import functools

import moire
import pytest
import torch
import torch.distributed as dist
from ranks import NEEDS_GLOO, in_gloo

pytest.importorskip("torchtitan.models.common.moe")
pytest.importorskip("torchtitan.overrides.fused_swiglu")  # which needs triton
pytestmark = NEEDS_GLOO

E, D, F, K = 8, 64, 32, 3
EXPERTS, DISPATCHER = "moire.torchtitan.experts", "moire.torchtitan.dispatcher"
BF16 = 2.0**-7  # what is rounded a few times to 8 bits of mantissa


def normal(tensor):
    torch.nn.init.normal_(tensor, std=0.2)


def config_of(*imports, of="common", comm_backend="standard", is_spread=False):
    """A MoE layer's, with overrides; `is_spread` over ranks by its experts."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common import config_utils
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
    from torchtitan.models.qwen3 import sharding

    kind = GroupedExperts if of == "common" else GptOssGroupedExperts
    names = ("w1_EFD", "w2_EDF", "w3_EFD", "mlp1_weight_EGD", "mlp1_bias_EG")
    names += ("mlp2_weight_EDF", "mlp2_bias_ED")
    experts = kind.Config(
        dim=D, hidden_dim=F, num_experts=E, param_init=dict.fromkeys(names, normal)
    )
    sent = config_utils.make_token_dispatcher_config(
        num_experts=E, top_k=K, comm_backend=comm_backend
    )
    config = config_utils.make_moe_config(
        num_experts=E,
        router=config_utils.make_router_config(
            dim=D, num_experts=E, gate_param_init={"weight": normal}, top_k=K, route_norm=True
        ),
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=sent),
    )
    if is_spread:
        layout = sharding._GROUPED_EXPERTS_PARAM_LAYOUT
        options = {"enable_ep": True, "enable_sp": False, "expert_param_layout": layout}
        sharding.set_moe_sharding_config(config, **options)
    apply_overrides(OverrideConfig(imports=list(imports)), config)
    return config


def built(config, state=None):
    torch.manual_seed(5)
    layer = config.build()
    layer.init_states()
    if state is not None:
        layer.load_state_dict(state)
    return layer


def far(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def outcome(layer, x, grad):
    """y and the gradients of x and of all parameters, by the names of a checkpoint."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter, source in zip(copied.parameters(), layer.parameters()):
            parameter.copy_(source.grad)
    return {"y": y.detach(), "x": x.grad, **copied.state_dict()}


def same(found, wanted, bound=BF16):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.any():
            assert far(found[name], tensor) < bound, name
        else:
            assert not found[name].any(), name


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(9)
    return torch.randn(2, 2, 33, D, generator=generator)  # and the gradient of y


@pytest.mark.parametrize("of", ["common", "gpt_oss"])
@pytest.mark.parametrize("imports", [(EXPERTS,), (DISPATCHER,), (EXPERTS, DISPATCHER)])
def test_a_layer_is_torchtitans_own(x, of, imports):
    dtype = torch.float32 if of == "common" else torch.bfloat16  # which GPT-OSS's want
    stock = built(config_of(of=of)).to(dtype)
    ours = built(config_of(*imports, of=of)).to(dtype)
    ours.load_state_dict(stock.state_dict())
    found, wanted = (outcome(layer, *x.to(dtype)) for layer in (ours, stock))
    same(found, wanted, bound=2 * BF16)


def test_what_an_override_makes():
    from torchtitan.models.common.moe import GroupedExperts

    layer = built(config_of(EXPERTS, DISPATCHER))
    experts = layer.routed_experts.inner_experts
    assert type(experts).__module__ == "moire.torchtitan" and isinstance(experts, GroupedExperts)
    assert type(layer.routed_experts.token_dispatcher).__name__ == "TokenDispatcher"
    stock = built(config_of())
    for name, tensor in stock.state_dict().items():  # initialised alike, gate and up apart
        assert tensor.shape == layer.state_dict()[name].shape
    assert abs(experts.w13.std().item() - 0.2) < 0.02


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_block"])
def test_options_are_those_of_grouped_mlp(x, recipe):
    layer = built(config_of((EXPERTS, {"recipe": recipe, "save_act": True, "save_z": False})))
    experts, rows = layer.routed_experts.inner_experts, x[0].flatten(0, 1)
    rows = rows * torch.logspace(-6, 6, D, base=2.0)  # so that blocks of 32 and of 128 differ
    splits = torch.tensor([10, 0, 7, 20, 0, 3, 5, 1])  # and a tail
    with torch.no_grad():
        found = experts(rows, splits)
        w1, w2 = experts.w13.flatten(1, 2), experts.w2_EDF
        groups = moire.Groups(splits=splits, capacity=len(rows))
        options = {"layout": moire.GluLayout(1), "compute_dtype": torch.bfloat16}
        wanted = moire.grouped_mlp(rows, w1, w2, groups, recipe=recipe, **options)
    assert torch.equal(found, wanted) and not found[splits.sum() :].any()


def test_experts_are_compiled_whole_and_computed_again(x):
    experts, rows = built(config_of(EXPERTS)).routed_experts.inner_experts, x[0].flatten(0, 1)
    splits = torch.tensor([10, 0, 7, 20, 0, 3, 5, 1])
    again = functools.partial(torch.utils.checkpoint.checkpoint, experts, use_reentrant=False)
    found = []
    for run in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager"), again):
        leaf = rows.clone().requires_grad_()
        y = run(leaf, splits)
        y.square().sum().backward()
        found.append((y, leaf.grad))
    for y, grad in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.equal(grad, found[0][1])


def test_recipes_of_8_bits_train(x):
    stock = built(config_of())
    ours = built(config_of((EXPERTS, {"recipe": "mxfp8"}), DISPATCHER), stock.state_dict())
    same(outcome(ours, *x), outcome(stock, *x), bound=0.08)


def test_what_cannot_be_is_refused():
    from moire.torchtitan import experts
    from torchtitan.models.common.moe import GroupedExperts

    for target, options, error, found in (
        (EXPERTS, {"recipe": "mxfp4"}, moire.InvalidArgument, "recipe is 'mxfp4', must be"),
        (EXPERTS, {"recipe": "fp32"}, moire.InvalidArgument, "'fp32' needs float32 operands, fou"),
        (EXPERTS, {"save_act": "no"}, moire.InvalidArgument, "experts: save_act is 'no', must be"),
        (EXPERTS, {"hidden_dim": 16}, TypeError, "hidden_dim"),
        (DISPATCHER, {"max_rows": "many"}, moire.InvalidArgument, "dispatcher: max_rows is 'many'"),
        (DISPATCHER, {"dispatch_format": "x"}, moire.InvalidArgument, "dispatch_format is 'x'"),
        (DISPATCHER, {"num_experts": 4}, TypeError, "num_experts"),
    ):
        with pytest.raises(error, match=found):
            config_of((target, options))

    class Converted(GroupedExperts):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    with pytest.raises(moire.Unsupported, match=r"found .*Converted.Config, needs GroupedExperts"):
        experts(Converted.Config(dim=D, hidden_dim=F, num_experts=E))


@pytest.mark.parametrize("name", ["standard", "minimal_async_ep"])
def test_any_dispatcher_is_replaced(name):
    config = config_of(DISPATCHER, comm_backend=name)
    assert config.routed_experts.token_dispatcher.num_experts == E


def test_what_a_dispatcher_does_besides_is_not_dropped():
    from moire.torchtitan import dispatcher
    from torchtitan.models.common import token_dispatcher as theirs

    of_both = {"num_experts": E, "top_k": K}
    for config, found in (
        (theirs.TorchAOTokenDispatcher.Config(**of_both, pad_multiple=32), "pad_multiple 32, nee"),
        (
            theirs.HybridEPTokenDispatcher.Config(**of_both, non_blocking_capacity_factor=0.5),
            "non_blocking_capacity_factor 0.5, needs max_rows",
        ),
    ):
        with pytest.raises(moire.Unsupported, match=found):
            dispatcher(config)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def dims_of(backend="partial_dtensor", **sizes):
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend

    parallel_dims.device_type = "cpu"
    set_spmd_backend(backend)
    sizes = {"dp_replicate": 1, "cp": 1, "pp": 1, "world_size": 2, **sizes}
    dims = parallel_dims.ParallelDims(**sizes, spmd_backend=backend)
    dims.build_mesh()
    return dims


def spread_over_ranks(rank):
    """Tokens of its own on each rank, experts as torchtitan spreads them."""
    dims = dims_of(dp_shard=2, tp=1, ep=2)
    generator = torch.Generator().manual_seed(3)
    x, grad = torch.randn(2, 2, 20, D, generator=generator)  # of each rank
    whole = built(config_of())
    wanted, own = outcome(whole, x, grad), slice(rank, rank + 1)
    for imports in ((EXPERTS,), (DISPATCHER,), (EXPERTS, DISPATCHER), (DISPATCHER, EXPERTS)):
        layer = built(config_of(*imports, is_spread=True), whole.state_dict())
        layer.parallelize(dims)
        saved = layer.state_dict()
        for _ in range(2):  # the dispatcher's group is there the second time
            layer.zero_grad()
            found = outcome(layer, x[own], grad[own])
        for name in ("y", "x"):
            assert far(found[name], wanted[name][own]) < BF16, (imports, name)
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            key = f"routed_experts.inner_experts.{name}"
            assert found[key].to_local().shape[0] == E // 2
            assert far(found[key].full_tensor(), wanted[key]) < BF16, (imports, name)
            assert torch.equal(saved[key].full_tensor(), whole.state_dict()[key])
        gate = found["router.gate.weight"]
        dist.all_reduce(gate)
        assert far(gate, wanted["router.gate.weight"]) < BF16


def experts_are_compiled_where_rows_are_counted(rank):
    """As torchtitan compiles: how many rows arrive, a graph does not know."""
    dims = dims_of(dp_shard=2, tp=1, ep=2)
    torch._dynamo.config.capture_scalar_outputs = True
    generator = torch.Generator().manual_seed(4 + rank)
    layer = built(config_of(EXPERTS, is_spread=True))
    layer.parallelize(dims)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (20, 12):
        x, grad = torch.randn(2, 1, tokens, D, generator=generator)
        found = []
        for run in (layer, compiled):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.backward(grad)
            found.append((y.detach(), leaf.grad))
        for eager, other in zip(*found):
            assert far(other, eager) < BF16


def the_dispatcher_says_that_it_is_not_compiled(rank):
    layer = built(config_of(DISPATCHER, is_spread=True))
    layer.parallelize(dims_of(dp_shard=2, tp=1, ep=2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="moire.torchtitan.dispatcher over ranks is not compiled"):
        compiled(torch.zeros(1, 20, D))


def selective_checkpoints_send_tokens_once(rank):
    """As torchtitan wraps a block: of what ranks sent each other the results are kept."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    dims = dims_of(dp_shard=2, tp=1, ep=2)
    x, grad = torch.randn(2, 1, 20, D, generator=torch.Generator().manual_seed(4 + rank))
    wrap = SelectiveAC(SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]))._wrap_block
    for options in ({}, {"dispatch_format": "mxfp8"}):
        found = []
        for wraps in (False, True):
            layer = built(config_of(EXPERTS, (DISPATCHER, options), is_spread=True))
            layer.parallelize(dims)
            layer = wrap(layer) if wraps else layer
            leaf = x.clone().requires_grad_()
            with torch.profiler.profile() as forward:
                y = layer(leaf)
            with torch.profiler.profile() as backward:
                y.backward(grad)
            sent = [
                sum(e.count for e in of.key_averages() if e.key == "c10d::alltoall_base_")
                for of in (forward, backward)
            ]
            found.append((sent, [y, leaf.grad, *(local(p.grad) for p in layer.parameters())]))
        (plain, wanted), (wrapped, made) = found
        assert plain == wrapped == [5, 3]  # of the forward two that tell what a rank calls
        assert all(map(torch.equal, made, wanted))


def a_bias_of_parts_of_an_expert_is_added_once(rank):
    """GPT-OSS's second one, by ranks that have halves of each expert and all of that bias."""
    from torchtitan.distributed import spmd_types
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.gpt_oss.sharding import _GPT_OSS_EXPERTS_PARAM_LAYOUT as LAYOUT

    x, grad = torch.randn(2, 2, 20, D, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = built(config_of(of="gpt_oss")).bfloat16()
    wanted, name = outcome(whole, x, grad), "routed_experts.inner_experts.mlp2_bias_ED"
    for backend in ("partial_dtensor", "spmd_types"):
        dims = dims_of(backend, dp_shard=1, tp=2, ep=1)
        for imports in ((EXPERTS,), (EXPERTS, DISPATCHER)):
            config = config_of(*imports, of="gpt_oss")
            options = {"enable_ep": False, "enable_sp": False, "expert_param_layout": LAYOUT}
            set_moe_sharding_config(config, **options)
            layer = built(config).bfloat16()
            layer.load_state_dict(whole.state_dict())
            layer.parallelize(dims)
            experts, leaf = layer.routed_experts.inner_experts, x.clone().requires_grad_()
            is_typed = backend == "spmd_types"  # parameters are then plain tensors
            mesh = spmd_types.set_current_spmd_mesh(dims.get_mesh("tp")) if is_typed else None
            with mesh or contextlib.nullcontext():
                y = layer(leaf)
                y = y if is_typed else y.full_tensor()
                y.backward(grad)
            assert local(experts.mlp2_weight_EDF).shape == (E, D, F // 2)
            assert far(y.detach(), wanted["y"]) < BF16 and far(leaf.grad, wanted["x"]) < BF16
            bias = experts.mlp2_bias_ED.grad
            if is_typed:
                dist.all_reduce(bias)  # each rank has that of its part of the sum
            else:
                bias = bias.full_tensor()
            assert far(bias, wanted[name]) < BF16, (backend, imports)


CASES = [spread_over_ranks, experts_are_compiled_where_rows_are_counted]
CASES += [the_dispatcher_says_that_it_is_not_compiled, selective_checkpoints_send_tokens_once]
CASES += [a_bias_of_parts_of_an_expert_is_added_once]


def test_experts_spread_over_ranks(tmp_path):
    args = (2, str(tmp_path / "store"), CASES)
    torch.multiprocessing.spawn(in_gloo, args, nprocs=2)
