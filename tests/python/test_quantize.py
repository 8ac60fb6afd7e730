"""moire.quantize and back: every byte against ml_dtypes' casts, block by block."""

import moire
import numpy as np
import pytest
import torch
import truth
import truth_fp8
from truth_fp8 import numpy_of

pytestmark = pytest.mark.usefixtures("device")

FORMS = ["mxfp8", "fp8_block"]
DIRECTIONS = ["rowwise", "columnwise"]
SPLITS = {**truth.SPLITS, "two_blocks": [129, 0, 40]}


def draw(generator, rows, k, dtype=torch.float32):
    """Magnitudes over many powers of two, a few zeros, and a block of zeros."""
    x = truth.draw(generator, rows, k) * 2.0 ** torch.randint(
        -20, 20, (rows, k), generator=generator
    )
    x[torch.rand(rows, k, generator=generator) < 0.1] = 0
    x[: rows // 2, :32] = 0
    return x.to(dtype)


def expect(tensor, x, form, element, splits):
    """All owned bytes and scales are those of the definition; the others are zero."""
    for direction in DIRECTIONS:
        copy = getattr(tensor, direction)
        data, scales, owned = truth_fp8.quantized(x, form, element, direction, splits)
        assert np.array_equal(truth_fp8.bytes_of(copy.data), data), direction
        found = truth_fp8.scales_of(copy.scales)
        assert np.array_equal(found[owned], scales[owned]), direction
        assert (
            truth_fp8.bytes_of(copy.scales).reshape(-1)[
                np.repeat(~owned.reshape(-1), copy.scales.itemsize)
            ]
            == 0
        ).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SPLITS)
def test_every_byte_of_both_directions(generator, form, name):
    splits = SPLITS[name]
    x = draw(generator, sum(splits) + 3, 70)
    tensor = moire.quantize(x, moire.Groups(splits=splits), form, columnwise=True)
    expect(tensor, x, form, "e4m3", splits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_and_source_types(generator, form, element, dtype):
    x = draw(generator, 40, 33).clamp(-6e4, 6e4).to(dtype)
    tensor = moire.quantize(x, None, form, columnwise=True, element=element)
    expect(tensor, x, form, element, None)
    assert tensor.dtype == dtype and tensor.element == element
    assert tensor.rowwise.data.dtype == truth_fp8.TORCH[element]
    one = moire.quantize(x, None, form, rowwise=False, columnwise=True, element=element)
    assert one.rowwise is None and torch.equal(one.columnwise.scales, tensor.columnwise.scales)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gathered_rows_are_the_bytes_of_gathering_first(generator, index):
    x, splits = draw(generator, 9, 40), [33, 0, 7]
    row_idx = torch.randint(9, (42,), generator=generator, dtype=index)
    groups = moire.Groups(splits=splits)
    gathered = moire.quantize(x, groups, columnwise=True, row_idx=row_idx)
    truth_fp8.assert_same_bytes(gathered, moire.quantize(x[row_idx], groups, columnwise=True))


@pytest.mark.parametrize("listed", [False, True])
def test_weights_are_uniform(generator, listed):
    w = draw(generator, 3 * 140, 150).view(3, 140, 150)
    given = list(w) if listed else w
    tensor = moire.quantize(given, columnwise=True)
    assert tensor.shape == (3, 140, 150) and tensor.groups is None and tensor.all_same_shape
    for g in range(3):
        for direction in DIRECTIONS:
            copy = getattr(tensor, direction)
            data, scales, owned = truth_fp8.quantized(w[g], "mxfp8", direction=direction)
            assert np.array_equal(truth_fp8.bytes_of(copy.data[g]), data)
            rows = copy.scales[g].shape[0]
            assert np.array_equal(truth_fp8.scales_of(copy.scales[g]), scales[:rows])
    tiles = moire.quantize(given, recipe="fp8_block", columnwise=True)
    assert tiles.format == "fp8_tile" and tiles.has_columnwise and tiles.columnwise is None
    for g in range(3):
        data, scales = truth_fp8.quantized_tiles(w[g])
        assert np.array_equal(truth_fp8.bytes_of(tiles.rowwise.data[g]), data)
        assert np.array_equal(truth_fp8.scales_of(tiles.rowwise.scales[g]), scales)


def test_a_list_of_matrices_that_differ_in_rows_is_ragged(generator):
    parts = [draw(generator, n, 40) for n in (5, 0, 33)]
    tensor = moire.quantize(parts, columnwise=True)
    assert tensor.shape == (38, 40) and tensor.groups.splits.tolist() == [5, 0, 33]
    whole = moire.quantize(torch.cat(parts), moire.Groups(splits=[5, 0, 33]), columnwise=True)
    truth_fp8.assert_same_bytes(tensor, whole)
    halves = [part.bfloat16() for part in parts]
    tensor = moire.quantize(halves)
    with torch.autocast(parts[0].device.type, torch.float16):
        truth_fp8.assert_same_bytes(moire.quantize(halves), tensor)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dequantize_is_the_decoded_value_rounded_once(generator, form, direction):
    splits = [33, 0, 40]
    x = draw(generator, 75, 70)
    tensor = moire.quantize(x, moire.Groups(splits=splits), form, columnwise=True)
    wanted = truth_fp8.round_trip(x, form, "e4m3", direction, splits)
    for dtype in (torch.float32, torch.bfloat16):
        found = tensor.dequantize(dtype, direction=direction)
        assert found.dtype == dtype and torch.equal(found, wanted.float().to(dtype))
    assert tensor.dequantize().dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", DIRECTIONS)
@pytest.mark.parametrize("uniform", [False, True])
def test_requantize_quantises_the_decoded_values(generator, form, first, uniform):
    if uniform and form == "fp8_block":
        pytest.skip("tiles serve both directions")
    x, groups = draw(generator, 75, 70), moire.Groups(splits=[33, 0, 42])
    given = (x.view(3, 25, 70), None) if uniform else (x, groups)
    wanted = {name: name == first for name in DIRECTIONS}
    tensor = moire.quantize(*given, form, **wanted)
    assert tensor.has_rowwise != tensor.has_columnwise
    values = tensor.dequantize(torch.float32)
    assert tensor.requantize() is tensor and tensor.has_rowwise and tensor.has_columnwise
    (second,) = set(DIRECTIONS) - {first}
    again = moire.quantize(values, given[1], form, **{n: n == second for n in DIRECTIONS})
    for mine, wanted in zip(getattr(tensor, second), getattr(again, second)):
        assert np.array_equal(truth_fp8.bytes_of(mine), truth_fp8.bytes_of(wanted))
    before = tensor.rowwise.data.data_ptr(), tensor.columnwise.data.data_ptr()
    tensor.requantize()  # nothing is missing any more
    assert before == (tensor.rowwise.data.data_ptr(), tensor.columnwise.data.data_ptr())


def test_fractional_scales_use_the_whole_range(generator):
    x = draw(generator, 9, 128)
    x[:, 0] = x.abs().amax(1) * 1.5
    recipe = moire.Recipe("fp8_block", fractional_scales=True)
    tensor = moire.quantize(x, recipe=recipe)
    assert (tensor.rowwise.data[:, 0].float() == 448).all()
    expected = x[:, :1].double() / 448
    assert ((tensor.rowwise.scales - expected).abs() <= expected * 2.0**-23).all()


def test_a_nan_stays_alone_and_infinities_saturate(generator):
    x = truth.draw(generator, 40, 64)
    clean = moire.quantize(x, columnwise=True)
    x[5, 7] = float("nan")
    found = moire.quantize(x, columnwise=True)
    for direction in DIRECTIONS:
        data = truth_fp8.bytes_of(getattr(found, direction).data)
        differs = data != truth_fp8.bytes_of(getattr(clean, direction).data)
        assert data[5, 7] == 0x7F
        inside = np.zeros_like(differs)
        inside[5, :32] = direction == "rowwise"
        inside[:32, 7] |= direction == "columnwise"
        assert not (differs & ~inside).any()
        assert found.dequantize(direction=direction).isnan().sum() == 1
    with pytest.raises(moire.InvalidArgument, match=r"source\[5, 7\] is infinite or NaN"):
        moire.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["ragged", "gathered", "uniform", "listed"])
