"""Recipes of 8 bits: values and gradients against decoded operands in double, and against their own
parts bit for bit.
"""

import contextlib

import moire
import pytest
import torch
import truth
import truth_recipes
from truth_recipes import Operands

pytestmark = pytest.mark.usefixtures("device")
RECIPES = list(truth_recipes.FORMS)
H, F = 40, 72  # one block of 32 and a part, for MXFP8; less than one of 128
WIDE = {"hidden": 136, "width": 144}  # more than one tile of 128


def make(generator, splits, dtype=torch.float32, tail=0, hidden=H, width=F, weights=torch.float32):
    rows, g = sum(splits) + tail, len(splits)
    return {
        "x": truth.draw(generator, rows, hidden, dtype=dtype),
        "w1": truth.draw(generator, g, 2 * width, hidden, dtype=weights, scale=hidden**-0.5),
        "w2": truth.draw(generator, g, hidden, width, dtype=weights, scale=width**-0.5),
        "probs": torch.rand(rows, generator=generator),
        "b1": truth.draw(generator, g, 2 * width),
        "b2": truth.draw(generator, g, hidden),
    }


def leaves(values):
    return {k: v.clone().requires_grad_() for k, v in values.items()}


def run(values, splits, **options):
    values = dict(values)
    x, w1, w2 = values.pop("x"), values.pop("w1"), values.pop("w2")
    return moire.grouped_mlp(x, w1, w2, moire.Groups(splits=splits), **values, **options)


def results(values, splits, grad=None, **options):
    """y and all gradients, as a list."""
    mine = leaves(values)
    y = run(mine, splits, **options)
    y.backward(torch.ones_like(y) if grad is None else grad)
    return [y.detach(), *(t.grad for t in mine.values())]


def assert_rms(found, wanted, bound, name):
    """A last bit of a stored tensor may decide how an 8-bit operand is rounded, by a sixteenth of
    its value; of thousands that is one or two, hence a bound on the whole.
    """
    found, wanted = found.detach().double(), wanted.double()
    assert found.shape == wanted.shape and found.isfinite().all(), name
    size = wanted.pow(2).mean().sqrt() if wanted.numel() else torch.tensor(0.0)
    error = (found - wanted).pow(2).mean().sqrt() if wanted.numel() else size
    assert error <= bound * size, f"{name}: differs by {(error / size).item():.2e}, bound {bound}"


def of_two(rows, width):
    """What two elements of such an operand that are rounded otherwise make of a result's rms: each
    is at most four times as large as the others, and differs by a sixteenth of that.
    """
    return (2 / max(1, rows * width)) ** 0.5 / 4


