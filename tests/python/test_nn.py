"""Modules: the same values as the functions, their parameters, and what is saved and loaded."""

import contextlib
import copy
import io
import pickle

import moire
import pytest
import torch
import truth
from moire import nn

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 12, 16
SPLITS = [4, 0, 5]


def mlp(**options):
    torch.manual_seed(3)
    return nn.GroupedMLP(E, H, F, **{"bias": True, **options})


def inputs(generator):
    return truth.draw(generator, sum(SPLITS), H), torch.rand(sum(SPLITS), generator=generator)


@pytest.mark.parametrize(
    "splits",
    [SPLITS, torch.tensor(SPLITS), torch.tensor(SPLITS).int(), moire.Groups(splits=SPLITS)],
)
def test_every_form_of_splits(generator, splits):
    layer = nn.GroupedLinear(E, H, F, bias=True)
    x, _ = inputs(generator)
    wanted = truth.linear(x.double(), layer.weight.double(), SPLITS, layer.bias.double())
    truth.assert_close(layer(x, splits), wanted, torch.float32, H)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packed": False},
        {"weight_layout": "in_out"},
        {"layout": 8, "act": "geglu_tanh"},
        {"layout": "ungated", "act": "relu2"},
    ],
)
def test_fused_sequential_is_the_same_numbers_on_the_same_parameters(generator, options):
    x, probs = inputs(generator)
    given = mlp(**options)
    chain = nn.Sequential(given.fc1, given.activation, given.fc2)
    fused = nn.fuse(chain)
    assert fused.fc1 is given.fc1 and fused.fc2 is given.fc2
    y = fused(x, SPLITS, probs)
    assert torch.equal(y, given(x, SPLITS, probs)) and torch.equal(y, chain(x, SPLITS, probs))


@pytest.mark.parametrize(
    "modules, message",
    [
        (
            lambda: [nn.ScaledGLU()],
            "fuse: has 1 modules, needs GroupedLinear, ScaledGLU, GroupedLinear",
        ),
        (
            lambda: [torch.nn.Linear(H, 2 * F), nn.ScaledGLU(), nn.GroupedLinear(E, F, H)],
            "found a Linear where a GroupedLinear",
        ),
        (
            lambda: [nn.GroupedLinear(E, H, F), nn.ScaledGLU(), nn.GroupedLinear(E, F, H)],
            "has 16 outputs, needs 2 x 16",
        ),
        (
            lambda: [nn.GroupedLinear(2, H, 2 * F), nn.ScaledGLU(), nn.GroupedLinear(E, F, H)],
            "2 groups but the second has 3",
        ),
        (
            lambda: [
                nn.GroupedLinear(E, H, 2 * F, glu_layout=8),
                nn.ScaledGLU(),
                nn.GroupedLinear(E, F, H),
            ],
            "'interleaved blocks of 8, gate first', the activation's 'halves, gate first'",
        ),
        (
            lambda: [
                nn.GroupedLinear(E, H, 2 * F, weight_layout="in_out"),
                nn.ScaledGLU(),
                nn.GroupedLinear(E, F, H),
            ],
            "weight_layout are 'in_out' and 'out_in', must be equal",
        ),
    ],
)
def test_fuse_says_why_not(modules, message):
    with pytest.raises(moire.InvalidArgument) as e:
        nn.fuse(torch.nn.Sequential(*modules()))
    assert message in str(e.value)


