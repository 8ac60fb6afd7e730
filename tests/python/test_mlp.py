"""grouped_mlp and moe against plain PyTorch in double, and against their own parts bit for bit."""

import moire
import pytest
import torch
import truth

pytestmark = pytest.mark.usefixtures("device")

ACTS = {
    "swiglu": {},
    "geglu_tanh": {},
    "clamped_swiglu": {"limit": 1.5, "alpha": 1.702, "offset": 1.0},
    "reglu": {},
    "reglu2": {},
}
UNGATED = (0, "ungated")
LAYOUTS = [(0, "gate_first"), (0, "up_first"), (1, "gate_first"), (8, "gate_first"), UNGATED]
H, F = 24, 32


def make(generator, splits, dtype, tail=0, layout=None):
    rows, g, fc1 = sum(splits) + tail, len(splits), F if layout == UNGATED else 2 * F
    return {
        "x": truth.draw(generator, rows, H, dtype=dtype),
        "w1": truth.draw(generator, g, fc1, H, dtype=dtype, scale=H**-0.5),
        "w2": truth.draw(generator, g, H, F, dtype=dtype, scale=F**-0.5),
        "probs": torch.rand(rows, generator=generator),
        "b1": truth.draw(generator, g, fc1),
        "b2": truth.draw(generator, g, H),
    }


def run(values, splits, **options):
    values = dict(values)
    x, w1, w2 = values.pop("x"), values.pop("w1"), values.pop("w2")
    return moire.grouped_mlp(x, w1, w2, moire.Groups(splits=splits), **values, **options)


def compare(generator, values, splits, dtype, act="swiglu", layout=(0, "gate_first"), **options):
    ours = {k: v.clone().requires_grad_() for k, v in values.items()}
    wanted = {k: truth.double(v) for k, v in values.items()}
    kind = moire.Activation(act, **ACTS[act])
    y = run(ours, splits, act=kind, layout=moire.GluLayout(*layout), **options)
    round_to = None if dtype == torch.float32 else dtype
    y_wanted = truth.mlp(
        **wanted, splits=splits, act=act, layout=layout, round_to=round_to, **ACTS[act]
    )
    truth.assert_close(y, y_wanted, dtype, F, steps=3, name="y")
    grad = truth.draw(generator, *y.shape, dtype=dtype)
    y.backward(grad)
    y_wanted.backward(grad.double())
    for name, mine in ours.items():
        terms = 2 * F + (max(splits) if name[0] in "wb" else 0)
        truth.assert_close(mine.grad, wanted[name].grad, dtype, terms, steps=4, name=f"grad_{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", truth.SPLITS)
def test_forward_and_every_gradient(generator, name, dtype):
    splits = truth.SPLITS[name]
    compare(generator, make(generator, splits, dtype, tail=2), splits, dtype)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_and_layouts(generator, act, layout):
    splits = [5, 0, 9]
    values = make(generator, splits, torch.float32, layout=layout)
    compare(generator, values, splits, torch.float32, act, layout)


@pytest.mark.parametrize(
    "options", [{"save_act": True}, {"save_z": False}, {"recipe": "mxfp8"}, {"recipe": "fp8_block"}]
)
def test_experts_without_a_gate_have_the_bits_of_ups_of_one(generator, options):
    splits = [5, 0, 9]
    plain = make(generator, splits, torch.bfloat16, layout=UNGATED)
    gated = dict(plain)
    gated["w1"] = torch.cat([plain["w1"], torch.zeros_like(plain["w1"])], 1)
    gated["b1"] = torch.cat([plain["b1"], torch.ones_like(plain["b1"])], 1)
    results = []
    for values, layout in ((plain, "ungated"), (gated, "halves")):
        values = {k: v.clone().requires_grad_() for k, v in values.items()}
        y = run(values, splits, act="relu2", layout=layout, **options)
        y.backward(truth.draw(generator.manual_seed(1), *y.shape, dtype=y.dtype))
        gradients = {k: v.grad[:, :F] if k in ("w1", "b1") else v.grad for k, v in values.items()}
        results.append({"y": y.detach(), **gradients})
    if "recipe" in options:  # the products of grad_z are sums over other blocks
        results = [{k: v for k, v in r.items() if k != "x"} for r in results]
    else:  # sums of more terms
        truth.assert_close(results[0].pop("x"), results[1].pop("x").double(), torch.bfloat16, 2 * F)
    for name, mine in results[0].items():
        assert torch.equal(mine, results[1][name]), name


@pytest.mark.parametrize("options", [{"save_act": True}, {"recipe": "fp32"}])
def test_options_change_no_value(generator, options):
    splits = [5, 0, 9]
    compare(generator, make(generator, splits, torch.float32), splits, torch.float32, **options)


