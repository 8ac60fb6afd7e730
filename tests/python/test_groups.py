"""Groups: every accepted form, and what is said about the others."""

import moire
import numpy as np
import pytest
import torch


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
