"""Groups: every accepted form, and what is said about the others."""

import copy
import pickle

import moire
import numpy as np
import pytest
import torch
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from truth_fp8 import assert_same_bytes


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("bits", [32, 64])
def test_splits_ends_and_offsets_are_the_same_groups(form, bits):
    def given(values):
        if form is np.array:
            return np.array(values, f"int{bits}")
        return (
            torch.tensor(values, dtype=getattr(torch, f"int{bits}"))
            if form is torch.tensor
            else form(values)
        )

    for groups in (
        moire.Groups(splits=given([3, 0, 4])),
        moire.Groups(ends=given([3, 3, 7])),
        moire.Groups(offsets=given([0, 3, 3, 7])),
        moire.Groups(splits=given([3, 0, 4]), capacity=9),
    ):
        assert groups.offsets.tolist() == [0, 3, 3, 7] and len(groups) == groups.num_groups == 3
        assert groups.splits.tolist() == [3, 0, 4]
    assert (
        moire.Groups(splits=given([])[:0] if form in (np.array, torch.tensor) else []).num_groups
        == 0
    )


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "Groups: needs exactly one of splits, ends and offsets, found none"),
        ({"splits": [1], "ends": [1]}, "found splits and ends"),
        ({"splits": torch.ones(2)}, "splits_to_offsets: splits is fp32 [2]"),
        (
            {"splits": torch.ones(2, 2, dtype=torch.int64)},
            "Groups: splits is [2, 2], must have rank 1",
        ),
        ({"splits": 3}, "Groups: splits is 3, must be a Torch tensor or a NumPy array"),
        ({"offsets": []}, "Groups: offsets is empty, must have at least the leading zero"),
        ({"splits": [1, -2, 3]}, "Groups: splits[1] is -2"),
        ({"splits": torch.tensor([1, -2, 3])}, "group 1"),
        ({"ends": [4, 2]}, "group 1"),
        ({"offsets": [1, 2]}, "offsets"),
        ({"splits": [3, 4], "capacity": 6}, "capacity"),
    ],
)
def test_messages(given, message):
    with pytest.raises(moire.InvalidArgument) as e:
        moire.Groups(**given)
    assert message in str(e.value)


OUTPUTS = [
    moire.OffsetsOutput(),
    moire.OffsetsOutput(leading_zero=False, dtype="int32"),
    moire.OffsetsOutput(24),
    moire.OffsetsOutput(7, False),
    moire.OffsetsOutput(3, True, "int32"),
]
WANTED = [[0, 3, 3, 7], [3, 3, 7], [0, 72, 72, 168], [21, 21, 49], [0, 9, 9, 21]]
SPLITS = {"splits": [3, 0, 4], "ends": [3, 3, 7], "offsets": [0, 3, 3, 7]}


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_all_derived_arrays_of_one_launch(device, form, kind):
    splits, found = form(SPLITS[kind]), []
    steps = moire.explain(lambda: found.extend(moire.splits_to_offsets(splits, OUTPUTS, kind=kind)))
    assert [step["op"] for step in steps] == ["splits_to_offsets"]
    assert all((array == 0).all() for array in found)
    found = moire.splits_to_offsets(splits, OUTPUTS, kind=kind, capacity=8)
    assert [array.tolist() for array in found] == WANTED
    for array, output in zip(found, OUTPUTS):
        assert str(array.dtype).removeprefix("torch.") == output.dtype
        assert type(array) is (np.ndarray if form is np.array else torch.Tensor)
        if form is torch.tensor:
            assert array.device == splits.device
    (offsets,) = moire.splits_to_offsets(splits, kind=kind)
    assert offsets.tolist() == WANTED[0]
    assert moire.splits_to_offsets(splits, (), kind=kind) == ()


def test_derived_arrays_of_no_group_and_of_many(device):
    assert [a.tolist() for a in moire.splits_to_offsets([], OUTPUTS[:2])] == [[0], []]
    splits = torch.randint(9, (5000,))
    ends = splits.cumsum(0)
    found = moire.splits_to_offsets(splits, OUTPUTS)
    assert torch.equal(found[3], 7 * ends) and torch.equal(found[1], ends.int())


