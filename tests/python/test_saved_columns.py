"""The column-wise copy of x that a forward keeps: where FP8 tensor cores will sum the weight
gradient it lies transposed, as they read it, and no bit of a gradient is another for that.
"""

import moire
import pytest
import torch
import truth
from moire.saved_columns import add_sums, sums_apart
from moire.wgrad import Beta

RECIPES = ["fp8_block", "mxfp8_fast"]
SPLITS = [700, 0, 273, 391, 1]  # 273 rows a group in the mean
HIDDEN, WIDTH = 256, 192
TRANSPOSED = (HIDDEN, 128 * (sum(SPLITS) // 128 + len(SPLITS)))
CANONICAL = (sum(SPLITS), HIDDEN)


def drawn(generator, splits=SPLITS, dtype=torch.bfloat16, layout="out_in"):
    g, rows = len(splits), sum(splits)
    w1, w2 = (g, 2 * WIDTH, HIDDEN), (g, HIDDEN, WIDTH)
    if layout == "in_out":
        w1, w2 = ((g, inner, out) for g, out, inner in (w1, w2))
    shapes = {"x": (rows, HIDDEN), "w1": w1, "w2": w2}
    return {name: truth.draw(generator, *s, dtype=dtype, scale=0.1) for name, s in shapes.items()}


def run(values, op, splits=SPLITS, **options):
    """(all gradients, the shapes of what was kept for them)."""
    x, w1, w2 = (t.clone().requires_grad_() for t in values.values())
    groups, shapes = moire.Groups(splits=splits), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
    ):
        if op == "mlp":
            y = moire.grouped_mlp(x, w1, w2, groups, **options)
        else:
            y = moire.grouped_linear(x, w1, groups, **options)
    torch.manual_seed(0)
    y.backward(torch.randn_like(y))
    return [t.grad for t in (x, w1, w2) if t.grad is not None], shapes


def has_cores():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("op", ["linear", "mlp"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_x_itself(generator, device, name, element, op, layout):
    values = drawn(generator, layout=layout)
    options = {"op": op, "weight_layout": layout}
    recipes = [moire.Recipe(name, element, save=s) for s in ("quantized", "input")]
    kept, wanted = (run(values, recipe=recipe, **options) for recipe in recipes)
    assert all(torch.equal(a, b) for a, b in zip(kept[0], wanted[0], strict=True))
    is_turned = device == "cuda" and has_cores()
    assert (TRANSPOSED in kept[1]) == is_turned and (CANONICAL in kept[1]) != is_turned
    assert TRANSPOSED not in wanted[1]


@pytest.mark.parametrize("name", RECIPES)
def test_what_tensor_cores_refuse_is_kept_in_order(generator, device, name):
    few = [500, 0, 190, 330, 60]  # 216 in the mean
    shape = (HIDDEN, 128 * (sum(few) // 128 + len(few)))
    assert shape not in run(drawn(generator, few), "mlp", few, recipe=name)[1]
    assert TRANSPOSED not in run(drawn(generator, dtype=torch.float16), "mlp", recipe=name)[1]
    with moire.settings(implementation="portable" if device == "cuda" else None):
        assert TRANSPOSED not in run(drawn(generator), "mlp", recipe=name)[1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_layer_has_the_same_gradients(generator, device, name):
    values = drawn(generator)

    def layer(x, w1, w2, offsets):
        groups = moire.Groups.of_offsets(offsets, x.shape[0])
        return moire.grouped_mlp(x, w1, w2, groups, recipe=name)

    offsets, found = torch.tensor([0, *SPLITS]).cumsum(0), []
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        given = [t.clone().requires_grad_() for t in values.values()]
        y = call(*given, offsets)
        found.append(torch.autograd.grad(y, given, torch.ones_like(y)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif(moire.info()["cuda"].startswith("off"), reason="a build for CPUs plans nothing")
@pytest.mark.parametrize("name", RECIPES)
def test_on_hopper_no_pass_transposes_x_in_the_backward(generator, name):
    values = drawn(generator)
    with moire.settings(plan_for="sm90"):
        plan = moire.explain(run, values, "mlp", recipe=name)
    policies = [step["policy"] for step in plan if step["op"] == "grouped_gemm_wgrad"]
    assert len(policies) == 2 and all(p.startswith("FP8 tensor cores") for p in policies)
    assert not any("transposing" in p for p in policies)


@pytest.mark.parametrize("recipe", [2, 3], ids=["mxfp8_fast", "fp8_block"])
def test_columns_do_not_depend_on_who_multiplies_the_rows(generator, device, recipe):
    """Rows of a y that TMA cannot store are multiplied by a plain kernel, of rows as it reads them:
    those of mxfp8_fast are not folded then, the columns all the same.
    """
    if device == "cpu" or not has_cores():
        pytest.skip("needs FP8 tensor cores")
    x, w1, _ = drawn(generator).values()
    offsets, found = torch.tensor([0, *SPLITS]).cumsum(0), []
    sizes = {"offsets": offsets, "num_groups": len(SPLITS), "capacity": sum(SPLITS)}
    for stride in (2 * WIDTH, 2 * WIDTH + 1):
        codes = torch.zeros(TRANSPOSED, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(TRANSPOSED[1] // 128, HIDDEN)
        y = torch.empty(sum(SPLITS), stride, dtype=torch.bfloat16)[:, : 2 * WIDTH]
        given = {"x": x, "w": [w1], "y": y, "recipe": recipe, "x_columnwise": (codes, scales)}
        plan = moire.explain(moire.call, "grouped_linear", **given, **sizes)
        assert ("FP8 tensor cores" in str(plan)) == (stride == 2 * WIDTH)
        moire.call("grouped_linear", **given, **sizes)
        found.append((codes.view(torch.uint8), scales))
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][0].any()


def buffers_of(layer, offset, dtype):
    """The layer's parameters, each with a main_grad that begins so many elements behind an address
    that TMA stores to."""
    for p in layer.parameters():
        memory = torch.ones(p.numel() + offset, dtype=dtype, device=p.device)
        p.main_grad = memory[offset:].view(p.shape)
    return list(layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "listed"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_main_grad_may_lie_anywhere(generator, device, name, packed, delayed, dtype):
    """FP8 tensor cores store to whole 16 bytes alone, and nobody knows in the forward to which: the
    same bits, and those of gradients that are added one by one."""
    sizes = {"in_features": HIDDEN, "out_features": WIDTH, "num_groups": len(SPLITS)}
    wgrad = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delayed}
    layer = moire.nn.GroupedLinear(
        **sizes, recipe=name, packed=packed, **wgrad, device=device, dtype=torch.bfloat16
    )
    xs = [truth.draw(generator, sum(SPLITS), HIDDEN, dtype=torch.bfloat16) for _ in range(4)]
    groups, found, shapes = moire.Groups(splits=SPLITS), [], []
    for offset in (0, 1):
        parameters = buffers_of(layer, offset, dtype)
        parameters[-1].overwrite_main_grad = True
        for x in xs:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
            ):
                y = layer(x.clone().requires_grad_(), groups)
            y.backward(torch.ones_like(y))
            if delayed:
                layer.backward_dw()
        found.append([p.main_grad.clone() for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert (TRANSPOSED in shapes) == (device == "cuda" and has_cores())
    for i, group in enumerate(found[0] if not packed else found[0][0]):
        parts = [x.split(SPLITS)[i].double().sum(0) for x in xs]
        overwrites = packed or i == len(SPLITS) - 1
        wanted = parts[-1] if overwrites else 1 + sum(parts)
        at_most = 0.1 * max(wanted.abs().max().item(), 1)  # of ones: every output's are the same
        assert (group.double().mean(0) - wanted).abs().max() <= at_most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_added_as_by_a_kernel(generator, dtype):
    grads = [truth.draw(generator, 3, 40, dtype=dtype) for _ in range(2)]
    flags = torch.tensor([1, 0], dtype=torch.uint8)
    for beta, adds in ((Beta(), (0, 0)), (Beta(1), (1, 1)), (Beta(per_group=flags), (1, 0))):
        memory = [torch.zeros(3 * 40 + 1, dtype=dtype)[1:].view(3, 40).copy_(g) for g in grads]
        to = {"w": (memory, beta), "others": (None, Beta())}
        sums = sums_apart(to)
        assert list(sums) == ["w"] and sums["w"][1] == Beta()
        for made in sums["w"][0]:
            assert made.dtype == torch.float32
            made.copy_(torch.rand(made.shape, generator=generator))
        add_sums(to, sums)
        for found, grad, made, is_added in zip(memory, grads, sums["w"][0], adds):
            assert torch.equal(found, (made + is_added * grad.float()).to(dtype))
    lies_well = torch.zeros(8, dtype=dtype)
    assert bool(sums_apart({"w": ([lies_well], Beta())})) == (dtype == torch.float16)


@pytest.mark.parametrize("name", RECIPES)
def test_calls_made_again_follow_settings(generator, name):
    """Recorded by default, then on the plain kernels, whole and in turns."""
    where = "cuda" if has_cores() else "cpu"
    x, w, _ = (t.to(where) for t in drawn(generator).values())
    groups = moire.Groups(splits=torch.tensor(SPLITS, device=where))
    for implementation in (None, None, None, "portable", "portable", None):
        with moire.settings(implementation=implementation if where == "cuda" else None):
            given = [t.clone().requires_grad_() for t in (x, w)]
            y = moire.grouped_linear(*given, groups, recipe=name)
            y.backward(torch.ones_like(y))
            assert all(t.grad.isfinite().all() for t in given)


@pytest.mark.parametrize("name", RECIPES)
def test_tensors_without_memory_have_shapes(name):
    x, w = (
        torch.empty(*s, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for s in (CANONICAL, (len(SPLITS), WIDTH, HIDDEN))
    )
    offsets = torch.zeros(len(SPLITS) + 1, dtype=torch.int64, device="meta")
    y = moire.grouped_linear(x, w, moire.Groups.of_offsets(offsets), recipe=name)
    assert y.shape == (sum(SPLITS), WIDTH)
