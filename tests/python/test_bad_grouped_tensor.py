"""Wrong use of GroupedTensor and quantize, and of Recipe: each is refused with the reason."""

import moire
import numpy as np
import pytest
import torch
from samples_fp8 import uniform

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


def test_groups_of_a_uniform_tensor_have_no_gate_and_up(generator):
    _, weight = uniform(generator, layout="halves")
    with pytest.raises(moire.InvalidArgument, match="dim is 0, the groups of a GroupedTensor"):
        moire.convert_glu(weight, "halves", 1)
