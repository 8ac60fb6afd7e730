"""Modules whose parameter is a weight in 8 bits: what products read, what optimizers step, what is
saved and loaded.
"""

import copy
import io
import pickle

import moire
import pytest
import torch
import truth
from graphs import captured
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from truth_fp8 import assert_same_bytes

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 4, 64, 128
SPLITS = [5, 0, 9, 6]
RECIPES = ["mxfp8", "mxfp8_fast", "fp8_block"]


def of(recipe, *, seed=3, **options):
    """An MLP with primary weights, and its twin that quantises the same numbers at each step."""
    both = []
    for name in ("primary", "recipe"):
        torch.manual_seed(seed)
        both.append(nn.GroupedMLP(E, H, F, **{name: recipe}, **options))
    return both


def weights(module):
    return [module.fc1.weight, module.fc2.weight]


def trained(module, x, **options):
    y = module(x, SPLITS, **options)
    y.square().mean().backward()
    return y


def rows_of_x(generator, device):
    """On a GPU in BF16, of which prepared weights and others have the same kernels."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return truth.draw(generator, sum(SPLITS), H, dtype=dtype)


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bytes_are_those_of_what_the_same_seed_draws(generator, device, recipe, layout):
    x = rows_of_x(generator, device)
    primary, twin = of(recipe, weight_layout=layout)
    options = {"probs": torch.rand(sum(SPLITS), generator=generator)}
    assert torch.equal(trained(primary, x, **options), trained(twin, x, **options))
    for mine, theirs in zip(weights(primary), weights(twin)):
        assert isinstance(mine, moire.GroupedTensor) and isinstance(mine, torch.nn.Parameter)
        assert_same_bytes(mine, moire.quantize(theirs.detach(), recipe=recipe, columnwise=True))
        assert type(mine.grad) is torch.Tensor and torch.equal(mine.grad, theirs.grad)
    said = [moire.explain(module, x, SPLITS) for module in (primary, of(recipe)[1])]
    writes = {"quantize_weight", "prepare_weight"}  # the latter on a GPU
    assert [any(s["op"] in writes for s in steps) for steps in said] == [False, True]
    torch.manual_seed(3)
    before = [w.clone() for w in weights(primary)]
    for layer in (primary.fc1, primary.fc2):
        layer.weight.data.zero_()
        layer.reset_parameters()
    for mine, wanted in zip(weights(primary), before):
        assert_same_bytes(mine, wanted)


def test_routed_and_single_layers_read_the_bytes(generator):
    x, idx = truth.draw(generator, 9, H), torch.randint(E, (9, 2), generator=generator)
    shares = torch.rand(9, 2, generator=generator)
    primary, twin = of("mxfp8")
    assert torch.equal(primary.route(x, idx, shares), twin.route(x, idx, shares))
    chain = nn.Sequential(primary.fc1, primary.activation, primary.fc2)
    rows = truth.draw(generator, sum(SPLITS), H)
    assert torch.equal(chain(rows, SPLITS), twin(rows, SPLITS))
    assert torch.equal(primary.fc1(rows, SPLITS), twin.fc1(rows, SPLITS))


def test_what_it_began_as_is_there_until_it_is_cleared():
    primary, twin = of("mxfp8", dtype=torch.bfloat16)
    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        assert not hasattr(primary.fc1.weight, name)  # which is what Megatron asks
    torch.manual_seed(3)
    kept = nn.GroupedMLP(
        E, H, F, primary="mxfp8", dtype=torch.bfloat16, preserve_high_precision_init_val=True
    ).bfloat16()
    for mine, theirs in zip(weights(kept), weights(twin)):
        assert torch.equal(mine.get_high_precision_init_val(), theirs.cpu())
        mine.clear_high_precision_init_val()
        assert mine.get_high_precision_init_val() is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_in_fp32_are_stepped_and_copied(generator, device, recipe):
    x = rows_of_x(generator, device)
    primary, twin = of(recipe)
    masters = [w.detach().clone() for w in weights(twin)]
    optimizers = [torch.optim.AdamW(masters, 1e-2), torch.optim.AdamW(twin.parameters(), 1e-2)]
    for _ in range(3):
        losses = [trained(module, x).square().mean().detach() for module in (primary, twin)]
        assert torch.equal(*losses)
        for master, weight in zip(masters, weights(primary)):
            master.grad = weight.grad
        for optimizer, module in zip(optimizers, (primary, twin)):
            optimizer.step()
            module.zero_grad()
        with torch.no_grad():
            for master, weight, data in zip(masters, weights(primary), (False, True)):
                version, target = weight._version, weight.data if data else weight
                assert target.copy_(master) is target
                assert data or weight._version > version


def again(step, device):
    """(what runs the step again, what it returns then): on a GPU a graph."""
    if device == "cuda":
        return captured(step)
    found = step()
    return lambda: [mine.copy_(new) for mine, new in zip(found, step())], found


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_reads_the_bytes_that_masters_were_copied_into(
    generator, device, recipe, kind
):
    """A weight in 8 bits has its twin's results, and new bytes where a graph finds them."""
    x, made = truth.draw(generator, sum(SPLITS), H, dtype=torch.bfloat16), []
    for name in ("primary", "recipe"):
        torch.manual_seed(3)
        layer = nn.GroupedMLP if kind == "mlp" else nn.GroupedLinear
        made.append(layer(E, H, F, **{name: recipe}, dtype=torch.bfloat16))
    splits = torch.tensor(SPLITS)

    def step(module):
        y = module(x, moire.Groups(splits=splits, capacity=x.shape[0]))
        return [t.detach() for t in (y, *torch.autograd.grad(y.sum(), list(module.parameters())))]

    replay, found = again(lambda: step(made[0]), device)
    for factor, now in ((1, SPLITS), (2, SPLITS), (2, [20, 0, 0, 0])):
        splits.copy_(torch.tensor(now))
        with torch.no_grad():
            for mine, theirs in zip(made[0].parameters(), made[1].parameters()):
                theirs.mul_(factor)
                assert mine.copy_(theirs.float()) is mine and mine.device.type == device
        replay()
        for mine, theirs in zip(found, step(made[1])):
            assert torch.equal(mine, theirs)


