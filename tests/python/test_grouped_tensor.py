"""GroupedTensor: views, copies, operations in place, files, layouts; byte for byte."""

import copy
import io
import pickle

import moire
import numpy as np
import pytest
import torch
import truth
import truth_fp8
from samples_fp8 import SPLITS, ragged, uniform
from truth_fp8 import assert_same_bytes

FORMS = ["mxfp8", "fp8_block"]


MADE = {
    "ragged": lambda g: ragged(g)[1],
    "ragged_blocks": lambda g: ragged(g, "fp8_block", element="e5m2")[1],
    "one_direction": lambda g: ragged(g, rowwise=False)[1],
    "uniform": lambda g: uniform(g, layout=8)[1],
    "tiles": lambda g: uniform(g, "fp8_block")[1],
    "fractional": lambda g: ragged(g, moire.Recipe("fp8_block", fractional_scales=True))[1],
    "numpy": lambda g: moire.quantize(ragged(g)[0].numpy(), moire.Groups(splits=SPLITS)),
}


@pytest.fixture(params=MADE)
def tensor(request, generator):
    return MADE[request.param](generator)


def same(a, b):
    assert_same_bytes(a, b)
    for name in ("format", "element", "shape", "layout", "dtype", "fractional_scales"):
        assert getattr(a, name) == getattr(b, name), name
    assert (a.groups is None) == (b.groups is None)
    if a.groups is not None:
        assert a.groups.offsets.tolist() == b.groups.offsets.tolist()
    return True


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


