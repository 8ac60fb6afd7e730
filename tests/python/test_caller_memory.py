"""Memory that the caller gives: what may be written, and what must not be misread."""

import moire
import numpy as np
import pytest
import torch


def operands():
    return torch.randn(5, 4), torch.randn(2, 3, 4), moire.Groups(splits=[2, 3])


def test_autograd_notices_that_out_was_overwritten():
    x, w, groups = operands()
    p, out = torch.randn(5, 3, requires_grad=True), torch.ones(5, 3)
    loss = (p * out).sum()
    moire.grouped_linear(x, w, groups, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_may_not_be_a_leaf_that_requires_grad():
    x, w, groups = operands()
    out = torch.zeros(5, 3, requires_grad=True)
    with pytest.raises(moire.InvalidArgument, match="out is a leaf that requires grad"):
        moire.grouped_linear(x, w, groups, out=out)


def test_an_untouched_tail_needs_out():
    x, w, groups = operands()
    with pytest.raises(moire.InvalidArgument, match="tail is 'untouched' but out is absent"):
        moire.grouped_linear(x, w, groups, tail="untouched")


def test_a_read_only_array_is_not_written():
    x, w, groups = (np.ones((5, 4), np.float32), np.ones((2, 3, 4), np.float32), [2, 3])
    out = np.zeros((5, 3), np.float32)
    out.flags.writeable = False
    with pytest.raises(moire.InvalidArgument, match="read-only"):
        moire.grouped_linear(x, w, moire.Groups(splits=groups), out=out)
    assert (out == 0).all()


def test_foreign_byte_order_is_refused():
    x, w = np.ones((5, 4), ">f4"), np.ones((2, 3, 4), np.float32)
    with pytest.raises(moire.InvalidArgument, match=">f4"):
        moire.grouped_linear(x, w, moire.Groups(splits=[2, 3]))


def test_offsets_must_be_int64_and_one_more_than_the_groups():
    x, w, _ = operands()
    groups = moire.Groups.of_offsets(torch.tensor([0, 2, 5], dtype=torch.int32))
    with pytest.raises(moire.InvalidArgument, match=r"offsets is int32 \[3\], needs int64 \[3\]"):
        moire.grouped_linear(x, w, groups)


def test_router_and_experts_agree_on_their_number():
    experts = moire.nn.GroupedMLP(3, 8, 6)
    with pytest.raises(moire.InvalidArgument, match="scores 4 experts but there are 3"):
        moire.nn.MoE(experts, moire.nn.Router(8, 4, k=2))