def test_a_backward_notices_that_its_weight_was_written(generator):
    primary, _ = of("mxfp8")
    y = primary(truth.draw(generator, sum(SPLITS), H), SPLITS)
    with torch.no_grad():
        primary.fc2.weight.copy_(torch.zeros(E, H, F))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_optimizer_that_has_no_master_says_which_it_needs(generator):
    primary, _ = of("mxfp8")
    trained(primary, truth.draw(generator, sum(SPLITS), H))
    before = primary.fc1.weight.detach().clone()
    needs = "FP32 master that the optimizer steps.*parameter.copy_"
    for foreach in (False, True):
        with pytest.raises(moire.Unsupported, match=needs):
            torch.optim.AdamW(primary.parameters(), foreach=foreach).step()
    with torch.no_grad(), pytest.raises(moire.Unsupported, match=needs):
        primary.fc1.weight.mul_(0.5)
    assert_same_bytes(primary.fc1.weight, before)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_gradients_go_where_those_of_others_go(generator, into, delayed):
    x = truth.draw(generator, sum(SPLITS), H)
    options = {"accumulate_into_main_grad": into, "delay_wgrad_compute": delayed}
    found = []
    for module in of("mxfp8", dtype=torch.bfloat16, **options):
        for weight in weights(module):
            weight.main_grad = torch.ones(weight.shape)
        for _ in range(2):
            trained(module, x)
            if delayed:
                module.backward_dw()
        found.append([w.main_grad if into else w.grad for w in weights(module)])
        assert getattr(module.fc1.weight, "skip_backward_post_hook", False) == delayed
    for mine, theirs in zip(*found):
        assert torch.equal(mine, theirs) and mine.dtype == (
            torch.float32 if into else torch.bfloat16
        )


