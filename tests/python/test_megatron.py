"""moire.megatron against Megatron-Core's own SequentialMLP, on a CPU, and inside its MoELayer."""

import functools
import types

import moire
import pytest
import torch
from ranks import NEEDS_GLOO, alone_in_gloo
from torch.nn import functional

pytest.importorskip("megatron.core")
pytestmark = NEEDS_GLOO

E, H, F = 4, 64, 32
SPLITS = [3, 0, 5, 2]
ROWS = sum(SPLITS)


@pytest.fixture(scope="module")
def groups():
    """Megatron's process groups, of one rank."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    with alone_in_gloo():
        parallel_state.initialize_model_parallel()
        yield ProcessGroupCollection.use_mpu_process_groups()
        parallel_state.destroy_model_parallel()


def config_of(**options):
    """A TransformerConfig; what its own checks want a GPU or other libraries for is set after."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 4, "num_moe_experts": E}
    given.update(moe_ffn_hidden_size=F, use_cpu_initialization=True, gated_linear_unit=True)
    given.update(activation_func=functional.silu, add_bias_linear=False, moe_router_topk=2)
    given.update(bias_activation_fusion=False, moe_router_load_balancing_type="none")
    given.update(hidden_dropout=0.0, moe_token_dispatcher_type="allgather")
    later = {n: options.pop(n) for n in list(options) if n in _LATER}
    config = TransformerConfig(**{**given, **options})
    for name, value in later.items():
        setattr(config, name, value)
    return config


_LATER = {"gradient_accumulation_fusion", "delay_wgrad_compute", "fp8", "fp8_recipe", "fp8_param"}
_LATER |= {"fp4", "quant_recipe", "moe_single_grouped_weight", "moe_single_grouped_bias"}
_LATER |= {"moe_mlp_glu_interleave_size", "activation_func_fp8_input_store"}
_LATER |= {"first_last_layers_bf16", "fine_grained_activation_offloading", "offload_modules"}


def made(config, groups):
    from moire.megatron import GroupedMLP

    torch.manual_seed(2)
    return GroupedMLP(E, config, pg_collection=groups)


