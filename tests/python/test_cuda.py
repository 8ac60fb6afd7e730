"""What Torch tensors on a GPU add: streams, graphs, the allocator, autograd's threads, another
device to copy from, and errors that are found there.
"""

import moire
import pytest
import torch
import truth
from graphs import captured
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from samples_fp8 import places, ragged, same, uniform
from truth_fp8 import assert_same_bytes

pytestmark = pytest.mark.usefixtures("gpu")
SPLITS = [70, 0, 130, 56]
H, F = 64, 128
NAMES = ("x", "w1", "w2", "probs")


@pytest.fixture
def gpu(device):
    if device != "cuda":
        pytest.skip("is about the GPU")


def make(generator, dtype=torch.bfloat16, requires_grad=False):
    rows, groups = sum(SPLITS), len(SPLITS)
    shapes = [(rows, H), (groups, 2 * F, H), (groups, H, F)]
    values = [truth.draw(generator, *s, dtype=dtype, scale=s[-1] ** -0.5) for s in shapes]
    values.append(torch.rand(rows, generator=generator))
    return [v.requires_grad_(requires_grad) for v in values]


def mlp(x, w1, w2, probs, groups, **options):
    return moire.grouped_mlp(x, w1, w2, groups, probs=probs, **options)


def test_calls_run_on_the_current_stream(generator):
    values, groups = make(generator), moire.Groups(splits=SPLITS)
    wanted = mlp(*values, groups)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = mlp(*values, groups)
        assert not stream.query()  # so that the call had not waited, and is behind the sleep
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, wanted)


def in_8_bits(x, w, splits):
    """What operations on GroupedTensors that wait for nothing make of rows and of weights."""
    groups = moire.Groups(splits=splits, capacity=x.shape[0])
    both = moire.quantize(x, groups, columnwise=True)
    rows = moire.quantize(x, groups).requantize()
    with torch.no_grad():
        weight = moire.quantize(torch.zeros_like(w), columnwise=True).copy_(w)
    turned = moire.convert_glu(weight, "halves", 32, dim=1)
    found = [both, weight, rows, rows.clone().zero_().copy_(rows), turned, weight[1].clone()]
    return found, [t.dequantize(direction="columnwise") for t in found]


def test_operations_on_8_bits_run_on_the_current_stream(generator):
    x, w, *_ = make(generator)
    splits = torch.tensor(SPLITS)
    wanted = in_8_bits(2 * x, 2 * w, splits)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        x.mul_(2), w.mul_(2)  # behind the sleep, as all that reads them must be
        found = in_8_bits(x, w, splits)
        assert not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    for mine, theirs in zip(found[0], wanted[0]):
        assert_same_bytes(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1]))


def test_a_graph_writes_8_bits_anew_from_what_it_finds(generator):
    x, w, *_ = make(generator)
    splits = torch.tensor(SPLITS)
    held = moire.quantize(x, moire.Groups(splits=splits), columnwise=True)
    parameter = torch.nn.Parameter(moire.quantize(w, columnwise=True))

    def step():
        held.quantize_(x, moire.Groups(splits=splits, capacity=x.shape[0]))
        with torch.no_grad():
            parameter.copy_(w)
        return in_8_bits(x, w, splits)

    replay, (tensors, values) = captured(step)
    for now in (SPLITS, [256, 0, 0, 0], [1, 127, 97, 31]):
        splits.copy_(torch.tensor(now))
        x.mul_(3), w.mul_(3)
        replay()
        of_now, values_of_now = in_8_bits(x, w, splits)
        for mine, theirs in zip((held, parameter, *tensors), (*of_now[:2], *of_now)):
            assert_same_bytes(mine, theirs)
        assert all(torch.equal(a, b) for a, b in zip(values, values_of_now))
        assert held.groups.splits.tolist() == now


COPIES = {
    "copy_": lambda t, other, values: t.copy_(other),
    "copy_ of values": lambda t, other, values: t.copy_(values.to(other.device)),
    "load_state_dict": lambda t, other, values: t.load_state_dict(other.state_dict()),
}