@pytest.mark.parametrize("size", [None, 8])
def test_transformer_engines_name_is_the_same_activation(generator, size):
    x, probs = inputs(generator)
    given = mlp(layout=size)
    theirs = nn.ScaledSwiGLU(glu_interleave_size=size)
    fused = nn.fuse([given.fc1, theirs, given.fc2])
    assert torch.equal(fused(x, SPLITS, probs), given(x, SPLITS, probs))
    z = truth.draw(generator, 3, 5, 2 * F)
    assert torch.equal(theirs(z), nn.ScaledGLU("swiglu", size)(z))
    with pytest.raises(TypeError):  # by name alone, there as here
        nn.ScaledSwiGLU(8)


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_state_dict_of_packed_and_listed_load_into_either(source, target):
    a, b = mlp(packed=source), mlp(packed=target, init_method=torch.nn.init.zeros_)
    result = b.load_state_dict(a.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    for e in range(E):
        assert torch.equal(a.fc1.expert_weight(e), b.fc1.expert_weight(e))
    assert torch.equal(a.fc2.biases(), b.fc2.biases())
    assert set(b.state_dict()) == set(mlp(packed=target).state_dict())


def test_missing_weights_are_reported_by_name():
    state = mlp(packed=False).state_dict()
    del state["fc1.weight1"]
    with pytest.raises(RuntimeError, match="fc1.weight"):
        mlp(packed=True).load_state_dict(state)


def test_packed_and_listed_start_from_the_same_numbers():
    a, b = mlp(packed=True), mlp(packed=False)
    assert torch.equal(a.fc1.weight, torch.stack(b.fc1.weights()))
    bound = H**-0.5
    assert a.fc1.weight.abs().max() <= bound and a.fc1.weight.std() > bound / 3
    doubled = nn.GroupedLinear(E, H, F, init_method=lambda w: w.fill_(w.shape[0]))
    assert (doubled.weight == F).all()
    doubled.init_method = None
    doubled.reset_parameters()
    assert doubled.weight.abs().max() <= bound


def test_the_glu_layout_is_a_tag_that_is_checked_on_load():
    state = mlp(layout=8).state_dict()
    assert set(state) == {
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    }  # never an extra tensor
    mlp(layout=8).load_state_dict(state)
    before = mlp()
    wanted = {k: v.clone() for k, v in before.state_dict().items()}
    with pytest.raises(RuntimeError) as e:
        before.load_state_dict(state)
    assert "glu_layout is 'interleaved blocks of 8, gate first'" in str(e.value)
    assert "built with 'halves, gate first'" in str(e.value)
    assert torch.equal(before.fc1.weight, wanted["fc1.weight"])  # not loaded
    assert state._metadata["fc1"]["glu_layout"] == "interleaved blocks of 8, gate first"


TO = [
    {"layout": 4},
    {"weight_layout": "in_out"},
    {"layout": moire.GluLayout(2, "up_first"), "weight_layout": "in_out", "packed": False},
]


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("options", [{}, {"layout": 8, "packed": False}])
def test_the_load_errors_advice_works_as_it_is_written(generator, options, to):
    source = torch.nn.Sequential(mlp(**options), torch.nn.BatchNorm1d(H))
    module = torch.nn.Sequential(mlp(**to), torch.nn.BatchNorm1d(H))
    state_dict = source.state_dict()
    before = {key: value.clone() for key, value in state_dict.items()}
    with pytest.raises(RuntimeError, match="or load moire.nn.convert_state_dict") as e:
        module.load_state_dict(state_dict)
    advice = str(e.value).split("or load ")[1].splitlines()[0]
    module.load_state_dict(eval(advice))
    x, probs = inputs(generator)
    truth.assert_close(
        module[0](x, SPLITS, probs), source[0](x, SPLITS, probs).double(), torch.float32, F
    )
    assert all(torch.equal(state_dict[key], value) for key, value in before.items())
    source.load_state_dict(nn.convert_state_dict(module.state_dict(), source))
    assert all(torch.equal(source.state_dict()[key], value) for key, value in before.items())


def test_a_state_dict_without_tags_is_converted_from_what_is_said(generator):
    source, module = mlp(layout=8), mlp()
    plain = dict(source.state_dict())  # as from safetensors
    module.load_state_dict(nn.convert_state_dict(plain, module, glu_layout=8))
    wanted = moire.convert_glu(source.fc1.weight, 8, "halves", dim=1)
    assert torch.equal(module.fc1.weight, wanted)
    same = nn.convert_state_dict(plain, source)
    assert all(same[key] is value for key, value in plain.items())


def test_that_there_is_no_gate_is_a_tag_and_converts_to_nothing_else(generator):
    plain = {"layout": "ungated", "act": "relu2"}
    source, module = mlp(**plain), mlp(**plain, weight_layout="in_out", packed=False)
    state = source.state_dict()
    assert source.fc1.weight.shape == (E, F, H)
    assert state._metadata["fc1"]["glu_layout"] == "ungated"
    module.load_state_dict(nn.convert_state_dict(state, module))
    x, probs = inputs(generator)
    wanted = source(x, SPLITS, probs).double()
    truth.assert_close(module(x, SPLITS, probs), wanted, torch.float32, F)
    with pytest.raises(moire.InvalidArgument, match="ungated.*, which has no halves to move"):
        nn.convert_state_dict(mlp().state_dict(), module)


def test_the_orientation_is_a_tag_too():
    square = nn.GroupedLinear(E, H, H, weight_layout="in_out")
    with pytest.raises(
        RuntimeError, match="weight_layout is 'in_out' but the module was built with 'out_in'"
    ):
        nn.GroupedLinear(E, H, H).load_state_dict(square.state_dict())


def test_a_state_dict_without_tags_is_believed_to_be_as_declared():
    module = mlp(layout=8)
    module.load_state_dict(dict(mlp(layout=8).state_dict()))  # as from safetensors


def test_tags_survive_torch_save():
    file = io.BytesIO()
    torch.save(mlp(layout=8).state_dict(), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="glu_layout"):
        mlp().load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("options", [{}, {"packed": False}, {"primary": "mxfp8"}], ids=str)
def test_tags_survive_moires_files(tmp_path, generator, options):
    files = pytest.importorskip("safetensors.torch")
    path, wide = tmp_path / "file", {"bias": True, **options}
    source = nn.GroupedMLP(E, 64, 64, layout=32, **wide)
    model = torch.nn.Sequential(source, torch.nn.BatchNorm1d(64))
    moire.save_safetensors(model.state_dict(), path)
    found = moire.load_safetensors(path)
    assert found._metadata == model.state_dict()._metadata
    other = torch.nn.Sequential(nn.GroupedMLP(E, 64, 64, **wide), torch.nn.BatchNorm1d(64))
    with pytest.raises(RuntimeError, match="glu_layout is 'interleaved blocks of 32, gate first'"):
        other.load_state_dict(found)
    other.load_state_dict(nn.convert_state_dict(found, other))
    x = truth.draw(generator, sum(SPLITS), 64)
    wanted = source(x, SPLITS).double()
    truth.assert_close(other[0](x, SPLITS), wanted, torch.float32, 64)
    model.load_state_dict(found)
    moire.save_safetensors(found, path)  # and again
    assert moire.load_safetensors(path)._metadata == found._metadata
    name = "bias" if source.fc1.packed else "bias0"
    assert torch.equal(files.load_file(path)[f"0.fc1.{name}"], getattr(source.fc1, name).cpu())
    moire.save_safetensors(dict(model.state_dict()), path)  # without tags, as it was built
    assert not hasattr(moire.load_safetensors(path), "_metadata")
    plain = moire.load_safetensors(path)
    if "primary" not in options:
        other.load_state_dict(plain)
        return
    wide.pop("primary")  # 8-bit weights have a layout of their own
    for module in (other, torch.nn.Sequential(nn.GroupedMLP(E, 64, 64, **wide), other[1])):
        with pytest.raises(RuntimeError, match="lies as 'interleaved blocks of 32, "):
            module.load_state_dict(plain)
        module.load_state_dict(nn.convert_state_dict(plain, module, glu_layout=32))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize(
    "options",
    [{}, {"packed": False, "delay_wgrad_compute": True, "accumulate_into_main_grad": True}],
)
def test_copies_are_independent_and_whole(generator, copied, options):
    x, probs = inputs(generator)
    module = mlp(layout=8, **options)
    twin = copied(module)
    assert torch.equal(twin(x, SPLITS, probs), module(x, SPLITS, probs))
    with torch.no_grad():
        twin.fc1.expert_weight(0).zero_()
    assert not torch.equal(twin(x, SPLITS, probs), module(x, SPLITS, probs))
    if options:
        assert twin.fc1.operands()[2].parameters[0] is twin.fc1.weight0


def test_meta_construction_then_materialised():
    module = mlp(device="meta", dtype=torch.bfloat16)
    assert module.fc1.weight.is_meta
    module.to_empty(device="cpu")
    for part in (module.fc1, module.fc2):
        part.reset_parameters()
    assert module.fc1.weight.dtype == torch.bfloat16 and module.fc1.weight.abs().max() > 0


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_forward_on_meta_gives_shapes(recipe):
    module = mlp(device="meta", recipe=recipe)
    y = module(
        torch.empty(9, H, device="meta"),
        moire.Groups(splits=torch.empty(E, dtype=torch.int64, device="meta")),
    )
    assert y.is_meta and y.shape == (9, H)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_listed_parameters_are_packed_ones_under_autocast_of_another_type(generator, dtype):
    x, probs = inputs(generator)
    packed, listed = (mlp(dtype=dtype, packed=is_packed) for is_packed in (True, False))
    with torch.autocast(x.device.type, torch.float16):
        y, same = (module(x.to(dtype), SPLITS, probs) for module in (packed, listed))
    assert y.dtype == torch.float16 and torch.equal(y, same)
    y.sum().backward()
    same.sum().backward()
    found = torch.stack([getattr(listed.fc1, f"bias{i}").grad for i in range(E)])
    assert torch.equal(found, packed.fc1.bias.grad)


def test_master_weights_in_fp32_run_in_bf16(generator):
    x, probs = inputs(generator)
    module = mlp(compute_dtype=torch.bfloat16)
    with torch.no_grad():  # biases stay FP32 there and are BF16 in the second module: both can be
        for bias in (module.fc1.bias, module.fc2.bias):
            bias.copy_(bias.bfloat16())
    y = module(x, SPLITS, probs)
    y.sum().backward()
    assert y.dtype == torch.float32 and module.fc1.weight.grad.dtype == torch.float32
    low = mlp(dtype=torch.bfloat16)
    low.load_state_dict(module.state_dict())
    assert torch.equal(y, low(x.bfloat16(), SPLITS, probs).float())


@pytest.mark.parametrize("kind, expert_bias", [("softmax", False), ("sigmoid", True)])
def test_moe_layer_against_double(generator, kind, expert_bias):
    torch.manual_seed(1)
    shared = torch.nn.Linear(H, H)
    layer = nn.MoE(mlp(), nn.Router(H, E, 2, kind=kind, expert_bias=expert_bias), shared)
    x = truth.draw(generator, 2, 5, H)
    y = layer(x)
    assert y.shape == x.shape
    tokens, w = x.reshape(-1, H).double(), layer.router.weight.double()
    scores = (tokens @ w.T).softmax(-1) if kind == "softmax" else (tokens @ w.T).sigmoid()
    weights, idx = scores.topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    fc1, fc2 = layer.experts.fc1, layer.experts.fc2
    z = torch.einsum("th,efh->tef", tokens, fc1.weight.double()) + fc1.bias.double()
    out = torch.einsum("tef,ehf->teh", truth.glu(z, None), fc2.weight.double()) + fc2.bias.double()
    wanted = (out.gather(1, idx[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)
    wanted = wanted + torch.nn.functional.linear(
        tokens, shared.weight.double(), shared.bias.double()
    )
    truth.assert_close(y.reshape(-1, H), wanted, torch.float32, F, steps=4)
    y.square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
    state = set(layer.state_dict())
    assert ("router.expert_bias" in state) == expert_bias


def test_biases_start_as_bias_init_says():
    shapes = []

    def fill(bias):
        shapes.append(tuple(bias.shape))
        bias.fill_(3)

    for packed in (True, False):
        layer = nn.GroupedLinear(E, H, F, bias=True, packed=packed, bias_init=fill)
        assert all((b == 3).all() and b.shape == (F,) for b in layer.biases())
    assert shapes == 2 * E * [(F,)]
    torch.manual_seed(3)
    a = nn.GroupedLinear(E, H, F, bias=True)
    torch.manual_seed(3)
    b = nn.GroupedLinear(E, H, F, bias=True, packed=False)
    assert torch.equal(a.biases(), b.biases())
    both = mlp(bias_init=torch.nn.init.zeros_)
    assert (both.fc1.bias == 0).all() and (both.fc2.bias == 0).all()


class Tracker:
    """As Megatron's: a fork has a stream of random numbers of its own."""

    def __init__(self, seed):
        self.seed, self.names = seed, []

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        self.names.append(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            yield


@pytest.mark.parametrize("name", [None, "expert-parallel-rng"])
def test_parameters_start_in_a_fork_of_the_callers(name):
    def make(tracker, **options):
        options.update(get_rng_state_tracker=lambda: tracker, rng_tracker_name=name)
        return nn.GroupedLinear(E, H, F, bias=True, **options)

    tracker = Tracker(7)
    before = torch.random.get_rng_state()
    first = make(tracker)
    assert tracker.names == [name or "model-parallel-rng"]
    if not first.weight.is_cuda:
        assert torch.equal(torch.random.get_rng_state(), before)
        assert torch.equal(make(Tracker(7)).weight, first.weight)
        assert not torch.equal(make(Tracker(8)).weight, first.weight)
    make(tracker, device="meta")  # which has no numbers
    assert len(tracker.names) == 1
    options = {"packed": False, "get_rng_state_tracker": lambda: tracker}
    nn.GroupedLinear(0, H, F, **options)  # and no experts are no trouble


@pytest.mark.parametrize("tail", ["zero", "untouched"])
def test_modules_take_the_buffers_of_the_functions(generator, tail):
    groups = moire.Groups(splits=SPLITS, capacity=11)
    x = truth.draw(generator, 11, H)
    for layer in (mlp(), nn.GroupedLinear(E, H, H, bias=True)):
        out, grad_x = torch.full((11, H), 7.0), torch.full((11, H), 7.0)
        wanted, given = (x.clone().requires_grad_() for _ in range(2))
        layer(wanted, groups).sin().sum().backward()
        y = layer(given, groups, out=out, grad_x_out=grad_x, tail=tail)
        y[:9].sin().sum().backward()
        assert y.data_ptr() == out.data_ptr()
        assert (out[9:] == (0 if tail == "zero" else 7)).all()
        assert torch.equal(grad_x[:9], wanted.grad[:9])
        for name in ("recipe", "weight_layout"):  # the module's own
            with pytest.raises(TypeError, match="multiple values"):
                layer(x, groups, **{name: None})


def test_a_moe_layer_calls_its_experts(generator):
    """Their hooks, a forward of their own and what wraps them have their part."""
    x = torch.randn(6, H, generator=generator)
    layer, counted = nn.MoE(mlp(), nn.Router(H, E, 2)), []
    y = layer(x)
    assert y._base is None  # what is written into a view, FSDP2 does not see
    handle = layer.experts.register_forward_hook(lambda module, args, y: 2 * y)
    assert torch.equal(layer(x), 2 * y)
    handle.remove()
    layer.experts.register_full_backward_hook(lambda *_: counted.append(1))
    layer(x.requires_grad_()).sum().backward()
    assert counted == [1]
    layer.experts.forward = lambda *args, **options: (
        -type(layer.experts).forward(layer.experts, *args, **options)
    )
    assert torch.equal(layer(x), -y)


@pytest.mark.parametrize(
    "name, part, message",
    [
        ("fc2", lambda: nn.GroupedLinear(E, H, H, weight_layout="in_out"), "weight_layout are"),
        ("fc2", lambda: nn.GroupedLinear(E, H, H, compute_dtype=torch.bfloat16), "compute_dtype"),
        ("activation", lambda: nn.ScaledGLU("swiglu", layout=1), "gate/up layout is 'halves, gate"),
    ],
)
def test_an_mlp_with_a_part_that_does_not_fit_is_refused(generator, name, part, message):
    layer = nn.GroupedMLP(E, H, H)
    setattr(layer, name, part())
    with pytest.raises(moire.InvalidArgument, match=f"GroupedMLP: .*{message}"):
        layer(torch.ones(9, H), SPLITS)


def test_a_router_from_meta_chooses_without_bias():
    router = nn.Router(H, E, 2, expert_bias=True, device="meta").to_empty(device="cpu")
    router.expert_bias.fill_(7)
    router.reset_parameters()
    assert not router.expert_bias.any()


class Doubled(nn.GroupedLinear):
    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)


def test_an_mlp_whose_parts_have_a_forward_of_their_own_is_refused(generator):
    layer, (x, probs) = mlp(), inputs(generator)
    layer.fc2 = Doubled(E, layer.fc2.in_features, layer.fc2.out_features)
    with pytest.raises(moire.Unsupported, match="fc2 has a forward of its own, which one call"):
        layer(x, SPLITS, probs)


@pytest.mark.parametrize("hooked", ["fc1", "activation", "fc2"])
def test_an_mlp_whose_parts_have_hooks_is_refused(generator, hooked):
    layer, (x, probs) = mlp(), inputs(generator)
    handle = getattr(layer, hooked).register_forward_hook(lambda *_: None)
    with pytest.raises(moire.Unsupported, match=f"GroupedMLP: {hooked} has hooks, which one call"):
        layer(x, SPLITS, probs)
    handle.remove()
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    assert torch.equal(layer(x, SPLITS, probs), 2 * layer.forward(x, SPLITS, probs))
