"""What the constructors of moire.nn refuse, so that no layer fails at its first forward; fuse and
Hugging Face experts.
"""

import moire
import numpy as np
import pytest
import torch
from moire import nn

X = torch.ones(6, 8)


def experts(**changes):
    return nn.GroupedMLP(**{"num_groups": 2, "hidden": 8, "width": 10, **changes})


def linear(**changes):
    return nn.GroupedLinear(**{"num_groups": 2, "in_features": 8, "out_features": 20, **changes})


@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": "mxfp8"}, {"packed": False, "recipe": "mxfp8"}, {"primary": "mxfp8"}],
)
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_weights_inside_a_transform_of_torch_func_are_refused(transform, options):
    layer, groups = linear(**options), moire.Groups(splits=[2, 4])
    weights = dict(layer.named_parameters())

    def loss(weights):
        return torch.func.functional_call(layer, weights, (X, groups)).sum()

    with pytest.raises(moire.Unsupported, match="torch.autograd.grad or backward"):
        if transform == "grad":
            torch.func.grad(loss)(weights)
        else:
            tangents = {name: torch.ones(w.shape) for name, w in weights.items()}
            torch.func.jvp(loss, (weights,), (tangents,))


def router(**changes):
    return nn.Router(**{"hidden": 8, "num_experts": 2, "k": 1, **changes})


BAD = [
    (lambda: linear(num_groups=-1), "GroupedLinear: num_groups is -1, must be an integer"),
    (lambda: linear(in_features=8.0), "GroupedLinear: in_features is 8.0"),
    (lambda: linear(out_features=None), "GroupedLinear: out_features is None"),
    (lambda: linear(bias_init=0), "GroupedLinear: bias_init is 0, must be callable"),
    (
        lambda: linear(get_rng_state_tracker="cuda"),
        "GroupedLinear: get_rng_state_tracker is 'cuda', must be callable",
    ),
    (lambda: linear(bias="yes"), "GroupedLinear: bias is 'yes', must be True or False"),
    (lambda: linear(scale_bias=None), "GroupedLinear: scale_bias is None, must be True or False"),
    (lambda: linear(packed=2), "GroupedLinear: packed is 2"),
    (lambda: linear(weight_layout="io"), "GroupedLinear: weight_layout is 'io', must be one of"),
    (
        lambda: linear(glu_layout=3),
        "blocks of 3, gate first, but 2F is 20",
    ),
    (lambda: linear(glu_layout="x"), "GroupedLinear: glu_layout is 'x'"),
    (lambda: linear(dtype="bf16"), "GroupedLinear: dtype is 'bf16', must be torch.float32"),
    (lambda: linear(dtype=torch.float64), "GroupedLinear: dtype is torch.float64"),
    (lambda: linear(compute_dtype="bf16"), "GroupedLinear: compute_dtype is 'bf16'"),
    (lambda: linear(recipe="nope"), "GroupedLinear: recipe is 'nope', must be one of as_stored"),
    (
        lambda: linear(device="moon"),
        "GroupedLinear: device is 'moon', must be a device, such as 'cpu'",
    ),
    (lambda: linear(init_method=3), "GroupedLinear: init_method is 3, must be callable"),
    (lambda: linear(delay_wgrad_compute=1), "delay_wgrad_compute is 1, must be True or False"),
    (lambda: experts(hidden=-8), "GroupedMLP: hidden is -8"),
    (lambda: experts(width="x"), "GroupedMLP: width is 'x'"),
    (lambda: experts(out_features=-1), "GroupedMLP: out_features is -1"),
    (lambda: experts(layout=3), "but 2F is 20, must be a multiple of 6"),
    (lambda: experts(layout=[1]), "ScaledGLU: layout is a list, must be 'halves', a block size"),
    (lambda: experts(act="tanh"), "ScaledGLU: act is 'tanh', must be one of swiglu"),
    (
        lambda: nn.ScaledSwiGLU(glu_interleave_size=0),
        "ScaledSwiGLU: glu_interleave_size is 0, must be 'halves', a block size",
    ),
    (lambda: experts(save_act="no"), "GroupedMLP: save_act is 'no'"),
    (lambda: experts(save_z=0), "GroupedMLP: save_z is 0, must be True or False"),
    (lambda: experts(recipe=3), "recipe is 3, must be one of as_stored"),
    (lambda: router(k=3), "Router: k is 3, must be at most the 2 experts"),
    (lambda: router(k=0), "Router: k is 0, must be a positive integer"),
    (lambda: router(hidden=0), "Router: hidden is 0"),
    (lambda: router(num_experts=2.5), "Router: num_experts is 2.5"),
    (lambda: router(kind="top"), "Router: kind is 'top', must be one of softmax, sigmoid"),
    (lambda: router(scale=0), "Router: scale is 0, must not be"),
    (lambda: router(normalize=5), "Router: normalize is 5"),
    (lambda: router(expert_bias=[0.0, 1.0]), "Router: expert_bias is a list, must be True or"),
    (lambda: router(dtype=3), "Router: dtype is 3"),
    (lambda: nn.MoE(linear(), router()), "MoE: experts is a GroupedLinear, must be a GroupedMLP"),
    (lambda: nn.MoE(experts(), None), "MoE: router is None, must be a module"),
    (lambda: nn.MoE(experts(), router(), shared=3), "MoE: shared is 3, must be a module"),
    (lambda: nn.MoE(experts(), router(), overlap=True), "overlap is on, but there is no shared"),
    (lambda: nn.MoE(experts(), router(), router(), overlap=1), "MoE: overlap is 1, must be True"),
    (lambda: nn.MoE(experts(), router())(3), "MoE: x is 3, must be a Torch tensor"),
    (lambda: nn.MoE(experts(), router())(X[:, :7]), "MoE: x is [6, 7], must be [..., 8]"),
    (lambda: router()(X[0]), "Router: x is [8], must have rank 2"),
    (
        lambda: router()(X.numpy()),
        "Router: x is a NumPy array, must be a Torch tensor as the parameters are",
    ),
    (lambda: linear()(X.numpy(), [2, 4]), "w is a Torch tensor, must be a NumPy array"),
    (lambda: linear()(X, [2.0, 4]), "Groups: splits[0] is 2.0"),
    (lambda: linear()(X, None), "Groups: needs exactly one of splits, ends and offsets"),
    (lambda: nn.convert_state_dict(3, linear()), "convert_state_dict: state_dict is 3, must be a"),
    (lambda: nn.convert_state_dict({}, 3), "convert_state_dict: module is 3, must be a torch.nn"),
    (
        lambda: nn.convert_state_dict({"fc1.bias": 3}, experts(), glu_layout=10),
        "convert_state_dict: fc1.bias is 3, must be a Torch tensor as a module's parameters are",
    ),
    (
        lambda: moire.GluLayout.parse("halves, down first"),
        "GluLayout.parse: text is 'halves, down first', must be as in 'halves, gate first'",
    ),
    (lambda: nn.fuse(None), "fuse: modules is None, must be a Sequential or a list"),
    (lambda: nn.fuse([linear()]), "fuse: has 1 modules, needs GroupedLinear"),
    (lambda: nn.fuse([1, 2, 3]), "fuse: found 1 where a GroupedLinear has to be"),
    (lambda: nn.Sequential(linear())(X), "Groups: needs exactly one of splits"),
    (lambda: moire.hf.recognise(torch.nn.Linear(2, 2)), "moire.hf: found a Linear without"),
    (lambda: moire.hf.recognise(None), "moire.hf: found None without has_gate, has_bias"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m[:40] for _, m in BAD])