def test_numpy_gives_the_bytes_of_torch(generator, form, kind):
    """On a CPU, whatever device Torch's are on: of each call that quantises or decodes."""
    splits = [33, 0, 42]
    x, y = (draw(generator, sum(splits), 70) for _ in range(2))
    row_idx = torch.randint(len(x), (len(x),), generator=generator) if kind == "gathered" else None
    if kind in ("uniform", "listed"):
        x, y, splits = x.view(3, 25, 70), y.view(3, 25, 70), None
    found = []
    for of in (lambda t: t, numpy_of):
        groups = splits and moire.Groups(splits=of(torch.tensor(splits)))
        given = [list(map(of, t)) if kind == "listed" else of(t) for t in (x, y)]
        rows = {} if row_idx is None else {"row_idx": of(row_idx)}
        both = moire.quantize(given[0], groups, form, columnwise=True, **rows)
        one = moire.quantize(given[0], groups, form, **rows).requantize()
        new = both.clone().quantize_(given[1], **rows)
        values = [t.dequantize(direction=d) for t in (both, both[2]) for d in DIRECTIONS]
        found.append(([both, one, new, both[2]], values))
    for mine, theirs in zip(*(tensors for tensors, _ in found)):
        truth_fp8.assert_same_bytes(mine, theirs)
        assert theirs.rowwise.data.dtype.name == "float8_e4m3fn" and theirs.device == "cpu"
    for mine, theirs in zip(*(values for _, values in found)):
        assert np.array_equal(numpy_of(mine), theirs)


def test_gradients_pass_straight_through_to_x(generator):
    x = truth.draw(generator, 9, 40).requires_grad_()
    row_idx = torch.tensor([0, 3, 3, 8])
    for given in ({}, {"row_idx": row_idx}):
        tensor = moire.quantize(x, **given)
        grad = truth.draw(generator, *tensor.shape)
        (found,) = torch.autograd.grad(tensor, x, grad)
        wanted = grad if not given else torch.zeros_like(x).index_add(0, row_idx, grad)
        assert torch.equal(found, wanted)
        assert not tensor.detach().requires_grad
