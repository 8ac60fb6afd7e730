"""The recipe of a module that is there already: assigned, both ways, as a new module would have it;
and what a module's repr says of it.
"""

import copy
import io
import pickle

import moire
import pytest
import torch
import truth
from graphs import captured
from moire import nn
from moire.dtypes import COMPILES_WHOLE_GRAPHS

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 40, 72
SPLITS = [33, 0, 7]
FRACTIONAL = moire.Recipe("fp8_block", fractional_scales=True)
SAVING = moire.Recipe("mxfp8", save="input")
RECIPES = [None, "mxfp8", "mxfp8_fast", "fp8_block", FRACTIONAL, SAVING]
MODULES = {
    "GroupedLinear": lambda **options: nn.GroupedLinear(E, H, H, bias=True, **options),
    "listed": lambda **options: nn.GroupedLinear(E, H, H, packed=False, **options),
    "GroupedMLP": lambda **options: nn.GroupedMLP(E, H, F, weight_layout="in_out", **options),
    "Sequential": lambda **options: nn.Sequential(
        nn.GroupedLinear(E, H, 2 * F, **options),
        nn.ScaledGLU(),
        nn.GroupedLinear(E, F, H, **options),
    ),
    "MoE": lambda **options: nn.MoE(nn.GroupedMLP(E, H, F, **options), nn.Router(H, E, 2)),
}


def made(kind, recipe):
    torch.manual_seed(3)
    module = MODULES[kind]()
    module.recipe = recipe
    return module


def run(module, x, **options):
    return module(x, **options) if isinstance(module, nn.MoE) else module(x, SPLITS, **options)


def results(module, x, **options):
    """y and every gradient."""
    x = x.detach().requires_grad_()
    y = run(module, x, **options)
    return y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])


def assert_as_new(kind, module, x, **options):
    """As a module that was built with this recipe and has these parameters."""
    new = MODULES[kind](recipe=module.recipe)
    new.load_state_dict(module.state_dict())
    for found, wanted in zip(results(module, x, **options), results(new, x)):
        assert torch.equal(found, wanted)


def step(module):
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(module.parameters(), 0.05).step()


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_computes_by_the_recipe_that_it_has_now(generator, kind):
    module, x = made(kind, "mxfp8"), truth.draw(generator, 40, H)
    module.zero_grad()
    for recipe in (*RECIPES, *RECIPES[::-1], None, "mxfp8"):
        module.recipe = recipe
        assert module.recipe == moire.Recipe.of(recipe)
        assert_as_new(kind, module, x)
        step(module)
        assert_as_new(kind, module, x)


def test_switching_changes_results(generator):
    """So that the test above compares different ones."""
    x, found = truth.draw(generator, 40, H), []
    module = made("GroupedMLP", None)
    for module.recipe in (None, "mxfp8", FRACTIONAL, None):
        found.append(module(x, SPLITS))
    assert torch.equal(found[0], found[3])
    assert not any(torch.equal(found[a], found[b]) for a, b in ((0, 1), (1, 2), (0, 2)))


@pytest.mark.parametrize("kind", MODULES)
def test_copies_of_a_recipe_are_made_anew_when_it_comes_back(generator, kind):
    """Whatever was written meanwhile, also for the microbatches after the first."""
    module, x = made(kind, "mxfp8"), truth.draw(generator, 40, H)
    run(module, x, is_first_microbatch=True)
    module.recipe = None
    for p in module.parameters():
        p.data.mul_(2)  # which nobody counts
    run(module, x, is_first_microbatch=True)
    module.recipe = "mxfp8"
    assert_as_new(kind, module, x, is_first_microbatch=False)


def test_copies_of_a_recipe_keep_their_addresses(generator):
    module, x = made("GroupedLinear", "mxfp8"), truth.draw(generator, 40, H)

    def copies():
        module(x, SPLITS)
        return module.operands()[1]

    first = copies()
    module.recipe = "mxfp8"  # the same
    assert module.operands()[1] is first
    y = module(x.requires_grad_(), SPLITS)
    module.recipe = "fp8_block"
    assert copies() is not first
    module.recipe = None
    assert copies() is None
    y.sum().backward()  # by the recipe of its forward
    module.recipe = moire.Recipe("mxfp8")
    assert copies() is first


def test_one_layer_of_an_mlp_alone_is_refused_until_the_other_follows(generator):
    mlp, x = made("GroupedMLP", "mxfp8"), truth.draw(generator, 40, H)
    for recipe in (None, "mxfp8"):
        mlp.fc1.recipe = recipe
        with pytest.raises(moire.InvalidArgument, match="GroupedMLP: fc1 has Recipe"):
            mlp(x, SPLITS)
        with pytest.raises(moire.InvalidArgument, match="GroupedMLP: layers have Recipe.*, ask ea"):
            print(mlp.recipe)
        mlp.fc2.recipe = recipe
        assert_as_new("GroupedMLP", mlp, x)
    chain = nn.Sequential(mlp.fc1, mlp.activation, mlp.fc2)
    chain[0].recipe = None  # which then run one by one
    assert moire.explain(chain, x, SPLITS).not_fused
    assert nn.Sequential(torch.nn.Tanh()).recipe == moire.Recipe()