def test_a_state_of_another_layout_or_format_is_refused(generator):
    _, tensor = uniform(generator, layout=8)
    before = tensor.clone()
    for other, says in (
        (uniform(generator, layout=32)[1], "glu_block is 32, must be 8"),
        (uniform(generator)[1], "glu_block is absent, must be 8"),
        (moire.quantize(torch.ones(3, 128, 64), columnwise=True, element="e5m2", layout=8), "e5m2"),
        (uniform(generator, "fp8_block", layout=8)[1], "format is fp8_tile, must be mxfp8"),
        (moire.quantize(torch.ones(3, 128, 64), layout=8), "columnwise is absent, must be present"),
        (moire.quantize(torch.ones(2, 128, 64), columnwise=True, layout=8), "shape is (2, 128"),
    ):
        with pytest.raises(moire.InvalidArgument) as e:
            tensor.load_state_dict(other.state_dict())
        assert says in str(e.value)
        assert same(tensor, before)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_safetensors_round_trip(tmp_path, generator, framework):
    path = tmp_path / "tensors.safetensors"
    given = {f"layer.{name}": make(generator) for name, make in MADE.items() if name != "numpy"}
    given["bias"] = truth.draw(generator, 3, 5)
    moire.save_safetensors(given, path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing beside it
    found = moire.load_safetensors(path, framework)
    assert found.keys() == given.keys()
    assert np.array_equal(found["bias"], given["bias"])
    for name in MADE.keys() - {"numpy"}:
        mine, wanted = found[f"layer.{name}"], given[f"layer.{name}"]
        assert_same_bytes(mine, wanted)
        assert mine.tags() == wanted.tags() and mine.layout == wanted.layout
        kind = np.ndarray if framework == "numpy" else torch.Tensor
        assert isinstance(mine._any.data, kind)
    moire.save_safetensors(found, path)  # and again, from either kind
    again = moire.load_safetensors(path)
    assert same(again["layer.uniform"], given["layer.uniform"])


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_file_holds_what_shares_memory(tmp_path, generator, framework):
    path, groups = tmp_path / "tensors.safetensors", moire.Groups(splits=SPLITS)
    x, w = truth.draw(generator, 172, 70), truth.draw(generator, 3, 64, 40)
    if framework == "numpy":
        x, w = x.numpy(), w.numpy()
    first = moire.quantize(x, groups, columnwise=True)
    second, weights = moire.quantize(2 * x, groups), moire.quantize(w)
    given = {"x": first, "dy": second, "again": first, "view": first[2], "w": weights}
    given |= {f"w{g}": view for g, view in enumerate(weights)}
    moire.save_safetensors(
        {**given, "plain": x, "transposed": x.T, "twice": x, "part": x[3:5]}, path
    )
    found = moire.load_safetensors(path, framework)
    for name, tensor in given.items():
        assert same(found[name], tensor)
    for name, wanted in (("plain", x), ("transposed", x.T), ("twice", x), ("part", x[3:5])):
        assert np.array_equal(found[name], wanted)


def test_a_state_has_arrays_of_one_kind(tmp_path, generator):
    x, path = truth.draw(generator, 172, 70), tmp_path / "x.safetensors"
    for groups in (moire.Groups(splits=SPLITS), moire.Groups(splits=np.array(SPLITS))):
        for source, kind in ((x, torch.Tensor), (x.numpy(), np.ndarray)):
            tensor = moire.quantize(source, groups)
            assert all(isinstance(array, kind) for array in tensor.state_dict().values())
            moire.save_safetensors({"x": tensor}, path)
            framework = "torch" if kind is torch.Tensor else "numpy"
            assert same(moire.load_safetensors(path, framework)["x"], tensor)


def test_other_readers_see_fp8_data_in_the_file(tmp_path, generator):
    from safetensors.torch import load_file

    path = tmp_path / "tensors.safetensors"
    _, tensor = ragged(generator)
    moire.save_safetensors({"x": tensor}, path)
    found = load_file(path)
    assert found["x.rowwise.data"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["x.columnwise.scales"], tensor.columnwise.scales)


def test_bad_files_are_named_and_nothing_is_left_half_written(tmp_path, generator):
    path = tmp_path / "tensors.safetensors"
    _, tensor = ragged(generator)
    moire.save_safetensors({"x": tensor}, path)
    whole = path.read_bytes()

    def refused(content, *fragments):
        path.write_bytes(content)
        with pytest.raises(moire.Error) as e:
            moire.load_safetensors(path)
        assert e.value.code == moire.Code.IO and str(path) in str(e.value)
        for fragment in fragments:
            assert fragment in str(e.value)

    refused(whole[:-1])
    refused(b"")
    refused(b"no such thing" * 9)
    refused(whole.replace(b"x.rowwise.scales", b"x.rowwise.skales"), "'x'", "'rowwise.skales'")
    refused(whole.replace(b'\\"mxfp8\\"', b'\\"mxfp9\\"'), "'x'", "format is 'mxfp9'")
    refused(whole.replace(b'\\"float32\\"', b'\\"xloat32\\"'), "'x'", "'dtype' is 'xloat32'")
    path.write_bytes(whole)
    with pytest.raises(moire.Error, match="save_safetensors"):
        moire.save_safetensors({"x": tensor, "y": torch.ones(2).to_sparse()}, path)
    assert path.read_bytes() == whole and len(list(tmp_path.iterdir())) == 1
    for other, says in (
        (torch.ones(2, dtype=torch.complex64), "'y' is complex64, must be one of bfloat16, bool, "),
        (torch.ones(2, device="meta"), "'y' is on the device 'meta', must have values"),
    ):
        with pytest.raises(moire.InvalidArgument, match=says):
            moire.save_safetensors({"x": tensor, "y": other}, path)
    for nowhere, says in ((tmp_path / "no" / "x", "No such file"), (path / "x", "Not a directory")):
        with pytest.raises(moire.Error) as e:
            moire.save_safetensors({"x": tensor}, nowhere)
        assert str(e.value).startswith(f"save_safetensors: {nowhere}: {says}")
    with pytest.raises(moire.InvalidArgument, match="tensors is a GroupedTensor, must be a dict"):
        moire.save_safetensors(tensor, path)
    for other in ("x.rowwise.data", "x.bias"):
        with pytest.raises(moire.InvalidArgument, match=f"'{other}' begins as the parts of"):
            moire.save_safetensors({"x": tensor, other: torch.ones(2)}, path)
    assert path.read_bytes() == whole


def test_states_that_are_none_are_refused(generator):
    _, tensor = ragged(generator)
    state, tags = tensor.state_dict(), tensor.tags()
    with pytest.raises(moire.InvalidArgument, match="must be a dict of arrays by name"):
        tensor.load_state_dict(5)
    for wrong, message in (
        ({k: v for k, v in tags.items() if k != "element"}, "the tags have no 'element'"),
        ({**tags, "dtype": "load"}, "the tag 'dtype' is 'load', must be one of float32"),
        ({**tags, "glu_block": "x", "glu_order": "gate_first"}, "the tag 'glu_block' is 'x'"),
        ({**tags, "glu_block": "0"}, "GluLayout: order is"),
        ({**tags, "fractional_scales": "no"}, "'fractional_scales' is 'no', must be one of true"),
    ):
        with pytest.raises(moire.InvalidArgument, match=message):
            moire.GroupedTensor.from_state_dict(state, wrong)
    with pytest.raises(moire.InvalidArgument, match="rowwise and columnwise are both absent"):
        moire.GroupedTensor.from_state_dict({}, tags)


def test_the_tag_of_fractional_scales_is_read(generator):
    _, tensor = ragged(generator, "fp8_block")
    for text, wanted in (("false", False), ("true", True)):
        tags = {**tensor.tags(), "fractional_scales": text}
        again = moire.GroupedTensor.from_state_dict(tensor.state_dict(), tags)
        assert again.fractional_scales is wanted


def test_safetensors_absent_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    for call in (
        lambda: moire.save_safetensors({}, tmp_path / "x"),
        lambda: moire.load_safetensors("x"),
    ):
        with pytest.raises(ImportError, match="needs safetensors: pip install safetensors"):
            call()


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


# ---- wrong use

DATA = torch.zeros(6, 64, dtype=torch.float8_e4m3fn)
SCALES = torch.zeros(6, 2, dtype=torch.uint8)
COLUMN_SCALES = torch.zeros(1, 64, dtype=torch.uint8)


def made(format="mxfp8", rowwise=(DATA, SCALES), **options):
    return moire.GroupedTensor(format, rowwise=rowwise, **options)


BAD = [
    (lambda: made("fp4"), "format is 'fp4', must be one of mxfp8, fp8_block, fp8_tile"),
    (lambda: made(rowwise=None), "rowwise and columnwise are both absent"),
    (lambda: made(rowwise=DATA), "rowwise is a Torch tensor, must be (data, scales)"),
    (lambda: made(rowwise=(DATA, [1])), "rowwise.scales is a list, must be a Torch tensor"),
    (lambda: made(rowwise=(DATA, SCALES[:, :1])), "scales is uint8 [6, 1], needs uint8 [6, 2] (mx"),
    (lambda: made(rowwise=(DATA, SCALES.float())), "is float32 [6, 2], needs uint8 [6, 2]"),
    (lambda: made("fp8_block"), "is uint8 [6, 2], needs float32 [6, 1] (fp8_block, rowwise, 1"),
    (lambda: made(columnwise=(DATA, SCALES)), "columnwise.scales is uint8 [6, 2], needs uint8 [1,"),
    (lambda: made(columnwise=(DATA[1:], COLUMN_SCALES)), "columnwise.data is [5, 64], needs [6,"),
    (
        lambda: made(columnwise=(DATA.float().to(torch.float8_e5m2), COLUMN_SCALES)),
        "columnwise.data is e5m2, but the other direction or element= is e4m3; mixed formats",
    ),
    (lambda: made(rowwise=(DATA.float(), SCALES)), "rowwise.data is float32 [6, 64], needs float8"),
    (lambda: made(rowwise=(DATA.view(torch.uint8), SCALES)), "is uint8, needs element='e4m3'"),
    (lambda: made(rowwise=(DATA[0], SCALES)), "rowwise.data is [64], must be ragged [rows, k]"),
    (lambda: made(groups=[6]), "groups is a list, must be moire.Groups"),
    (
        lambda: made(groups=moire.Groups(splits=[2], capacity=5)),
        "has 6 rows, but groups have a cap",
    ),
    (
        lambda: made(groups=moire.Groups(splits=[3, 0, 4])),
        "GroupedTensor: the groups end at row 7, past the 6 rows of the data",
    ),
    (
        lambda: moire.quantize(torch.ones(6, 64), moire.Groups(splits=np.array([7]))),
        "quantize: the groups end at row 7, past the 6 rows of the data",
    ),
    (
        lambda: made().to(torch.float64),
        "GroupedTensor.to: dtype is torch.float64, must be torch.float32, torch.bfloat16 or ",
    ),
    (lambda: made().to("gpu"), "GroupedTensor.to: device is 'gpu', must be a device"),
    (lambda: made("fp8_tile"), "format is 'fp8_tile', but rowwise.data is ragged"),
    (lambda: made(layout="x"), "layout is 'x'"),
    (lambda: made(dtype=torch.int8), "dtype is torch.int8"),
    (
        lambda: made().dequantize(direction="columnwise"),
        "has no columnwise copy; quantise with col",
    ),
    (lambda: made().dequantize(torch.int8), "dequantize: dtype is torch.int8"),
    (lambda: made().dequantize(direction=1), "direction is 1, must be one of rowwise, columnwise"),
    (lambda: made().copy_(DATA), "copy_: other is a Torch tensor, must be a moire.GroupedTensor"),
    (lambda: made().copy_(moire.quantize(torch.ones(5, 64))), "shape is (5, 64), must be (6, 64)"),
    (lambda: made().quantize_(torch.ones(5, 64)), "quantize_: x is [5, 64], must be [6, 64]"),
    (
        lambda: made().quantize_(torch.ones(6, 64), moire.Groups(splits=[2, 4])),
        "quantize_: groups is 2, must be 1",
    ),
    (lambda: moire.quantize(torch.ones(6)), "quantize: x is [6], must be [rows, k], [G, n, k] or"),
    (lambda: moire.quantize([]), "x is an empty list"),
    (lambda: moire.quantize([torch.ones(6)]), "x[0] is [6], must have rank 2"),
    (lambda: moire.quantize([DATA.float(), 3]), "x[1] is 3, must be a Torch tensor"),
    (
        lambda: moire.quantize([torch.ones(6, 64), torch.ones(6, 32)]),
        "x[1] is [6, 32] but x[0] is [6, 64]; a ragged last dimension is not supported",
    ),
    (
        lambda: moire.quantize([torch.ones(6, 64), torch.ones(3, 32)]),
        "all-different shapes are not supported",
    ),
    (
        lambda: moire.quantize([torch.ones(2, 4)], moire.Groups(splits=[2])),
        "groups are given, but x is a list",
    ),
    (
        lambda: moire.quantize(torch.ones(1, 2, 4), moire.Groups(splits=[2])),
        "groups is given, but x is uniform, [1, 2, 4]",
    ),
    (lambda: moire.quantize(torch.ones(6, 64), recipe="bf16"), "recipe is 'bf16', must be one of"),
    (lambda: moire.quantize(torch.ones(6, 64), recipe=3), "quantize: recipe is 3, must be one of"),
    (lambda: moire.quantize(torch.ones(6, 64), element="e3m4"), "element is 'e3m4', must be one"),
    (lambda: moire.quantize(torch.ones(6, 64), rowwise=1), "rowwise is 1, must be True or False"),
    (
        lambda: moire.quantize(torch.ones(6, 64), rowwise=False),
        "are both False, needs at least one",
    ),
    (lambda: moire.quantize(torch.ones(6, 64), [6]), "quantize: groups is a list, must be"),
    (lambda: moire.quantize(torch.ones(6, 64).int()), "int32"),
    (
        lambda: moire.quantize(torch.ones(6, 64), row_idx=torch.tensor(3)),
        "row_idx is [], must have",
    ),
    (lambda: moire.Recipe("nope"), "Recipe: name is 'nope', must be one of as_stored"),
    (
        lambda: moire.Recipe("mxfp8", save="all"),
        "Recipe: save is 'all', must be one of input, quan",
    ),
    (lambda: moire.Recipe("mxfp8", "e4"), "Recipe: gradient_element is 'e4'"),
    (
        lambda: moire.Recipe("mxfp8", fractional_scales=True),
        "name is 'mxfp8', needs fp8_block",
    ),
    (lambda: moire.Recipe("mxfp8", emulate_accumulation=True), "needs mxfp8_fast or fp8_block"),
    (
        lambda: moire.Recipe("bf16", emulate_accumulation=True),
        "emulate_accumulation is True but name is 'bf16', needs mxfp8_fast or fp8_block",
    ),
    (
        lambda: moire.Recipe(gradient_element="e5m2"),
        "gradient_element is 'e5m2' but name is 'as_stored', needs mxfp8 or",
    ),
    (
        lambda: moire.Recipe("fp32", save="quantized"),
        "save is 'quantized' but name is 'fp32', needs mxfp8 or mxfp8_fast or fp8_block",
    ),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m[:40] for _, m in BAD])
