"""8-bit copies of weights: made once per update, in memory that stays, never stale."""

import copy
import pickle

import moire
import numpy as np
import pytest
import torch
import truth
import truth_fp8
from moire import nn
from moire.arrays import Numpy, Torch
from weight_updates import updates

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 40, 72
SPLITS = [33, 0, 7]
RECIPES = ["mxfp8", "fp8_block"]


@pytest.fixture
def quantised(monkeypatch):
    """The shapes of the weights that were quantised, or prepared, in order."""
    calls = []

    def counting(fw, run):
        def counted(name, fields):
            if name in ("quantize_weight", "prepare_weight"):
                source = fields["source" if name == "quantize_weight" else "w"]
                calls.append(tuple(source[0].shape))
            return run(name, fields)

        monkeypatch.setattr(fw, "run", staticmethod(counted))

    counting(Torch, Torch.run)
    counting(Numpy, Numpy.run)
    return calls


def layer(**options):
    torch.manual_seed(3)
    return nn.GroupedLinear(E, H, F, **{"recipe": "mxfp8", **options})


def fresh(module, x, recipe="mxfp8"):
    """The layer's result on its parameters as they are now, without copies."""
    weights = [t.detach() for t in module._all("weight")]
    weights = weights if len(weights) > 1 else weights[0]
    options = {"recipe": recipe, "weight_layout": module.weight_layout}
    return moire.grouped_linear(x, weights, moire.Groups(splits=SPLITS), **options)


def on_cpu(w):
    """The same memory as a NumPy array."""
    if not w.is_cpu:
        pytest.skip("NumPy's arrays are a CPU's")
    return w.numpy()


def addresses(module):
    (entry,) = set(module._copies._entries.values())
    if isinstance(entry.tensor, moire.PreparedWeight):
        return [entry.tensor.memory.data_ptr()]
    return [array.data_ptr() for _, array in entry.tensor.arrays()]


