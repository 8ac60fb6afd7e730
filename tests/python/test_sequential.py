"""moire.nn.Sequential runs any chain, fuses what it can, and says what it cannot."""

import copy
import pickle

import moire
import pytest
import torch
import truth
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 12, 16
SPLITS = [4, 0, 5]


def linear(k, n, **options):
    return nn.GroupedLinear(E, k, n, **{"bias": True, **options})


def three(k=H, width=F, n=H, **options):
    return [linear(k, 2 * width, **options), nn.ScaledGLU(), linear(width, n, **options)]


def with_other_layouts():
    return [*three()[:2], linear(F, H, weight_layout="in_out")]


def draw(generator):
    torch.manual_seed(3)
    return truth.draw(generator, 9, H), torch.rand(9, generator=generator)


def one_by_one(modules, x, probs):
    groups = moire.Groups(splits=SPLITS)
    for before, module in zip([None, *modules], modules):
        if isinstance(module, nn.GroupedLinear):
            is_scaled = module.has_bias and module.scale_bias and isinstance(before, nn.ScaledGLU)
            x = module(x, groups, scale=probs if is_scaled else None)
        else:
            x = module(x, probs, groups) if isinstance(module, nn.ScaledGLU) else module(x)
    return x


def ops_of(steps):
    return [step["op"] for step in steps if step["op"] != "splits_to_offsets"]


FUSED = ["grouped_gemm_glu", "grouped_gemm"]
ALONE = ["grouped_gemm", "glu", "grouped_gemm"]
CHAINS = [
    (lambda: three(), FUSED),
    (lambda: [torch.nn.LayerNorm(H), *three(), torch.nn.Tanh(), *three()], FUSED + FUSED),
    (lambda: [linear(H, F), torch.nn.ReLU(), linear(F, 5)], ["grouped_gemm", "grouped_gemm"]),
    (lambda: [torch.nn.Linear(H, 4)], []),
    (lambda: [linear(H, H), *three()], ["grouped_gemm", *FUSED]),
    (lambda: three(n=5), FUSED),
    (lambda: three(scale_bias=False), FUSED),
    (lambda: with_other_layouts(), ALONE),
    (lambda: three()[:2], ALONE[:2]),
    (lambda: [*three(n=H), nn.ScaledGLU()], [*FUSED, "glu"]),
]


@pytest.mark.parametrize("make, ops", CHAINS)
def test_any_chain_runs_and_neighbours_that_fit_are_one_call(generator, make, ops):
    x, probs = draw(generator)
    modules = make()
    chain = nn.Sequential(*modules)
    assert torch.equal(chain(x, SPLITS, probs), one_by_one(modules, x, probs))
    steps = moire.explain(chain, x, SPLITS, probs)
    assert ops_of(steps) == ops
    assert len(steps.not_fused) == ops.count("glu")


def test_a_chain_of_chains_and_no_splits_where_nobody_needs_them(generator):
    x, probs = draw(generator)
    mlp, inner = nn.GroupedMLP(E, H, F, bias=True), nn.Sequential(*three())
    wanted = inner(mlp(x, SPLITS, probs), SPLITS, probs)
    assert torch.equal(nn.Sequential(mlp, inner)(x, SPLITS, probs), wanted)
    assert nn.Sequential(torch.nn.Linear(H, 4))(x).shape == (9, 4)


NESTED = [
    lambda a, b, c: [nn.Sequential(a, b), c],
    lambda a, b, c: [a, nn.Sequential(b), nn.Sequential(), torch.nn.Sequential(c)],
    lambda a, b, c: [torch.nn.Sequential(nn.Sequential(a), b, nn.Sequential(c))],
]


@pytest.mark.parametrize("nest", NESTED)
def test_a_chain_in_a_chain_is_its_modules_in_their_places(generator, nest):
    x, probs = draw(generator)
    modules = three()
    chain = nn.Sequential(*nest(*modules))
    assert torch.equal(chain(x, SPLITS, probs), one_by_one(modules, x, probs))
    assert ops_of(moire.explain(chain, x, SPLITS, probs)) == FUSED


