"""GroupedTensors in state_dicts and safetensors files: bytes, tags, and what shares memory."""

import concurrent.futures
import os
import stat

import moire
import numpy as np
import pytest
import torch
import truth
from samples_fp8 import MADE, SPLITS, places, ragged, same, uniform
from truth_fp8 import assert_same_bytes, numpy_of

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def path(tmp_path):
    pytest.importorskip("safetensors")
    return tmp_path / "tensors.safetensors"


def skip_numpy_on_a_gpu(framework, device):
    if (framework, device) == ("numpy", "cuda"):
        pytest.skip("NumPy's are a CPU's")


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
def test_safetensors_round_trip(path, generator, framework):
    given = {f"layer.{name}": make(generator) for name, make in MADE.items() if name != "numpy"}
    given["bias"] = truth.draw(generator, 3, 5)
    moire.save_safetensors(given, path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing beside it
    found = moire.load_safetensors(path, framework)
    assert found.keys() == given.keys()
    assert np.array_equal(found["bias"], numpy_of(given["bias"]))
    for name in MADE.keys() - {"numpy"}:
        mine, wanted = found[f"layer.{name}"], given[f"layer.{name}"]
        assert_same_bytes(mine, wanted)
        assert mine.tags() == wanted.tags() and mine.layout == wanted.layout
        kind = np.ndarray if framework == "numpy" else torch.Tensor
        assert isinstance(mine._any.data, kind) and places(mine) == {"cpu"}
    moire.save_safetensors(found, path)  # and again, from either kind
    again = moire.load_safetensors(path)
    assert same(again["layer.uniform"], given["layer.uniform"])


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_file_holds_what_shares_memory(path, generator, device, framework):
    skip_numpy_on_a_gpu(framework, device)
    groups = moire.Groups(splits=SPLITS)
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
        assert np.array_equal(found[name], numpy_of(wanted))


@pytest.mark.parametrize("splits", [np.array(SPLITS), torch.tensor(SPLITS)], ids=type)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_state_has_arrays_of_one_kind_and_place(path, generator, device, framework, splits):
    """Wherever the groups are: here they are the host's."""
    skip_numpy_on_a_gpu(framework, device)
    x = truth.draw(generator, 172, 70)
    tensor = moire.quantize(x if framework == "torch" else x.numpy(), moire.Groups(splits=splits))
    state, kind = tensor.state_dict(), type(tensor.rowwise.scales)
    assert {type(array) for array in state.values()} == {kind} and places(state) == {device}
    moire.save_safetensors({"x": tensor}, path)
    assert same(moire.load_safetensors(path, framework)["x"], tensor)


def test_other_readers_see_fp8_data_in_the_file(path, generator):
    from safetensors.torch import load_file

    _, tensor = ragged(generator)
    moire.save_safetensors({"x": tensor}, path)
    found = load_file(path)
    assert found["x.rowwise.data"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["x.columnwise.scales"], tensor.columnwise.scales.cpu())


def test_the_tag_of_fractional_scales_is_read(generator):
    _, tensor = ragged(generator, "fp8_block")
    for text, wanted in (("false", False), ("true", True)):
        tags = {**tensor.tags(), "fractional_scales": text}
        again = moire.GroupedTensor.from_state_dict(tensor.state_dict(), tags)
        assert again.fractional_scales is wanted


def test_a_file_is_replaced_where_a_link_leads(path, generator):
    tensor = moire.quantize(truth.draw(generator, 3, 32, 64))
    moire.save_safetensors({"x": tensor}, path)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    moire.save_safetensors({"y": tensor}, link)
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(moire.load_safetensors(path)) == ["y"]
    os.mkfifo(pipe := path.with_name("pipe"))
    (loop := path.with_name("loop")).symlink_to(loop)
    for other in (pipe, loop, path.parent):
        with pytest.raises(moire.Error, match=f"{other.name}: is there and no file"):
            moire.save_safetensors({"x": tensor}, other)
    with pytest.raises(moire.Error, match="File name too long"):
        moire.save_safetensors({"x": tensor}, path.with_name(300 * "x"))
    moire.save_safetensors({"x": tensor}, path.with_name(255 * "x"))
    assert len(list(path.parent.iterdir())) == 5


def test_threads_may_write_one_file(path, generator):
    tensor = moire.quantize(truth.draw(generator, 3, 32, 64))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: moire.save_safetensors({"x": tensor}, path), range(40)))
    assert same(moire.load_safetensors(path)["x"].to(tensor.device), tensor)
    assert list(path.parent.iterdir()) == [path]