def sequential(mlp, config, groups):
    """Megatron's, with the same parameters."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    theirs = SequentialMLP(E, config, layers, pg_collection=groups)
    copy_into(theirs, mlp)
    return theirs


@torch.no_grad()
def copy_into(theirs, mlp):
    for i, expert in enumerate(theirs.local_experts):
        for layer in ("linear_fc1", "linear_fc2"):
            ours = getattr(mlp, layer)
            for name, parameter in getattr(expert, layer).named_parameters():
                parameter.copy_(getattr(ours, f"{name}{i}"))


def inputs(generator, dtype=torch.float32):
    x = torch.randn(ROWS, H, generator=generator).to(dtype).requires_grad_()
    return x, torch.tensor(SPLITS), torch.rand(ROWS, generator=generator).requires_grad_()


def activations():
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu

    return {
        "swiglu": {},
        "clamped": {"activation_func_clamp_value": 0.5, "glu_linear_offset": 0.25},
        "gpt_oss": {
            "activation_func": fused_bias_geglu.quick_gelu,  # as Megatron's arguments have it
            "activation_func_clamp_value": 0.7,
            "glu_linear_offset": 1.0,
        },
        "quick_geglu": {"activation_func": activations.quick_gelu},
        "geglu": {"activation_func": activations.fast_gelu},
        "geglu_tanh": {"activation_func": functools.partial(functional.gelu, approximate="tanh")},
        "reglu": {"activation_func": functional.relu},
        "silu": {"gated_linear_unit": False},
        "relu2": {"gated_linear_unit": False, "activation_func": activations.squared_relu},
    }


@pytest.mark.parametrize("name", ("swiglu", "clamped", "gpt_oss", "quick_geglu", "geglu"))
def test_it_computes_what_megatron_does(name, groups, generator):
    compare(config_of(**activations()[name]), groups, generator)


@pytest.mark.parametrize("name", ("geglu_tanh", "reglu", "silu", "relu2"))
def test_activations_of_other_names(name, groups, generator):
    compare(config_of(**activations()[name]), groups, generator)


def compare(config, groups, generator):
    mlp = made(config, groups)
    theirs, found = sequential(mlp, config, groups), []
    x, splits, probs = inputs(generator)
    of_theirs = [
        [getattr(expert, layer).weight for expert in theirs.local_experts]
        for layer in ("linear_fc1", "linear_fc2")
    ]
    of_ours = [getattr(mlp, layer).weights() for layer in ("linear_fc1", "linear_fc2")]
    for experts, weights in ((mlp, of_ours), (theirs, of_theirs)):
        y, bias = experts(x, splits, probs)
        assert bias is None and y.shape == (ROWS, H)
        leaves = x, probs, *weights[0], *weights[1]
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        found.append((y, *grads))
    assert len(found[0]) == 3 + 2 * E
    for ours, wanted in zip(*found):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_biases_are_scaled_by_probs(groups, generator):
    config = config_of(add_bias_linear=True)
    mlp = made(config, groups)
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        for bias in layer._all("bias"):
            assert not bias.any()
            bias.copy_(torch.randn(bias.shape, generator=generator))
    theirs = sequential(mlp, config, groups)
    given = inputs(generator)
    torch.testing.assert_close(mlp(*given)[0], theirs(*given)[0], rtol=1e-4, atol=1e-5)


def test_probs_may_be_applied_to_the_input(groups, generator):
    config = config_of(
        moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True
    )
    compare(config, groups, generator)


def test_rows_may_be_none(groups):
    mlp = made(config_of(), groups)
    x = torch.zeros(0, H, requires_grad=True)
    y, _ = mlp(x, torch.zeros(E, dtype=torch.int64), torch.zeros(0))
    y.sum().backward()
    assert y.shape == (0, H) and not mlp.linear_fc1.weight0.grad.any()


def test_parameters_are_marked_as_megatrons_are(groups):
    mlp = made(config_of(add_bias_linear=True), groups)
    names = [f"{p}{e}" for p in ("weight", "bias") for e in range(E)]
    assert [n for n, _ in mlp.linear_fc1.named_parameters()] == names
    for layer, axis in ((mlp.linear_fc1, 0), (mlp.linear_fc2, 1)):
        for name, p in layer.named_parameters():
            is_cut = axis == 0 or name.startswith("weight")
            assert p.allreduce is True and p.tensor_model_parallel is is_cut
            assert not is_cut or (p.partition_dim, p.partition_stride) == (axis, 1)
    config = config_of(expert_model_parallel_size=1)
    config.expert_model_parallel_size = 2
    assert not any(p.allreduce for p in made(config, groups).parameters())


@pytest.mark.parametrize("delay", (False, True))
def test_gradients_go_to_main_grad(delay, groups, generator):
    config = config_of(gradient_accumulation_fusion=True, delay_wgrad_compute=delay)
    plain, mlp, ran = made(config_of(), groups), made(config, groups), []
    given = inputs(generator)
    plain(*given)[0].sum().backward()
    for p in mlp.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.ones(p.shape), False
        assert getattr(p, "skip_backward_post_hook", False) is delay
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.register_wgrad_accumulation_and_reduce_hooks(functools.partial(ran.append, layer))
    mlp(*given)[0].sum().backward()
    if delay:
        assert all((p.main_grad == 1).all() for p in mlp.parameters())
        mlp.backward_dw()
        assert ran == [mlp.linear_fc2, mlp.linear_fc1]
    for p, wanted in zip(mlp.parameters(), plain.parameters()):
        assert p.grad_added_to_main_grad
        torch.testing.assert_close(p.main_grad, wanted.grad + 1)


def test_hooks_that_gather_parameters_run_before_they_are_read(groups, generator):
    mlp, seen = made(config_of(), groups), []
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.register_forward_pre_hook(lambda module, args: seen.append(module))
    mlp(*inputs(generator))
    assert seen == [mlp.linear_fc1, mlp.linear_fc2]
    mlp.linear_fc1.register_forward_pre_hook(lambda m, args, kwargs: seen.clear(), with_kwargs=True)
    mlp(*inputs(generator))
    assert seen == [mlp.linear_fc2]
    handle = mlp.linear_fc1.register_forward_pre_hook(lambda module, args: args)
    with pytest.raises(moire.Unsupported, match="a forward pre-hook changes what a layer is given"):
        mlp(*inputs(generator))
    handle.remove()
    mlp.linear_fc2.register_forward_hook(lambda module, args, y: None)
    with pytest.raises(moire.Unsupported, match="has hooks that run after it"):
        mlp(*inputs(generator))


def test_parameters_may_be_made_later(groups):
    """On the meta device, then anywhere; or not be initialised, of which biases are zeros."""
    config = config_of(add_bias_linear=True)
    config.use_cpu_initialization, config.init_model_with_meta_device = False, True
    mlp = made(config, groups)
    assert all(p.is_meta for p in mlp.parameters())
    mlp.to_empty(device="cpu")
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.reset_parameters()
    assert mlp.linear_fc2.weight1.partition_dim == 1 and mlp.linear_fc1.bias1.allreduce is True
    given = torch.randn(ROWS, H), torch.tensor(SPLITS), torch.rand(ROWS)
    assert mlp(*given)[0].isfinite().all()
    mlp = made(config_of(add_bias_linear=True, perform_initialization=False), groups)
    assert not any(p.any() for n, p in mlp.named_parameters() if "bias" in n)


@pytest.mark.parametrize("fp8, recipe", (("hybrid", "mxfp8"), ("e4m3", "blockwise")))
def test_fp8_is_the_recipe_of_that_name(fp8, recipe, groups, generator):
    config = config_of(fp8=fp8, fp8_recipe=recipe, params_dtype=torch.bfloat16)
    mlp = made(config, groups)
    given = inputs(generator, torch.bfloat16)
    y, _ = mlp(*given)
    element = "e5m2" if fp8 == "hybrid" else "e4m3"
    name = {"mxfp8": "mxfp8", "blockwise": "fp8_block"}[recipe]
    wanted = moire.grouped_mlp(
        given[0],
        *(layer.weights() for layer in (mlp.linear_fc1, mlp.linear_fc2)),
        moire.Groups(splits=SPLITS),
        probs=given[2],
        recipe=moire.Recipe(name, gradient_element=element),
    )
    assert torch.equal(y, wanted)
    grads = (torch.autograd.grad(t.sum(), given[0])[0] for t in (y, wanted))
    assert torch.equal(*grads)
    for p in mlp.parameters():
        p.data.mul_(2)  # as Megatron's optimizer writes, which says it by the flag
    assert torch.equal(mlp(*given)[0], y)
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.is_first_microbatch = True
    again = mlp(*given)[0]
    assert not torch.equal(again, y) and not mlp.linear_fc1.is_first_microbatch
    torch.optim.SGD(mlp.parameters(), 1e-1).step()
    with torch.no_grad():
        mlp.linear_fc2.weight0.zero_()
    assert not mlp(*given)[0][: SPLITS[0]].any()  # a write that is counted needs no flag


@pytest.mark.parametrize("keeps_no_copies", (False, True))
def test_a_layer_that_is_used_twice_has_both_gradients(keeps_no_copies, groups, generator):
    """The first use of a step adds to main_grad as well, although its backward comes last."""
    config = config_of(fp8="e4m3", fp8_recipe="mxfp8", gradient_accumulation_fusion=True)
    config.disable_parameter_transpose_cache = keeps_no_copies
    mlp = made(config, groups)
    for p in mlp.parameters():
        p.main_grad = torch.zeros(p.shape)
    x, splits, probs = inputs(generator)
    for times in (1, 2):
        for layer in (mlp.linear_fc1, mlp.linear_fc2):
            layer.is_first_microbatch = True
        y = sum(mlp(x, splits, probs)[0] for _ in range(times))
        y.sum().backward()
        grads = [p.main_grad.clone() for p in mlp.parameters()]
        for p in mlp.parameters():
            p.main_grad.zero_()
        if times == 1:
            once = grads
    for found, wanted in zip(grads, once):
        torch.testing.assert_close(found, 2 * wanted)


def test_buffers_are_written(groups, generator):
    mlp = made(config_of(), groups)
    given = inputs(generator)
    y, _ = mlp(*given)
    (wanted,) = torch.autograd.grad(y.sum(), given[0])
    out, grad_x = torch.empty(ROWS, H), torch.empty(ROWS, H)
    for _ in range(2):  # steps, which share the buffers
        out.zero_(), grad_x.zero_()
        found, _ = mlp(*given, output_buffer=out, grad_input_buffer=grad_x)
        assert torch.equal(found, y) and found.data_ptr() == out.data_ptr()
        found.sum().backward()
        assert torch.equal(grad_x, wanted)


def flat(shards):
    """Key, global shape and offset of everything that would be saved."""
    found = set()
    for shard in shards.values():
        parts = [shard]
        if hasattr(shard, "build"):
            built = shard.build()
            parts = built if isinstance(built, list) else list(built.values())
        for part in parts:
            found.add((part.key, tuple(part.global_shape), tuple(part.global_offset)))
    return found


@pytest.mark.parametrize("apart", (False, True))
def test_checkpoints_are_those_of_megatrons_experts(apart, groups):
    config = config_of()
    mlp = made(config, groups)
    theirs = sequential(mlp, config, groups)
    metadata = {"singleton_local_shards": apart}
    found = [flat(m.sharded_state_dict("mlp.", (), dict(metadata))) for m in (mlp, theirs)]
    assert found[0] == found[1] and len(found[0]) == 5 * E  # gate, up, fc2, two extra states


def test_checkpoints_are_read_both_ways(groups, tmp_path, monkeypatch):
    pytest.importorskip("psutil")
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    config = config_of()
    mlp = made(config, groups)
    theirs = sequential(mlp, config, groups)
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(2)
    for i, (source, target) in enumerate(((theirs, mlp), (mlp, theirs))):
        (tmp_path / str(i)).mkdir()
        dist_checkpointing.save(source.sharded_state_dict("mlp."), str(tmp_path / str(i)))
        with torch.no_grad():
            for p in target.parameters():
                p.fill_(torch.nan)
        read = dist_checkpointing.load(target.sharded_state_dict("mlp."), str(tmp_path / str(i)))
        target.load_state_dict({k.removeprefix("mlp."): v for k, v in read.items()})
        for e, expert in enumerate(theirs.local_experts):
            for layer in ("linear_fc1", "linear_fc2"):
                ours = getattr(getattr(mlp, layer), f"weight{e}")
                assert torch.equal(ours, getattr(expert, layer).weight)


class Group:
    """A rank of some, of whom nothing else is asked."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def test_a_rank_has_its_share_of_experts_and_widths(groups):
    ranks = types.SimpleNamespace(ep=Group(1, 2), expt_tp=Group(1, 4), expt_dp=Group(0, 1))
    from moire.megatron import GroupedMLP

    mlp = GroupedMLP(E, config_of(), pg_collection=ranks)
    assert mlp.linear_fc1.weight0.shape == (2 * F // 4, H)
    assert mlp.linear_fc2.weight0.shape == (H, F // 4)
    metadata = {"dp_cp_group": groups.dp}
    shards = mlp.sharded_state_dict("mlp.", (), metadata)
    fc2 = shards["mlp.linear_fc2.weight1"]
    assert (fc2.key, fc2.global_shape) == ("mlp.experts.linear_fc2.weight", (2 * E, H, F))
    assert fc2.global_offset == (E + 1, 0, F // 4)
    ranks.expt_tp = Group(0, 3)
    with pytest.raises(moire.InvalidArgument, match="64 features cannot be divided by 3 ranks"):
        GroupedMLP(E, config_of(), pg_collection=ranks)


def spec_of(**options):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(**options)


def test_a_layer_of_megatron_runs_it(groups, generator, monkeypatch):
    """Router and dispatcher are Megatron's, of which the first asks for a GPU."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from moire.megatron import GroupedMLP, use_moire

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # 0.16 without it
    layers, config = [], config_of()
    for change in (lambda spec: spec, use_moire):
        mlp = change(spec_of(num_experts=E, moe_grouped_gemm=False)).submodules.mlp
        build = mlp if isinstance(mlp, functools.partial) else functools.partial(build_module, mlp)
        layers.append(build(config=config, pg_collection=groups))
    theirs, ours = layers
    assert isinstance(ours.experts, GroupedMLP) and ours.state_dict().keys() >= {
        "experts.linear_fc1.weight0",
        "experts.linear_fc2.weight3",
    }
    copy_into(theirs.experts, ours.experts)
    ours.router.load_state_dict(theirs.router.state_dict())
    x, found = torch.randn(6, 2, H, generator=generator), []
    for layer in layers:
        given = x.clone().requires_grad_()
        y, bias = layer(given)
        y.square().sum().backward()
        found.append((y, given.grad, layer.router.weight.grad))
        assert bias is None
    for mine, wanted in zip(*found):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_a_copy_of_any_spec_has_it():
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from moire.megatron import GroupedMLP, use_moire

    def experts_of(spec):
        mlp = spec.submodules.mlp
        return getattr(mlp, "keywords", vars(mlp))["submodules"].experts

    layers = [spec_of(num_experts=E), spec_of()]
    before, changed = experts_of(layers[0]), use_moire(layers)
    assert experts_of(changed[0]) is GroupedMLP and experts_of(layers[0]) is before
    inner = MoESubmodules(experts=before)
    for spec in ({"moe": inner}, ModuleSpec(module=object, submodules=inner), (3, [inner])):
        use_moire(spec)
    for spec in (layers[1], 3, [], ModuleSpec(module=object)):
        with pytest.raises(moire.InvalidArgument, match="has no MoE layer, needs the spec of one"):
            use_moire(spec)


REFUSED = [
    ({"activation_func": functional.gelu}, "activation_func is gelu, gated, with"),
    ({"activation_func": functional.relu, "glu_linear_offset": 1.0}, "offset 1.0; needs silu or"),
    ({"gated_linear_unit": False, "activation_func_clamp_value": 1.0}, "without a gate, with"),
    ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "is 'delayed', needs 'mxfp8' or 'blockwise'"),
    ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_param": True}, "has fp8_param, which moire"),
    ({"fp4": "e2m1"}, "has fp4"),
    ({"quant_recipe": object()}, "has quant_recipe"),
    ({"activation_func_fp8_input_store": True}, "has activation_func_fp8_input_store"),
    ({"moe_single_grouped_weight": True}, "has moe_single_grouped_weight"),
    ({"moe_mlp_glu_interleave_size": 32}, "has moe_mlp_glu_interleave_size"),
    ({"moe_apply_probs_on_input": True}, "has moe_apply_probs_on_input with a moe_router_topk o"),
    (
        {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
        "has offloaded activations",
    ),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_what_moire_does_not_do_is_said(options, message, groups):
    with pytest.raises(moire.Unsupported, match=message):
        made(config_of(**options), groups)


def test_process_groups_have_to_be_there():
    from moire.megatron import GroupedMLP

    with pytest.raises(moire.InvalidArgument, match="pg_collection is absent"):
        GroupedMLP(E, config_of())