def test_derived_arrays_in_a_compiled_function():
    def derive(splits):
        a, b = moire.splits_to_offsets(splits, OUTPUTS[2:4])
        return a + 1, b

    torch._dynamo.reset()
    compiled = torch.compile(derive, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    a, b = compiled(torch.tensor([3, 0, 4]))
    assert a.tolist() == [1, 73, 73, 169] and b.tolist() == WANTED[3]


def test_a_callers_arrays_are_written_by_call():
    arrays = [np.empty(4, np.int64), np.empty(3, np.int32)]
    splits, options = np.array([3, 0, 4]), {"outputs_no_leading_zero": [0, 1]}
    moire.call(
        "splits_to_offsets",
        splits=splits,
        capacity=-1,
        outputs=arrays,
        outputs_multiplier=[24, 1],
        **options,
    )
    assert [array.tolist() for array in arrays] == [WANTED[2], WANTED[1]]
    with pytest.raises(moire.InvalidArgument, match="has 2 numbers, but there are 1 outputs"):
        moire.call("splits_to_offsets", splits=splits, outputs=arrays[:1], **options)
    with pytest.raises(moire.InvalidArgument, match="'num_outputs' is no field of it"):
        moire.call("splits_to_offsets", splits=splits, outputs=arrays, num_outputs=3)
    with pytest.raises(moire.InvalidArgument, match="outputs_no_leading_zero is 4294967296"):
        moire.call(
            "splits_to_offsets", splits=splits, outputs=arrays[:1], outputs_no_leading_zero=[2**32]
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"splits": [1, -2]}, "splits_to_offsets: splits[1] is -2"),
        ({"splits": [3, 4], "capacity": 6}, "capacity"),
        ({"splits": [], "kind": "offsets"}, "splits is empty, must have at least the leading zero"),
        ({"kind": 0}, "kind is 0, must be one of splits, ends, offsets"),
        ({"outputs": [(1, True, "int64")]}, "outputs[0] is a tuple, must be a moire.OffsetsOutput"),
        ({"outputs": [moire.OffsetsOutput(0)]}, "outputs[0].multiplier is 0, must be a positive"),
        ({"outputs": [moire.OffsetsOutput(1, 1)]}, "outputs[0].leading_zero is 1, must be True or"),
        ({"outputs": [moire.OffsetsOutput(dtype="int16")]}, "dtype is 'int16', must be one of"),
        ({"outputs": [moire.OffsetsOutput(2**40, dtype="int32")]}, "splits_to_offsets: "),
    ],
)
def test_messages_of_splits_to_offsets(change, message):
    with pytest.raises(moire.InvalidArgument) as e:
        moire.splits_to_offsets(**{"splits": [3, 4], **change})
    assert message in str(e.value)


@pytest.mark.parametrize("how", ["to", "to and back", "pickle", "deepcopy"])
def test_copies_are_the_same_groups_and_divide_on(device, how):
    x = torch.arange(8 * 32.0).view(8, 32)
    groups = moire.Groups(splits=[3, 0, 4], capacity=8)
    found = {
        "to": lambda: groups.to(device),
        "to and back": lambda: groups.to("cpu").to(device),
        "pickle": lambda: pickle.loads(pickle.dumps(groups)),
        "deepcopy": lambda: copy.deepcopy(groups),
    }[how]()
    assert found.offsets.device == groups.offsets.device == x.device
    assert torch.equal(found.offsets, groups.offsets)
    assert (found.num_groups, found.capacity) == (3, 8)
    assert_same_bytes(*(moire.quantize(x, g, columnwise=True) for g in (groups, found)))


def test_no_groups_move_with_their_tensor():
    batch = moire.quantize(torch.ones(8, 32), moire.Groups(splits=[]))
    assert batch.to("meta").groups.offsets.is_meta
