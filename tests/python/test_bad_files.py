"""Tags, pickles, files and libraries that anybody may have written: what is wrong with them is
moire's own error, with a sentence.
"""

import copy
import io
import pickle
from collections import OrderedDict

import moire
import pytest
import torch
from moire import _abi, arrays
from moire.errors import LibraryNotFound
from samples_fp8 import ragged

G = moire.Groups(splits=[2, 4])


def made():
    return moire.quantize(torch.ones(6, 32), G, "mxfp8", columnwise=True, layout=8)


def deep():
    found = []
    for _ in range(100_000):
        found = [found]
    return found


def state_of(tensor, metadata=None, **arrays):
    state = OrderedDict(tensor.state_dict())
    state.update({name.replace("__", "."): array for name, array in arrays.items()})
    state._metadata = tensor.state_dict()._metadata if metadata is None else metadata
    return state


def state_without_metadata():
    state = state_of(made())
    state._metadata = None
    return state


def tagged(**tags):
    return state_of(made(), {"": {**made().tags(), **tags}})


STATES = [
    (state_of(made(), 5), "the dict's metadata is 5, must be a dict"),
    (state_of(made(), {"": [1]}), "the tags in the dict's metadata is a list, must be a dict"),
    (tagged(format=deep()), "the tag 'format' is a list, must be a string"),
    (tagged(glu_block=8), "the tag 'glu_block' is 8, must be a string"),
    (tagged(element=torch.ones(2)), "the tag 'element' is a Torch tensor, must be a string"),
    (state_of(made(), rowwise__data=5), "rowwise.data is 5, must be a Torch tensor"),
    (state_of(made(), rowwise__data=torch.ones(())), "rowwise.data is [], must be"),
    (state_of(made(), groups__offsets="ab"), "groups.offsets is 'ab', must be a Torch tensor"),
    ({**state_of(made()), 5: torch.ones(2)}, "found 5, which no GroupedTensor has"),
]


@pytest.mark.parametrize("state, message", STATES, ids=[m[:30] for _, m in STATES])
def test_states_are_refused_with_a_sentence(state, message):
    for load in (
        made().load_state_dict,
        lambda s: made().from_state_dict(s, None if hasattr(s, "_metadata") else made().tags()),
    ):
        with pytest.raises(moire.InvalidArgument) as e:
            load(state)
        assert message in str(e.value)


def test_a_state_without_metadata_has_the_tags_beside_it_or_those_of_its_tensor():
    state = state_without_metadata()
    with pytest.raises(moire.InvalidArgument, match="has no metadata, needs the tags beside it"):
        moire.GroupedTensor.from_state_dict(state)
    for tags in (5, [], {"format": 5}):
        with pytest.raises(moire.InvalidArgument, match="from_state_dict: .*, must be a"):
            moire.GroupedTensor.from_state_dict(state, tags)
    assert moire.GroupedTensor.from_state_dict(state, made().tags()).layout == moire.GluLayout(8)
    assert torch.equal(made().load_state_dict(state).rowwise.scales, made().rowwise.scales)


@pytest.mark.parametrize("block", ["9" * 5000, "8.0", "", "-8", "٨"])
def test_a_block_that_is_no_number_is_refused(block):
    with pytest.raises(moire.InvalidArgument, match="the tag 'glu_block' is .*, must be a number"):
        moire.GroupedTensor.from_state_dict(tagged(glu_block=block))


@pytest.mark.parametrize("path", [5, None, "", "/", "a\0b", "\ud800", b"x", [], deep()])
def test_a_path_that_is_none_is_refused(path):
    pytest.importorskip("safetensors")
    with pytest.raises(moire.InvalidArgument, match="save_safetensors: path is .*, must be the pa"):
        moire.save_safetensors({"t": made()}, path)
    with pytest.raises(moire.InvalidArgument, match="load_safetensors: path is .*, must be the pa"):
        moire.load_safetensors(path)


def test_a_name_that_is_no_string_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(moire.InvalidArgument, match="a tensor's name is 5, must be a string"):
        moire.save_safetensors({5: made()}, tmp_path / "file")