def test_a_recipe_that_does_not_fit_changes_nothing(generator):
    mlp, x = made("GroupedMLP", "mxfp8"), truth.draw(generator, 40, H)
    wanted = mlp(x, SPLITS)
    for module in (mlp, mlp.fc1):
        with pytest.raises(moire.InvalidArgument, match="GroupedLinear: recipe is 'mxfp4', must"):
            module.recipe = "mxfp4"
    assert torch.equal(mlp(x, SPLITS), wanted)
    linear = nn.GroupedLinear(E, H, 2 * F, primary="mxfp8")
    for recipe in (None, "fp8_block", "bf16"):
        with pytest.raises(moire.InvalidArgument) as e:
            linear.recipe = recipe
        assert "GroupedLinear: primary is 'mxfp8' but recipe is" in str(e.value)
        assert "the bytes of all experts that the recipe's products read" in str(e.value)
    linear.recipe = "mxfp8_fast"  # reads the same bytes
    linear.recipe = "mxfp8"
    mixed = nn.Sequential(nn.GroupedLinear(E, H, H), linear)
    with pytest.raises(moire.InvalidArgument, match="primary is 'mxfp8' but recipe is 'as_stored'"):
        mixed.recipe = None
    with pytest.raises(moire.InvalidArgument, match="primary is 'mxfp8' but recipe is 'fp8_block'"):
        mixed.recipe = "fp8_block"
    assert mixed[0].recipe == moire.Recipe() and mixed[1].recipe == moire.Recipe("mxfp8")


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_what_is_copied_switches_on_its_own(generator, copied):
    module, x = made("GroupedMLP", "mxfp8"), truth.draw(generator, 40, H)
    wanted = module(x, SPLITS)
    other = copied(module)
    other.recipe = None
    assert torch.equal(module(x, SPLITS), wanted)
    assert_as_new("GroupedMLP", other, x)
    other.recipe = "mxfp8"
    assert torch.equal(other(x, SPLITS), wanted)


def test_main_grad_and_delayed_gradients_go_on(generator):
    x, found = truth.draw(generator, 40, H), []
    for switched in (False, True):
        torch.manual_seed(3)
        options = {"delay_wgrad_compute": True, "accumulate_into_main_grad": True}
        mlp = nn.GroupedMLP(E, H, F, recipe="mxfp8" if switched else None, **options)
        for p in mlp.parameters():
            p.main_grad = torch.zeros_like(p)
        mlp.recipe = None
        mlp(x, SPLITS).square().mean().backward()
        mlp.recipe = "mxfp8" if switched else None  # what waits is of the recipe of its forward
        mlp.backward_dw()
        found.append([p.main_grad for p in mlp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_compiled_module_follows(generator):
    module, x = made("GroupedMLP", "mxfp8"), truth.draw(generator, 40, H)
    splits = torch.tensor(SPLITS)
    compiled = torch.compile(module, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    for recipe in ("mxfp8", None, "fp8_block", "mxfp8"):
        module.recipe = recipe
        assert torch.equal(compiled(x, splits), module(x, splits)), recipe


def test_a_captured_graph_reads_its_copies(generator, device):
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    module, x = made("GroupedMLP", "mxfp8"), truth.draw(generator, 40, H)
    splits = torch.tensor(SPLITS)
    module(x, splits, is_first_microbatch=True)
    replay, y = captured(lambda: module(x, splits, is_first_microbatch=False).detach())
    for other in (None, "fp8_block"):
        module.recipe = other
        module(x, splits)
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(-1.5)
        module.recipe = "mxfp8"
        wanted = module(x, splits)
        replay()
        assert torch.equal(y, wanted)


def test_a_repr_says_what_is_not_as_usual():
    assert repr(nn.GroupedLinear(E, H, F)) == "GroupedLinear(3, 40, 72, bias=False, packed)"
    options = {"compute_dtype": torch.bfloat16, "recipe": moire.Recipe("mxfp8", save="input")}
    options.update(accumulate_into_main_grad=True, delay_wgrad_compute=True)
    linear = nn.GroupedLinear(E, H, F, bias=True, packed=False, **options)
    assert repr(linear) == (
        "GroupedLinear(3, 40, 72, bias=True, listed, compute_dtype=torch.bfloat16, "
        "recipe=Recipe('mxfp8', save='input'), accumulate_into_main_grad=True, "
        "delay_wgrad_compute=True)"
    )
    linear.recipe = None
    assert "recipe" not in repr(linear)
    primary = nn.GroupedLinear(E, H, F, primary="mxfp8")
    assert repr(primary).endswith("packed, primary=Recipe('mxfp8'))")
    primary.recipe = "mxfp8_fast"
    assert repr(primary).endswith("recipe=Recipe('mxfp8_fast'), primary=Recipe('mxfp8'))")
    assert repr(moire.Recipe()) == "Recipe('as_stored')"
    changed = moire.Recipe("fp8_block", "e5m2", fractional_scales=True)
    text = "Recipe('fp8_block', gradient_element='e5m2', fractional_scales=True)"
    assert repr(changed) == text and eval(text, {"Recipe": moire.Recipe}) == changed
