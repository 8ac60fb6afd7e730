"""save_z=False: z is not kept for the backward, which makes it again, to the bit."""

import moire
import pytest
import torch
import truth
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from torch.utils.checkpoint import checkpoint
from truth_recipes import FORMS

pytestmark = pytest.mark.usefixtures("device")

H, F = 40, 72
SPLITS = [33, 0, 7]
ROWS = sum(SPLITS) + 2
RECIPES = [None, *FORMS]


def make(generator, dtype=torch.float32):
    return {
        "x": truth.draw(generator, ROWS, H, dtype=dtype),
        "w1": truth.draw(generator, 3, 2 * F, H, scale=H**-0.5),
        "w2": truth.draw(generator, 3, H, F, scale=F**-0.5),
        "b1": truth.draw(generator, 3, 2 * F),
        "b2": truth.draw(generator, 3, H),
        "probs": torch.rand(ROWS, generator=generator),
    }


def gradients(values, wanted=None, row_idx=None, **options):
    """y and the gradients of these leaves, with z kept and without; also what was kept."""
    groups = moire.Groups(splits=SPLITS, capacity=ROWS)
    results, kept = [], []
    for save_z in (True, False):
        v = {n: t.clone().requires_grad_(n in (wanted or values)) for n, t in values.items()}
        others = {**options, "row_idx": row_idx, "save_z": save_z}

        def run(v=v, others=others):
            return moire.grouped_mlp(groups=groups, **v, **others)

        kept.append({tensor["name"]: tensor for tensor in moire.explain(run).saved})
        y = run()
        y.sin().sum().backward()
        results.append([y, *(t.grad for t in v.values() if t.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert "z" in kept[0] and "z" not in kept[1]
    return kept[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options", [{}, {"save_act": True}, {"act": "geglu_tanh", "layout": 8}, {"gathered": True}]
)
def test_gradients_are_the_bits_of_a_z_that_was_kept(generator, recipe, options):
    options, row_idx = dict(options), None
    values = make(generator)
    if options.pop("gathered", False):
        values["x"] = values["x"][:9].clone()
        row_idx = torch.randint(9, (ROWS,), generator=generator)
    kept = gradients(values, recipe=recipe, row_idx=row_idx, **options)
    assert kept["x"]["by_reference"] and "x_columnwise" not in kept
    named = [name for name in kept if not kept[name]["by_reference"]]
    assert set(named) <= {"act", "act_columnwise"}


@pytest.mark.parametrize("needed", ["x", "w1", "w2", "b1", "b2", "probs"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_each_gradient_alone(generator, recipe, needed):
    gradients(make(generator), [needed], recipe=recipe)


@pytest.mark.parametrize("save", ["input", "quantized"])
def test_x_is_kept_by_reference_whatever_the_recipe_says(generator, save):
    kept = gradients(make(generator), recipe=moire.Recipe("fp8_block", save=save))
    assert kept["x"]["by_reference"] and "x_columnwise" not in kept


def test_modules_keep_what_they_are_told_to(generator):
    x, probs = truth.draw(generator, 40, H), torch.rand(40, 1, generator=generator)
    topk_idx = torch.zeros(40, 1, dtype=torch.int64)
    for options in ({}, {"save_z": False}, {"save_act": True}):
        layer = nn.GroupedMLP(3, H, F, **options)
        for run in (
            lambda: layer(x, SPLITS, probs[:, 0]),  # noqa: B023
            lambda: layer.route(x, topk_idx, probs),  # noqa: B023
        ):
            kept = {tensor["name"] for tensor in moire.explain(run).saved}
            assert ("z" in kept) == options.get("save_z", True)
            assert ("act" in kept) == options.get("save_act", False)


def test_types_that_are_cast(generator):
    gradients(make(generator), compute_dtype=torch.bfloat16)
    gradients(make(generator, torch.bfloat16), recipe="mxfp8")
    with torch.autocast("cuda" if torch.empty(0).is_cuda else "cpu", torch.bfloat16):
        gradients(make(generator))


@pytest.mark.parametrize("recipe", list(FORMS))
@pytest.mark.parametrize("columnwise", [False, True])
def test_operands_in_8_bits(generator, recipe, columnwise):
    values, results = make(generator), []
    groups = moire.Groups(splits=SPLITS, capacity=ROWS)
    x = moire.quantize(values.pop("x"), groups, recipe, columnwise=columnwise)
    copies = {
        f"{w}_quantized": moire.quantize(values[w] * 2, recipe=recipe, columnwise=True)
        for w in ("w1", "w2")  # not of the weights, so that who reads those is seen
    }
    for save_z in (True, False):
        v = {n: t.clone().requires_grad_() for n, t in values.items()}
        options = {"recipe": recipe, "save_z": save_z, **copies}
        y = moire.grouped_mlp(x, groups=groups, **v, **options)
        y.sin().sum().backward()
        results.append([y, *(t.grad for t in v.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def module(**options):
    torch.manual_seed(3)
    return nn.GroupedMLP(3, H, F, bias=True, **options)


def step(layer, x, probs):
    x = x.clone().requires_grad_()
    y = layer(x, SPLITS, probs)
    y.sin().sum().backward()
    if layer.need_backward_dw():
        layer.backward_dw()
    grads = [getattr(p, "main_grad", p.grad) for p in layer.parameters()]
    return [y, x.grad, *grads]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options",
    [
        {"packed": False, "weight_layout": "in_out"},
        {"delay_wgrad_compute": True},
        {"accumulate_into_main_grad": True},
        {"delay_wgrad_compute": True, "accumulate_into_main_grad": True, "save_act": True},
    ],
)
def test_modules(generator, recipe, options):
    x, probs = truth.draw(generator, 40, H), torch.rand(40, generator=generator)
    results = []
    for save_z in (True, False):
        layer = module(recipe=recipe, save_z=save_z, **options)
        for p in layer.parameters() if "accumulate_into_main_grad" in options else ():
            p.main_grad = torch.ones_like(p)
        results.append(step(layer, x, probs))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_prepared_weights(generator):
    x, probs = truth.draw(generator, 40, H), torch.rand(40, generator=generator)
    recipe = moire.Recipe("mxfp8", dequantized_weights=True)
    results = [step(module(recipe=recipe, save_z=s), x, probs) for s in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("recipe", RECIPES)
def test_moe(generator, recipe):
    x = truth.draw(generator, 11, H)
    results = []
    for save_z in (True, False):
        torch.manual_seed(4)
        layer = nn.MoE(module(recipe=recipe, save_z=save_z), nn.Router(H, 3, 2))
        names = [tensor["name"] for tensor in moire.explain(layer, x).saved]
        assert ("z" in names) == save_z
        y = layer(x)
        y.sin().sum().backward()
        results.append([y, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_compiled_and_checkpointed(generator, recipe):
    x, probs = truth.draw(generator, 40, H), torch.rand(40, generator=generator)
    layers = [module(recipe=recipe, save_z=s) for s in (True, False, False, False)]
    compiled = torch.compile(layers[2], backend="aot_eager", fullgraph=COMPILES_WHOLE_GRAPHS)
    splits = torch.tensor(SPLITS)
    calls = (
        layers[0],
        layers[1],
        compiled,
        lambda *args: checkpoint(layers[3], *args, use_reentrant=False),
    )
    results = []
    for layer, call in zip(layers, calls):
        y = call(x, splits, probs)
        y.sin().sum().backward()
        results.append([y, *(p.grad for p in layer.parameters())])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0]))


def test_an_x_that_is_overwritten_is_noticed(generator):
    layer, x = module(save_z=False), truth.draw(generator, 40, H)
    layer.fc1.weight.requires_grad_(False)  # z alone needs x
    y = layer(x, SPLITS)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
