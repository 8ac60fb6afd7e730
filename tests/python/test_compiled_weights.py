"""Compiled modules quantise their weights in the graph, once for both passes of a call."""

import moire
import pytest
import torch
import truth
from moire import nn
from moire.arrays import Torch
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 48, 80
SPLITS = [33, 0, 7]


def layer(**options):
    torch.manual_seed(3)
    return nn.GroupedLinear(E, H, F, **{"recipe": "mxfp8", **options})


def fresh(module, x):
    """The layer's result on its parameters as they are now, without copies."""
    weight = module.weight.detach()
    return moire.grouped_linear(x, weight, moire.Groups(splits=SPLITS), recipe=module.recipe)


@pytest.fixture
def ran(monkeypatch):
    """The entries that were run, in order."""
    names, invoke = [], moire.invoke.invoke

    def counted(name, *args, **options):
        names.append(name)
        return invoke(name, *args, **options)

    monkeypatch.setattr(moire.invoke, "invoke", counted)
    return names


def compiled_whole(function, **options):
    torch._dynamo.reset()
    options.setdefault("backend", "aot_eager")
    return torch.compile(function, fullgraph=COMPILES_WHOLE_GRAPHS, **options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "fp8_block"])
def test_a_compiled_layer_quantises_once_for_both_passes(generator, ran, recipe, packed, backend):
    if backend == "inductor" and not COMPILES_WHOLE_GRAPHS:
        pytest.skip("this torch runs ops between graphs")
    module, splits = layer(recipe=recipe, packed=packed), torch.tensor(SPLITS)
    compiled = compiled_whole(module, backend=backend)
    for _ in range(2):
        x = truth.draw(generator, 40, H).requires_grad_()
        leaves = [x, *module.parameters()]
        y = module(x, splits)
        wanted = [y, *torch.autograd.grad(y.sin().sum(), leaves)]
        ran.clear()
        y = compiled(x, splits)
        found = [y, *torch.autograd.grad(y.sin().sum(), leaves)]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
        if COMPILES_WHOLE_GRAPHS:
            assert ran.count("prepare_weight") == 1
        with torch.no_grad():
            ran.clear()
            assert torch.equal(compiled(x, splits), wanted[0])
            assert "prepare_weight" not in ran  # the layer does, for the one pass
            for p in module.parameters():
                p -= 0.1


@pytest.mark.skipif(not COMPILES_WHOLE_GRAPHS, reason="this torch exports no ops of moire's")
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_layer_depends_on_no_device(generator, strict):
    x, splits = truth.draw(generator, 40, H), torch.tensor(SPLITS)
    program = torch.export.export(layer(), (x, splits), strict=strict)
    assert "prepare_weight" not in str(program.graph)
    assert torch.equal(program.module()(x, splits), fresh(layer(), x))


def test_a_compiled_layer_takes_weights_of_any_shape(generator):
    """Which no parameters are: nobody knows their memory's size while the graph is made."""
    module, splits = layer(), torch.tensor(SPLITS)

    def called(x, w):
        return torch.func.functional_call(module, {"weight": w}, (x, splits))

    compiled = compiled_whole(called, dynamic=True)
    x, w = truth.draw(generator, 40, H), module.weight.detach().clone().requires_grad_()
    assert torch.equal(compiled(x, w), fresh(module, x))


def test_a_checkpoint_in_a_graph_quantises_too(generator, monkeypatch):
    """A graph's part that runs twice may have no side effects, such as to keep a device's name."""
    monkeypatch.setattr(Torch, "_places", {None: ("cpu", 0)})
    module, splits = layer(recipe="fp8_block"), torch.tensor(SPLITS)
    x = truth.draw(generator, 40, H).requires_grad_()

    def run(x):
        return checkpoint(module, x, splits, use_reentrant=False)

    y = compiled_whole(run)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    want = module(x, splits)
    assert torch.equal(y, want)
    assert torch.equal(grad, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.skipif(not COMPILES_WHOLE_GRAPHS, reason="this torch runs ops between graphs")
def test_a_graph_holds_to_the_shapes_that_it_prepared(generator):
    module, splits = layer(recipe="fp8_block"), torch.tensor(SPLITS)
    x = truth.draw(generator, 40, H)
    with torch._dynamo.config.patch(force_parameter_static_shapes=False):
        compiled = compiled_whole(module, dynamic=True)
        assert torch.equal(compiled(x, splits), fresh(module, x))


@pytest.mark.skipif(not COMPILES_WHOLE_GRAPHS, reason="this torch runs ops between graphs")
def test_a_module_without_memory_compiles(generator):
    module, x = layer().to("meta"), truth.draw(generator, 40, H).to("meta")
    assert compiled_whole(module)(x, torch.tensor(SPLITS, device="meta")).shape == (40, F)
