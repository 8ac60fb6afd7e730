"""Arguments of a wrong type: public function x argument x bad value. Each gets InvalidArgument (a
ValueError as well) whose sentence names the call and the argument.
"""

import moire
import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from moire import nn
from torch._subclasses.fake_tensor import FakeTensorMode

X, Z, W1, W2 = torch.ones(6, 8), torch.ones(6, 20), torch.ones(2, 20, 8), torch.ones(2, 8, 10)
IDX, WEIGHTS, LOGITS = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1), torch.ones(6, 2)
ROWS, ENDS = torch.arange(6), torch.tensor([2, 6])
GROUPS, PLAN = moire.Groups(splits=[2, 4]), moire.make_plan(IDX, 2)
GATHERED = {"row_idx": ROWS, "scatter_idx": ROWS.view(6, 1)}

# Of each function: arguments that it takes, and which of them are arrays (? may be left out).
CALLS = {
    "grouped_linear": (
        {"x": X, "w": W1, "groups": GROUPS, **GATHERED, "bias": torch.ones(2, 20)},
        "x w bias? scale? row_idx? scatter_idx? out? grad_x_out?",
    ),
    "grouped_mlp": (
        {"x": X, "w1": W1, "w2": W2, "groups": GROUPS, **GATHERED},
        "x w1 w2 probs? b1? b2? b2_scale? row_idx? scatter_idx? out? grad_x_out?",
    ),
    "moe": (
        {"x": X, "w1": W1, "w2": W2, "topk_idx": IDX, "topk_weights": WEIGHTS},
        "x w1 w2 topk_idx topk_weights b1? b2? b2_scale?",
    ),
    "grouped_mm": ({"a": X, "b_t": W1.transpose(1, 2), "offs": ENDS}, "a b_t offs?"),
    "glu": ({"z": Z}, "z probs?"),
    "convert_glu": (
        {"tensor": Z, "from_layout": "halves", "to_layout": 1, "dim": 1},
        "tensor",
    ),
    "interleave_glu_tensor": ({"tensor": Z, "interleave_size": 2, "dim": 1}, "tensor"),
    "deinterleave_glu_tensor": ({"tensor": Z, "interleave_size": 2, "dim": 1}, "tensor"),
    "router": ({"logits": LOGITS, "k": 1}, "logits expert_bias?"),
    "make_plan": ({"topk_idx": IDX, "num_groups": 2}, "topk_idx"),
    "permute": ({"x": X, "plan": PLAN, "topk_weights": WEIGHTS}, "x topk_weights?"),
    "unpermute": ({"rows": X, "plan": PLAN}, "rows weights?"),
    "quantize": ({"x": X, "groups": GROUPS, "row_idx": ROWS}, "x row_idx?"),
}

ARRAYS = [
    (name, argument.rstrip("?"), argument.endswith("?"))
    for name, (_, arguments) in CALLS.items()
    for argument in arguments.split()
]
ARRAY_IDS = [f"{name}-{argument}" for name, argument, _ in ARRAYS]
NOT_ARRAYS = [3, 2.5, "x", [1.0, "a", None], (X, 3), {"x": 1}, object(), torch.nn.Linear(2, 2)]


def run(function, **changes):
    return getattr(moire, function)(**{**CALLS[function][0], **changes})


def refused(call, *fragments):
    with pytest.raises(moire.InvalidArgument) as e:
        call()
    assert isinstance(e.value, ValueError) and e.value.code == moire.Code.INVALID_ARGUMENT
    for fragment in fragments:
        assert fragment in str(e.value)