@pytest.mark.parametrize("tags", ["[" * 100_000, "5", "null", '{"format": 5}', "{"])
def test_a_file_whose_tags_are_none_is_refused(tmp_path, tags):
    torch_files = pytest.importorskip("safetensors.torch")
    path = tmp_path / "file"
    parts = {f"t.{name}": array for name, array in made().state_dict().items()}
    torch_files.save_file(parts, path, {"moire.t": tags})
    with pytest.raises(moire.Error, match="'t' is no GroupedTensor") as e:
        moire.load_safetensors(path)
    assert e.value.code == moire.Code.IO


@pytest.mark.parametrize("text", ["[" * 100_000, "5", "null", '{"fc1": 5}', "{"])
def test_a_file_whose_tags_of_modules_are_none_is_refused(tmp_path, text):
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"t": torch.ones(2)}, tmp_path / "file", {"moire": text})
    with pytest.raises(moire.Error, match="load_safetensors: .*: in the file's metadata") as e:
        moire.load_safetensors(tmp_path / "file")
    assert e.value.code == moire.Code.IO


def test_tags_that_no_file_takes_are_refused(tmp_path):
    pytest.importorskip("safetensors")
    state = OrderedDict(t=torch.ones(2))
    state._metadata = {"": {"of": {1, 2}}}
    with pytest.raises(moire.Error, match="save_safetensors: .*set is not JSON serializable"):
        moire.save_safetensors(state, tmp_path / "file")
    assert not list(tmp_path.iterdir())


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


def test_safetensors_absent_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    for call in (
        lambda: moire.save_safetensors({}, tmp_path / "x"),
        lambda: moire.load_safetensors("x"),
    ):
        with pytest.raises(ImportError, match="needs safetensors: pip install safetensors"):
            call()


VALUES = {
    "GroupedTensor": made(),
    "Groups": G,
    "GluLayout": moire.GluLayout(8, "up_first"),
    "Activation": moire.Activation.clamped_swiglu(),
    "Recipe": moire.Recipe("fp8_block", fractional_scales=True),
    "WeightCache": moire.WeightCache("fp8_block"),
}


def tampered(value, state):
    """The pickle of a `value` whose state is another."""

    class Tampered:
        def __reduce__(self):
            if isinstance(value, moire.GroupedTensor):  # arrays and tags, or none of them
                make, (_, tags, *_) = value.__reduce_ex__(2)
                if not isinstance(state, dict):
                    return make, (state, tags)
                found = {tag: state.pop(tag) for tag in tags if tag in state}
                return make, (state, {**tags, **found})
            return object.__new__, (type(value),), state

    return pickle.dumps(Tampered())


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("state", [5, {}, [], "state"], ids=str)
def test_a_pickle_without_a_state_is_refused(name, state):
    if not state:  # nothing is set then, by pickle itself
        state = {"unknown": 1}
    said = f"{name}: the state in the pickle|from_state_dict: (state is|found 'unknown', which)"
    with pytest.raises(moire.InvalidArgument, match=said):
        pickle.loads(tampered(VALUES[name], state))


TAMPERED = [
    ("GroupedTensor", {"format": None}, "the tag 'format' is None, must be a string"),
    ("GroupedTensor", {"format": "fp4"}, "format is 'fp4', must be one of mxfp8"),
    ("GroupedTensor", {"element": "e3m4"}, "element is 'e3m4', must be one of e4m3, e5m2"),
    ("GroupedTensor", {"dtype": "int32"}, "the tag 'dtype' is 'int32', must be one of"),
    ("GroupedTensor", {"groups.offsets": [2, 4]}, "groups.offsets is a list, must be"),
    (
        "GroupedTensor",
        {"groups.offsets": torch.tensor([0, 9])},
        "group 0 ends at row 9, past the capacity 6",
    ),
    ("GroupedTensor", {"glu_block": "x"}, "the tag 'glu_block' is 'x', must be a number"),
    ("GroupedTensor", {"rowwise.data": None}, "rowwise.data is None, must be a"),
    (
        "GroupedTensor",
        {"rowwise.scales": torch.ones(3)},
        "rowwise.scales is float32 [3], needs uint8 [6, 1]",
    ),
    ("Groups", {"offsets": [0, 2]}, "offsets is a list, must be a Torch tensor"),
    ("Groups", {"offsets": torch.ones(3)}, "offsets in the pickle are torch.float32, must be int6"),
    ("Groups", {"offsets": torch.tensor([0, 4, 2])}, "group 1 ends at 2, before its start 4"),
    ("Groups", {"offsets": torch.tensor([1, 4])}, "offsets[0]"),
    ("Groups", {"capacity": -1}, "capacity is -1, must be an integer"),
    ("GluLayout", {"block": "8"}, "block is '8', must be an integer"),
    ("Activation", {"kind": "relu"}, "kind is 'relu', must be one of swiglu"),
    ("Activation", {"limit": float("nan")}, "limit is nan, must be a finite number"),
    ("Recipe", {"name": "fp4"}, "name is 'fp4', must be one of as_stored"),
    ("WeightCache", {"recipe": "bf16"}, "recipe is 'bf16', must be one of mxfp8"),
]