def test_wrong_use_is_refused_with_the_reason(call, message):
    with pytest.raises(moire.InvalidArgument) as e:
        call()
    assert message in str(e.value)


def test_uint8_data_with_the_element_named():
    tensor = made(rowwise=(DATA.view(torch.uint8), SCALES + 127), element="e5m2")
    assert tensor.rowwise.data.dtype == torch.float8_e5m2
    if hasattr(torch, "float8_e8m0fnu"):
        typed = made(rowwise=(DATA, SCALES.view(torch.float8_e8m0fnu)))
        assert typed.rowwise.scales.dtype == torch.uint8


def test_groups_of_a_uniform_tensor_have_no_gate_and_up(generator):
    _, weight = uniform(generator, layout="halves")
    with pytest.raises(moire.InvalidArgument, match="dim is 0, the groups of a GroupedTensor"):
        moire.convert_glu(weight, "halves", 1)


def test_a_refused_quantize_leaves_the_groups(generator):
    x, batch = ragged(generator)
    before = batch.groups
    with pytest.raises(moire.InvalidArgument):
        batch.quantize_(x[:40], moire.Groups(splits=[1, 2, 3, 4]))
    assert batch.groups is before


def test_to_where_it_is_returns_the_object_itself(generator):
    _, batch = ragged(generator)
    assert batch.to("cpu") is batch
