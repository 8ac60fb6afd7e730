"""Memory that the caller gives: what may be written, and what must not be misread."""

import moire
import numpy as np
import pytest
import torch


def operands():
    return torch.randn(5, 4), torch.randn(2, 3, 4), moire.Groups(splits=[2, 3])


@pytest.mark.parametrize("has_gradients", [False, True])
def test_autograd_notices_that_out_was_overwritten(has_gradients):
    for _ in range(4):
        x, w, groups = operands()
        p, out = torch.randn(5, 3, requires_grad=True), torch.ones(5, 3)
        loss = (p * out).sum()
        moire.grouped_linear(x.requires_grad_(has_gradients), w, groups, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_that_are_written_somewhere_are_counted(delayed):
    x, _, groups = operands()
    options = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delayed}
    layer, grad_x = moire.nn.GroupedLinear(2, 4, 3, **options), torch.ones(5, 4)
    main_grad = layer.weight.main_grad = torch.zeros(2, 3, 4)
    layer(x.requires_grad_(), groups, grad_x_out=grad_x).sum().backward()
    layer.backward_dw()
    assert main_grad._version == grad_x._version == 1


def test_copies_of_a_weight_that_are_written_are_counted(device):
    x, w, groups = torch.randn(5, 32, requires_grad=True), torch.randn(2, 3, 32), operands()[2]
    prepared, quantized = moire.PreparedWeight(w), moire.quantize(w, columnwise=True)
    seen, unseen = (torch.nn.Parameter(moire.quantize(w, columnwise=True)) for _ in range(2))
    writes = {
        prepared: lambda: prepared.quantize_(2 * w),
        quantized: lambda: quantized.quantize_(2 * w),
        seen: lambda: seen.data.copy_(2 * w),
        unseen: lambda: torch.ops.aten.copy_(unseen.data, 2 * w),
    }
    for copies, write in writes.items():
        y = moire.grouped_linear(x, w, groups, recipe="mxfp8", w_quantized=copies)
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("name", ["out", "grad_x_out"])
def test_a_buffer_may_not_be_a_leaf_that_requires_grad(name):
    x, w, groups = operands()
    buffer = torch.zeros(5, 3 if name == "out" else 4, requires_grad=True)
    with pytest.raises(moire.InvalidArgument, match=f" {name} is a leaf that requires grad"):
        moire.grouped_linear(x, w, groups, **{name: buffer})


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


def lazily_negated(t):
    view = torch._neg_view(t)
    assert view.is_neg() and view.data_ptr() == t.data_ptr()
    return view


def test_lazily_negated_tensors_are_read_as_what_they_show():
    x, w, groups = operands()
    negated = lazily_negated
    wanted = moire.grouped_linear(x, w, groups)
    for found in (
        moire.grouped_linear(negated(-x), w, groups),
        moire.grouped_linear(negated(-x.t().contiguous()).t(), w, groups),
        moire.grouped_linear(x, negated(-w), groups),
        moire.grouped_linear(x, list(negated(-w)), groups),
        moire.grouped_linear(x, w, moire.Groups(splits=negated(torch.tensor([-2, -3])))),
        moire.grouped_linear(
            *(x, w, groups),
            row_idx=negated(-torch.arange(5)),
            scatter_idx=negated(-torch.arange(5)[:, None]),
        ),
    ):
        assert torch.equal(found, wanted)
    leaves = [w.clone().requires_grad_() for _ in range(2)]
    grad_y = torch.randn(5, 3)
    moire.grouped_linear(x, leaves[0], groups).backward(negated(-grad_y))
    moire.grouped_linear(x, leaves[1], groups).backward(grad_y)
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_an_imaginary_part_and_zeros_without_memory():
    _, w, groups = operands()
    z = torch.randn(5, 4, dtype=torch.complex64)
    imaginary = z.conj().imag  # Torch negates it when it is read
    assert imaginary.is_neg()
    wanted = moire.grouped_linear(-z.imag.contiguous(), w, groups)
    assert torch.equal(moire.grouped_linear(imaginary, w, groups), wanted)
    zeros = torch._efficientzerotensor(5, 4)
    assert (moire.grouped_linear(zeros, w, groups) == 0).all()
    for t in (z[:4].conj(), lazily_negated(torch.randn(4, 3))):
        assert torch.equal(moire.convert_glu(t, "halves", 1), moire.convert_glu(t + 0, "halves", 1))


def test_a_lazily_negated_buffer_is_not_written():
    x, w, groups = operands()
    out = torch.ones(5, 3)
    with pytest.raises(moire.InvalidArgument, match="output y is negated when it is read"):
        moire.grouped_linear(x, w, groups, out=lazily_negated(out))
    assert (out == 1).all()


def test_copies_and_files_of_lazily_negated_weights(tmp_path):
    w, cache = torch.randn(2, 3, 32), moire.WeightCache()
    copies = [cache.get(t, 1).dequantize() for t in (w, lazily_negated(w))]
    assert torch.equal(copies[0], -copies[1])
    pytest.importorskip("safetensors")
    moire.save_safetensors({"w": lazily_negated(w)}, tmp_path / "w.safetensors")
    assert torch.equal(moire.load_safetensors(tmp_path / "w.safetensors")["w"], -w)


@pytest.mark.parametrize("given", [torch.tensor, np.array])
def test_indices_of_another_type_are_told_which_they_may_be(given):
    splits = given([2, 3])
    splits = splits.short() if isinstance(splits, torch.Tensor) else splits.astype(np.int16)
    with pytest.raises(moire.InvalidArgument, match="splits is int16 .2., needs int32 or int64"):
        moire.Groups(splits=splits)
    x, w = given(np.ones((5, 4), np.float32)), given(np.ones((2, 3, 4), np.float32))
    groups = moire.Groups(splits=[2, 3])
    with pytest.raises(moire.InvalidArgument, match="row_idx is int16 .2., needs int32 or int64"):
        moire.grouped_linear(x, w, groups, row_idx=splits)
    with pytest.raises(moire.InvalidArgument, match="x is int16 .5, 4., needs float32, bfloat16"):
        x = x.short() if isinstance(x, torch.Tensor) else x.astype(np.int16)
        moire.grouped_linear(x, w, groups)


@pytest.mark.parametrize("tail", ["zero", "untouched"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("is_view", [True, False])
def test_gradients_pass_an_out_that_had_a_history(tail, trains, is_view):
    x, w = torch.randn(7, 4), torch.randn(2, 3, 4)
    x.requires_grad_(trains)
    base = torch.randn(9, 3, requires_grad=True)
    whole = base * 1
    out = whole[1:8] if is_view else whole[1:8].clone()
    y = moire.grouped_linear(x, w, moire.Groups(splits=[2, 3], capacity=7), out=out, tail=tail)
    (whole if is_view else y).sum().backward()
    kept = torch.ones(9, 3) if is_view else torch.zeros(9, 3)
    kept[1:8] = 0
    if tail == "untouched":
        kept[6:8] = 1
    assert torch.equal(base.grad, kept)
    if trains:
        wanted = torch.cat([w[0].sum(0).expand(2, 4), w[1].sum(0).expand(3, 4), torch.zeros(2, 4)])
        torch.testing.assert_close(x.grad, wanted)
