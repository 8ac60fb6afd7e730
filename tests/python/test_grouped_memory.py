"""Who shows the memory of a GroupedTensor: its views, which share its groups."""

import moire
import pytest
import torch
from samples_fp8 import SPLITS, ragged, same

pytestmark = pytest.mark.usefixtures("device")

OTHER_SPLITS = [0, 100, 9, 60]
VIEWS = {
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "Tensor.detach": torch.Tensor.detach,
    "view": lambda t: t.view(t.shape),
    "Parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "data of": lambda t: set_data(t.clone(), t),
    "data of data": lambda t: t.detach().data,
    "itself": lambda t: set_data(set_data(t, t), t.data),
}


def set_data(tensor, other):
    tensor.data = other
    return tensor


# ---- views


@pytest.mark.parametrize("view", VIEWS)
def test_groups_are_those_of_all_that_show_the_memory(generator, view):
    x, tensor = ragged(generator)
    other = moire.quantize(x, moire.Groups(splits=OTHER_SPLITS), columnwise=True)
    for write in (
        lambda t: t.copy_(other),
        lambda t: t.quantize_(x, other.groups),
        lambda t: torch.Tensor.copy_(t, other),
        lambda t: t.__setitem__(..., other),
    ):
        for first, second in ((0, 1), (1, 0)):
            tensor.quantize_(x, moire.Groups(splits=SPLITS))
            both = tensor, VIEWS[view](tensor)
            write(both[first])
            assert same(both[second], other)
            assert both[second].groups is both[first].groups


def test_who_gets_other_memory_has_its_own_groups(generator):
    x, tensor = ragged(generator)
    other = moire.quantize(x, moire.Groups(splits=OTHER_SPLITS), columnwise=True)
    view, copies = tensor.detach(), (tensor.clone(), tensor.to(dtype=torch.bfloat16))
    tensor.data = other
    assert same(tensor, other) and tensor.groups is not view.groups
    tensor.quantize_(x, moire.Groups(splits=SPLITS))
    assert same(tensor, other) and same(tensor, view)
    view.quantize_(x, moire.Groups(splits=OTHER_SPLITS))
    for unchanged in (tensor, *copies):
        assert unchanged.groups.splits.tolist() == SPLITS


@pytest.mark.parametrize("view", ["none", *VIEWS])
def test_writes_that_are_explained_leave_the_groups(generator, view):
    x, tensor = ragged(generator)
    other = moire.quantize(x, moire.Groups(splits=OTHER_SPLITS), columnwise=True)
    before, show = tensor.clone(), VIEWS.get(view, lambda t: t)
    for write in (
        lambda: show(tensor).copy_(other),
        lambda: show(tensor).quantize_(x, other.groups),
        lambda: torch.Tensor.copy_(show(tensor), other),
        lambda: show(tensor).__setitem__(..., other),
    ):
        moire.explain(write)
        assert same(tensor, before)
