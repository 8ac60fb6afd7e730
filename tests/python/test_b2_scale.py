"""What scales FC2's bias (probs, nothing, a tensor of its own), and a result of another width than
x: functions and modules.
"""

import moire
import numpy as np
import pytest
import torch
import truth
from moire import nn

pytestmark = pytest.mark.usefixtures("device")

E, H, F, N = 3, 12, 16, 20
SPLITS = [4, 0, 5]
GROUPS = moire.Groups(splits=SPLITS)
SCALES = ["probs", "nothing", "own"]
RECIPES = [None, "mxfp8", "mxfp8_fast", "fp8_block"]


def make(generator, scale, dtype=torch.float32):
    values = {
        "x": truth.draw(generator, 11, H, dtype=dtype),
        "w1": truth.draw(generator, E, 2 * F, H, dtype=dtype, scale=H**-0.5),
        "w2": truth.draw(generator, E, N, F, dtype=dtype, scale=F**-0.5),
        "b1": truth.draw(generator, E, 2 * F),
        "b2": truth.draw(generator, E, N),
        "probs": torch.rand(11, generator=generator),
    }
    if scale == "own":
        values["b2_scale"] = truth.draw(generator, 11)
    return {name: t.requires_grad_() for name, t in values.items()}


def run(v, scale, **options):
    v = {**v, "b2_scale": v.get("b2_scale", "probs" if scale == "probs" else None)}
    return moire.grouped_mlp(v.pop("x"), v.pop("w1"), v.pop("w2"), GROUPS, **v, **options)


def factor(v, scale):
    return {"probs": v["probs"], "nothing": None, "own": v.get("b2_scale")}[scale]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", SCALES)