def test_a_chain_with_hooks_keeps_them_and_the_scale_of_a_bias(generator):
    x, probs = draw(generator)
    modules, called = three(), []
    wanted = one_by_one(modules, x, probs)
    for begin in (0, 1, 2):
        inner = nn.Sequential(*modules[begin : begin + 2])
        inner.register_forward_hook(lambda *_: called.append(1))
        chain = nn.Sequential(*modules[:begin], inner, *modules[begin + 2 :])
        if begin < 2:
            assert torch.equal(chain(x, SPLITS, probs), wanted)
            continue
        with pytest.raises(moire.InvalidArgument, match="module 2 is a chain with hooks or a forw"):
            chain(x, SPLITS, probs)
        inner._forward_hooks.clear()
        inner.forward = inner.forward  # its own, which is as good a reason
        with pytest.raises(moire.InvalidArgument, match="module 2 is a chain with hooks or a forw"):
            chain(x, SPLITS, probs)
        modules[2].scale_bias = False
        assert torch.equal(chain(x, SPLITS, probs), one_by_one(modules, x, probs))
    assert called == [1, 1]


def test_backward_dw_is_that_of_the_layers_that_delay(generator):
    x, probs = draw(generator)
    chain = [*three(delay_wgrad_compute=True), nn.GroupedMLP(E, H, F, delay_wgrad_compute=True)]
    delayed, order = nn.Sequential(*chain, linear(H, 5)), []
    plain = nn.Sequential(*three(), nn.GroupedMLP(E, H, F), linear(H, 5))
    plain.load_state_dict(delayed.state_dict())
    for i, layer in enumerate([chain[0], chain[2], chain[3].fc1, chain[3].fc2]):
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda i=i: order.append(i))
    for module in (plain, delayed):
        module(x, SPLITS, probs).sin().sum().backward()
    delayed.backward_dw()
    assert order == [3, 2, 1, 0]
    for mine, reference in zip(delayed.parameters(), plain.parameters()):
        assert torch.equal(mine.grad, reference.grad)
    assert delayed.need_backward_dw() and not plain.need_backward_dw()


class OfItsOwn(nn.ScaledGLU):
    def forward(self, z, probs=None, splits=None):
        return 2 * super().forward(z, probs, splits)


def with_hook():
    modules = three()
    modules[2].register_forward_hook(lambda module, args, y: 2 * y)
    return modules


def with_backward_hook():
    modules = three()
    modules[1].register_full_backward_hook(lambda module, given, found: None)
    return modules


def with_forward_of_an_object():
    modules = three()
    modules[0].forward = modules[0].forward
    return modules


def with_other(**options):
    return [*three()[:2], linear(F, H, **options)]


REASONS = [
    (lambda: with_other_layouts(), "the layers' weight_layout are 'out_in' and 'in_out', must be"),
    (lambda: three()[:2], "has 2 modules, needs GroupedLinear, ScaledGLU, GroupedLinear"),
    (lambda: [*three(), nn.ScaledGLU()], "module 2 is in the fused call before it"),
    (lambda: [*three()[:1], OfItsOwn(), *three()[2:]], "a OfItsOwn has a forward of its own"),
    (with_hook, "a GroupedLinear has hooks, which one call for all three would pass by"),
    (with_backward_hook, "a ScaledGLU has hooks, which one call for all three would pass by"),
    (with_forward_of_an_object, "a GroupedLinear has a forward of its own"),
    (lambda: with_other(recipe="fp32"), "the layers' recipe are"),
    (lambda: with_other(compute_dtype=torch.float32), "the layers' compute_dtype are None and"),
    (lambda: with_other(weight_layout="in_out"), "weight_layout are 'out_in' and 'in_out'"),
    (lambda: [linear(H, 2 * F, glu_layout=8), *three()[1:]], "the activation's 'halves, gate"),
]


