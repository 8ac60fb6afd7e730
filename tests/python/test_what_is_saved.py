"""What a layer's call saves: what the gradients that are wanted read, and numbers per row."""

from itertools import combinations

import moire
import pytest
import torch
import truth

pytestmark = pytest.mark.usefixtures("device")

H, F, SPLITS, ROWS = 64, 128, [40, 0, 24], 64
LINEAR = {"x": (ROWS, H), "w": (3, F, H), "bias": (3, F), "scale": (ROWS,)}
MLP = {"x": (ROWS, H), "w1": (3, 2 * F, H), "w2": (3, H, F), "b1": (3, 2 * F), "b2": (3, H)}
SHAPES = {"linear": LINEAR, "mlp": {**MLP, "probs": (ROWS,), "b2_scale": (ROWS,)}}

SAVED = {  # of the operands, by what is wanted of a linear layer, and of an MLP that keeps z
    ("linear", "x"): "w scale",
    ("linear", "w"): "x scale",
    ("linear", "bias"): "scale",
    ("linear", "scale"): "bias scale",
    ("mlp", "x"): "w1 w2 probs b2_scale",
    ("mlp", "w1"): "x w2 probs b2_scale",
    ("mlp", "b1"): "w2 probs b2_scale",
    ("mlp", "w2"): "probs b2_scale",
    ("mlp", "b2"): "probs b2_scale",
    ("mlp", "probs"): "w2 b2 probs b2_scale",
    ("mlp", "b2_scale"): "b2 probs b2_scale",
}


def drawn(generator, kind):
    return {n: truth.draw(generator, *shape, scale=0.2) for n, shape in SHAPES[kind].items()}


def called(kind, values, wanted, **options):
    """The call's leaves, and its result."""
    leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in values.items()}
    groups, function = moire.Groups(splits=SPLITS), getattr(moire, f"grouped_{kind}")
    return leaves, function(groups=groups, **leaves, **options)


@pytest.mark.parametrize("kind, wanted", SAVED)
def test_what_a_gradient_reads_is_saved(generator, kind, wanted):
    """By Torch's own account, in bytes."""
    values, sizes = drawn(generator, kind), {}

    def save(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        leaves, _ = called(kind, values, {wanted})
    found = {name: sizes.pop(t.data_ptr(), 0) for name, t in leaves.items()}
    names = SAVED[kind, wanted].split()
    assert found == {n: t.nbytes if n in names else 0 for n, t in values.items()}
    z, offsets = ROWS * 2 * F * 4 if kind == "mlp" else 0, 4 * 8
    assert sum(sizes.values()) == z + offsets


@pytest.mark.parametrize("kind, wanted", SAVED)
def test_what_is_not_read_may_be_overwritten_before_the_backward(generator, kind, wanted):
    """And what is read may not."""
    values = drawn(generator, kind)
    leaves, y = called(kind, values, {wanted})
    (before,) = torch.autograd.grad(y.sum(), leaves[wanted])
    for name in values:
        leaves, y = called(kind, values, {wanted})
        with torch.no_grad():
            leaves[name].mul_(2)
        if name in SAVED[kind, wanted].split():
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            assert torch.equal(torch.autograd.grad(y.sum(), leaves[wanted])[0], before)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_block"])
@pytest.mark.parametrize("kind, options", [("linear", {}), ("mlp", {}), ("mlp", {"save_z": False})])
def test_some_gradients_are_those_of_a_call_of_which_all_are_wanted(
    generator, kind, options, recipe
):
    values, options = drawn(generator, kind), {**options, "recipe": recipe}
    leaves, y = called(kind, values, values, **options)
    every = dict(zip(leaves, torch.autograd.grad(y.sin().sum(), [*leaves.values()])))
    for count in (1, 2):
        for wanted in combinations(values, count):
            leaves, y = called(kind, values, wanted, **options)
            found = torch.autograd.grad(y.sin().sum(), [leaves[name] for name in wanted])
            assert all(map(torch.equal, found, map(every.get, wanted))), wanted