def test_values_and_every_gradient_are_those_of_the_formula(generator, scale, dtype):
    v = make(generator, scale, dtype)
    wanted = {name: truth.double(t) for name, t in v.items()}
    y = run(v, scale)
    given = {"b2_scale": None, **wanted} if scale == "nothing" else wanted
    round_to = None if dtype == torch.float32 else dtype
    y_wanted = truth.mlp(**given, splits=SPLITS, round_to=round_to)
    truth.assert_close(y, y_wanted, dtype, F, steps=3, name="y")
    grad = truth.draw(generator, 11, N, dtype=dtype)
    y.backward(grad)
    y_wanted.backward(grad.double())
    for name, mine in v.items():
        truth.assert_close(mine.grad, wanted[name].grad, dtype, 2 * F + 5, steps=5, name=name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scale", SCALES[1:])
def test_fused_is_its_parts_bit_for_bit(generator, scale, recipe):
    v, parts = (make(generator.manual_seed(7), scale, torch.bfloat16) for _ in range(2))
    y = run(v, scale, recipe=recipe)
    z = moire.grouped_linear(parts["x"], parts["w1"], GROUPS, bias=parts["b1"], recipe=recipe)
    act = moire.glu(z, parts["probs"], groups=GROUPS)
    options = {"bias": parts["b2"], "scale": factor(parts, scale), "recipe": recipe}
    wanted = moire.grouped_linear(act, parts["w2"], GROUPS, **options)
    assert torch.equal(y, wanted)
    grad = truth.draw(generator, 11, N, dtype=torch.bfloat16)
    y.backward(grad)
    wanted.backward(grad)
    for name, mine in v.items():
        assert torch.equal(mine.grad, parts[name].grad), name


@pytest.mark.parametrize("needed", ["b2", "b2_scale", "probs"])
def test_each_gradient_alone(generator, needed):
    v = make(generator, "own")
    alone = {name: t.detach().clone().requires_grad_(name == needed) for name, t in v.items()}
    for given in (v, alone):
        run(given, "own").sin().sum().backward()
    assert [name for name, t in alone.items() if t.grad is not None] == [needed]
    assert torch.equal(alone[needed].grad, v[needed].grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_without_autograd(generator, scale, recipe):
    v = make(generator, scale, torch.bfloat16)
    grad = truth.draw(generator, 11, N, dtype=torch.bfloat16)
    wanted = torch.autograd.grad(run(v, scale, recipe=recipe), list(v.values()), grad)
    options = {name: v[name] for name in ("b1", "b2", "probs")}
    options["b2_scale"] = v.get("b2_scale", "probs" if scale == "probs" else None)
    call = (grad, v["x"], v["w1"], v["w2"], GROUPS)
    found = moire.grouped_mlp_backward(*call, **options, recipe=recipe, wants=list(v))
    for name, t in zip(v, wanted):
        assert torch.equal(getattr(found, name), t), name


def test_numpy(generator):
    v = {name: t.detach().cpu() for name, t in make(generator, "own").items()}
    n = {name: t.numpy() for name, t in v.items()}
    for scale in (*SCALES[:2], "own"):
        given = {k: t for k, t in n.items() if k != "b2_scale" or scale == "own"}
        theirs = {k: t for k, t in v.items() if k != "b2_scale" or scale == "own"}
        assert np.array_equal(run(given, scale), run(theirs, scale).numpy())


@pytest.mark.parametrize("scale", SCALES)
def test_moe_is_plan_mlp_unpermute(generator, scale):
    v = make(generator, scale)
    idx = torch.tensor([[0, 2], [2, -1], [1, 0], [2, 1], [3, 2]])
    shape = idx.shape
    choices = {n: torch.rand(shape, generator=generator).requires_grad_() for n in ("w", "s")}
    b2_scale = {"probs": "probs", "nothing": None, "own": choices["s"]}[scale]
    x, weights = v["x"][:5].detach().requires_grad_(), choices["w"]
    names = ("w1", "w2", "b1", "b2")
    given = {name: v[name] for name in names}
    y = moire.moe(x, topk_idx=idx, topk_weights=weights, b2_scale=b2_scale, **given)
    plan = moire.make_plan(idx, E)
    rows, probs = moire.permute(x, plan, topk_weights=weights)
    of_rows = moire.permute(x, plan, topk_weights=choices["s"])[1] if scale == "own" else b2_scale
    given.update(groups=plan.groups, probs=probs, b2_scale=of_rows)
    wanted = moire.unpermute(moire.grouped_mlp(rows, **given), plan)
    assert y.shape == (5, N) and torch.equal(y, wanted)
    leaves = [x, weights, *(v[name] for name in names)]
    leaves += [choices["s"]] if scale == "own" else []
    grad = truth.draw(generator, 5, N)
    for a, b in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(wanted, leaves, grad)
    ):
        truth.assert_close(a, b.double(), torch.float32, F, steps=4)


def layers(**options):
    torch.manual_seed(3)
    options = {"bias": True, **options}
    fc1, fc2 = nn.GroupedLinear(E, H, 2 * F, **options), nn.GroupedLinear(E, F, N, **options)
    return [fc1, nn.ScaledGLU(), fc2]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("scale_bias", [True, False])
def test_modules_say_what_scales_fc2s_bias(generator, scale_bias, packed):
    fc1, glu, fc2 = modules = layers(scale_bias=scale_bias, packed=packed)
    x, probs = truth.draw(generator, 9, H), torch.rand(9, generator=generator).requires_grad_()
    act = glu(fc1(x, GROUPS), probs, GROUPS)
    wanted = fc2(act, GROUPS, scale=probs if scale_bias else None)
    mlp = nn.GroupedMLP(E, H, F, out_features=N, bias=True, scale_bias=scale_bias, packed=packed)
    mlp.load_state_dict(nn.fuse(modules).state_dict())
    unfused = nn.Sequential(*layers(scale_bias=scale_bias, packed=packed))
    unfused[1].register_forward_hook(lambda *_: None)
    (grad,) = torch.autograd.grad(wanted.sum(), probs, retain_graph=True)
    for module in (nn.Sequential(*modules), nn.fuse(modules), mlp, unfused):
        y = module(x, GROUPS, probs)
        assert torch.equal(y, wanted)
        truth.assert_close(
            torch.autograd.grad(y.sum(), probs)[0], grad.double(), torch.float32, N, steps=2
        )
    assert moire.explain(nn.Sequential(*modules), x, GROUPS, probs).not_fused == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_weight_gradients_of_a_layer_that_goes_elsewhere(generator, recipe):
    options = {"out_features": N, "bias": True, "scale_bias": False, "recipe": recipe}
    now, later = (nn.GroupedMLP(E, H, F, **options, delay_wgrad_compute=d) for d in (False, True))
    later.load_state_dict(now.state_dict())
    x, probs = truth.draw(generator, 9, H), torch.rand(9, generator=generator)
    for mlp in (now, later):
        mlp(x, SPLITS, probs).sin().sum().backward()
    later.backward_dw()
    for a, b in zip(now.parameters(), later.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_a_moe_layer_may_change_the_width(generator):
    experts = nn.GroupedMLP(E, H, F, out_features=N, bias=True, scale_bias=False)
    layer = nn.MoE(experts, nn.Router(H, E, 2))
    x = truth.draw(generator, 2, 3, H)
    choice = layer.router(x.view(6, H))
    assert torch.equal(layer(x), experts.route(x.view(6, H), *choice).view(2, 3, N))


WRONG = [
    ({"b2_scale": "prob"}, "b2_scale is 'prob', must be 'probs', None or an array"),
    ({"b2_scale": 2.0}, "b2_scale is 2.0, must be a Torch tensor as the first array is"),
    ({"b2_scale": torch.ones(11, dtype=torch.int32)}, "b2_scale is int32 [11], must be of a float"),
    ({"b2_scale": torch.ones(5)}, "b2_scale is fp32 [5], needs [capacity] = [11]"),
    ({"b2_scale": torch.ones(11), "b2": None}, "b2_scale is present but b2 is absent"),
    ({"w2": torch.ones(E, N + 1, F)}, "b2 is fp32 [3, 20], needs [G, N] = [3, 21]"),
]


@pytest.mark.parametrize("change, message", WRONG, ids=[m for _, m in WRONG])
def test_wrong_use_is_said(generator, change, message):
    v = {name: t.detach() for name, t in make(generator, "own").items()}
    change = {n: t.to(v["x"].device) if torch.is_tensor(t) else t for n, t in change.items()}
    with pytest.raises(moire.InvalidArgument, match="grouped_mlp: ") as e:
        moire.grouped_mlp(groups=GROUPS, **{**v, **change})
    assert message in str(e.value)


def test_wrong_use_of_moe_and_modules_is_said(generator):
    v = {name: t.detach() for name, t in make(generator, "nothing").items()}
    idx = torch.zeros(11, 1, dtype=torch.int64)
    call = {name: v[name] for name in ("x", "w1", "w2", "b1", "b2")}
    call.update(topk_idx=idx, topk_weights=v["probs"].view(11, 1), b2_scale=torch.ones(11))
    with pytest.raises(moire.InvalidArgument, match=r"b2_scale is \[11\], must be \[11, 1\] as"):
        moire.moe(**call)
    layer = nn.GroupedLinear(E, F, N, bias=True, scale_bias=False)
    with pytest.raises(
        moire.InvalidArgument, match="scale is given, but it was built with scale_bias"
    ):
        layer(torch.ones(9, F), SPLITS, scale=torch.ones(9))