@pytest.mark.parametrize("function", CALLS)
def test_the_good_arguments_are_good(function):
    run(function)


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_what_is_no_array_is_refused(function, argument, is_optional):
    is_weight = argument in ("w", "w1", "w2") or (function, argument) == ("quantize", "x")
    for value in NOT_ARRAYS if is_optional else [None, *NOT_ARRAYS]:
        says = (
            f"{argument}[" if is_weight and isinstance(value, (list, tuple)) else f"{argument} is"
        )
        refused(lambda v=value: run(function, **{argument: v}), f"{function}: {says}")


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_numpy_and_torch_are_not_mixed(function, argument, is_optional):
    arrays = [a.rstrip("?") for a in CALLS[function][1].split()]
    value = np.ones((6, 8), np.float32)
    if argument != arrays[0]:
        found = f"{function}: {argument} is a NumPy array, must be a Torch tensor as the first"
        refused(lambda: run(function, **{argument: value}), found)
    elif any(a in CALLS[function][0] for a in arrays[1:]):
        found = " is a Torch tensor, must be a NumPy array as the first array is"
        refused(lambda: run(function, **{argument: value}), found)


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_sparse_and_nested_tensors_are_refused(function, argument, is_optional):
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(4, 8)])
    jagged = torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged)
    for value in (X.to_sparse(), X.to_sparse_csr(), nested, jagged):
        refused(
            lambda v=value: run(function, **{argument: v}),
            f"{function}: {argument} is a ",
            "must be a dense (strided) one",
        )


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_tangents_of_forward_mode_are_refused(function, argument, is_optional):
    good = CALLS[function][0].get(argument, X)
    if not good.is_floating_point():
        return
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(good, torch.ones_like(good))
        with pytest.raises(moire.Unsupported, match=f"{function}: {argument} carries a forward"):
            run(function, **{argument: dual})
    with pytest.raises(moire.Unsupported, match="moire differentiates backward only"):
        torch.func.jvp(lambda t: run(function, **{argument: t}), (good,), (good,))


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_transforms_of_torch_func_are_refused(function, argument, is_optional):
    good = CALLS[function][0].get(argument, X)
    match = f"{function}: {argument} is inside a transform of torch.func"
    with pytest.raises(moire.Unsupported, match=match):
        torch.vmap(lambda t: run(function, **{argument: t}))(torch.stack([good, good]))


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_a_fake_tensor_among_others_is_refused(function, argument, is_optional):
    given, arrays = CALLS[function]
    beside = {a.rstrip("?") for a in arrays.split()} & given.keys() | given.keys() & {"groups"}
    if argument in given and len(beside) > 1:
        fake = FakeTensorMode().from_tensor(given[argument])
        refused(
            lambda: run(function, **{argument: fake}),
            "is a FakeTensor, without values, but",
            "all must be of one FakeTensorMode, or none",
        )


def test_a_mode_that_allows_for_others_has_both():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = moire.grouped_linear(mode.from_tensor(X), W1, GROUPS)
    assert y.shape == (6, 20) and y.fake_mode is mode


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_a_meta_tensor_among_others_is_refused(function, argument, is_optional):
    others = [a for a in CALLS[function][1].split() if a.rstrip("?") in CALLS[function][0]]
    if argument in CALLS[function][0] and len(others) > 1:
        meta = CALLS[function][0][argument].to("meta")
        refused(lambda: run(function, **{argument: meta}), "on meta")


@pytest.mark.parametrize("function, argument, is_optional", ARRAYS, ids=ARRAY_IDS)
def test_types_that_no_kernel_reads_are_refused(function, argument, is_optional):
    if argument == "grad_x_out":  # looked at by the backward
        return
    good = CALLS[function][0].get(argument, X)
    only_moved = function == "convert_glu" or function.endswith("glu_tensor")
    for dtype in [torch.complex128] if only_moved else [torch.complex64, torch.bool, torch.int8]:
        refused(lambda d=dtype: run(function, **{argument: good.to(d)}), str(dtype)[6:9])


# function, argument, bad values, what the sentence says after the argument's name
SCALARS = [
    ("grouped_linear", "groups", [None, [2, 4], ENDS, 3, "x"], "must be moire.Groups(splits=...)"),
    ("grouped_linear", "compute_dtype", ["bf16", 16, torch.int32, np.float32], "torch.bfloat16"),
    ("grouped_linear", "recipe", ["nope", 3, ["bf16"], X], "must be one of as_stored, bf16"),
    ("grouped_linear", "weight_layout", [None, 0, ["out_in"], X], "must be one of out_in, in_out"),
    ("grouped_linear", "tail", [None, 0, X], "must be one of zero, untouched"),
    ("grouped_mlp", "act", [None, 3, "tanh", X], "must be one of swiglu, clamped_swiglu"),
    ("grouped_mlp", "layout", [0, 2.0, True, X, "up", [1]], "must be 'halves', a block size"),
    ("grouped_mlp", "save_act", [None, 1, "yes"], "must be True or False"),
    ("grouped_mlp", "save_z", [None, 1, "yes"], "must be True or False"),
    ("grouped_mlp", "groups", [(2, 4)], "must be moire.Groups(splits=...)"),
    ("grouped_mlp", "compute_dtype", ["bf16"], "torch.bfloat16"),
    ("moe", "plan", [tuple(PLAN), 3, IDX], "must be what moire.make_plan returns"),
    ("moe", "layout", [{}], "must be 'halves', a block size"),
    ("grouped_mm", "out_dtype", ["bf16", torch.int8], "torch.bfloat16"),
    ("glu", "groups", [[6], 6], "must be moire.Groups(splits=...)"),
    ("glu", "act", [3], "must be one of swiglu"),
    ("convert_glu", "from_layout", [3.5, "x"], "must be 'halves', a block size"),
    ("convert_glu", "to_layout", [-1, X], "must be 'halves', a block size"),
    ("convert_glu", "dim", [None, 2, -3, 1.0, "x"], "must be an integer, -2 to 1"),
    (
        "interleave_glu_tensor",
        "interleave_size",
        [None, 0, 2.0, "x"],
        "must be a positive integer",
    ),
    ("deinterleave_glu_tensor", "interleave_size", [True, X], "must be a positive integer"),
    ("router", "k", [None, 0, -1, 1.0, "1", True, X], "must be a positive integer"),
    ("router", "k", [3], "must be at most the 2 experts"),
    ("router", "kind", [None, 0, "top", X], "must be one of softmax, sigmoid"),
    ("router", "normalize", [None, 5, "yes"], "must be True or False"),
    ("router", "scale", [None, "x", float("nan"), 10**400, X], "must be a finite number"),
    ("make_plan", "num_groups", [None, -1, 2.0, "x", 2**31, 10**30], "must be an integer, 0 to"),
    ("make_plan", "capacity", [-1, 2.0, "x", 10**30], "must be an integer, at least 0"),
    ("permute", "plan", [None, tuple(PLAN), "x"], "must be what moire.make_plan returns"),
    ("unpermute", "plan", [None, PLAN.offsets], "must be what moire.make_plan returns"),
    ("quantize", "groups", [[2, 4], 3], "must be moire.Groups(splits=...)"),
    ("quantize", "recipe", [None, "bf16", 3, X], "must be one of"),
    ("quantize", "element", [None, "e3m4", 4], "must be one of e4m3, e5m2"),
    ("quantize", "rowwise", [None, 1], "must be True or False"),
    ("quantize", "columnwise", ["yes"], "must be True or False"),
    ("quantize", "layout", [0, "up"], "must be 'halves', a block size"),
]