@pytest.mark.parametrize("kind", [ragged, uniform])
@pytest.mark.parametrize("how", COPIES)
def test_it_is_copied_from_the_other_device(generator, kind, how):
    values, there = kind(generator)
    here = there.to("cpu").clone()
    for target, source in ((there.clone(), here), (here.clone(), there)):
        assert COPIES[how](target.zero_(), source, values) is target and same(target, source)
        assert places(target) == {target.device.type} != {source.device.type}
        assert torch.equal(target.dequantize().cpu(), source.dequantize().cpu())
        if target.groups is not None:
            assert target.groups.offsets.device == target.device
        if target.device.type == "cuda":  # of which a graph could upload nothing
            replay, values_of_graph = captured(target.dequantize)
            replay()
            assert torch.equal(values_of_graph, target.dequantize())
    with pytest.raises(moire.InvalidArgument, match="all must be on one device"):
        there.quantize_(values.cpu())


def test_a_graph_captured_once_follows_the_splits(generator):
    leaves = make(generator, requires_grad=True)
    splits = torch.tensor(SPLITS)
    grad_y = truth.draw(generator, *leaves[0].shape, dtype=torch.bfloat16)

    def step():
        groups = moire.Groups(splits=splits, capacity=leaves[0].shape[0])
        y = mlp(*leaves, groups)
        return [y, *torch.autograd.grad(y, leaves, grad_y)]

    replay, found = captured(step)
    for now in (SPLITS, [256, 0, 0, 0], [0, 0, 0, 0], [1, 127, 97, 31]):
        splits.copy_(torch.tensor(now))
        replay()
        for name, mine, eager in zip(("y", *NAMES), found, step()):
            assert torch.equal(mine, eager), (now, name)


@pytest.mark.parametrize("is_decoded", [False, True])
def test_a_captured_layer_makes_the_copies_of_its_weights_unless_it_is_told_not_to(
    generator, is_decoded
):
    recipe = moire.Recipe("mxfp8", dequantized_weights=is_decoded)
    layer = moire.nn.GroupedLinear(len(SPLITS), H, F, recipe=recipe, dtype=torch.bfloat16)
    x, groups, graphs = make(generator)[0], moire.Groups(splits=SPLITS), {}

    def plain():
        return moire.grouped_linear(x, layer.weight.detach(), groups, recipe="mxfp8")

    before = plain()
    for is_first in (None, False):
        assert torch.equal(layer(x, groups), before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            y = layer(x, groups, is_first_microbatch=is_first)
        graphs[is_first] = graph, y
    layer.weight.data.mul_(2)  # which nobody counts
    graphs[False][0].replay()
    assert torch.equal(graphs[False][1], before)
    graphs[None][0].replay()
    assert torch.equal(graphs[None][1], plain())
    with torch.no_grad():
        assert torch.equal(layer(x, groups, is_first_microbatch=False), plain())
        layer.weight.mul_(2)
        assert torch.equal(layer(x, groups), plain())
    moire.check()


def test_a_weight_in_8_bits_goes_there_with_its_module(generator):
    with torch.device("cpu"):
        layer = moire.nn.GroupedLinear(
            2, H, F, primary="mxfp8", preserve_high_precision_init_val=True
        )
        before, drawn = layer.weight.detach().clone(), layer.weight.get_high_precision_init_val()
    layer.to("cuda")
    assert isinstance(layer.weight, moire.GroupedTensor) and layer.weight.device.type == "cuda"
    for (_, there), (_, here) in zip(layer.weight.arrays(), before.arrays()):
        assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))
    assert layer.weight.get_high_precision_init_val() is drawn


@pytest.mark.parametrize("recipe", [None, "mxfp8", "mxfp8_fast", "fp8_block"])
def test_a_hundred_runs_give_the_same_bits(generator, recipe):
    leaves, groups = make(generator, requires_grad=True), moire.Groups(splits=SPLITS)
    grad_y = truth.draw(generator, *leaves[0].shape, dtype=torch.bfloat16)
    first = None
    for _ in range(100):
        y = mlp(*leaves, groups, recipe=recipe)
        found = [y, *torch.autograd.grad(y, leaves, grad_y)]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first))