BOUND = {torch.float32: 4e-3, torch.bfloat16: 1e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", truth.SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_reads_decoded_operands(generator, recipe, name, dtype):
    splits = truth.SPLITS[name]
    v = make(generator, splits, dtype, tail=2)
    given = (v["x"], v["w1"], v["b1"], v["probs"])
    x, w, bias, scale = mine = [t.clone().requires_grad_() for t in given]
    groups = moire.Groups(splits=splits)
    y = moire.grouped_linear(x, w, groups, bias=bias, scale=scale, recipe=recipe)
    grad = truth.draw(generator, *y.shape, dtype=dtype)
    y.backward(grad)
    wanted = truth_recipes.linear(Operands(recipe, splits), *given, grad)
    truth.assert_close(y, wanted["y"], dtype, H, name="y")
    for label, t in zip(("x", "w", "bias", "scale"), mine):
        assert t.grad.dtype == t.dtype
        truth.assert_close(t.grad, wanted[label], t.dtype, max(2 * F, *splits), name=label)
    assert (y[sum(splits) :] == 0).all() and (x.grad[sum(splits) :] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_of_several_tiles_and_gradients_in_e5m2(generator, recipe, dtype):
    splits = [130, 0, 9]
    v = make(generator, splits, dtype, **WIDE)
    given = (v["x"], v["w1"], v["b1"], v["probs"])
    mine = [t.clone().requires_grad_() for t in given]
    for element in ("e4m3", "e5m2"):
        options = {"recipe": moire.Recipe(recipe, gradient_element=element)}
        y = moire.grouped_linear(*mine[:2], moire.Groups(splits=splits), bias=mine[2], **options)
        grad = truth.draw(generator, *y.shape, dtype=dtype)
        found = torch.autograd.grad(y, mine[:2], grad)
        ones = torch.ones_like(v["probs"])
        wanted = truth_recipes.linear(Operands(recipe, splits, element), *given[:3], ones, grad)
        truth.assert_close(y, wanted["y"], dtype, 136, name="y")
        truth.assert_close(found[0], wanted["x"], dtype, 288, name="x")
        truth.assert_close(found[1], wanted["w"], torch.float32, 130, name="w")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", truth.SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mlp_reads_decoded_operands(generator, recipe, name, dtype):
    splits = truth.SPLITS[name]
    values = make(generator, splits, dtype, tail=2)
    grad = truth.draw(generator, *values["x"].shape, dtype=dtype)
    found = results(values, splits, grad, recipe=recipe)
    wanted = truth_recipes.mlp(Operands(recipe, splits), **values, grad=grad)
    bound = max(BOUND[dtype], of_two(sum(splits), F))  # of few rows one element is more
    for label, t in zip(("y", *values), found):
        assert_rms(t, wanted[label], bound, label)
    assert (found[0][sum(splits) :] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "options", [{"act": "geglu_tanh"}, {"layout": 8}, {"save_act": True}, {"sizes": WIDE}]
)
def test_mlp_options(generator, recipe, element, options):
    options = dict(options)
    splits = [33, 0, 7]
    values = make(generator, splits, **options.pop("sizes", {}))
    grad = truth.draw(generator, *values["x"].shape)
    full = moire.Recipe(recipe, gradient_element=element)
    found = results(values, splits, grad, recipe=full, **options)
    options.pop("save_act", None)
    if "layout" in options:
        options["layout"] = (options["layout"], "gate_first")
    wanted = truth_recipes.mlp(Operands(recipe, splits, element), **values, grad=grad, **options)
    for label, t in zip(("y", *values), found):
        assert_rms(t, wanted[label], BOUND[torch.float32], label)


@pytest.mark.parametrize("wrong", ["no_recipe", "blocks", "element"])
def test_the_comparison_fails_on_another_recipe(generator, wrong):
    splits = [140, 33]
    values = make(generator, splits, **WIDE)
    values["x"][:, 0] *= 2.0**20  # whatever shares a block with it becomes zero
    values["w1"][:, :, 0] = 0
    grad = truth.draw(generator, *values["x"].shape)
    given = {
        "no_recipe": None,
        "blocks": "fp8_block",
        "element": moire.Recipe("mxfp8", gradient_element="e5m2"),
    }
    found = results(values, splits, grad, recipe=given[wrong])
    wanted = truth_recipes.mlp(Operands("mxfp8", splits), **values, grad=grad)
    with pytest.raises(AssertionError, match="differs by"):
        for label, t in zip(("y", *values), found):
            assert_rms(t, wanted[label], BOUND[torch.float32], label)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("needed", ["x", "w1", "w2", "b1", "b2", "probs"])
def test_each_gradient_alone(generator, recipe, needed):
    splits = [4, 0, 36]
    values = make(generator, splits)
    everything = leaves(values)
    alone = {k: v.clone().requires_grad_(k == needed) for k, v in values.items()}
    for given in (everything, alone):
        run(given, splits, recipe=recipe).sin().sum().backward()
    assert [k for k, v in alone.items() if v.grad is not None] == [needed]
    assert torch.equal(alone[needed].grad, everything[needed].grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_equals_its_parts_in_bf16_bit_for_bit(generator, recipe, dtype):
    splits = [5, 0, 39]
    values = make(generator, splits, dtype)
    groups = moire.Groups(splits=splits)
    fused = results(values, splits, recipe=recipe)
    v, options = leaves(values), {"recipe": recipe}
    z = torch.empty(44, 2 * F, dtype=torch.bfloat16)
    z = moire.grouped_linear(v["x"], v["w1"], groups, bias=v["b1"], out=z, **options)
    act = moire.glu(z, v["probs"], groups=groups)
    options.update(bias=v["b2"], scale=v["probs"], out=torch.empty(44, H, dtype=dtype))
    y = moire.grouped_linear(act, v["w2"], groups, **options)
    y.backward(torch.ones_like(y))
    for name, a, b in zip(("y", *v), fused, [y, *(t.grad for t in v.values())]):
        assert name == "probs" or torch.equal(a, b), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
def test_weight_forms_agree_with_packed(generator, recipe, listed, weight_layout):
    splits = [3, 37]
    values = make(generator, splits)
    wanted = results(values, splits, recipe=recipe)
    given, arrays = leaves(values), {}
    for k in ("w1", "w2"):
        w = values[k] if weight_layout == "out_in" else values[k].transpose(1, 2).contiguous()
        arrays[k] = [t.clone().requires_grad_() for t in w] if listed else [w.requires_grad_()]
        given[k] = arrays[k] if listed else arrays[k][0]
    y = run(given, splits, recipe=recipe, weight_layout=weight_layout)
    assert torch.equal(y, wanted[0])
    y.backward(torch.ones_like(y))
    assert torch.equal(given["x"].grad, wanted[1])
    for found, expected in zip(arrays.values(), wanted[2:4]):
        grad = torch.stack([t.grad for t in found]) if listed else found[0].grad
        grad = grad if weight_layout == "out_in" else grad.transpose(1, 2)
        truth.assert_close(grad, expected.double(), torch.float32, max(splits))


def test_masters_are_quantised_as_they_are_and_never_cast_first(generator):
    splits = [33, 7]
    values = make(generator, splits)
    options = {"recipe": "mxfp8", "compute_dtype": torch.bfloat16}
    y, grad_x, grad_w1, *_ = results(values, splits, **options)
    assert y.dtype == grad_x.dtype == grad_w1.dtype == torch.float32
    low = {**values, "x": values["x"].bfloat16()}
    wanted = results(low, splits, recipe="mxfp8")
    assert torch.equal(y, wanted[0].float()) and torch.equal(grad_w1, wanted[2])
    with torch.autocast(values["x"].device.type, dtype=torch.bfloat16):
        automatic = results(values, splits, recipe="mxfp8")
    assert automatic[0].dtype == torch.bfloat16 and torch.equal(automatic[0], wanted[0])
    # Just below a tie of E4M3, which rounds down to 1.125; rounded to BF16 it is one and goes up.
    w = torch.full((1, 1, 32), 1.1875 - 2.0**-10)
    x, groups = torch.ones(1, 32), moire.Groups(splits=[1])
    for given in (w, w.bfloat16()):
        y = moire.grouped_linear(x, given, groups, **options)
        assert y.item() == (36.0 if given is w else 40.0)


def test_delayed_and_accumulated_weight_gradients(generator):
    from moire import nn

    torch.manual_seed(3)
    plain = nn.GroupedMLP(3, H, F, bias=True, recipe="mxfp8")
    x, probs = truth.draw(generator, 40, H), torch.rand(40, generator=generator)
    splits = [33, 0, 7]
    plain(x, splits, probs).sin().sum().backward()
    for options in ({}, {"save_act": True}, {"recipe": moire.Recipe("mxfp8", save="input")}):
        options = {"recipe": "mxfp8", **options}
        layer = nn.GroupedMLP(3, H, F, bias=True, delay_wgrad_compute=True, **options)
        layer.load_state_dict(plain.state_dict())
        layer(x, splits, probs).sin().sum().backward()
        assert layer.fc1.weight.grad is None
        layer.backward_dw()
        for mine, reference in zip(layer.parameters(), plain.parameters()):
            assert torch.equal(mine.grad, reference.grad)
    layer = nn.GroupedMLP(3, H, F, bias=True, accumulate_into_main_grad=True, recipe="mxfp8")
    layer.load_state_dict(plain.state_dict())
    for p in (layer.fc1.weight, layer.fc2.weight):
        p.main_grad = torch.ones_like(p)
    layer(x, splits, probs).sin().sum().backward()
    for p, reference in zip((layer.fc1.weight, layer.fc2.weight), (plain.fc1, plain.fc2)):
        wanted = reference.weight.grad.double() + 1
        truth.assert_close(p.main_grad, wanted, torch.float32, 33)
    assert torch.equal(layer.fc1.bias.grad, plain.fc1.bias.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_rows_are_the_bits_of_permuting_first(generator, recipe):
    splits, tokens = [36, 0, 9], 11
    values = make(generator, splits)
    row_idx = torch.randint(tokens, (45,), generator=generator)
    x = truth.draw(generator, tokens, H)
    for save in ("input", "quantized"):
        full = moire.Recipe(recipe, save=save)
        gathered = results({**values, "x": x}, splits, recipe=full, row_idx=row_idx)
        copied = results({**values, "x": x[row_idx]}, splits, recipe=full)
        back = torch.zeros(tokens, H).index_add(0, row_idx, copied[1])
        truth.assert_close(gathered[1], back.double(), torch.float32, 45)
        for i in (0, 2, 3, 4, 5, 6):
            assert torch.equal(gathered[i], copied[i])


@pytest.mark.parametrize("recipe", RECIPES)
def test_moe_equals_plan_mlp_unpermute(generator, recipe):
    values = make(generator, [0] * 3, torch.bfloat16)
    x = truth.draw(generator, 70, H, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(70, 2, generator=generator)
    topk_idx = torch.randint(-1, 3, (70, 2), generator=generator, dtype=torch.int32)
    w1, w2 = leaves(values)["w1"], leaves(values)["w2"]
    plan = moire.make_plan(topk_idx, 3)
    rows, probs = moire.permute(x, plan, topk_weights=weights)
    options = {"recipe": recipe}
    y = moire.unpermute(moire.grouped_mlp(rows, w1, w2, plan.groups, probs=probs, **options), plan)
    fused = moire.moe(x, w1, w2, topk_idx, weights, **options)
    assert torch.equal(y, fused)
    theirs = torch.autograd.grad(y.float().square().sum(), [x, w1, w2])
    mine = torch.autograd.grad(fused.float().square().sum(), [x, w1, w2])
    for a, b in zip(mine, theirs):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_in_one_group_stays_there_and_tails_are_not_read(generator, recipe):
    splits = [34, 5, 0, 36]
    values = make(generator, splits, tail=2)
    clean = results(values, splits, recipe=recipe)
    values["x"][34:39], values["x"][75:] = float("nan"), float("nan")
    found = results(values, splits, recipe=recipe)
    with pytest.raises(moire.InvalidArgument, match="is infinite or NaN"):
        moire.check()
    rows = torch.tensor([i for i in range(75) if not 34 <= i < 39])
    groups = torch.tensor([0, 2, 3])
    assert found[0][34:39].isnan().all() and found[2][1].isnan().any()
    for a, b, kept in zip(found, clean, (rows, rows, groups, groups, rows, groups, groups)):
        assert torch.equal(a[kept], b[kept])
    assert (found[0][75:] == 0).all()


def test_the_sums_of_hopper_can_be_emulated(generator):
    splits = [33, 31]
    values = make(generator, splits, torch.bfloat16, hidden=512)
    for name in ("mxfp8_fast", "fp8_block"):
        exact = results(values, splits, recipe=name)
        found = results(values, splits, recipe=moire.Recipe(name, emulate_accumulation=True))
        assert not torch.equal(found[2], exact[2])
        # Sums that differ by some 2^-10 lie on two sides of a boundary of E4M3 one time in 60; then
        # act or grad_z differs by a step, 2^-4 of it in the mean: 1e-2 in the mean of squares.
        for label, a, b in zip(("y", *values), found, exact):
            assert_rms(a, b, 2e-2, label)


def test_fractional_scales_reach_every_product(generator):
    splits = [33, 31]
    values = make(generator, splits)
    recipe = moire.Recipe("fp8_block", fractional_scales=True)
    found, wanted = (results(values, splits, recipe=r) for r in (recipe, "fp8_block"))
    for name, a, b in zip(("y", *values), found, wanted):
        assert name == "b2" or not torch.equal(a, b), name


# ---- what is kept


def saved(call):
    explanation = moire.explain(call)
    return explanation, {t["name"]: t for t in explanation.saved}


def test_x_in_expert_order_is_kept_in_8_bits_and_gathered_x_by_reference(generator):
    splits = [33, 7]
    values = leaves(make(generator, splits, torch.bfloat16))
    row_idx = torch.arange(40)
    for save in (None, "input", "quantized"):
        recipe = moire.Recipe("mxfp8", save=save)
        for idx in (None, row_idx):
            explanation, tensors = saved(
                lambda r=recipe, i=idx: run(values, splits, recipe=r, row_idx=i)
            )
            kept = save or ("quantized" if idx is None else "input")
            assert ("x" in tensors) == (kept == "input")
            assert ("x_columnwise" in tensors) == (kept == "quantized")
            columns = 40 * H + (40 // 32 + 2) * H if kept == "quantized" else 0
            assert explanation.saved_bytes == 40 * 2 * F * 2 + columns
            assert f"saved for the backward: {explanation.saved_bytes:,} B" in str(explanation)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_z_is_bf16_whatever_x_is(generator, recipe, dtype):
    values = leaves(make(generator, [33, 7], dtype))
    _, tensors = saved(lambda: run(values, [33, 7], recipe=recipe))
    assert tensors["z"]["bytes"] == 40 * 2 * F * 2
    y = run(values, [33, 7], recipe=recipe)
    y.sum().backward()
    assert y.dtype == values["x"].grad.dtype == dtype


def test_the_activation_is_kept_in_8_bits_if_asked_for(generator):
    values = leaves(make(generator, [33, 7], torch.bfloat16))
    _, tensors = saved(lambda: run(values, [33, 7], recipe="mxfp8", save_act=True))
    assert "act" not in tensors and not tensors["act_columnwise"]["by_reference"]
    _, tensors = saved(lambda: run(values, [33, 7], save_act=True, compute_dtype=torch.bfloat16))
    assert tensors["act"]["bytes"] == 40 * F * 2


def test_without_weight_gradients_nothing_of_x_is_kept(generator):
    values = make(generator, [33, 7])
    values["x"].requires_grad_()
    for recipe in (None, "mxfp8"):
        _, tensors = saved(lambda r=recipe: run(values, [33, 7], recipe=r))
        assert "x" not in tensors and "x_columnwise" not in tensors


def test_what_an_op_made_is_not_kept_by_reference(generator):
    values = leaves(make(generator, [33, 7], torch.bfloat16))
    topk_idx, topk_weights = torch.zeros(40, 1, dtype=torch.int64), torch.ones(40, 1)
    layer = (values["x"], values["w1"], values["w2"], topk_idx, topk_weights)
    options = {"compute_dtype": torch.bfloat16}
    explanation, tensors = saved(lambda: moire.moe(*layer, **options))
    assert explanation.saved_bytes == 40 * (2 * F * 2 + 4) and tensors["row_idx"]["by_reference"]
    logits = truth.draw(generator, 40, 3).requires_grad_()
    explanation, tensors = saved(lambda: moire.router(logits, 2))
    assert explanation.saved_bytes == 40 * 2 * 8 and tensors["logits"]["by_reference"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_changes_no_bit(generator, recipe):
    splits = [33, 0, 7]
    values = make(generator, splits, torch.bfloat16)
    wanted = results(values, splits, recipe=recipe)
    for options in ({"save": "input"}, {"save": "quantized"}):
        for save_act in (False, True):
            full = moire.Recipe(recipe, **options)
            found = results(values, splits, recipe=full, save_act=save_act)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_infinities_that_a_recipe_quantises_are_reported_once():
    groups = moire.Groups(splits=[3, 2])
    x = torch.randn(5, 64)
    x[4, 7] = float("inf")
    w1, w2 = torch.randn(2, 64, 64) * 0.1, torch.randn(2, 64, 32) * 0.1
    with contextlib.suppress(moire.InvalidArgument):  # what other tests left
        moire.check()
    moire.grouped_mlp(x, w1, w2, groups, recipe="mxfp8")
    with pytest.raises(moire.InvalidArgument, match=r"grouped_mlp: x\[4, 7\] is infinite or NaN"):
        moire.check()
    moire.check()