@pytest.mark.parametrize("kind", ["tensor", "list", "numpy"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_explicit_version(generator, quantised, kind, recipe):
    w = truth.draw(generator, E, F, H)
    given = {"tensor": lambda: w, "list": lambda: list(w), "numpy": lambda: on_cpu(w)}[kind]()
    cache = moire.WeightCache(recipe)
    first = cache.get(given, 1)
    truth_fp8.assert_same_bytes(first, moire.quantize(given, recipe=recipe, columnwise=True))
    del quantised[:]
    assert cache.get(given, 1) is first and not quantised
    w *= 2
    assert cache.get(given, 1) is first and not quantised  # the version says that nothing changed
    assert cache.get(given, 2) is first and len(quantised) == 1  # the same memory, other bytes
    truth_fp8.assert_same_bytes(first, moire.quantize(given, recipe=recipe, columnwise=True))
    cache.get(given, None)
    cache.get(given, None)
    assert len(quantised) == 4  # with the two comparisons' own


def test_weights_are_told_apart_and_forgotten(generator, quantised):
    a, b = truth.draw(generator, E, F, H), truth.draw(generator, E, F, H)
    cache = moire.WeightCache()
    assert cache.get(a, 0) is not cache.get(b, 0)
    assert cache.get(a, 0, columnwise=False) is cache.get(a, 0)  # has more than was asked for
    narrow = moire.WeightCache()
    assert not narrow.get(a, 0, columnwise=False).has_columnwise
    assert narrow.get(a, 0).has_columnwise
    for other in (a[:, :8].clone(), a.bfloat16(), a.clone()):
        a.data = other
        assert cache.get(a, 0).shape == tuple(a.shape)
    del b
    cache.get(a, 0)
    c = truth.draw(generator, E, F, H)
    cache.get(c, 0)
    assert len(set(cache._entries.values())) == 2  # a and c; b is gone
    cache.clear()
    del quantised[:]
    cache.get(a, 0)
    assert len(quantised) == 1
    for lost in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert lost.recipe == cache.recipe and not lost._entries
    with pytest.raises(moire.InvalidArgument, match="WeightCache: recipe is 'bf16', must be one"):
        moire.WeightCache("bf16")


TEMPORARIES = {
    "detach": lambda w: w.detach(),
    "view": lambda w: w[1:],
    "transposed": lambda w: w.transpose(1, 2).transpose(1, 2),
    "list": lambda w: [w[g] for g in range(E)],
    "unbind": lambda w: w.detach().unbind(),
    "numpy": lambda w: w.numpy()[:],
    "numpy list": lambda w: list(w.numpy()),
}


@pytest.mark.parametrize("how", TEMPORARIES)
def test_temporaries_of_one_weight_have_one_copy(generator, quantised, how):
    w, show, cache = truth.draw(generator, E, F, H), TEMPORARIES[how], moire.WeightCache()
    if "numpy" in how:
        array = on_cpu(w).copy()
        show = {"numpy": lambda _: array[:], "numpy list": lambda _: list(array)}[how]
    first = cache.get(show(w), 1)
    for _ in range(20):
        assert cache.get(show(w), 1) is first
        truth.draw(generator, E, F, H)  # ids and addresses that are free again are used again
    assert len(quantised) == 1
    assert (
        cache.get(show(w), 2) is first
        and len(quantised) == 2
        and len(set(cache._entries.values())) == 1
    )
    truth_fp8.assert_same_bytes(first, moire.quantize(show(w), columnwise=True))


def test_views_of_one_memory_are_told_apart(generator):
    w = truth.draw(generator, 2 * E, H, H).bfloat16()
    cache = moire.WeightCache()
    shown = {
        "whole": lambda: w.detach(),
        "head": lambda: w[:E],
        "rest": lambda: w[E:],
        "transposed": lambda: w.transpose(1, 2),
        "list": lambda: list(w[:E]),
        "reversed": lambda: list(w[:E])[::-1],
        "bits": lambda: w[:E].view(torch.float16),
    }
    made = {name: cache.get(show(), 0) for name, show in shown.items()}
    assert len({id(tensor) for tensor in made.values()}) == len(shown)
    for name, show in shown.items():
        assert cache.get(show(), 0) is made[name]
        truth_fp8.assert_same_bytes(made[name], moire.quantize(show(), columnwise=True))


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_memory_that_is_used_again_is_another_weight(generator, framework):
    cache, taken = moire.WeightCache(), set()
    for i in range(30):
        w = truth.draw(generator, E, F, H)
        w = w if framework == "torch" else on_cpu(w).copy()
        taken.add(w.data_ptr() if framework == "torch" else w.ctypes.data)
        found = cache.get(w[:], 1)
        truth_fp8.assert_same_bytes(found, moire.quantize(w, columnwise=True))
        assert len(set(cache._entries.values())) == 1, i  # the last one is gone, and its copies
        del w
    assert len(taken) < 30


def test_a_parameter_with_other_memory_is_the_same_weight(generator):
    p, cache = torch.nn.Parameter(truth.draw(generator, E, F, H)), moire.WeightCache()
    first, old = cache.get(p, 0), p.detach()
    p.data = truth.draw(generator, E, F, H)
    assert cache.get(p, 1) is first and cache.get(p.detach(), 1) is first
    other = cache.get(old, 1)
    assert other is not first
    truth_fp8.assert_same_bytes(other, moire.quantize(old, columnwise=True))
    truth_fp8.assert_same_bytes(first, moire.quantize(p.detach(), columnwise=True))
    q = torch.nn.Parameter(truth.draw(generator, E, F, H))
    of_q = cache.get(q, 1)
    p.data = q.data  # tied from now on
    assert cache.get(p, 2) is first and cache.get(q, 2) is of_q
    assert cache.get(p, 2) is first
    with torch.no_grad():
        q.mul_(2)
    cache.invalidate()
    for tensor in (cache.get(q, 2), cache.get(p, 2), cache.get(q.detach(), 2)):
        truth_fp8.assert_same_bytes(tensor, moire.quantize(q.detach(), columnwise=True))


def test_copies_have_the_tag_that_was_asked_for(generator, quantised):
    w1, w2 = truth.draw(generator, E, 2 * F, H), truth.draw(generator, E, H, F)
    cache, x = moire.WeightCache(), truth.draw(generator, 40, H)
    tagged = cache.get(w1, 1, layout=8)
    assert tagged.layout == moire.GluLayout.of(8) and cache.get(w1, 1) is tagged
    assert cache.get(w1, 1, layout=moire.GluLayout(8)) is tagged and len(quantised) == 1
    options = {"recipe": "mxfp8", "w1_quantized": tagged}
    moire.grouped_mlp(x, w1, w2, moire.Groups(splits=SPLITS), layout=8, **options)
    with pytest.raises(moire.InvalidArgument, match="w1_quantized was quantised with gate and up"):
        moire.grouped_mlp(x, w1, w2, moire.Groups(splits=SPLITS), **options)
    assert cache.get(w1, 1, layout="halves").layout == moire.GluLayout()
    assert tagged.layout == moire.GluLayout.of(8)
    with pytest.raises(moire.InvalidArgument, match="WeightCache.get: layout is 'x'"):
        cache.get(w1, 1, layout="x")


@pytest.mark.parametrize("how", list(updates(layer())))
@pytest.mark.parametrize("packed", [True, False])
def test_copies_are_made_anew_when_a_parameter_changed(generator, quantised, how, packed):
    module, x = layer(packed=packed), truth.draw(generator, 40, H)
    for _ in range(3):
        assert torch.equal(module(x, SPLITS), fresh(module, x))
    assert len(quantised) == 1
    before = addresses(module)
    updates(module)[how]()
    assert torch.equal(module(x, SPLITS), fresh(module, x))
    module(x, SPLITS)
    assert len(quantised) == 2 and addresses(module) == before


def test_a_weight_that_was_turned_where_it_lies_is_noticed(generator):
    module, x = moire.nn.GroupedLinear(E, H, H, recipe="mxfp8"), truth.draw(generator, 40, H)
    module(x, SPLITS)
    module.weight.data = module.weight.data.mT
    wanted = moire.grouped_linear(x, module.weight, moire.Groups(splits=SPLITS), recipe="mxfp8")
    assert torch.equal(module(x, SPLITS), wanted)


def test_memory_that_lies_where_the_old_one_lay_is_noticed(generator):
    """As of a model that sleeps: its memory is freed, given out again and filled with others."""
    module, x = layer(), truth.draw(generator, 40, H)
    memory = module.weight.detach().clone()
    module.weight.data = torch.from_dlpack(memory)  # which is another storage there
    for _ in range(3):
        module(x, SPLITS)
    module.weight.data = torch.empty(0)
    memory.mul_(3)
    module.weight.data = torch.from_dlpack(memory)
    assert module.weight.data_ptr() == memory.data_ptr()
    assert torch.equal(module(x, SPLITS), fresh(module, x))


def test_weights_made_in_inference_mode_count_nothing(generator, quantised):
    x = truth.draw(generator, 40, H)
    with torch.inference_mode():
        module = layer()
        for factor in (1, 3, 3):
            module.load_state_dict({k: factor * v for k, v in module.state_dict().items()})
            assert torch.equal(module(x, SPLITS), fresh(module, x))
    assert len(quantised) == 3


def test_weights_that_are_not_trained_outlive_the_steps_of_others(generator, quantised):
    module, x = layer().requires_grad_(False), truth.draw(generator, 40, H)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    for _ in range(3):
        module(x, SPLITS)
        torch.optim.SGD([other], 0.1).step()
    assert len(quantised) == 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
def test_one_call_serves_forward_and_backward(generator, quantised, recipe, weight_layout):
    module = layer(recipe=recipe, weight_layout=weight_layout)
    x = truth.draw(generator, 40, H).requires_grad_()
    y = module(x, SPLITS)
    found = torch.autograd.grad(y.sin().sum(), [x, module.weight])
    assert quantised == [tuple(module.weight.shape)]
    w = module.weight.detach().requires_grad_()
    options = {"recipe": recipe, "weight_layout": weight_layout}
    y = moire.grouped_linear(x, w, moire.Groups(splits=SPLITS), **options)
    wanted = torch.autograd.grad(y.sin().sum(), [x, w])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
def test_inference_makes_the_forward_copy_only(generator, mode, weight_layout):
    module, x = layer(weight_layout=weight_layout), truth.draw(generator, 40, H)
    with mode():
        assert torch.equal(module(x, SPLITS), fresh(module, x))
    (entry,) = set(module._copies._entries.values())
    assert entry.tensor.has_rowwise == (weight_layout == "out_in") != entry.tensor.has_columnwise
    y = module(x, SPLITS)  # and training goes on with both
    y.sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        module.weight.mul_(2)
    with mode():
        assert torch.equal(module(x, SPLITS), fresh(module, x))


def test_microbatches(generator, quantised):
    module, x = layer(), truth.draw(generator, 40, H)
    old = module(x, SPLITS, is_first_microbatch=True)
    module.weight.data.mul_(2)
    assert torch.equal(module(x, SPLITS, is_first_microbatch=False), old)  # as it was told
    assert len(quantised) == 1
    assert torch.equal(module(x, SPLITS, is_first_microbatch=True), fresh(module, x))
    module(x, SPLITS, is_first_microbatch=True)
    assert len(quantised) == 3
    module(x, SPLITS)
    assert len(quantised) == 4  # nobody said what the parameters were like
    module(x, SPLITS)
    assert len(quantised) == 4
    with pytest.raises(moire.InvalidArgument, match="is_first_microbatch is 1, must be True or"):
        module(x, SPLITS, is_first_microbatch=1)
    del quantised[:]
    torch.manual_seed(0)
    experts = nn.GroupedMLP(E, H, F, recipe="mxfp8")
    moe = nn.MoE(experts, nn.Router(H, E, 2))
    for first in (True, False, False):
        experts(x, SPLITS, is_first_microbatch=first)
        moe(x, is_first_microbatch=first)
    assert len(quantised) == 4
    alone = nn.Sequential(nn.GroupedLinear(E, H, H, recipe="mxfp8"), torch.nn.Tanh(), experts)
    fused = nn.Sequential(experts.fc1, experts.activation, experts.fc2)
    for first, times in ((True, 9), (False, 0)):  # whatever was written in between
        del quantised[:]
        moe(x, is_first_microbatch=first)
        experts.route(x, *moe.router(x), is_first_microbatch=first)
        fused(x, SPLITS, is_first_microbatch=first)
        alone(x, SPLITS, is_first_microbatch=first)
        assert len(quantised) == times
        with torch.no_grad():
            for p in (*experts.parameters(), *alone.parameters()):
                p.mul_(2)


def test_a_layer_that_was_captured_trusts_no_copies(generator, quantised, monkeypatch):
    """Replays of a graph with the optimizer's step write weights, and nobody counts them."""
    module, x = layer(), truth.draw(generator, sum(SPLITS), H)
    module(x, SPLITS)
    with monkeypatch.context() as capture:
        capture.setattr(moire.weight_cache, "_is_captured", lambda arrays: True)
        module(x, SPLITS)
    for replay in range(3):
        module.weight.data.mul_(-1)
        assert torch.equal(module(x, SPLITS), fresh(module, x)), replay
    quantised.clear()
    module(x, SPLITS, is_first_microbatch=False)
    assert not quantised


def test_a_write_through_data_is_seen_once_it_is_said(generator, quantised):
    x = truth.draw(generator, 40, H)
    experts = nn.GroupedMLP(E, H, F, recipe="mxfp8")
    linear = layer()
    for module, run in ((linear, linear), (experts, experts)):
        run(x, SPLITS, is_first_microbatch=True)
        for fc in {linear: [linear], experts: [experts.fc1, experts.fc2]}[module]:
            fc.weight.data[1, 2, 3] = 1e3
        module.weights_changed()
        del quantised[:]
        after = run(x, SPLITS, is_first_microbatch=False)
        assert len(quantised) == (1 if module is linear else 2)
        run(x, SPLITS, is_first_microbatch=False)
        assert torch.equal(after, copy.deepcopy(module)(x, SPLITS))
    cache, w = moire.WeightCache(), truth.draw(generator, E, F, H)
    first = cache.get(w, 1)
    w[1, 2, 3] = 1e3
    cache.invalidate()
    assert cache.get(w, 1) is first
    truth_fp8.assert_same_bytes(first, moire.quantize(w, columnwise=True))
    nn.GroupedLinear(E, H, F).weights_changed()  # has no copies


def test_a_backward_that_still_needs_the_old_copies_says_so(generator):
    module, x = layer(), truth.draw(generator, 40, H).requires_grad_()
    y = module(x, SPLITS)
    module.weight.data.mul_(2)
    module.weights_changed()
    module(x, SPLITS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_explaining_leaves_no_copies_that_were_never_written(generator, quantised):
    module, x = layer(), truth.draw(generator, 40, H)
    steps = moire.explain(module, x, SPLITS)
    assert [s["op"] for s in steps] == [
        "splits_to_offsets",
        "quantize_weight",
        "quantize",
        "grouped_gemm",
    ]
    assert torch.equal(module(x, SPLITS), fresh(module, x))
    with torch.no_grad():
        module.weight.mul_(2)
    moire.explain(module, x, SPLITS)
    assert torch.equal(module(x, SPLITS), fresh(module, x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copied_modules_have_copies_of_their_own(generator, copied):
    module, x = layer(), truth.draw(generator, 40, H)
    wanted = module(x, SPLITS)
    twin = copied(module)
    assert set(twin.state_dict()) == {"weight"}
    with torch.no_grad():
        twin.weight.mul_(2)
    assert torch.equal(twin(x, SPLITS), fresh(twin, x)) and torch.equal(module(x, SPLITS), wanted)


def test_modules_train_under_every_recipe(generator):
    x = truth.draw(generator, 64, H)
    target = truth.draw(generator, 64, H, scale=0.3)
    losses = {}
    for recipe in (None, "mxfp8", "mxfp8_fast", "fp8_block"):
        torch.manual_seed(1)
        experts = nn.GroupedMLP(E, H, F, recipe=recipe, compute_dtype=torch.bfloat16)
        model = nn.MoE(experts, nn.Router(H, E, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(60):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[recipe] = loss.item()
    start = (target.square().mean()).item()
    for recipe, loss in losses.items():
        assert loss < 0.5 * start and abs(loss - losses[None]) < 0.1 * start, (recipe, losses)


def test_a_recipe_is_checked_in_the_constructor():
    with pytest.raises(moire.InvalidArgument, match="recipe is 'mxfp4', must be one of as_stored"):
        nn.GroupedMLP(E, H, F, recipe="mxfp4")
    chain = nn.Sequential(layer(), nn.ScaledGLU(), nn.GroupedLinear(E, F // 2, H))
    with pytest.raises(moire.InvalidArgument, match="fuse: the layers' recipe are"):
        nn.fuse(chain)
    assert np.all([layer(recipe=r).recipe.name == r for r in RECIPES])
