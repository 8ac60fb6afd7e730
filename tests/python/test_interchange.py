"""A GroupedTensor in the layouts of others: scales for other libraries, gate and up."""

import moire
import numpy as np
import pytest
import torch
import truth
from samples_fp8 import SPLITS, ragged, uniform
from truth_fp8 import assert_same_bytes, bytes_of, numpy_of

pytestmark = pytest.mark.usefixtures("device")

# ---- scales of other libraries


def padded(scales, splits, direction, block=32):
    """[outer, blocks] of each group in the middle of zeros, from canonical scales."""
    parts, start = [], 0
    for g, n in enumerate(splits):
        if direction == "rowwise":
            part = scales[start : start + n]
        else:
            row = start // block + g
            part = scales[row : row + -(-n // block)].T
        outer, blocks = (-(-size // to) * to for size, to in zip(part.shape, (128, 4)))
        full = np.zeros((outer, blocks), np.uint8)
        full[: part.shape[0], : part.shape[1]] = part
        parts.append(full)
        start += n
    return parts


def swizzled(full):
    """Tiles of 128 x 4, row by row: element [r, c] at 16 (r % 32) + 4 (r / 32) + c."""
    tiles = full.reshape(full.shape[0] // 128, 4, 32, full.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


@pytest.mark.parametrize("kind", ["ragged", "uniform", "one_group"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("layout", ["dense", "padded", "swizzled"])
def test_scales_of_other_libraries(generator, kind, direction, layout):
    if kind == "uniform":
        w = truth.draw(generator, 3, 45, 70)
        tensor, splits = moire.quantize(w, columnwise=True), [45] * 3
        canonical = moire.quantize(w.view(-1, 70), moire.Groups(splits=splits), columnwise=True)
    elif kind == "ragged":
        (_, tensor), splits = ragged(generator), SPLITS
        canonical = tensor
    else:
        tensor, splits = moire.quantize(truth.draw(generator, 45, 70), columnwise=True), [45]
        canonical = tensor
    found = tensor.export_scales(layout, direction)
    scales = numpy_of(getattr(canonical, direction).scales)
    parts = padded(scales, splits, direction)
    if layout == "dense":
        rows = [s for s, n in zip(parts, splits)]
        rows = [
            part[:n, : scales.shape[1]] if direction == "rowwise" else part.T[: -(-n // 32), :70]
            for part, n in zip(rows, splits)
        ]
        wanted = np.concatenate(rows).reshape(-1)
    else:
        flat = [part.reshape(-1) if layout == "padded" else swizzled(part) for part in parts]
        wanted = np.concatenate(flat)
    assert np.array_equal(numpy_of(found).reshape(-1)[: wanted.size], wanted)
    back = tensor.clone()
    getattr(back, direction).scales.zero_()
    assert back.import_scales(found, layout, direction) is back
    assert torch.equal(back.dequantize(direction=direction), tensor.dequantize(direction=direction))
    with pytest.raises(moire.InvalidArgument, match="import_scales: scales is uint8"):
        back.import_scales(found[:-1], layout, direction)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("layout", ["dense", "padded", "swizzled"])
def test_scales_of_no_groups(generator, layout, direction):
    tensor = moire.quantize(truth.draw(generator, 64, 64), moire.Groups(splits=[]), columnwise=True)
    found = tensor.export_scales(layout, direction)
    assert found.numel() == 0 or (layout, direction) == ("dense", "rowwise")  # rows of the tail
    assert tensor.import_scales(found, layout, direction) is tensor


def test_scales_that_have_one_layout_only(generator):
    _, blocks = ragged(generator, "fp8_block")
    with pytest.raises(moire.Unsupported, match="FP32 scales have one layout only"):
        blocks.export_scales()
    _, tensor = ragged(generator, columnwise=False)
    with pytest.raises(moire.InvalidArgument, match="has no columnwise copy"):
        tensor.export_scales(direction="columnwise")
    with pytest.raises(moire.InvalidArgument, match="layout is 'foreign', must be one of dense"):
        tensor.export_scales("foreign")


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("layout", ["dense", "padded", "swizzled"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_scales_with_gaps_are_written_in_place(generator, layout, direction, framework):
    for _, tensor in (ragged(generator), uniform(generator)):
        given = tensor.export_scales(layout, direction)
        data, scales = getattr(tensor, direction)
        element, groups = tensor.element, tensor.groups
        if framework == "numpy":
            given, scales, data = numpy_of(given), numpy_of(scales), bytes_of(data)
            groups = moire.Groups(splits=np.array(SPLITS)) if groups else None
        wide = scales.repeat(2, -1) if framework == "numpy" else scales.repeat_interleave(2, -1)
        wide[..., 1::2] = 7
        own = wide[..., ::2]
        own[...] = 0
        options = {direction: (data, own), "groups": groups, "element": element}
        other = moire.GroupedTensor("mxfp8", **options)
        assert other.import_scales(given, layout, direction) is other
        assert np.array_equal(*map(numpy_of, (other.export_scales(layout, direction), given)))
        used = numpy_of(own) != 0
        assert np.array_equal(numpy_of(own)[used], numpy_of(scales)[used]) and used.any()
        assert (wide[..., 1::2] == 7).all()


# ---- gate and up


@pytest.mark.parametrize("to", [1, 8, 32, moire.GluLayout(0, "up_first")])
def test_glu_layouts_of_rowwise_weights_are_exact_for_any_block(generator, to):
    w = truth.draw(generator, 3, 128, 64)
    tensor = moire.quantize(w, layout="halves")
    found = moire.convert_glu(tensor, "halves", to, dim=1)
    assert found.layout == moire.GluLayout.of(to)
    wanted = moire.quantize(moire.convert_glu(w, "halves", to, dim=1))
    assert_same_bytes(found, wanted)
    assert_same_bytes(moire.convert_glu(found, to, "halves", dim=1), tensor)


@pytest.mark.parametrize(
    "form, n, to", [("mxfp8", 128, 32), ("mxfp8", 256, 64), ("fp8_block", 512, 128)]
)
def test_glu_layouts_that_keep_blocks_whole_are_exact_in_both_directions(generator, form, n, to):
    w = truth.draw(generator, 2, n, 64)
    found = moire.interleave_glu_tensor(moire.quantize(w, recipe=form, columnwise=True), to, dim=1)
    wanted = moire.quantize(moire.interleave_glu_tensor(w, to, dim=1), recipe=form, columnwise=True)
    assert_same_bytes(found, wanted)
    assert_same_bytes(
        moire.deinterleave_glu_tensor(found, to, dim=1),
        moire.quantize(w, recipe=form, columnwise=True),
    )


@pytest.mark.parametrize("form, n, to", [("mxfp8", 128, 32), ("fp8_block", 512, 128)])
@pytest.mark.parametrize("of", [lambda t: t, numpy_of])
def test_glu_layouts_of_a_matrix_without_groups(generator, of, form, n, to):
    """Its columns have a row of scales behind those of their blocks."""
    w, options = of(truth.draw(generator, n, 64)), {"recipe": form, "columnwise": True}
    found = moire.convert_glu(moire.quantize(w, **options), "halves", to, dim=0)
    assert_same_bytes(found, moire.quantize(moire.convert_glu(w, "halves", to, dim=0), **options))


def test_glu_layouts_along_the_columns_of_ragged_rows(generator):
    z, groups = truth.draw(generator, 40, 128), moire.Groups(splits=[33, 7])
    for direction, block in (("columnwise", 8), ("rowwise", 32)):
        wanted = {n: n == direction for n in ("rowwise", "columnwise")}
        tensor = moire.quantize(z, groups, **wanted)
        found = moire.convert_glu(tensor, "halves", block, dim=1)
        after = moire.quantize(moire.convert_glu(z, "halves", block, dim=1), groups, **wanted)
        assert_same_bytes(found, after)
        assert found.groups is groups


def test_glu_layouts_that_would_tear_blocks_apart_are_refused(generator):
    _, both = uniform(generator, layout="halves")
    _, tiles = uniform(generator, "fp8_block")
    _, rows = ragged(generator)
    for call, says in (
        (
            lambda: moire.convert_glu(both, "halves", 8, dim=1),
            "columnwise scales cover 32 elements",
        ),
        (lambda: moire.convert_glu(both, "halves", 8, dim=2), "rowwise scales cover 32 elements"),
        (lambda: moire.convert_glu(tiles, "halves", 32, dim=1), "cover 128 elements"),
        (lambda: moire.convert_glu(both, 32, "halves", dim=1), "but tensor is in 'halves, gate"),
        (lambda: moire.convert_glu(rows, "halves", 2, dim=0), "dim is 0, the ragged rows"),
        (lambda: moire.convert_glu(both, "halves", 3, dim=1), "must be a multiple of 6"),
    ):
        with pytest.raises(moire.InvalidArgument) as e:
            call()
        assert says in str(e.value)
