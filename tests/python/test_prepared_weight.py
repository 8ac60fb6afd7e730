"""Prepared weights: layers that are given them, and what modules keep of them."""

import copy

import moire
import numpy as np
import pytest
import torch
import truth
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS

E, H, F = 3, 40, 72
SPLITS = [33, 0, 7]
RECIPES = ["mxfp8", "mxfp8_fast", "fp8_block", moire.Recipe("mxfp8", dequantized_weights=True)]
DECODED = RECIPES[-1]


def problem(generator, weight_layout="out_in"):
    x = truth.draw(generator, sum(SPLITS), H).bfloat16()
    w1, w2 = truth.draw(generator, E, 2 * F, H), truth.draw(generator, E, H, F)
    if weight_layout == "in_out":
        w1, w2 = w1.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    return x, w1.bfloat16(), w2.bfloat16()


@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_layers_have_the_bits_of_the_weight(generator, device, recipe, weight_layout):
    x, w1, w2 = problem(generator, weight_layout)
    groups, options = (
        moire.Groups(splits=SPLITS),
        {"recipe": recipe, "weight_layout": weight_layout},
    )
    prepared = [moire.PreparedWeight(w, **options) for w in (w1, w2)]
    assert [p.shape for p in prepared] == [tuple(w1.shape), tuple(w2.shape)]
    found = []
    for stand_ins in ({}, dict(zip(("w1_quantized", "w2_quantized"), prepared))):
        leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
        y = moire.grouped_mlp(*leaves, groups, **options, **stand_ins)
        found.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for a, b in zip(*found):
        assert torch.equal(a, b)
    # and instead of them
    assert torch.equal(moire.grouped_mlp(x, *prepared, groups, **options), found[0][0])
    leaf = x.clone().requires_grad_()
    y = moire.grouped_mlp(leaf, *prepared, groups, **options)
    assert torch.equal(torch.autograd.grad(y, leaf, torch.ones_like(y))[0], found[0][1])
    gradients = moire.grouped_mlp_backward(
        torch.ones_like(y), x, *prepared, groups, wants=("x",), **options
    )
    assert torch.equal(gradients.x, found[0][1])


def test_moe_knows_how_many_experts_they_are(generator, device):
    """Without a plan, and without the weights themselves."""
    x, *weights = problem(generator)
    topk_idx = torch.randint(E, (len(x), 2), generator=generator)
    topk_weights = torch.rand(len(x), 2, generator=generator)
    wanted = moire.moe(x, *weights, topk_idx, topk_weights, recipe="mxfp8")
    prepared = [moire.PreparedWeight(w, recipe="mxfp8") for w in weights]
    assert torch.equal(moire.moe(x, *prepared, topk_idx, topk_weights, recipe="mxfp8"), wanted)


def test_numpy_and_lists_are_prepared(generator, device):
    x, w1, _ = problem(generator)
    groups = moire.Groups(splits=SPLITS)
    want = moire.grouped_linear(x.float(), w1.float(), groups, recipe="mxfp8")
    listed = moire.PreparedWeight([w for w in w1.float()])
    assert torch.equal(moire.grouped_linear(x.float(), listed, groups, recipe="mxfp8"), want)
    if device == "cpu":
        arrays = x.float().numpy(), moire.PreparedWeight(w1.float().numpy())
        found = moire.grouped_linear(*arrays, moire.Groups(splits=np.array(SPLITS)), recipe="mxfp8")
        assert np.array_equal(found, want.numpy())


def test_wrong_ones_are_refused(generator):
    x, w1, w2 = problem(generator)
    groups = moire.Groups(splits=SPLITS)
    prepared = moire.PreparedWeight(w1)

    def refuses(message, w=prepared, x=x, **options):
        with pytest.raises(moire.InvalidArgument, match=message):
            moire.grouped_linear(x, w, groups, **{"recipe": "mxfp8", **options})

    refuses("w_prepared was prepared with recipe 1, needs 2", recipe="mxfp8_fast")
    refuses("w_prepared was prepared with layout 0, needs 1", weight_layout="in_out")
    refuses("w_prepared is present but recipe is 0", recipe=None)
    refuses(r"w_quantized is \[3, 40, 72\] but w is", w=w1, w_quantized=moire.PreparedWeight(w2))
    refuses("w_quantized is too much", w_quantized=prepared)
    refuses("must be a GroupedTensor or a PreparedWeight", w=w1, w_quantized=w1)
    forward_only = moire.PreparedWeight(w1, forward_only=True)
    assert forward_only.nbytes < prepared.nbytes
    y = moire.grouped_linear(x.clone().requires_grad_(), forward_only, groups, recipe="mxfp8")
    with pytest.raises(moire.InvalidArgument, match="forward_only 1, needs 0: its gradient of x"):
        y.sum().backward()
    with pytest.raises(moire.InvalidArgument, match=r"needs \[groups, out, in\] or a list"):
        moire.PreparedWeight(w1[0])
    with pytest.raises(moire.InvalidArgument, match="recipe is 'bf16', must be one of"):
        moire.PreparedWeight(w1, "bf16")
    with pytest.raises(moire.InvalidArgument, match="dequantized_weights is True but name is"):
        moire.Recipe("fp8_block", dequantized_weights=True)
    with pytest.raises(moire.InvalidArgument, match=r"prepared of \[3, 144, 40\], needs \[3, 40"):
        prepared.quantize_(w2)


