"""Calls that are made again by tapes.py: the same results, gradients, errors and refusals."""

import gc
import sys
import threading
import weakref

import moire
import pytest
import torch
from calls import CASES, ON, ROWS, SPLITS, F, G, H, K, groups_of, normal, of_mlp
from moire import invoke, tapes


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """How many calls were made again, of functions that remember nothing of other tests."""
    if invoke.compiled_for is None:
        pytest.skip("invoke.cpp was not built, or this Torch has no DLPack C exchange API")

    class Watched:
        count = 0

        def __getattr__(self, name):
            return getattr(module, name)

        def replay(self, *args):
            self.count += 1
            return module.replay(*args)

    module, watched = invoke.compiled, Watched()
    monkeypatch.setattr(invoke, "compiled", watched)
    for function in (moire.grouped_linear, moire.grouped_mlp, moire.moe, moire.router):
        kinds(function).clear()
    kinds(moire.make_plan).clear()
    kinds(moire.unpermute).clear()
    return watched


def kinds(function):
    """The tapes of a function."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__))
    return cells["tapes"].cell_contents


@pytest.fixture(params=["cpu", "cuda"])
def place(request, monkeypatch):
    if request.param == "cuda" and (
        not torch.cuda.is_available() or moire.info()["devices"][-1]["device"] != "cuda"
    ):
        pytest.skip("needs a GPU, and a build of moire with CUDA")
    monkeypatch.setitem(ON, "device", request.param)
    return request.param


def tensors_in(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from value


def outcome(function, given, has_gradients, seed):
    """What the call returns, and its gradients."""
    leaves = [t for t in tensors_in(given.values()) if has_gradients and t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    found = function(**given)
    results = list(found) if isinstance(found, tuple) else [found]
    y = results[-1]
    if has_gradients:
        generator = torch.Generator(y.device).manual_seed(seed)
        grad = torch.randn(y.shape, generator=generator, **ON).to(y.dtype)
        results += torch.autograd.grad(y, leaves, grad, allow_unused=True)
    return results


def same(one, other):
    return (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("has_gradients", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_call_that_is_made_again_gives_the_same(
    case, dtype, has_gradients, place, replays, monkeypatch
):
    for i in range(5):
        torch.manual_seed(i)
        function, given = CASES[case](dtype)
        before = replays.count
        found = outcome(function, given, has_gradients, i)
        # The first is made step by step, the second recorded; the backward pass begins to count
        # with the first call that was made again.
        wanted = (0 if i < 2 else 1) + (has_gradients and i >= 4)
        assert replays.count - before == wanted
        with monkeypatch.context() as patch:
            patch.setattr(invoke, "compiled_for", None)
            again = outcome(function, given, has_gradients, i)
        assert all(same(a, b) for a, b in zip(found, again)) and len(found) == len(again)
        assert [t.requires_grad for t in found[:1]] == [t.requires_grad for t in again[:1]]


def test_a_captured_call_is_made_again(place, replays):
    """On another stream, and as a graph."""
    if place == "cpu":
        pytest.skip("graphs are CUDA's")
    function, given = of_mlp(probs=True)(torch.bfloat16)
    given["x"].requires_grad_()

    def step():
        y = function(**given)
        return y, *torch.autograd.grad(y, given["x"], torch.ones_like(y))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = [step() for _ in range(5)][-1]
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), replays.count
    with torch.cuda.graph(graph):
        found = step()
    assert replays.count == before + 2
    for t in found:
        t.detach().fill_(7)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_weights_in_8_bits_have_a_gradient_after_calls_that_had_none(place, replays):
    """A key has what wants a gradient, and whether any may be had."""
    mlp = moire.nn.GroupedMLP(G, H, F, primary="mxfp8", device=ON["device"])
    x, groups = normal(ROWS, H, dtype=torch.float32), groups_of()
    for i in range(9):
        with torch.set_grad_enabled(i % 3 == 2):
            assert mlp(x, groups).requires_grad == (i % 3 == 2)
    leaf = torch.randn(ROWS, 4 * H, **ON).requires_grad_()
    w = normal(G, F, 4 * H, dtype=torch.float32)
    for i in range(9):
        quantized = moire.quantize(leaf, groups, recipe="mxfp8")
        with torch.set_grad_enabled(i % 3 == 2):
            y = moire.grouped_linear(quantized, w, groups, recipe="mxfp8")
        assert y.requires_grad == (i % 3 == 2)


def test_a_callers_buffer_has_the_history_of_every_call(place, replays):
    x, w, p = normal(ROWS, H), normal(G, F, H), normal(ROWS, F).requires_grad_()
    for _ in range(6):
        leaf, whole = x.clone().requires_grad_(), torch.ones(ROWS + 2, F, **ON).bfloat16()
        out, loss = whole[:ROWS], (p * whole[:ROWS]).sum()
        y = moire.grouped_linear(leaf, w, groups_of(), out=out)
        assert y is out and out._version == 1 and out.grad_fn is not None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        whole.sum().backward()
        assert leaf.grad is not None and leaf.grad.any(1).all()
    assert replays.count == 0


@pytest.mark.parametrize("experts", [64, 256, 319, 400])
def test_weights_of_many_experts_may_be_listed(experts, place, replays):
    w1, w2 = ([normal(*s).requires_grad_() for _ in range(experts)] for s in ((8, 16), (16, 4)))
    groups = groups_of([1] * experts)
    outcomes = []
    for _ in range(5):
        x = torch.ones(experts, 16, **ON).bfloat16().requires_grad_()
        y = moire.grouped_mlp(x, w1, w2, groups)
        outcomes.append([y, *torch.autograd.grad(y, (x, *w1, *w2), torch.ones_like(y))])
    assert replays.count == (0 if experts == 400 else 3 + (experts <= 256))
    for found in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(found, outcomes[0]))


def made_again(replays, call, times=4):
    """How many of so many calls were."""
    before = replays.count
    for _ in range(times):
        call()
    return replays.count - before


def test_what_differs_is_a_kind_of_its_own(replays):
    x, w, groups = normal(ROWS, H), normal(G, F, H), moire.Groups(splits=SPLITS)
    y = moire.grouped_linear(x, w, groups)
    assert made_again(replays, lambda: moire.grouped_linear(x, w, groups)) == 3
    leaf, room = x.clone().requires_grad_(), moire.Groups(splits=SPLITS, capacity=ROWS)
    others = [
        lambda: moire.grouped_linear(x.float(), w.float(), groups),
        lambda: moire.grouped_linear(x, w[:, :16].contiguous(), groups),
        lambda: moire.grouped_linear(x, list(w), groups),
        lambda: moire.grouped_linear(leaf, w, groups),
        lambda: moire.grouped_linear(x, w, groups=groups),
        lambda: moire.grouped_linear(x, w, room),
        lambda: moire.grouped_linear(x, w.mT.contiguous(), groups, weight_layout="in_out"),
        lambda: moire.grouped_linear(x, w, groups, recipe="mxfp8"),
        lambda: moire.grouped_linear(x, w, groups, recipe=moire.Recipe("mxfp8_fast")),
        lambda: moire.grouped_linear(x, w, groups, compute_dtype=torch.bfloat16),
    ]
    assert [made_again(replays, call) for call in others] == [2] * len(others)
    with torch.no_grad():
        again = moire.grouped_linear(leaf, w, groups)
    assert torch.equal(again, y) and not again.requires_grad
    assert moire.grouped_linear(leaf, w, groups).requires_grad


def test_one_tensor_twice_is_another_kind_than_two(replays):
    def call(b1, b2):
        function, given = of_mlp()(torch.bfloat16)
        return function(**{**given, "b1": b1, "b2": b2, "w2": normal(G, 2 * F, F)})

    both = normal(G, 2 * F)
    assert made_again(replays, lambda: call(both, both)) == 2
    assert made_again(replays, lambda: call(both, both.clone())) == 2


def test_calls_that_do_more_go_their_own_way(replays):
    function, given = of_mlp()(torch.bfloat16)
    out, leaf = torch.empty(ROWS, H, dtype=torch.bfloat16), given["x"].clone().requires_grad_()
    wide = {name: given[name].float() for name in ("w1", "w2")}
    strided = normal(ROWS, 2 * H)[:, ::2]
    for more in (
        {"out": out},
        {"x": leaf, "grad_x_out": torch.empty_like(out)},
        {"x": strided},
        {"b1": torch.zeros(G, 2 * F).bfloat16()},
        {"b1": None, "compute_dtype": torch.bfloat16, **wide},
        {"b1": None, "probs": torch.rand(ROWS, dtype=torch.float64)},
    ):
        version = out._version
        found = made_again(replays, lambda more=more: function(**{**given, **more}))
        assert found == (2 if "b1" in more else 0)
        assert (out._version - version) == (4 if "out" in more else 0)
    trained = torch.nn.Parameter(moire.quantize(given["w1"], columnwise=True))
    assert made_again(replays, lambda: function(**{**given, "w1": trained, "recipe": "mxfp8"})) == 2


def test_what_passes_a_gradient_on_may_not_be_overwritten_as_an_array(replays):
    leaf, groups = normal(ROWS, H).requires_grad_(), groups_of()
    w = normal(G, F, H)

    def quantized():
        return moire.quantize(leaf, groups, recipe="mxfp8")

    for _ in range(4):
        x = quantized().detach().requires_grad_()
        moire.grouped_linear(x, w, groups, recipe="mxfp8").backward(normal(ROWS, F))
        assert x.grad is not None
    assert replays.count > 0
    for _ in range(4):
        x = quantized()
        moire.grouped_linear(x, w, groups, recipe="mxfp8")
        x.rowwise.data.view(torch.uint8).zero_()
        with pytest.raises(moire.InvalidArgument, match="passes a gradient on was overwritten"):
            moire.grouped_linear(x, w, groups, recipe="mxfp8")


def test_autocast_is_part_of_a_kind(replays):
    function, given = of_mlp(probs=True)(torch.float32)
    leaves = [given[name].requires_grad_() for name in ("x", "w1", "w2", "probs")]
    found = {}
    for _ in range(5):
        for dtype in (None, torch.bfloat16, torch.float16):
            before = replays.count
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                y = function(**given)
            grads = torch.autograd.grad(y.sum() if dtype is None else y.float().sum(), leaves)
            assert y.dtype == (dtype or torch.float32)
            assert [g.dtype for g in grads] == [torch.float32] * 4
            same_as = found.setdefault(dtype, [y, *grads])
            assert all(map(torch.equal, same_as, [y, *grads]))
    assert replays.count - before == 2


def test_values_that_are_checked_are_checked_each_time(replays):
    tokens = normal(6, H)
    plan = moire.make_plan(torch.randint(0, G, (6, K)), G)
    function, given = of_mlp()(torch.bfloat16)
    given.update(x=tokens, groups=plan.groups, row_idx=plan.gather_idx)
    inverse = plan.scatter_idx.clone()
    assert made_again(replays, lambda: function(**given, scatter_idx=inverse)) == 0
    inverse[0, 0], inverse[1, 0] = inverse[1, 0].clone(), inverse[0, 0].clone()
    with pytest.raises(moire.InvalidArgument, match="must be the inverse"):
        function(**given, scatter_idx=inverse)


def test_an_error_is_the_one_of_the_first_call(replays):
    topk_idx = torch.zeros(6, K, dtype=torch.int64)
    assert made_again(replays, lambda: moire.make_plan(topk_idx, G)) == 2
    topk_idx[2, 1] = G + 5
    with pytest.raises(moire.InvalidArgument) as again:
        moire.make_plan(topk_idx, G)
    kinds(moire.make_plan).clear()
    with pytest.raises(moire.InvalidArgument) as first:
        moire.make_plan(topk_idx, G)
    assert str(first.value) == str(again.value)
    topk_idx[2, 1] = 0
    moire.make_plan(topk_idx, G)


def test_a_refusal_stays_one(replays):
    x, w, groups = normal(ROWS, H), normal(G, F, H), moire.Groups(splits=SPLITS)
    assert made_again(replays, lambda: moire.grouped_linear(x, w, groups)) == 2
    with moire.settings(implementation="none such"), pytest.raises(moire.Error, match="none such"):
        moire.grouped_linear(x, w, groups)
    with pytest.raises(moire.InvalidArgument, match="weight_layout"):
        moire.grouped_linear(x, w, groups, weight_layout="sideways")


def test_who_watches_sees_every_call(replays):
    function, given = of_mlp()(torch.bfloat16)
    made_again(replays, lambda: function(**given))
    before = replays.count
    explained = moire.explain(lambda: function(**given))
    assert "grouped_gemm_glu" in str(explained)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(**given).dtype == torch.bfloat16
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        function(**given)
    assert any("grouped_mlp" in name for name in seen)
    with torch.profiler.profile() as profile:
        function(**given)
    assert any("grouped_mlp" in event.key for event in profile.key_averages())
    with torch.autograd.forward_ad.dual_level():
        function(**given)
        dual = torch.autograd.forward_ad.make_dual(given["x"], given["x"])
        with pytest.raises(moire.Unsupported, match="tangent"):
            function(**{**given, "x": dual})
    assert replays.count == before
    assert torch.equal(function(**given), function(**given)) and replays.count == before + 2


def test_gradients_are_those_that_are_asked_for(replays):
    for _ in range(6):
        function, given = of_mlp(biases=True)(torch.float32)
        leaves = [given[name].requires_grad_() for name in ("x", "w1", "w2", "b1", "b2")]
        y = function(**given)
        grad = torch.randn_like(y)
        (of_w2,) = torch.autograd.grad(y, (leaves[2],), grad, retain_graph=True)
        found = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        assert torch.equal(of_w2, found[2])
        assert all(map(torch.equal, torch.autograd.grad(y, leaves, grad), found))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, leaves, grad)


def test_what_the_backward_reads_may_not_be_written(replays):
    for _ in range(4):
        function, given = of_mlp()(torch.float32)
        given["x"].requires_grad_()
        y = function(**given)
        given["w1"].add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            y.sum().backward()


def test_an_incoming_gradient_may_lie_as_it_likes(replays):
    for _ in range(5):
        function, given = of_mlp()(torch.float32)
        x = given["x"].requires_grad_()
        function(**given).sum().backward()  # one number, expanded
        first = x.grad.clone()
        x.grad = None
        function(**given).backward(torch.ones(ROWS, H))
        assert torch.equal(x.grad, first)


def test_double_backward_is_refused(replays):
    for _ in range(4):
        function, given = of_mlp()(torch.float32)
        x = given["x"].requires_grad_()
        (grad,) = torch.autograd.grad(function(**given).sum(), x, create_graph=True)
        with pytest.raises(moire.Unsupported, match="a second derivative is asked for"):
            grad.sum().backward()


def test_tapes_keep_no_tensors(replays):
    function, given = of_mlp(biases=True)(torch.float32)
    for leaf in tensors_in(given.values()):
        leaf.requires_grad_()
    for _ in range(4):
        y = function(**given)
        y.backward(torch.ones_like(y))
    alive = [weakref.ref(t) for t in (y, *tensors_in(given.values()))]
    del y, given, leaf
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_no_reference_is_kept(replays):
    function, given = of_mlp(layout=moire.GluLayout(block=16), recipe="mxfp8")(torch.float32)
    counted = (*given.values(), given["groups"].offsets, None, False, True, 0, torch.float32)
    made_again(replays, lambda: function(**given))
    before = [sys.getrefcount(value) for value in counted]
    assert made_again(replays, lambda: function(**given), 200) == 200
    after = [sys.getrefcount(value) for value in counted]
    assert all(abs(a - b) < 50 for a, b in zip(after, before))


def test_a_function_keeps_so_many_kinds(replays):
    w, kept = normal(G, F, H), tapes._MOST_KINDS
    for rows in range(kept + 20):
        moire.grouped_linear(normal(rows, H), w, moire.Groups(splits=[rows, 0, 0]))
        assert len(kinds(moire.grouped_linear)) <= kept
    assert replays.count == 0


def test_threads_record_and_replay_on_their_own(replays):
    wrong = []

    def work(seed):
        for i in range(20):
            generator = torch.Generator().manual_seed(100 * seed + i)
            x = torch.randn(ROWS, H, generator=generator).requires_grad_()
            w = torch.randn(G, F, H, generator=generator).requires_grad_()
            y = moire.grouped_linear(x, w, moire.Groups(splits=SPLITS))
            y.backward(torch.ones_like(y))
            wanted = torch.cat([p @ m.T for p, m in zip(x.detach().split(SPLITS), w.detach())])
            if not torch.allclose(y.detach(), wanted, atol=1e-4):
                wrong.append((seed, i))
            if not torch.allclose(w.grad.sum((0, 1)), x.detach().sum(0) * F, atol=1e-2):
                wrong.append((seed, i, "gradient"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and replays.count > 100


def test_what_a_transform_left_behind_is_refused(replays):
    function, given = of_mlp()(torch.float32)
    given["w1"].requires_grad_()
    left = []

    def loss(x):
        left.append(x)
        return x.sum()

    torch.func.grad(loss)(given["x"])
    assert made_again(replays, lambda: function(**given)) == 2
    with pytest.raises(moire.Unsupported, match="inside a transform"):
        function(**{**given, "x": left[0]})


def test_inference_mode_gives_inference_tensors(replays):
    function, given = of_mlp()(torch.bfloat16)
    for _ in range(4):
        with torch.inference_mode():
            assert function(**given).is_inference()
    for _ in range(4):
        assert not function(**given).is_inference()


def test_a_failed_recording_leaves_nothing_behind(replays, monkeypatch):
    function, given = of_mlp()(torch.bfloat16)
    function(**given)

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tapes, "ran", fails)
        with pytest.raises(MemoryError):
            function(**given)
    assert tapes.recording() is None
    assert made_again(replays, lambda: function(**given)) == 3


def test_signatures_tell_arguments_apart():
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)

    def key(*args, has_gradients=False, **kwargs):
        found = invoke.compiled.sign((args, kwargs), has_gradients)
        return found and found[0]

    values = [1, 1.0, True, None, "1", (1,), [1], "", (), [], 2**40, -1, {"a": 1}, {"b": 1}]
    values += [torch.float32, torch.float16, moire.Recipe("mxfp8"), moire.Recipe("fp8_block")]
    keys = [key(x, value) for value in values] + [key(x, a=value) for value in values]
    keys += [key(x, x), key(x, y), key(x, [y]), key(x, [x, y]), key(x, [y, x]), key(x, (y, x))]
    keys += [key(t) for t in (x, x[:1], x.reshape(3, 2), x.reshape(6), x.double(), x.int())]
    leaf = torch.zeros(2, 3, requires_grad=True)
    keys += [key(leaf, has_gradients=True), key(torch.nn.Parameter(leaf.detach()))]
    assert None not in keys and len(set(keys)) == len(keys)
    assert key(leaf) == key(x) == key(y) and key(x, "ab") == key(x, "".join(["a", "b"]))
    for value in (object(), 2**70, print, torch.zeros(2, 2).t(), x.to("meta"), x.to_sparse()):
        assert key(x, value) is None
    assert key(1, "a") is None  # no tensor: nothing says where it would run
    assert key(*(torch.zeros(1) for _ in range(700))) is None
    assert key(x, "a" * 40000) is None