def test_norms_are_clipped_as_those_of_others(generator):
    x = truth.draw(generator, sum(SPLITS), H)
    norms = []
    for module in of("fp8_block"):
        trained(module, x)
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3))
        norms.append(module.fc1.weight.grad)
    assert torch.equal(norms[0], norms[2]) and torch.equal(norms[1], norms[3])


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_a_module_in_another_type_keeps_the_bytes(generator, recipe):
    x = truth.draw(generator, sum(SPLITS), H)
    primary, _ = of(recipe)
    before, wanted = primary.fc1.weight.detach().clone(), primary(x, SPLITS)
    for convert in (lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.float()):
        convert(primary)
        weight = primary.fc1.weight
        assert_same_bytes(weight, before)
        assert torch.equal(primary(x, SPLITS), wanted)
        assert weight.dtype == weight.dequantize().dtype
    with pytest.raises(moire.InvalidArgument, match="dtype is torch.float64, must be torch.fl"):
        primary.double()
    twins = copy.deepcopy(primary), pickle.loads(pickle.dumps(primary))
    assert all(torch.equal(twin(x, SPLITS), wanted) for twin in twins)


CONVERSIONS = {
    "bfloat16": lambda m, device: m.bfloat16(),
    "half": lambda m, device: m.half(),
    "cpu": lambda m, device: m.cpu(),
    "there and back": lambda m, device: m.to("cpu").to(device),
    "share_memory": lambda m, device: m.share_memory(),
    "nothing": lambda m, device: m.to(device),
    "meta": lambda m, device: m.to("meta"),
}


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_converted_module_has_the_parameter_that_others_have(generator, device, how, overwrites):
    """With hooks, gradient and attributes, by Torch's rule for plain ones; or a new parameter."""
    found, keeps = [], {"primary": "mxfp8", "preserve_high_precision_init_val": True}
    set_overwrites = torch.__future__.set_overwrite_module_params_on_conversion
    for options in ({"recipe": "mxfp8"}, keeps):
        layer, calls = nn.GroupedLinear(E, H, F, bias=True, **options), []
        names, weight = [name for name, _ in layer.named_parameters()], layer.weight
        layer(truth.draw(generator, sum(SPLITS), H), SPLITS).sum().backward()
        weight.mine, grad = {"a": 1}, weight.grad
        weight.register_hook(lambda grad, calls=calls: calls.append("hook"))
        weight.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append("after"))
        try:
            set_overwrites(overwrites)
            CONVERSIONS[how](layer, device)
        finally:
            set_overwrites(False)
        now = layer.weight
        assert [name for name, _ in layer.named_parameters()] == names
        found.append((now is weight, now.grad is grad, now.grad.dtype, now.grad.device, now.dtype))
        found[-1] += now.device, now.requires_grad, now.is_leaf, getattr(now, "mine", None)
        if not overwrites and now.device.type == device:
            x = truth.draw(generator, sum(SPLITS), H, dtype=now.dtype)
            layer(x, SPLITS).sum().backward()
            assert calls == ["hook", "after"]
    assert found[0] == found[1]
    assert overwrites or how == "meta" or now.get_high_precision_init_val() is not None


def test_a_conversion_that_fails_changes_nothing():
    layer = nn.GroupedLinear(E, H, F, primary="mxfp8", bias=True)
    before = dict(layer.named_parameters())
    with pytest.raises(moire.InvalidArgument, match="dtype is torch.float64"):
        layer.double()
    assert all(layer.get_parameter(name) is p for name, p in before.items())
    assert layer.bias.dtype == layer.weight.dtype == torch.float32


def test_what_it_began_as_is_copied_and_not_in_a_state_dict():
    layer = nn.GroupedLinear(E, H, F, primary="mxfp8", preserve_high_precision_init_val=True)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        mine, theirs = (m.weight.get_high_precision_init_val() for m in (copied, layer))
        assert torch.equal(mine, theirs) and mine is not theirs
    state = saved_and_loaded(layer.state_dict(), "cpu")
    assert not hasattr(state["weight"], "get_high_precision_init_val")


def test_a_module_that_is_made_without_memory_is_given_it_later(device):
    torch.manual_seed(3)
    layer = nn.GroupedLinear(E, H, F, primary="mxfp8", device="meta").to_empty(device=device)
    wanted = nn.GroupedLinear(E, H, F, primary="mxfp8")
    torch.manual_seed(3)
    layer.reset_parameters()
    assert isinstance(layer.weight, moire.GroupedTensor) and layer.weight.device.type == device
    torch.manual_seed(3)
    wanted.reset_parameters()
    assert_same_bytes(layer.weight, wanted.weight)


