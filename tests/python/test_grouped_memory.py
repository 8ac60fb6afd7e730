"""Who shows the memory of a GroupedTensor: its views, which share its groups and whose writes it
counts; processes that it is sent to; and copies, with what was set on it.
"""

import copy
import gc
import io
import pickle
import weakref

import moire
import numpy as np
import pytest
import torch
import truth
from samples_fp8 import SPLITS, ragged, same, uniform

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


# ---- writes are counted


PARTS = {
    "itself": lambda t: t,
    "t[1]": lambda t: t[1],
    "split": lambda t: t.split()[1],
    "t[1][0]": lambda t: t[1][0],
    **{name: view for name, view in VIEWS.items() if name not in ("data of", "itself")},
    "detach()[1]": lambda t: t.detach()[1],
    "narrow": lambda t: t.narrow(0, 1, 1),
}
WRITES = {
    "zero_": lambda t: t.zero_(),
    "quantize_": lambda t: t.quantize_(torch.zeros(t.shape)),
    "copy_": lambda t: t.copy_(t.clone().zero_()),
    "copy_ of values": lambda t: t.copy_(torch.zeros(t.shape)),
    "Tensor.zero_": torch.Tensor.zero_,
    "Tensor.copy_": lambda t: torch.Tensor.copy_(t, t.clone().zero_()),
    "Tensor.copy_ of values": lambda t: torch.Tensor.copy_(t, torch.zeros(t.shape)),
    "into arrays": lambda t: [array.view(torch.uint8).zero_() for _, array in t.arrays()],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_what_it_shows_counts(generator, part, write):
    _, weight = uniform(generator)
    cache, values = moire.WeightCache(), torch.empty(weight.shape)
    copies = cache.get(values.copy_(weight.dequantize()), weight._version)
    version = weight._version
    WRITES[write](PARTS[part](weight))
    assert weight._version > version
    copies = cache.get(values.copy_(weight.dequantize()), weight._version)
    assert torch.equal(copies.dequantize(), values)


@pytest.mark.parametrize("view", VIEWS)
def test_inference_mode_shows_it_and_counts(generator, view):
    _, weight = uniform(generator)
    version = weight._version
    with torch.inference_mode():
        VIEWS[view](weight).quantize_(torch.zeros(weight.shape))
        assert weight._version > version and not weight.dequantize().any()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("write", WRITES)
def test_a_backward_notices_every_write(generator, part, write):
    layer = moire.nn.GroupedLinear(3, 64, 96, primary="mxfp8")
    y = layer(truth.draw(generator, 12, 64).requires_grad_(), [4, 4, 4])
    with torch.no_grad():
        WRITES[write](PARTS[part](layer.weight))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:.* was given a GroupedTensor")
@pytest.mark.parametrize("part", [part for part in PARTS if not part.startswith("data")])
def test_torchs_own_backward_notices_a_write(generator, part):
    (_, weight), factor = uniform(generator), torch.ones(3, 128, 64, requires_grad=True)
    product = weight * factor
    PARTS[part](weight).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- sent to other processes


def sent(tensor):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(tensor)
    return queue.get()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("kind", ["ragged", "uniform"])
def test_a_part_that_is_sent_shows_the_memory_of_the_whole(generator, kind, is_shared):
    tensor = {"ragged": ragged, "uniform": uniform}[kind](generator)[1].to("cpu")
    plain = torch.ones(4, device="cpu")
    if is_shared:
        tensor.share_memory_()
        plain.share_memory_()
    theirs, of_plain = sent(tensor[2]), sent(plain[1:])
    assert same(theirs, tensor[2])
    tensor.zero_()
    plain.zero_()
    assert not theirs.dequantize().any() and not of_plain.any()
    assert plain.is_shared() and all(array.is_shared() for _, array in tensor.arrays())


def test_what_has_a_source_is_not_sent(generator):
    x = truth.draw(generator, 9, 64).to("cpu").requires_grad_()
    with pytest.raises(RuntimeError, match="refusing to serialize non-leaf"):
        sent(x * 1)
    with pytest.raises(
        moire.InvalidArgument, match="send: a GroupedTensor has a gradient to pass on; send"
    ):
        sent(moire.quantize(x))
    leaf = moire.quantize(x.detach()).requires_grad_()
    assert sent(leaf).requires_grad and same(sent(leaf), leaf)


# ---- copies


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


HOW = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.requires_grad_, torch.detach])
def test_copies_have_what_those_of_an_array_have(generator, kind, how):
    """Attributes, gradients, and whether they want one."""
    _, weight = uniform(generator)
    found = []
    for given in (weight.dequantize(), weight):
        tensor = kind(given)
        tensor.mine = {"a": [1, torch.ones(2)]}
        if tensor.requires_grad:
            tensor.grad = torch.ones(tensor.shape)
        copied = HOW[how](tensor)
        mine = getattr(copied, "mine", None)
        found.append((mine and mine["a"][0], mine is tensor.mine, type(copied) is type(tensor)))
        found[-1] += copied.requires_grad, copied.is_leaf, isinstance(copied, torch.nn.Parameter)
        found[-1] += copied.grad is None, copied.grad is tensor.grad
    assert found[0] == found[1]
    assert same(copied, weight)