def test_the_comparison_fails_on_swapped_halves(generator):
    splits = [6, 3]
    values = make(generator, splits, torch.float32)
    wanted = {k: truth.double(v) for k, v in values.items()}
    y_wanted = truth.mlp(**wanted, splits=splits)
    for wrong in ("up_first", 1):
        layout = moire.GluLayout(0, wrong) if wrong == "up_first" else wrong
        with pytest.raises(AssertionError, match="differ"):
            truth.assert_close(
                run(values, splits, layout=layout), y_wanted, torch.float32, F, steps=3
            )


@pytest.mark.parametrize("needed", ["x", "w1", "w2", "b1", "b2", "probs"])
def test_each_gradient_alone(generator, needed):
    splits = [4, 0, 6]
    values = make(generator, splits, torch.float32)
    everything = {k: v.clone().requires_grad_() for k, v in values.items()}
    alone = {k: v.clone().requires_grad_(k == needed) for k, v in values.items()}
    for given in (everything, alone):
        run(given, splits).sin().sum().backward()
    assert [k for k, v in alone.items() if v.grad is not None] == [needed]
    assert torch.equal(alone[needed].grad, everything[needed].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_its_parts_bit_for_bit(generator, dtype):
    splits = [5, 0, 9]
    values = make(generator, splits, dtype)
    groups = moire.Groups(splits=splits)
    results = []
    for fused in (True, False):
        v = {k: t.clone().requires_grad_() for k, t in values.items()}
        if fused:
            y = run(v, splits)
        else:
            z = moire.grouped_linear(v["x"], v["w1"], groups, bias=v["b1"])
            act = moire.glu(z, v["probs"], groups=groups)
            y = moire.grouped_linear(act, v["w2"], groups, bias=v["b2"], scale=v["probs"])
        y.backward(torch.ones_like(y))
        results.append([y, *(t.grad for k, t in v.items() if k != "probs")])
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
def test_weight_forms_agree_with_packed(generator, listed, weight_layout):
    splits = [3, 4]
    values = make(generator, splits, torch.float32)
    wanted = run({k: v.requires_grad_() for k, v in values.items()}, splits)
    wanted.sum().backward()
    gradients = {k: values[k].grad for k in ("w1", "w2")}
    given, leaves = dict(values), {}
    for k in gradients:
        w = values[k].detach()
        w = w.clone() if weight_layout == "out_in" else w.transpose(1, 2).contiguous()
        leaves[k] = [t.clone().requires_grad_() for t in w] if listed else [w.requires_grad_()]
        given[k] = leaves[k] if listed else leaves[k][0]
    y = run(given, splits, weight_layout=weight_layout)
    assert torch.equal(y, wanted)
    y.sum().backward()
    for k, arrays in leaves.items():
        mine = torch.stack([t.grad for t in arrays]) if listed else arrays[0].grad
        mine = mine if weight_layout == "out_in" else mine.transpose(1, 2)
        truth.assert_close(mine, gradients[k].double(), torch.float32, max(splits))


def reference_moe(v, topk_idx, topk_weights, **glu_options):
    """Token by token, expert by expert, in double."""
    y = torch.zeros(v["x"].shape[0], v["w2"].shape[1], dtype=torch.float64)
    rows = []
    for t in range(topk_idx.shape[0]):
        total = y[t]
        for j, e in enumerate(topk_idx[t].tolist()):
            if 0 <= e < v["w1"].shape[0]:
                z = v["w1"][e] @ v["x"][t] + v["b1"][e]
                act = truth.glu(z[None], None, **glu_options)[0]
                total = total + topk_weights[t, j] * (v["w2"][e] @ act + v["b2"][e])
        rows.append(total)
    return torch.stack(rows) if rows else y


def test_moe_routes_weights_and_drops(generator):
    experts, tokens, k = 4, 13, 2
    values = make(generator, [0] * experts, torch.float32)
    values["x"] = truth.draw(generator, tokens, H)
    del values["probs"]
    topk_idx = torch.stack(
        [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    )
    topk_idx[3, 1], topk_idx[5, 0] = -1, experts  # dropped, both ways
    ours = {n: v.clone().requires_grad_() for n, v in values.items()}
    weights = torch.rand(tokens, k, generator=generator).requires_grad_()
    y = moire.moe(
        ours["x"], ours["w1"], ours["w2"], topk_idx, weights, b1=ours["b1"], b2=ours["b2"]
    )
    wanted = {n: truth.double(v) for n, v in values.items()}
    weights64 = truth.double(weights)
    y_wanted = reference_moe(wanted, topk_idx, weights64)
    truth.assert_close(y, y_wanted, torch.float32, F, steps=3, name="y")
    grad = truth.draw(generator, *y.shape)
    y.backward(grad)
    y_wanted.backward(grad.double())
    ours["weights"], wanted["weights"] = weights, weights64
    for name, mine in ours.items():
        truth.assert_close(
            mine.grad,
            wanted[name].grad,
            torch.float32,
            2 * F + tokens,
            steps=4,
            name=f"grad_{name}",
        )
    assert weights.grad[3, 1] == 0 and weights.grad[5, 0] == 0


@pytest.mark.parametrize("needed", ["x", "weights", "w1", "b2"])
def test_moe_each_gradient_alone(generator, needed):
    values = make(generator, [0] * 3, torch.float32)
    values["x"], values["weights"] = (
        truth.draw(generator, 5, H),
        torch.rand(5, 2, generator=generator),
    )
    topk_idx = torch.tensor([[0, 1]] * 5)
    gradients = []
    for only in (False, True):
        v = {n: t.clone().requires_grad_(not only or n == needed) for n, t in values.items()}
        y = moire.moe(v["x"], v["w1"], v["w2"], topk_idx, v["weights"], b1=v["b1"], b2=v["b2"])
        y.sin().sum().backward()
        gradients.append(v[needed].grad)
    assert torch.equal(*gradients)


def test_moe_equals_plan_mlp_unpermute(generator):
    values = make(generator, [0] * 3, torch.bfloat16)
    x, weights = (
        truth.draw(generator, 7, H, dtype=torch.bfloat16),
        torch.rand(7, 2, generator=generator),
    )
    topk_idx = torch.randint(3, (7, 2), generator=generator, dtype=torch.int32)
    w1, w2 = values["w1"], values["w2"]
    x = x.requires_grad_()
    plan = moire.make_plan(topk_idx, 3)
    rows, probs = moire.permute(x, plan, topk_weights=weights)
    probs = probs.detach()
    y = moire.unpermute(moire.grouped_mlp(rows, w1, w2, plan.groups, probs=probs), plan)
    fused = moire.moe(x, w1, w2, topk_idx, weights)
    assert torch.equal(y, fused)
    assert torch.equal(moire.moe(x, w1, w2, topk_idx, weights, plan=plan), fused)
    (a,) = torch.autograd.grad(y.float().square().sum(), x)
    (b,) = torch.autograd.grad(fused.float().square().sum(), x)
    assert torch.equal(a, b)
    indices = {"row_idx": plan.gather_idx, "scatter_idx": plan.scatter_idx}
    gathered = moire.grouped_mlp(x, w1, w2, plan.groups, probs=probs, **indices)
    (c,) = torch.autograd.grad(moire.unpermute(gathered, plan).float().square().sum(), x)
    assert torch.equal(a, c)


def test_moe_keeps_the_type_of_x_around_a_compute_dtype(generator):
    values = make(generator, [0] * 3, torch.float32)
    x = truth.draw(generator, 7, H).requires_grad_()
    w1, w2 = (values[n].requires_grad_() for n in ("w1", "w2"))
    topk_idx, weights = torch.tensor([[0, 2]] * 7), torch.rand(7, 2, generator=generator)
    y = moire.moe(x, w1, w2, topk_idx, weights, compute_dtype=torch.bfloat16)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == w1.grad.dtype == w2.grad.dtype == torch.float32
    low = moire.moe(x.bfloat16(), w1.bfloat16(), w2.bfloat16(), topk_idx, weights)
    assert torch.equal(y.bfloat16(), low) and not torch.equal(y, low.float())  # summed in FP32


def test_no_graph_keeps_nothing(generator):
    splits = [3, 4]
    values = make(generator, splits, torch.float32)
    values["w1"].requires_grad_()
    with torch.no_grad():
        y = run(values, splits)
    assert not y.requires_grad and torch.equal(y, run(values, splits))


def test_the_result_and_the_gradient_of_x_go_into_the_callers_buffers(generator):
    splits = [3, 4]
    values = make(generator, splits, torch.float32, tail=2)
    values["x"].requires_grad_()
    wanted = run(values, splits)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), values["x"])
    out, grad_x = torch.full((9, H), 7.0), torch.full((9, H), 7.0)
    y = run(values, splits, out=out, grad_x_out=grad_x)
    assert y.data_ptr() == out.data_ptr() and torch.equal(out, wanted)
    (grad,) = torch.autograd.grad(y.sum(), values["x"])
    assert grad.data_ptr() == grad_x.data_ptr() and torch.equal(grad_x, wanted_grad)
    for wrong in ({"out": out[:8]}, {"grad_x_out": grad_x[:, 1:]}, {"grad_x_out": grad_x.double()}):
        with pytest.raises(moire.InvalidArgument, match="grouped_mlp"):
            run(values, splits, **wrong).sum().backward()
