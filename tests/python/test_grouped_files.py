"""GroupedTensors in state_dicts and safetensors files: bytes, tags, and what shares memory."""

import moire
import numpy as np
import pytest
import torch
import truth
from samples_fp8 import MADE, SPLITS, ragged, same, uniform
from truth_fp8 import assert_same_bytes


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


def test_the_tag_of_fractional_scales_is_read(generator):
    _, tensor = ragged(generator, "fp8_block")
    for text, wanted in (("false", False), ("true", True)):
        tags = {**tensor.tags(), "fractional_scales": text}
        again = moire.GroupedTensor.from_state_dict(tensor.state_dict(), tags)
        assert again.fractional_scales is wanted