def test_refused(call, message):
    with pytest.raises(moire.InvalidArgument) as e:
        call()
    assert message in str(e.value)
    assert e.value.code == moire.Code.INVALID_ARGUMENT


OF_TWO = {"list": [50, 50], "tensor": torch.tensor([50, 50]), "ends": moire.Groups(ends=[50, 100])}


@pytest.mark.parametrize("splits", OF_TWO)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "options", [{}, {"packed": False}, {"recipe": "mxfp8"}, {"primary": "mxfp8"}], ids=str
)
def test_splits_of_another_number_of_experts_are_named(options, device, splits):
    splits, x = OF_TWO[splits], torch.ones(100, 64, device=device)
    groups = splits if isinstance(splits, moire.Groups) else moire.Groups(splits=splits)
    said = "there are 2 splits but {} has 8 experts"
    options = {**options, "device": device}
    linear, mlp = nn.GroupedLinear(8, 64, 64, **options), nn.GroupedMLP(8, 64, 64, **options)
    for module, name in ((linear, "w"), (mlp, "w1")):
        with pytest.raises(moire.InvalidArgument, match=said.format(name)):
            module(x, splits)
    given = x, linear.weights(), groups
    recipe = "mxfp8" if "primary" in options else None
    with pytest.raises(moire.InvalidArgument, match=said.format("w")):
        moire.grouped_linear(*given, recipe=recipe)
    with pytest.raises(moire.InvalidArgument, match=said.format("w")):
        moire.grouped_linear_backward(x, *given, recipe=recipe, wants=["x"])


def test_numpy_integers_are_sizes():
    layer = experts(num_groups=np.int64(2), hidden=np.int32(8), width=np.int16(10))
    assert layer(X, [np.int64(2), 4]).shape == (6, 8)
    assert router(k=np.int64(2))(X)[0].shape == (6, 2)


@pytest.mark.parametrize(
    "values", [(5, 5), (torch.ones(8, 8), 5), (torch.ones(8, 8), torch.ones(8, 9))]
)
def test_listed_weights_that_cannot_be_packed_are_an_error_of_the_load(values):
    layer = moire.nn.GroupedLinear(2, 8, 8)
    state = {f"weight{i}": value for i, value in enumerate(values)}
    with pytest.raises(RuntimeError, match="weight0 to weight1: must be tensors of one shape"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("value", [5, torch.ones(())])
def test_a_packed_weight_that_is_none_is_an_error_of_the_load(value):
    layer = moire.nn.GroupedLinear(2, 8, 8, packed=False)
    with pytest.raises(RuntimeError, match="Unexpected key.*weight"):
        layer.load_state_dict({"weight": value})


def test_a_name_to_register_is_a_string():
    with pytest.raises(moire.InvalidArgument, match="moire.hf.register: name is 5, must be a stri"):
        moire.hf.register(5)
