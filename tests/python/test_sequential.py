"""moire.nn.Sequential runs any chain, fuses what it can, and says what it cannot."""

import moire
import pytest
import torch
import truth
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from moire.nn import fusion

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


REASONS = [
    (lambda: with_other_layouts(), "the layers' weight_layout are 'out_in' and 'in_out', must be"),
    (lambda: three()[:2], "has 2 modules, needs GroupedLinear, ScaledGLU, GroupedLinear"),
    (lambda: [*three(), nn.ScaledGLU()], "module 2 is in the fused call before it"),
    (lambda: [*three()[:1], OfItsOwn(), *three()[2:]], "a OfItsOwn has a forward of its own"),
    (with_hook, "a GroupedLinear has hooks, which one call for all three would pass by"),
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
    monkeypatch.setattr(fusion, "_run_alone", lambda *_: pytest.fail("something ran before"))
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