def test_a_new_weight_takes_the_same_memory(generator, device):
    x, w1, _ = problem(generator)
    groups = moire.Groups(splits=SPLITS)
    prepared = moire.PreparedWeight(w1)
    address = prepared.memory.data_ptr()
    assert address % 64 == 0
    y = moire.grouped_linear(x.requires_grad_(), prepared, groups, recipe="mxfp8")
    assert prepared.quantize_(2 * w1) is prepared and prepared.memory.data_ptr() == address
    want = moire.grouped_linear(x, 2 * w1, groups, recipe="mxfp8")
    assert torch.equal(moire.grouped_linear(x, prepared, groups, recipe="mxfp8"), want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # needs the old one


@pytest.fixture
def prepares(monkeypatch):
    """How often a weight was prepared."""
    calls = []
    write = moire.PreparedWeight._write
    monkeypatch.setattr(
        moire.PreparedWeight, "_write", lambda *args: (calls.append(1), write(*args))
    )
    return calls


def layer(**options):
    torch.manual_seed(3)
    return nn.GroupedLinear(E, H, F, recipe=DECODED, **options)


def fresh(module, x):
    weights = [w.detach() for w in module._all("weight")]
    weights = weights if len(weights) > 1 else weights[0]
    return moire.grouped_linear(x, weights, moire.Groups(splits=SPLITS), recipe="mxfp8")


def _in_place(module):
    with torch.no_grad():
        module.weight.mul_(2)


def _optimizer_step(module):
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.SGD([module.weight], lr=0.5).step()


def _other_data(module):
    module.weight.data = module.weight.data.clone() * 3


def _state_dict(module):
    module.load_state_dict({name: 2 * t for name, t in module.state_dict().items()})


def _said(module):
    module.weight.data.mul_(2)
    module.weights_changed()


CHANGES = [_in_place, _optimizer_step, _other_data, _state_dict, _said]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_modules_keep_them_until_the_weight_changes(generator, device, prepares, change):
    module, x = layer(), truth.draw(generator, sum(SPLITS), H)
    assert torch.equal(module(x, SPLITS), fresh(module, x))
    module(x, SPLITS)
    assert len(prepares) == 1
    kept = module.operands()[1]
    address = kept.memory.data_ptr()
    change(module)
    assert torch.equal(module(x, SPLITS), fresh(module, x))
    assert len(prepares) == 2 and module.operands()[1] is kept
    assert kept.memory.data_ptr() == address
    assert torch.equal(copy.deepcopy(module)(x, SPLITS), fresh(module, x))


def test_microbatches_say_when(generator, device, prepares):
    module, x = layer(packed=False), truth.draw(generator, sum(SPLITS), H)
    before = module(x, SPLITS, is_first_microbatch=True)
    with torch.no_grad():
        for w in module._all("weight"):
            w.mul_(2)
    assert torch.equal(module(x, SPLITS, is_first_microbatch=False), before)
    assert torch.equal(module(x, SPLITS, is_first_microbatch=True), fresh(module, x))
    assert len(prepares) == 2


# A CUDA graph replays what was recorded: a preparation that was not would be of the old weight.
def test_a_captured_graph_prepares_unless_it_is_told_not_to(generator, prepares, monkeypatch):
    module, x = layer(), truth.draw(generator, sum(SPLITS), H)
    module(x, SPLITS)
    monkeypatch.setattr("moire.weight_cache._is_captured", lambda arrays: True)
    for is_first, times in ((None, 2), (None, 3), (False, 3), (True, 4), (None, 5)):
        module(x, SPLITS, is_first_microbatch=is_first)
        assert len(prepares) == times
    monkeypatch.undo()


def test_one_direction_suffices_where_no_gradient_is_wanted(generator, device):
    x, module = truth.draw(generator, sum(SPLITS), H), layer()
    with torch.no_grad():
        module(x, SPLITS)
    assert module._copies.get(module.weight, None, columnwise=False).forward_only
    leaf = x.clone().requires_grad_()
    module(leaf, SPLITS).sum().backward()
    assert leaf.grad is not None


def test_explain_has_their_bytes(generator, device):
    x, module = truth.draw(generator, sum(SPLITS), H), layer()
    explained = moire.explain(module, x, SPLITS)
    assert "prepare_weight" in [step["op"] for step in explained]
    module(x, SPLITS)
    explained = moire.explain(module, x, SPLITS)
    assert "prepare_weight" not in [step["op"] for step in explained]
    size = module.operands()[1].nbytes
    assert explained.weights == {"w": size} and f"kept of w: {size:,} B" in str(explained)


@pytest.mark.parametrize("delayed", [False, True])
def test_layers_of_experts_train_alike(generator, device, delayed):
    found, x = [], truth.draw(generator, 50, H)
    for recipe in ("mxfp8", DECODED):
        torch.manual_seed(3)
        options = {"recipe": recipe, "delay_wgrad_compute": delayed}
        module = nn.MoE(nn.GroupedMLP(E, H, F, **options), nn.Router(H, E, 2))
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        if delayed:
            module.experts.backward_dw()
        found.append([y, leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_compiled_calls_take_them(generator, device):
    x, w1, _ = problem(generator)
    prepared, groups = moire.PreparedWeight(w1, DECODED), moire.Groups(splits=SPLITS)

    def run(x):
        return moire.grouped_linear(x, prepared, groups, recipe="mxfp8")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=COMPILES_WHOLE_GRAPHS)
    for function in (run, compiled):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.sum().backward()
        if function is run:
            wanted = y, leaf.grad
    assert torch.equal(y, wanted[0]) and torch.equal(leaf.grad, wanted[1])