def test_settings_and_explain_reach_the_threads_of_autograd(generator):
    leaves, groups = make(generator, requires_grad=True), moire.Groups(splits=SPLITS)
    with moire.settings(implementation="portable"):
        steps = moire.explain(lambda: mlp(*leaves, groups).sum().backward())
    assert [s["op"] for s in steps].count("grouped_gemm_wgrad") == 2
    for step in steps:
        is_gemm = step["op"].startswith("grouped_gemm")
        assert step["implementation"] == ("portable" if is_gemm else "cuda"), step
    y = mlp(*leaves, groups).sum()
    with (
        moire.settings(implementation="no such thing"),
        pytest.raises(moire.Unsupported, match="no such thing"),
    ):
        y.backward()


def test_splits_of_the_host_are_uploaded_once(generator):
    values = make(generator)
    with torch.device("cpu"):
        groups = moire.Groups(splits=SPLITS)
    assert groups.offsets.is_cpu
    wanted = mlp(*values, moire.Groups(splits=torch.tensor(SPLITS)))
    assert torch.equal(mlp(*values, groups), wanted)
    uploaded = groups.offsets_for(values[0])
    assert uploaded.is_cuda and groups.offsets_for(values[0]) is uploaded


def test_operands_on_two_devices_are_refused(generator):
    x, w1, w2, probs = make(generator)
    groups = moire.Groups(splits=SPLITS)
    for wrong in ((x, w1.cpu(), w2, probs), (x, w1, w2, probs.cpu()), (x.cpu(), w1, w2, probs)):
        with pytest.raises(moire.InvalidArgument, match="all must be on one device"):
            mlp(*wrong, groups)


def test_bad_splits_are_found_there_and_raised_by_check(generator):
    values = make(generator)
    wanted = mlp(*values, moire.Groups(splits=SPLITS))
    moire.check()
    moire.Groups(splits=torch.tensor([3, -2, 1]))
    with pytest.raises(moire.InvalidArgument, match="group 1 has -2 rows"):
        moire.check()
    rows = values[0].shape[0]
    offsets = torch.tensor([0, 70, 60, 200, 256])
    with pytest.raises(moire.InvalidArgument, match="group 1 has offsets 70 to 60"):
        mlp(*values, moire.Groups.of_offsets(offsets, rows))
        moire.check()
    moire.check()
    assert torch.equal(mlp(*values, moire.Groups(splits=SPLITS)), wanted)


def test_nothing_but_the_result_stays_allocated(generator):
    values, groups = make(generator), moire.Groups(splits=SPLITS)
    mlp(*values, groups)
    before = torch.cuda.memory_allocated()
    y = mlp(*values, groups)
    assert torch.cuda.memory_allocated() - before == -(-y.nbytes // 512) * 512


def test_no_call_waits_for_the_gpu(generator):
    leaves, groups = make(generator, requires_grad=True), moire.Groups(splits=SPLITS)
    mlp(*leaves, groups).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mlp(*leaves, groups).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_equals_eager(generator):
    torch._dynamo.reset()
    leaves = make(generator, requires_grad=True)
    splits = torch.tensor(SPLITS)

    def step(x, w1, w2, probs):
        return mlp(x, w1, w2, probs, moire.Groups(splits=splits, capacity=x.shape[0])) * 2

    results = []
    for function in (step, torch.compile(step, fullgraph=COMPILES_WHOLE_GRAPHS)):
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y.float().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_main_grad_accumulates_in_fp32_there(generator):
    values, groups = make(generator), moire.Groups(splits=SPLITS)
    layer = moire.nn.GroupedMLP(
        len(SPLITS), H, F, dtype=torch.bfloat16, accumulate_into_main_grad=True
    )
    with torch.no_grad():
        layer.fc1.weight.copy_(values[1])
        layer.fc2.weight.copy_(values[2])
    for p in layer.parameters():
        p.main_grad = torch.ones(p.shape)
    layer(values[0], groups, values[3]).float().sum().backward()
    plain = [v.clone().requires_grad_() for v in values]
    mlp(*plain, groups).float().sum().backward()
    for p, reference in zip(layer.parameters(), plain[1:3]):
        assert p.main_grad.dtype == torch.float32
        wanted = reference.grad.double()
        error = (p.main_grad.double() - 1 - wanted).norm() / wanted.norm()
        assert error < 1e-2