@pytest.mark.parametrize("name, changes, message", TAMPERED, ids=[m[:30] for *_, m in TAMPERED])
def test_a_tampered_pickle_is_refused(name, changes, message):
    value = VALUES[name]
    get = getattr(value, "__getstate__", None)
    if name == "GroupedTensor":
        _, (arrays, tags, *_) = value.__reduce_ex__(2)
        get = lambda: {**arrays, **tags}  # noqa: E731
    state = {**(value.__dict__ if get is None or get() is None else get()), **changes}
    with pytest.raises(moire.InvalidArgument) as e:
        pickle.loads(tampered(value, state))
    assert message in str(e.value)


@pytest.mark.parametrize("name", VALUES)
def test_pickles_and_copies_are_what_they_were(name):
    value = VALUES[name]
    for found in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert type(found) is type(value)
        if name == "GroupedTensor":
            assert found.tags() == value.tags() and found.shape == value.shape
            for (_, a), (_, b) in zip(found.arrays(), value.arrays()):
                assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        elif name == "Groups":
            assert torch.equal(found.offsets, value.offsets) and found.capacity == value.capacity
        elif name == "WeightCache":
            assert found.recipe == value.recipe
        else:
            assert found == value and hash(found) == hash(value)


def test_torch_load_of_weights_only_still_takes_a_grouped_tensor():
    file = io.BytesIO()
    torch.save({"t": made()}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["t"]
    assert found.tags() == made().tags() and found.groups.splits.tolist() == [2, 4]


def test_what_is_no_library_is_refused(tmp_path):
    library = tmp_path / "libmoire.so"
    library.write_text("no library")
    with pytest.raises(LibraryNotFound, match="could not be opened as moire's library: "):
        _abi._open(library, _abi.header_path)
    with pytest.raises(LibraryNotFound, match="could not be opened as moire's library: .*moire_ve"):
        _abi._open("libc.so.6", _abi.header_path)


@pytest.mark.parametrize(
    "text", ["\xff", "int f(", "int moire_version_number(void);"], ids=["bytes", "syntax", "none"]
)
def test_what_is_no_header_is_refused(tmp_path, text):
    header = tmp_path / "moire.h"
    text = f"/* cffi: begin */\n{text}\n/* cffi: end */"
    header.write_bytes(text.encode("latin-1"))
    with pytest.raises(LibraryNotFound, match="moire.h could not be read as moire's header: "):
        _abi._open(_abi.library_path, header)


@pytest.mark.parametrize("version", [torch.ones(2), (1, torch.ones(2))], ids=["tensor", "tuple"])
def test_a_version_that_equals_nothing_is_refused(version):
    cache, weight = moire.WeightCache(), torch.ones(2, 32, 32)
    cache.get(weight, copy.deepcopy(version))
    with pytest.raises(moire.InvalidArgument, match="version is .*, which cannot be compared"):
        cache.get(weight, version)


def test_plain_values_that_no_message_could_print():
    for name in ("", "a\0", "\ud800"):
        with pytest.raises(moire.InvalidArgument, match="implementation is '.*', must be a name"):
            moire.settings(implementation=name).__enter__()
    with pytest.raises(moire.InvalidArgument, match=r"splits\[0\] is an integer of 20001 bits, mu"):
        moire.Groups(splits=[1 << 20000])
    for device in (5.0, "x", "", -1, None, deep()):
        with pytest.raises(moire.InvalidArgument, match="Groups.to: device is .*, must be a devic"):
            G.to(device)


def test_bfloat16_without_ml_dtypes_is_a_sentence(monkeypatch):
    monkeypatch.setattr(arrays, "ml_dtypes", None)
    with pytest.raises(moire.Unsupported, match="bfloat16 is a type of ml_dtypes"):
        arrays.Numpy.dtype("bfloat16")