def test_a_copy_that_lost_its_source_is_a_leaf_that_wants_a_gradient(generator):
    x = truth.draw(generator, 9, 64).requires_grad_()
    for tensor in (x * 1, moire.quantize(x)):
        copied = saved_and_loaded(tensor)
        assert copied.requires_grad and copied.is_leaf


def test_what_is_copied_twice_is_one(generator):
    _, weight = uniform(generator)
    first, second = copy.deepcopy([weight, weight])
    assert first is second


def test_attributes_of_a_file_change_no_bytes(generator):
    _, weight = uniform(generator)
    make, (state, tags, *_) = weight.__reduce_ex__(2)
    told = {"rowwise": None, "_fw": 5, "groups": 3, "_groups_of_memory": [3], "mine": 1}
    found = make(state, tags, True, told)
    assert same(found, weight) and found.mine == 1 and found.requires_grad


# ---- memory of its own


USES = {
    **{name: lambda t, name=name: getattr(t, name)() for name in ("data_ptr", "numpy", "tolist")},
    "apply_": lambda t: t.apply_(lambda value: value),
    "map_": lambda t: t.map_(t.dequantize(), lambda a, b: a),
    "map2_": lambda t: t.map2_(t, t, lambda a, b, c: a),
    "__dlpack__": torch.from_dlpack,
    "__array__": np.asarray,
}


@pytest.mark.parametrize("name", USES)
def test_what_reads_memory_says_where_it_is(generator, name):
    _, weight = uniform(generator)
    with pytest.raises(moire.Unsupported, match=f"^{name}: a GroupedTensor has no memory of its o"):
        USES[name](weight)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_its_storage_is_empty(generator):
    _, weight = uniform(generator)
    before = weight.clone()
    for storage in (weight.untyped_storage(), weight.storage()):
        assert storage.nbytes() == 0 and storage.tolist() == []
        storage.share_memory_()
        for write in (lambda s: s.fill_(1), lambda s: s.copy_(before.rowwise.scales.storage())):
            with pytest.raises(RuntimeError):
                write(storage)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.Tensor.apply_(weight.to("cpu"), lambda value: value)
    assert same(weight, before)


def test_a_view_keeps_no_graph_and_no_attribute_alive(generator):
    x = torch.randn(96, 64, generator=generator, requires_grad=True)
    whole = moire.quantize(x * 1, moire.Groups(splits=[32, 64]), recipe="mxfp8")
    view, gone = whole[0].detach(), weakref.ref(whole)
    del whole
    gc.collect()
    assert gone() is None and view.shape == (32, 64)


def test_zeroing_in_inference_mode_counts(generator):
    tensor = uniform(generator)[1]
    for target in (tensor, tensor.detach(), tensor[0]):
        before = tensor._version
        with torch.inference_mode():
            target.zero_()
        assert tensor._version > before


def test_what_others_set_on_a_parameter_is_not_sent(generator):
    parameter = torch.nn.Parameter(uniform(generator)[1].to("cpu"))
    parameter.get_main_grad = lambda: None
    theirs = sent(parameter)
    assert isinstance(theirs, torch.nn.Parameter) and not hasattr(theirs, "get_main_grad")


def test_a_deep_copy_may_refer_to_itself(generator):
    tensor = uniform(generator)[1]
    tensor.me = tensor
    theirs = copy.deepcopy(tensor)
    assert theirs.me is theirs
