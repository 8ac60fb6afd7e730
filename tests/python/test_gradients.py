"""grouped_linear_backward and grouped_mlp_backward: the bits of autograd, on both kinds of array,
with x, weights and the incoming gradient as arrays or in 8 bits; wrong use.
"""

import moire
import numpy as np
import pytest
import torch
import truth
from torch.utils.checkpoint import checkpoint
from truth_fp8 import numpy_of
from truth_recipes import FORMS

pytestmark = pytest.mark.usefixtures("device")

RECIPES = [None, *FORMS]
SPLITS = [33, 0, 7]
H, F = 40, 72


@pytest.fixture(params=[torch.Tensor, np.ndarray])
def kind(request, device):
    if request.param is np.ndarray and device != "cpu":
        pytest.skip("NumPy's arrays are a CPU's, whose products have other bits")
    return request.param


def make(generator, layout="out_in"):
    """x, the weights, both biases, probs and the gradient of y, with a tail of two rows."""
    t = {
        "x": truth.draw(generator, 42, H),
        "w1": truth.draw(generator, 3, 2 * F, H, scale=H**-0.5),
        "w2": truth.draw(generator, 3, H, F, scale=F**-0.5),
        "b1": truth.draw(generator, 3, 2 * F),
        "b2": truth.draw(generator, 3, H),
        "probs": truth.draw(generator, 42),
        "grad_y": truth.draw(generator, 42, H),
    }
    if layout == "in_out":
        t.update({name: t[name].transpose(1, 2).contiguous() for name in ("w1", "w2")})
    return t


def groups():
    return moire.Groups(splits=SPLITS, capacity=42)


def by_autograd(function, t, names, grad_y):
    leaves = [t[name].clone().requires_grad_() for name in names]
    y = function(**{**t, **dict(zip(names, leaves))})
    return torch.autograd.grad(y, leaves, grad_y)


def given_as(kind, t):
    return {n: a.numpy() for n, a in t.items()} if kind is np.ndarray else t


def same(found, wanted, kind):
    for name, expected in wanted.items():
        array = getattr(found, name)
        assert isinstance(array, kind), name
        assert np.array_equal(numpy_of(array), numpy_of(expected)), name
    assert all(g is None for name, g in found._asdict().items() if name not in wanted)


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlps_gradients_are_those_of_autograd(generator, recipe, layout, kind):
    t = make(generator, layout)
    grad_y = t.pop("grad_y")
    options = {"act": "geglu_tanh", "recipe": recipe, "weight_layout": layout, "layout": 8}
    names = ("x", "w1", "b1", "w2", "b2", "probs")

    def forward(x, w1, w2, **others):
        return moire.grouped_mlp(x, w1, w2, groups(), **others, **options)

    wanted = dict(zip(names, by_autograd(forward, t, names, grad_y)))
    t = given_as(kind, {**t, "grad_y": grad_y})
    call = [t[name] for name in ("grad_y", "x", "w1", "w2")]
    others = {name: t[name] for name in ("b1", "b2", "probs")}
    found = moire.grouped_mlp_backward(*call, groups(), **others, **options, wants=names)
    same(found, wanted, kind)
    for name in names:
        alone = moire.grouped_mlp_backward(*call, groups(), **others, **options, wants=[name])
        same(alone, {name: wanted[name]}, kind)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layers_gradients_are_those_of_autograd(generator, recipe, kind):
    t = make(generator)
    t = {"x": t["x"], "w": t["w1"], "bias": t["b1"], "scale": t["probs"]}
    grad_y = truth.draw(generator, 42, 2 * F)

    def forward(x, w, **others):
        return moire.grouped_linear(x, w, groups(), recipe=recipe, **others)

    wanted = dict(zip(t, by_autograd(forward, t, tuple(t), grad_y)))
    n = given_as(kind, {**t, "grad_y": grad_y})
    call = n.pop("grad_y"), n.pop("x"), n.pop("w"), groups()
    same(
        moire.grouped_linear_backward(*call, **n, recipe=recipe, wants=tuple(wanted)), wanted, kind
    )
    two = moire.grouped_linear_backward(*call, **n, recipe=recipe)
    same(two, {name: wanted[name] for name in ("x", "w")}, kind)