@pytest.mark.parametrize("make, message", REASONS, ids=[m for _, m in REASONS])
def test_explain_says_why_not_and_strict_raises(generator, monkeypatch, make, message):
    x, probs = draw(generator)
    modules = make()
    chain = nn.Sequential(*modules)
    (sentence,) = moire.explain(chain, x, SPLITS, probs).not_fused
    assert message in sentence
    assert f"not fused: {sentence}" in str(moire.explain(chain, x, SPLITS, probs))
    assert torch.equal(chain(x, SPLITS, probs), one_by_one(modules, x, probs))
    monkeypatch.setattr(nn.mlp, "_run_alone", lambda *_: pytest.fail("something ran before"))
    with moire.strict(), pytest.raises(moire.Unsupported) as e:
        chain(x, SPLITS, probs)
    assert message in str(e.value)


def test_strict_runs_what_cannot_be_fused_any_better(generator):
    x, probs = draw(generator)
    if x.is_cuda:
        pytest.skip("strict has more to say on a GPU")
    for chain in (three(), [linear(H, F), torch.nn.ReLU(), linear(F, 5)]):
        with moire.strict():
            nn.Sequential(*chain)(x, SPLITS, probs)


def test_a_compiled_chain(generator):
    x, probs = draw(generator)
    if x.is_cuda:
        pytest.skip("for the CPU")
    chain = nn.Sequential(*three(), torch.nn.Tanh(), *three(n=5))
    compiled = torch.compile(chain, fullgraph=COMPILES_WHOLE_GRAPHS)
    splits = torch.tensor(SPLITS)
    torch.testing.assert_close(compiled(x, splits, probs), chain(x, splits, probs))