@pytest.mark.skipif(not COMPILES_WHOLE_GRAPHS, reason="an older Torch has its own errors")
def test_a_compiled_module_reads_the_bytes(generator):
    torch._dynamo.reset()
    x = truth.draw(generator, sum(SPLITS), H)
    primary, twin = of("mxfp8")
    compiled = torch.compile(primary, fullgraph=True, backend="aot_eager")
    splits = torch.tensor(SPLITS)
    y = compiled(x, splits)
    y.square().mean().backward()
    assert torch.equal(y, trained(twin, x))
    for mine, theirs in zip(weights(primary), weights(twin)):
        assert torch.equal(mine.grad, theirs.grad)


# ---- state_dicts


def saved_and_loaded(state, place):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, place, weights_only=True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_a_state_dict_loads_in_either_number_format(generator, device, recipe, layout, assign):
    x = truth.draw(generator, sum(SPLITS), H)
    primary, twin = of(recipe, weight_layout=layout)
    wanted = twin(x, SPLITS)
    # Parameters that are not assigned are copied to where the module is.
    place = device if assign else "cpu"
    saved, saved_twin = (saved_and_loaded(module.state_dict(), place) for module in (primary, twin))
    for state in (primary.state_dict(), saved, twin.state_dict(), saved_twin):
        (other, _) = of(recipe, seed=4, weight_layout=layout)
        assert not other.load_state_dict(state, assign=assign).missing_keys
        assert isinstance(other.fc1.weight, moire.GroupedTensor) and other.fc1.weight.is_leaf
        assert all(w.device.type == device for w in weights(other))
        assert torch.equal(other(x, SPLITS), wanted)
    for packed in (True, False):
        plain = nn.GroupedMLP(E, H, F, weight_layout=layout, packed=packed)
        plain.load_state_dict(saved, assign=assign)
        for mine, theirs in zip(plain.parameters(), weights(primary) if packed else []):
            assert type(mine) is torch.nn.Parameter and torch.equal(mine, theirs.dequantize())
    listed = nn.GroupedMLP(E, H, F, weight_layout=layout, packed=False)
    listed.load_state_dict(twin.state_dict())
    (other, _) = of(recipe, seed=4, weight_layout=layout)
    other.load_state_dict(listed.state_dict(), assign=assign)
    assert torch.equal(other(x, SPLITS), wanted)


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8),
    reason="an older Torch hands on the parts of a tensor that has a state_dict",
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_has_the_bytes(tmp_path):
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    (source, _), (target, _) = of("mxfp8"), of("mxfp8", seed=4)
    checkpoint.save(source.state_dict(), checkpoint_id=tmp_path)
    state = target.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    target.load_state_dict(state)
    for mine, theirs in zip(weights(target), weights(source)):
        assert_same_bytes(mine, theirs)


def test_a_state_dict_in_another_format_is_refused():
    primary, _ = of("mxfp8")
    other, _ = of("fp8_block")
    before = other.fc1.weight.clone()
    said = r"format is mxfp8, must be fp8_tile; give its dequantize\(\)"
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=f"fc1.weight: {said}"):
            other.load_state_dict(primary.state_dict(), assign=assign)
    with pytest.raises(moire.InvalidArgument, match=f"copy_: {said}"), torch.no_grad():
        other.fc1.weight.copy_(primary.fc1.weight)
    assert_same_bytes(other.fc1.weight, before)
    values = {name: t.dequantize() for name, t in primary.state_dict().items()}
    assert not other.load_state_dict(values).missing_keys