@pytest.mark.parametrize("recipe", list(FORMS))
def test_everything_may_be_in_8_bits(generator, recipe, kind):
    t = make(generator)
    names = ("x", "w1", "w2")
    leaves = {name: t[name] for name in names}
    options = {"recipe": recipe}

    def forward(x, w1, w2):
        return moire.grouped_mlp(x, w1, w2, groups(), **options)

    wanted = dict(zip(names, by_autograd(forward, leaves, names, t["grad_y"])))
    t = given_as(kind, t)
    x, grad_y = (
        moire.quantize(t[name], groups(), recipe, columnwise=True) for name in ("x", "grad_y")
    )
    w1, w2 = (moire.quantize(t[name], recipe=recipe, columnwise=True) for name in ("w1", "w2"))
    copies = {"w1_quantized": w1, "w2_quantized": w2}
    call = moire.grouped_mlp_backward
    same(call(grad_y, x, t["w1"], t["w2"], groups(), **copies, **options), wanted, kind)
    found = call(grad_y, x, w1, w2, groups(), **options, wants=("x",))
    same(found, {"x": wanted["x"]}, kind)
    rows = moire.quantize(t["grad_y"], groups(), recipe)  # enough for the gradient of x alone
    same(call(rows, x, w1, w2, groups(), **options, wants=("x",)), {"x": wanted["x"]}, kind)
    between = truth_bf16(t["x"], t["w1"], recipe)
    found = call(grad_y, x, t["w1"], t["w2"], groups(), z=between, **copies, **options)
    same(found, wanted, kind)


def truth_bf16(x, w1, recipe):
    """z as an MLP of 8 bits keeps it."""
    z = moire.grouped_linear(x, w1, groups(), recipe=recipe)
    if isinstance(z, torch.Tensor):
        return z.bfloat16()
    return z.astype(pytest.importorskip("ml_dtypes").bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_rows_and_listed_weights(generator, recipe):
    t = make(generator)
    x = truth.draw(generator, 9, H)
    row_idx = torch.randint(9, (42,), generator=generator)
    given = [[*t["w1"]], [*t["w2"]]]
    found = moire.grouped_mlp_backward(
        t["grad_y"], x, *given, groups(), row_idx=row_idx, recipe=recipe
    )
    wanted = moire.grouped_mlp_backward(
        t["grad_y"], x[row_idx], t["w1"], t["w2"], groups(), recipe=recipe
    )
    assert torch.equal(found.x, wanted.x) and found.x.shape == (42, H)
    assert isinstance(found.w1, list) and isinstance(found.w2, list)
    assert torch.equal(torch.stack(found.w1), wanted.w1)
    assert torch.equal(torch.stack(found.w2), wanted.w2)


def test_types_are_those_of_what_was_given(generator):
    t = make(generator)
    x, grad_y = t["x"].bfloat16(), t["grad_y"].bfloat16()
    w1 = t["w1"].requires_grad_()  # its history does not matter
    found = moire.grouped_mlp_backward(grad_y, x, w1, t["w2"], groups(), recipe="mxfp8")
    assert found.x.dtype == torch.bfloat16 and found.w1.dtype == torch.float32
    assert not found.x.requires_grad and not found.w1.requires_grad


def _routed(t):
    idx = torch.arange(42)[:, None] % 3
    return {"topk_idx": idx, "topk_weights": t["probs"].sigmoid()[:, None]}


def _mlp(x, t):
    return moire.grouped_mlp(x, t["w1"], t["w2"], groups())


def _moe(x, t):
    return moire.moe(x, t["w1"], t["w2"], **_routed(t))


def _unpermuted(x, t):
    plan = moire.make_plan(_routed(t)["topk_idx"], 3)
    rows, probs = moire.permute(x, plan, topk_weights=x[:, :1].sigmoid())
    return moire.unpermute(rows, plan, weights=probs[:, None])


OF_X = {
    "mlp": _mlp,
    "mlp in 8 bits": lambda x, t: moire.grouped_mlp(x, t["w1"], t["w2"], groups(), recipe="mxfp8"),
    "linear": lambda x, t: moire.grouped_linear(x, t["w1"], groups()),
    "grouped_mm": lambda x, t: moire.grouped_mm(x, t["w1"].mT, groups().offsets[1:]),
    "glu": lambda x, t: moire.glu(x),
    "moe": _moe,
    "router": lambda x, t: moire.router(x, 2)[1],
    "permute and unpermute": _unpermuted,
    "checkpoint": lambda x, t: checkpoint(_mlp, x, t, use_reentrant=False),
}


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()])
@pytest.mark.parametrize("name", OF_X)
def test_a_second_derivative_is_an_error_whatever_comes_in(generator, name, loss):
    """Torch's once_differentiable says nothing where the incoming gradient is a constant."""
    t = make(generator)
    for _ in range(3):  # also of calls that are made again
        x = t["x"].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(OF_X[name](x.tanh(), t)), x)
        (grad,) = torch.autograd.grad(loss(OF_X[name](x.tanh(), t)), x, create_graph=True)
        assert torch.equal(grad, wanted)
        with pytest.raises(moire.Unsupported, match="a second derivative is asked for"):
            grad.square().sum().backward()