@pytest.mark.parametrize(
    "function, argument, values, needs", SCALARS, ids=[f"{f}-{a}" for f, a, _, _ in SCALARS]
)
def test_plain_values_are_checked(function, argument, values, needs):
    for value in values:
        refused(
            lambda v=value: run(function, **{argument: v}), f"{function}: {argument} is ", needs
        )


OTHERS = [
    (lambda: moire.Groups(splits=[4.0]), "Groups: splits[0] is 4.0, must be an integer"),
    (lambda: moire.Groups(splits=[4, 10**30]), "Groups: splits[1] is 1000"),
    (lambda: moire.Groups(splits=[3, -1]), "Groups: splits[1] is -1, must be an integer, at least"),
    (lambda: moire.Groups(ends=[3, "x"]), "Groups: ends[1] is 'x'"),
    (lambda: moire.Groups(offsets=[0, None]), "Groups: offsets[1] is None"),
    (lambda: moire.Groups(splits=[True]), "Groups: splits[0] is True"),
    (lambda: moire.Groups(splits=4), "Groups: splits is 4, must be"),
    (lambda: moire.Groups(splits="44"), "Groups: splits is '44'"),
    (lambda: moire.Groups(splits=torch.ones(2)), "splits is fp32 [2], needs int32 or int64"),
    (lambda: moire.Groups(splits=torch.tensor(4)), "Groups: splits is [], must have rank 1"),
    (lambda: moire.Groups(splits=[4], capacity="x"), "Groups: capacity is 'x'"),
    (lambda: moire.Groups(splits=[4], capacity=-1), "Groups: capacity is -1"),
    (lambda: moire.Groups(splits=[4], capacity=4.0), "Groups: capacity is 4.0"),
    (lambda: moire.Groups(splits=ENDS.to("meta")).offsets_for(X), "offsets are on meta"),
    (lambda: moire.Groups.of_offsets([0, 2]), "of_offsets: offsets is a list"),
    (lambda: moire.permute(X[0], PLAN), "permute: x is [8], must have rank 2"),
    (lambda: moire.unpermute(X[0], PLAN), "unpermute: rows is [8], must have rank 2"),
    (
        lambda: moire.permute(X, moire.Plan(1, 2, 3)),
        "permute: plan.offsets is 1, must be a Torch tensor",
    ),
    (
        lambda: moire.permute(X, PLAN._replace(scatter_idx=ROWS)),
        "permute: plan.scatter_idx is [6], must have rank 2",
    ),
    (lambda: run("router", expert_bias=[0.0, 1.0]), "router: expert_bias is a list, must be"),
    (lambda: run("grouped_linear", row_idx=torch.tensor(3)), "row_idx is [], must have rank 1"),
    (lambda: moire.GluLayout(1.0), "GluLayout: block is 1.0"),
    (lambda: moire.GluLayout(1, None), "GluLayout: order is None"),
    (lambda: moire.Activation(3), "Activation: kind is 3"),
    (lambda: moire.Activation("clamped_swiglu", "x"), "Activation: limit is 'x'"),
    (lambda: moire.Activation("swiglu", limit=3), "found 3.0 beside 'swiglu', which has no const"),
    (lambda: moire.Activation.clamped_swiglu(limit=-7), "Activation: limit is -7.0"),
    (lambda: moire.explain(3), "explain: function is 3, must be callable"),
    (lambda: moire.settings(num_threads=1.5).__enter__(), "settings: num_threads is 1.5"),
    (lambda: moire.settings(strict=7).__enter__(), "settings: strict is 7, must be True or False"),
    (lambda: moire.settings(implementation=3).__enter__(), "settings: implementation is 3"),
]