@pytest.mark.parametrize("packed", [True, False])
def test_a_state_dict_of_the_reference_loads(packed):
    """It has `_extra_state` of every op, and may have a weight in both forms."""
    chain = nn.Sequential(
        nn.GroupedLinear(E, H, 2 * F), nn.ScaledGLU(), nn.GroupedLinear(E, F, H, packed=packed)
    )
    theirs = {f"{i}._extra_state": torch.zeros(3, dtype=torch.uint8) for i in range(3)}
    for i, sizes in ((0, (E, 2 * F, H)), (2, (E, H, F))):
        theirs[f"{i}.weight"] = torch.randn(sizes)
        theirs.update({f"{i}.weight{e}": w for e, w in enumerate(theirs[f"{i}.weight"])})
    chain.load_state_dict(theirs)
    assert torch.equal(chain[0].weight, theirs["0.weight"])
    assert torch.equal(torch.stack(list(chain[2].weights())), theirs["2.weight"])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        chain.load_state_dict({**theirs, "0.other": torch.zeros(1)})


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_bytes_are_converted_with_the_tags_of_their_layouts(generator, recipe):
    x = truth.draw(generator, sum(SPLITS), H)
    source, _ = of(recipe, layout=128, weight_layout="in_out")
    module, _ = of(recipe, seed=4)
    module.load_state_dict(nn.convert_state_dict(source.state_dict(), module))
    assert module.fc1.weight.layout == moire.GluLayout.of("halves")
    assert torch.equal(module(x, SPLITS), source(x, SPLITS))


def test_bytes_whose_scales_would_be_torn_apart_are_not_converted():
    source, _ = of("mxfp8", layout=8)
    module, _ = of("mxfp8")
    with pytest.raises(moire.InvalidArgument, match="blocks of 8.* would tear apart.*or quantise"):
        nn.convert_state_dict(source.state_dict(), module)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizers_state_is_converted_with_its_parameters(generator, named):
    """Moments that are the parameters themselves have to become the converted parameters."""
    options = {"layout": 8, "weight_layout": "in_out", "bias": True}
    source, module = nn.GroupedMLP(E, H, F, **options), nn.GroupedMLP(E, H, F, bias=True)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (source, module)]
    trained(source, truth.draw(generator, sum(SPLITS), H))
    optimizers[0].step()
    state, (names, parameters) = optimizers[0].state_dict(), zip(*source.named_parameters())
    for index, parameter in enumerate(parameters):
        state["state"][index]["exp_avg"] = parameter.detach().clone()
        state["state"][index]["exp_avg_sq"] = parameter.detach().square()
    if named:
        state["param_groups"][0]["param_names"], names = list(names), None
    before = copy.deepcopy(state)
    found = nn.convert_optimizer_state_dict(state, source.state_dict(), module, names)
    module.load_state_dict(nn.convert_state_dict(source.state_dict(), module))
    optimizers[1].load_state_dict(found)
    for index, parameter in enumerate(module.parameters()):
        entries = optimizers[1].state_dict()["state"][index]
        assert torch.equal(entries["exp_avg"], parameter)
        assert torch.equal(entries["exp_avg_sq"], parameter.square())
        assert entries["step"] == 1
        for name, entry in before["state"][index].items():
            assert torch.equal(state["state"][index][name], entry)


def test_an_optimizers_parameters_need_their_names():
    layer = nn.GroupedLinear(E, H, F)
    state = torch.optim.SGD(layer.parameters()).state_dict()
    with pytest.raises(moire.InvalidArgument, match="names has 0, but the optimizer 1 parameters"):
        nn.convert_optimizer_state_dict(state, layer.state_dict(), layer)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"primary": "bf16"}, "GroupedLinear: primary is 'bf16', must be one of mxfp8"),
        (
            {"primary": "mxfp8", "recipe": "fp8_block"},
            "primary is 'mxfp8' but recipe is 'fp8_block'",
        ),
        ({"primary": "mxfp8", "recipe": "bf16"}, "primary is 'mxfp8' but recipe is 'bf16'; one"),
        ({"primary": "mxfp8", "packed": False}, "primary is 'mxfp8' but packed is False"),
        (
            {"primary": moire.Recipe("mxfp8", dequantized_weights=True)},
            "recipe is 'mxfp8' with dequantized_weights; one parameter has the bytes of all",
        ),
        (
            {"primary": "mxfp8", "preserve_high_precision_init_val": 1},
            "GroupedLinear: preserve_high_precision_init_val is 1, must be True or False",
        ),
        (
            {"recipe": "mxfp8", "preserve_high_precision_init_val": True},
            "GroupedLinear: preserve_high_precision_init_val needs primary=; only a weight in 8",
        ),
    ],
)
def test_what_does_not_fit_is_said(options, said):
    with pytest.raises(moire.InvalidArgument) as e:
        nn.GroupedLinear(E, H, F, **options)
    assert said in str(e.value)