@pytest.mark.parametrize("name", [name for name in OF_X if name != "mlp in 8 bits"])
def test_a_second_derivative_of_some_inputs_is_an_error(generator, name):
    """Of what lies behind tensors that the call has kept, as x where weights want gradients."""
    t = make(generator)
    for value in t.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    for loss in (lambda y: y.sum(), lambda y: y.square().sum()):
        x = t["x"].detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(OF_X[name](x.tanh(), t)), x, create_graph=True)
        with pytest.raises(moire.Unsupported, match="a second derivative is asked for"):
            torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("name", [*OF_X, "convert_glu", "delayed", "ranks"])
def test_gradients_in_a_batch_are_refused(device, generator, name):
    """Before anything is left for later, as autograd would leave a part of a batch."""
    t, x = make(generator), make(generator)["x"]
    layer = moire.nn.GroupedMLP(3, H, F, delay_wgrad_compute=True)
    (rank,) = moire.Communicator.threads(1, 1 << 20, devices=[device] * (device != "cpu") or None)
    group = moire.ExpertParallel(rank, num_experts=3, max_tokens=42)
    others = {
        "convert_glu": lambda x, t: moire.convert_glu(x, "halves", 1, dim=1),
        "delayed": lambda x, t: layer(x, SPLITS),
        "ranks": lambda x, t: layer.route(x, torch.arange(42)[:, None] % 3, x[:, :1], group=group),
    }
    call = {**OF_X, **others}[name]

    def batched(x):
        return torch.autograd.functional.jacobian(lambda x: call(x.tanh(), t), x, vectorize=True)

    with pytest.raises(moire.Unsupported, match="backward: the incoming gradients are a batch"):
        batched(x)
    y = call(x.requires_grad_(), t)
    with pytest.raises(moire.Unsupported, match="give one at a time"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    assert not layer.fc1._wgrad.queue.waiting


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_a_graph_of_gradients_that_nobody_reads_changes_none(generator, into_main_grad):
    options = {"bias": True, "accumulate_into_main_grad": into_main_grad}
    mlp, x, buffer = moire.nn.GroupedMLP(3, H, F, **options), make(generator)["x"], None
    found = []
    for create_graph in (False, True):
        for p in mlp.parameters():
            p.grad, p.main_grad, p.grad_added_to_main_grad = None, torch.zeros_like(p), False
        buffer, leaf = torch.empty_like(x), x.clone().requires_grad_()
        y = mlp(leaf, groups(), grad_x_out=buffer)
        y.square().sum().backward(create_graph=create_graph)
        names = ("grad", "main_grad") if not into_main_grad else ("main_grad",)
        found.append([leaf.grad, *(getattr(p, name) for p in mlp.parameters() for name in names)])
        assert not buffer.requires_grad
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"wants": ()},
            "wants is empty, must be a tuple of names of x, w1, b1, w2, b2, probs, b2_scale",
        ),
        (
            {"wants": "x"},
            "wants is 'x', must be a tuple of names of x, w1, b1, w2, b2, probs, b2_scale",
        ),
        ({"wants": ("x", "w")}, "wants is 'w', must be one of x, w1, b1, w2, b2, probs, b2_scale"),
        ({"wants": ("b2",)}, "wants has 'b2', but b2 is absent"),
        ({"wants": ("probs",)}, "wants has 'probs', but probs is absent"),
        ({"grad_y": None}, "grad_y is None, must be"),
        ({"grad_y": np.ones((42, H), np.float32)}, "x is a Torch tensor, must be a NumPy array"),
        ({"grad_y": torch.ones(41, H)}, r"grad_y is fp32 \[41, 40\], needs"),
        ({"grad_y": torch.ones(42)}, r"grad_y is \[42\], must have rank 2"),
        ({"groups": SPLITS}, "groups is a list, must be moire.Groups"),
        ({"z": torch.ones(42, 2 * F)}, r"z is fp32 \[42, 144\], needs bf16"),
        ({"grad_y": "rows"}, "grad_y: the GroupedTensor has no columnwise copy; quantise with"),
        ({"grad_y": "others"}, r"grad_y was quantised for other groups: offsets\[1\] was 7, and"),
        ({"grad_y": "block"}, "grad_y is quantised as fp8_block, but the recipe is 'mxfp8'"),
        ({"grad_y": "both", "recipe": None}, "the recipe is 'as_stored', which reads no 8-bit"),
        ({"grad_y": "both", "wants": ("x", "b1", "b2"), "b1": 1, "b2": 1}, "wants has 'b2', a sum"),
        ({"w1": "both"}, "wants has 'w1', but w1 is quantised and has no gradient"),
        ({"w2": "rows"}, "the gradient of x reads w2 in blocks along its outputs"),
        ({"x": "both", "row_idx": torch.arange(42)}, "row_idx is given beside an x that was quan"),
    ],
)
def test_wrong_use_is_said(generator, device, change, said):
    if device != "cpu" and str(change.get("grad_y")) == "others":
        pytest.skip("offsets of a GPU are not compared")
    t = make(generator)
    change = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    arrays = {name: t[name] for name in ("grad_y", "x", "w1", "w2")}
    given = {**arrays, "groups": groups(), "recipe": "mxfp8", **change}
    if isinstance(given["grad_y"], np.ndarray):
        given["groups"] = moire.Groups(splits=np.array(SPLITS), capacity=42)
    for name in ("b1", "b2"):
        if name in given:
            given[name] = t[name]
    for name, array in arrays.items():
        if isinstance(given[name], str):
            of = None if array.ndim == 3 else groups()
            if given[name] == "others":
                of = moire.Groups(splits=[7, 0, 33], capacity=42)
            form = "fp8_block" if given[name] == "block" else "mxfp8"
            columnwise = given[name] != "rows"
            given[name] = moire.quantize(array, of, form, columnwise=columnwise)
    with pytest.raises(moire.InvalidArgument, match="^grouped_mlp_backward: ") as error:
        moire.grouped_mlp_backward(**given)
    error.match(said)