@pytest.mark.parametrize("call, message", OTHERS, ids=[m[:40] for _, m in OTHERS])
def test_the_rest_of_the_functions(call, message):
    refused(call, message)


def test_an_unknown_implementation_is_unsupported():
    with (
        moire.settings(implementation="nope"),
        pytest.raises(moire.Unsupported, match='the context asks for "nope"'),
    ):
        run("glu")


def test_numpy_integers_are_integers():
    one, two = np.int64(1), np.int32(2)
    assert run("router", k=one)[0].shape == (6, 1)
    assert run("make_plan", num_groups=two, capacity=np.int64(9)).gather_idx.shape == (9,)
    assert moire.Groups(splits=[two, np.uint8(4)], capacity=np.int64(6)).splits.tolist() == [2, 4]
    assert moire.GluLayout.of(two) == moire.GluLayout(2) == moire.GluLayout(two)
    assert run("convert_glu", to_layout=two, dim=one).shape == (6, 20)
    with moire.settings(num_threads=two):
        run("glu")


def test_numpy_dtypes_and_arrays():
    x, w = np.ones((6, 8), np.float32), np.ones((2, 20, 8), np.float32)
    for good in (np.float16, "float16", np.dtype(np.float16)):
        assert moire.grouped_linear(x, w, GROUPS, compute_dtype=good).dtype == np.float32
    for bad in ("bf16", np.int32, torch.float16, 3):
        refused(lambda d=bad: moire.grouped_linear(x, w, GROUPS, compute_dtype=d), "compute_dtype")
    refused(lambda: moire.permute(x[0], PLAN), "permute: x is [8]")
    for bad in (x.astype(object), np.ma.masked_array(x)):
        refused(lambda a=bad: moire.convert_glu(a, "halves", 1), "tensor is a NumPy array ")
        refused(lambda a=bad: moire.grouped_linear(a, w, GROUPS), "must be a plain one of numbers")
    refused(lambda: moire.router(x, 2, expert_bias=[0] * 8), "router: expert_bias is a list")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_only_floating_point_numbers_are_converted(dtype):
    """By compute_dtype and autocast: codes without their scales are none."""
    x, w, bf16 = torch.ones(6, 8), torch.ones(2, 20, 8), {"compute_dtype": torch.bfloat16}
    needs = "must be of a floating-point type"
    for name, args in (("x", (x.to(dtype), w)), ("w", (x, w.to(dtype)))):
        refused(lambda a=args: moire.grouped_linear(*a, GROUPS, **bf16), f"{name} is ", needs)
        with torch.autocast("cpu", torch.bfloat16):
            refused(lambda a=args: moire.grouped_linear(*a, GROUPS), f"{name} is ", needs)
    refused(
        lambda: moire.grouped_linear(
            x.numpy().astype(np.int64), w.numpy(), GROUPS, compute_dtype=np.float16
        ),
        "x is int64",
        needs,
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", ["asked for", "autocast", "delayed"])
def test_weights_that_no_gradient_can_have_the_type_of_are_refused_in_the_forward(how, packed):
    options = {"compute_dtype": None if how == "autocast" else torch.float32, "packed": packed}
    layer = nn.GroupedLinear(2, 8, 8, delay_wgrad_compute=how == "delayed", **options).double()
    with torch.autocast(X.device.type, torch.bfloat16, enabled=how == "autocast"):
        refused(
            lambda: layer(X, [4, 2]),
            "grouped_linear: w is float64 and wants a gradient",
            "which must be of float32, bfloat16 or float16; cast it, or give it main_grad",
        )
        layer.requires_grad_(False)(X, [4, 2])


def test_weights_in_fp64_with_main_grad_in_fp32_are_taken():
    layer = nn.GroupedLinear(
        2, 8, 8, compute_dtype=torch.float32, accumulate_into_main_grad=True
    ).double()
    layer.weight.main_grad = torch.zeros(2, 8, 8)
    layer(X, [4, 2]).sum().backward()
    assert layer.weight.main_grad.count_nonzero() > 0
