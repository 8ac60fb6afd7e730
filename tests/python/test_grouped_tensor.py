"""GroupedTensor: views, copies, operations in place; byte for byte."""

import copy
import io
import pickle

import moire
import numpy as np
import pytest
import torch
import truth
import truth_fp8
from samples_fp8 import MADE, SPLITS, ragged, same, uniform
from truth_fp8 import assert_same_bytes

FORMS = ["mxfp8", "fp8_block"]


@pytest.fixture(params=MADE)
def tensor(request, generator):
    return MADE[request.param](generator)


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


def test_operations_in_place_return_the_object_and_keep_its_memory(tensor):
    before = [array.__array_interface__["data"][0] for array in arrays(tensor)]
    other = tensor.clone()
    assert tensor.zero_() is tensor
    assert all((truth_fp8.bytes_of(array) == 0).all() for array in arrays(tensor))
    assert (np.asarray(tensor.dequantize()) == 0).all()
    assert tensor.copy_(other) is tensor and same(tensor, other)
    values = other.dequantize()
    assert tensor.quantize_(values) is tensor
    assert before == [array.__array_interface__["data"][0] for array in arrays(tensor)]


def arrays(tensor):
    return [
        np.asarray(a.view(torch.uint8)) if torch.is_tensor(a) else a for _, a in tensor.arrays()
    ]


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
def test_copies_are_lossless_and_independent(tensor, how):
    twin = COPIES[how](tensor)
    assert same(twin, tensor)
    twin.zero_()
    assert not all((truth_fp8.bytes_of(array) == 0).all() for array in arrays(tensor))


def test_a_view_is_pickled_without_what_it_does_not_show(tensor):
    for how in (pickle.dumps, lambda t: saved_bytes(t)):
        whole, views = len(how(tensor)), tensor.split()
        overhead = whole - tensor.nbytes
        for view in views:
            assert len(how(view)) <= view.nbytes + overhead + 512
            assert same(pickle.loads(pickle.dumps(view)), view)


def test_detach_and_to_share_memory(tensor):
    assert same(tensor.detach(), tensor)
    assert arrays(tensor.detach())[0].ctypes.data == arrays(tensor)[0].ctypes.data
    if tensor.device != "cpu" or not isinstance(tensor._any.data, np.ndarray):
        assert same(tensor.to("cpu"), tensor)
        meta = tensor.to("meta")
        assert meta.device.type == "meta" and meta.shape == tensor.shape
        assert meta.nbytes == tensor.nbytes
    else:
        with pytest.raises(moire.InvalidArgument, match="are NumPy's, which are on the CPU"):
            tensor.to("cpu")


def test_state_dict_round_trip_through_a_file(tensor):
    state = tensor.state_dict()
    if torch.is_tensor(next(iter(state.values()))):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    again = moire.GroupedTensor.from_state_dict(state)
    assert same(again, tensor)
    empty = tensor.clone().zero_()
    assert empty.load_state_dict(state) is empty and same(empty, tensor)
    plain = dict(state)  # without its tags: believed
    assert same(tensor.clone().zero_().load_state_dict(plain), tensor)
    with pytest.raises(moire.InvalidArgument, match="has no metadata, needs the tags"):
        moire.GroupedTensor.from_state_dict(plain)


def test_queries(generator):
    _, tensor = ragged(generator)
    assert not tensor.all_same_shape and tensor.has_rowwise and tensor.has_columnwise
    assert tensor.shape == (172, 70) and tensor.ndim == 2 and tensor.device.type == "cpu"
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


def test_to_where_it_is_returns_the_object_itself(generator):
    _, batch = ragged(generator)
    assert batch.to("cpu") is batch
