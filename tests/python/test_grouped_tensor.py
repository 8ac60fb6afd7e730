"""GroupedTensor: views, copies, operations in place; byte for byte, wherever it lies."""

import copy
import io
import pickle
from contextlib import nullcontext

import moire
import numpy as np
import pytest
import torch
import truth
from samples_fp8 import MADE, SPLITS, places, ragged, same, uniform
from truth_fp8 import assert_same_bytes, bytes_of, numpy_of

pytestmark = pytest.mark.usefixtures("device")

FORMS = ["mxfp8", "fp8_block"]


@pytest.fixture(params=MADE)
def tensor(request, device, generator):
    """On a GPU without the mode of `device`: calls are made as they are where nobody watches, and
    what comes of it lies beside it though the default is the CPU.
    """
    if (request.param, device) == ("numpy", "cuda"):
        pytest.skip("NumPy's are a CPU's")
    made = MADE[request.param](generator)
    with torch.overrides._pop_mode_temporarily() if device == "cuda" else nullcontext():
        yield made


@pytest.mark.parametrize("form", FORMS)
def test_a_group_is_a_view_with_the_bytes_of_quantising_it_alone(generator, form):
    x, tensor = ragged(generator, form)
    rows = x[: sum(SPLITS)].split(SPLITS)
    assert len(tensor) == len(tensor.split()) == len(list(tensor)) == 4
    for g, (part, view) in enumerate(zip(rows, tensor.split())):
        alone = moire.quantize(part, recipe=form, columnwise=True)
        owned = -(-SPLITS[g] // tensor.form.block)
        assert view.shape == (SPLITS[g], 70) and view.groups is None
        for name in ("rowwise", "columnwise"):
            mine, wanted = getattr(view, name), getattr(alone, name)
            assert torch.equal(mine.data.view(torch.uint8), wanted.data.view(torch.uint8))
            used = slice(owned if name == "columnwise" else None)
            assert torch.equal(mine.scales[used], wanted.scales[used])
            assert mine.data.untyped_storage().data_ptr() == (
                getattr(tensor, name).data.untyped_storage().data_ptr()
            )
        assert torch.equal(view.dequantize(), tensor[g].dequantize())
    assert torch.equal(tensor[-1].dequantize(), tensor[3].dequantize())
    with pytest.raises(moire.InvalidArgument, match="group is 4, must be an integer, -4 to 3"):
        tensor[4]


@pytest.mark.parametrize("form", FORMS)
def test_a_group_of_weights_is_a_view_too(generator, form):
    w, tensor = uniform(generator, form)
    for g, view in enumerate(tensor):
        assert view.shape == (1, 128, 64)
        assert torch.equal(view.dequantize(), tensor.dequantize()[g : g + 1])
        assert view.rowwise.data.data_ptr() == tensor.rowwise.data[g].data_ptr()
        assert_same_bytes(view, moire.quantize(w[g : g + 1], recipe=form, columnwise=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [ragged, uniform])
def test_what_is_written_into_a_group_is_in_the_whole_and_nowhere_else(generator, form, kind):
    x, tensor = kind(generator, form)
    y, ends = truth.draw(generator, *x.shape), np.cumsum(SPLITS)
    for g in (2, 0):
        own = slice(g, g + 1) if kind is uniform else slice(ends[g] - SPLITS[g], ends[g])
        x[own] = y[own]
        tensor[g].quantize_(y[own])
        wanted = moire.quantize(x, tensor.groups, form, columnwise=True)
        assert_same_bytes(tensor, wanted)
    tensor[2].zero_()
    tensor.split()[2].copy_(wanted[2])
    assert_same_bytes(tensor, wanted)


def test_operations_in_place_return_the_object_and_keep_its_memory(tensor):
    before, other = addresses(tensor), tensor.clone()
    assert tensor.zero_() is tensor and is_zeros(tensor)
    assert (numpy_of(tensor.dequantize()) == 0).all()
    assert tensor.copy_(other) is tensor and same(tensor, other)
    values = other.dequantize()
    assert tensor.quantize_(values) is tensor
    assert before == addresses(tensor)


def addresses(tensor):
    return [
        a.data_ptr() if torch.is_tensor(a) else a.__array_interface__["data"][0]
        for _, a in tensor.arrays()
    ]


def is_zeros(tensor):
    return all((bytes_of(array) == 0).all() for _, array in tensor.arrays())


def test_new_values_and_new_groups_in_the_same_memory(generator):
    x, tensor = ragged(generator)
    y, groups = truth.draw(generator, *x.shape), moire.Groups(splits=[1, 2, 160, 0])
    tensor.quantize_(y, groups)
    assert_same_bytes(tensor, moire.quantize(y, groups, columnwise=True))
    w, weights = uniform(generator)
    weights.quantize_([2 * matrix for matrix in w])
    assert_same_bytes(weights, moire.quantize(2 * w, columnwise=True))


def saved_bytes(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def saved_and_loaded(tensor):
    file = io.BytesIO(saved_bytes(tensor))
    # NumPy's arrays are not among what Torch takes for weights.
    return torch.load(file, weights_only=not isinstance(tensor._any.data, np.ndarray))


COPIES = {
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_lossless_and_independent(tensor, device, how):
    twin = COPIES[how](tensor)
    assert same(twin, tensor) and places(twin) == {device}
    twin.zero_()
    assert not is_zeros(tensor)


def test_a_view_is_pickled_without_what_it_does_not_show(tensor):
    for how in (pickle.dumps, lambda t: saved_bytes(t)):
        whole, views = len(how(tensor)), tensor.split()
        overhead = whole - tensor.nbytes
        for view in views:
            assert len(how(view)) <= view.nbytes + overhead + 512
            assert same(pickle.loads(pickle.dumps(view)), view)


def test_detach_shares_memory(tensor):
    assert same(tensor.detach(), tensor) and addresses(tensor.detach()) == addresses(tensor)


def test_it_keeps_its_bytes_and_tags_wherever_it_goes(tensor, device):
    if isinstance(tensor._any.data, np.ndarray):
        assert tensor.to("cpu") is tensor
        with pytest.raises(moire.InvalidArgument, match="are NumPy's, which are on the CPU"):
            tensor.to("cuda")
        return
    assert tensor.to(device) is tensor and tensor.to(tensor.device) is tensor
    here, values = tensor.to("cpu"), numpy_of(tensor.dequantize())
    assert (here is tensor) == (device == "cpu")
    there = here.to(device, torch.bfloat16)
    for moved, place in ((here, "cpu"), (there, device)):
        assert same(moved.to(dtype=tensor.dtype), tensor)
        assert places(moved) == {moved.device.type} == {place}
        assert np.array_equal(numpy_of(moved.dequantize(torch.float32)), values)
        for mine, theirs in zip(moved, tensor):
            assert same(mine.to(dtype=tensor.dtype), theirs) and places(mine) == {place}
    assert there.groups is None or there.groups.offsets.device == there.device
    meta = tensor.to("meta")
    assert places(meta) == {meta.device.type} == {"meta"} and meta.shape == tensor.shape
    assert meta.nbytes == tensor.nbytes


def test_groups_go_where_bytes_are_copied_to(generator):
    _, tensor = ragged(generator)
    for copy_to in (
        lambda target: target.copy_(tensor),
        lambda target: target.load_state_dict(tensor.state_dict()),
    ):
        there = copy_to(tensor.to("meta"))
        assert there.groups.offsets.is_meta and places(there) == {"meta"}
        assert same(copy_to(tensor.clone().zero_()), tensor)
    assert tensor.clone().copy_(tensor).groups is tensor.groups


def test_state_dict_round_trip_through_a_file(tensor, device):
    state = tensor.state_dict()
    assert places(state) == {device}
    if torch.is_tensor(next(iter(state.values()))):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    again = moire.GroupedTensor.from_state_dict(state)
    assert same(again, tensor) and places(again) == {device}
    empty = tensor.clone().zero_()
    assert empty.load_state_dict(state) is empty and same(empty, tensor)
    plain = dict(state)  # without its tags: believed
    assert same(tensor.clone().zero_().load_state_dict(plain), tensor)
    with pytest.raises(moire.InvalidArgument, match="has no metadata, needs the tags"):
        moire.GroupedTensor.from_state_dict(plain)


def test_queries(generator, device):
    _, tensor = ragged(generator)
    assert not tensor.all_same_shape and tensor.has_rowwise and tensor.has_columnwise
    assert tensor.shape == (172, 70) and tensor.ndim == 2 and tensor.device.type == device
    assert tensor.nbytes == 2 * 172 * 70 + 172 * 3 + (172 // 32 + 4) * 70
    assert repr(tensor) == "moire.GroupedTensor(mxfp8, e4m3, [172, 70], rowwise and columnwise)"
    _, tiles = uniform(generator, "fp8_block")
    assert tiles.all_same_shape and tiles.nbytes == 3 * (128 * 64 + 4) and len(tiles) == 3
    assert tiles.copy_of(0) is tiles.copy_of(1)
    rows = torch.ones(8, 32)
    assert moire.quantize(rows).all_same_shape
    assert not moire.quantize(rows, moire.Groups(splits=[4, 4])).all_same_shape


def test_uint8_data_with_the_element_named():
    codes, scales = torch.zeros(6, 64, dtype=torch.uint8), torch.full((6, 2), 127).byte()
    tensor = moire.GroupedTensor("mxfp8", rowwise=(codes, scales), element="e5m2")
    assert tensor.rowwise.data.dtype == torch.float8_e5m2
    if hasattr(torch, "float8_e8m0fnu"):
        data, scales = tensor.rowwise.data, scales.view(torch.float8_e8m0fnu)
        typed = moire.GroupedTensor("mxfp8", rowwise=(data, scales))
        assert typed.rowwise.scales.dtype == torch.uint8


def test_a_refused_quantize_leaves_the_groups(generator):
    x, batch = ragged(generator)
    before = batch.groups
    with pytest.raises(moire.InvalidArgument):
        batch.quantize_(x[:40], moire.Groups(splits=[1, 2, 3, 4]))
    assert batch.groups is before