@pytest.mark.parametrize("scale_bias", [True, False])
def test_a_first_layer_whose_bias_probs_scale_is_not_fused(generator, scale_bias):
    x, probs = draw(generator)
    modules = [nn.ScaledGLU(), *three(H // 2, scale_bias=scale_bias)]
    chain = nn.Sequential(*modules)
    assert torch.equal(chain(x, SPLITS, probs), one_by_one(modules, x, probs))
    steps = moire.explain(chain, x, SPLITS, probs)
    assert ops_of(steps) == ["glu", *(ALONE if scale_bias else FUSED)]
    said = "the bias of module 1 is scaled by probs, behind an activation"
    assert (said in str(steps.not_fused)) == scale_bias


@pytest.mark.parametrize("count", range(1, 9))
def test_neighbours_of_any_chain_have_the_gradients_of_modules_one_by_one(generator, count):
    """First layers, activations and others at random, some of them frozen."""
    x, probs = draw(generator)
    modules, k = [], H
    kinds = torch.randint(4, (count,), generator=generator).tolist()
    for at, kind in enumerate(kinds):
        if kind == 0 or (kind == 1 and k % 2):
            modules.append(linear(k, 2 * F))
            k = 2 * F
        elif kind == 1:
            modules.append(nn.ScaledGLU())
            k //= 2
        elif kind == 2 and at + 3 <= count:
            modules += three(k, F, k)
        else:
            modules.append(torch.nn.LayerNorm(k))
    for p in torch.nn.ModuleList(modules[::2]).parameters():
        p.requires_grad_(False)
    chain, results = nn.Sequential(*modules), []
    for run in (lambda t: chain(t, SPLITS, probs), lambda t: one_by_one(modules, t, probs)):
        leaf = x.clone().requires_grad_()
        chain.zero_grad()
        y = run(leaf)
        y.sin().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in chain.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_chain_fuse_as_it_does(generator, copied):
    x, probs = draw(generator)
    chain = nn.Sequential(*three(), nn.Sequential(*three()))
    twin = copied(chain)
    assert torch.equal(twin(x, SPLITS, probs), chain(x, SPLITS, probs))
    assert ops_of(moire.explain(twin, x, SPLITS, probs)) == FUSED + FUSED


def test_options_of_one_layer_alone_change_no_bit(generator):
    """main_grad and delay are the layer's own, fused or not; is_first_microbatch is all layers'."""
    x, probs = draw(generator)
    plain = nn.Sequential(*three())
    plain(x, SPLITS, probs).sin().sum().backward()
    first = linear(H, 2 * F, accumulate_into_main_grad=True)
    chain = nn.Sequential(first, nn.ScaledGLU(), linear(F, H, delay_wgrad_compute=True))
    chain.load_state_dict(plain.state_dict())
    first.weight.main_grad = torch.ones_like(first.weight)
    assert ops_of(moire.explain(chain, x, SPLITS, probs)) == FUSED
    chain(x, SPLITS, probs, is_first_microbatch=True).sin().sum().backward()
    chain.backward_dw()
    assert torch.equal(first.weight.main_grad, plain[0].weight.grad)
    assert torch.equal(chain[2].weight.grad, plain[2].weight.grad)


@pytest.mark.parametrize(
    "make",
    [
        three,
        lambda: [linear(H, H), *three(), torch.nn.Tanh(), linear(H, H)],
        lambda: [nn.Sequential(*three())],
        lambda: [nn.GroupedMLP(E, H, F), nn.GroupedMLP(E, H, F)],
        lambda: [linear(H, H)],
    ],
)
def test_buffers_of_the_caller(generator, make):
    x, probs = draw(generator)
    x, chain = torch.cat([x, x[:2]]), nn.Sequential(*make())
    probs, results = torch.cat([probs, probs[:2]]), []
    groups = moire.Groups(splits=SPLITS, capacity=11)
    out, grad_x = torch.full((11, H), 7.0), torch.full((11, H), 7.0)
    for buffers in ({}, {"out": out, "tail": "untouched", "grad_x_out": grad_x}):
        leaf = x.clone().requires_grad_()
        chain.zero_grad()
        y = chain(leaf, groups, probs, **buffers)
        y[:9].sin().sum().backward()
        results.append([y[:9], leaf.grad[:9], *(p.grad for p in chain.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert y.data_ptr() == out.data_ptr() and (out[9:] == 7).all()
    assert torch.equal(grad_x[:9], leaf.grad[:9])


@pytest.mark.parametrize(
    "buffers, message",
    [
        ({"grad_x_out": 1}, "Sequential: grad_x_out is given, but module 0 is a Tanh, which has"),
        ({"out": 1}, "Sequential: out is given, but module 4 is a Tanh, which has none"),
        ({"tail": "untouched"}, "Sequential: tail is given, but module 4 is a Tanh"),
    ],
)
def test_buffers_that_no_module_takes_are_refused(generator, buffers, message):
    x, probs = draw(generator)
    chain = nn.Sequential(torch.nn.Tanh(), *three(), torch.nn.Tanh())
    with pytest.raises(moire.InvalidArgument) as e:
        chain(x, SPLITS, probs, **buffers)
    assert message in str(e.value)
    (name,) = buffers
    with pytest.raises(moire.InvalidArgument, match=f"{name} is given, but the chain has no mod"):
        nn.Sequential(nn.Sequential())(x, SPLITS, probs, **buffers)


def test_a_moe_layer_in_a_chain_is_told_of_first_microbatches(generator):
    x, _ = draw(generator)
    experts = nn.GroupedMLP(E, H, F, accumulate_into_main_grad=True)
    layer = nn.MoE(experts, nn.Router(H, E, 2))
    found = []
    for module in (layer, nn.Sequential(layer)):
        for weight in experts.parameters():
            weight.main_grad = torch.full_like(weight, 100)
        module(x, is_first_microbatch=True).sum().backward()
        found.append(experts.fc1.weight.main_grad)
    assert torch.equal(*found)
