"""grouped_linear and grouped_mm against plain PyTorch in double."""

import moire
import pytest
import torch
import truth

pytestmark = pytest.mark.usefixtures("device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(generator, splits, dtype, tail=0, k=24, n=40):
    rows = sum(splits) + tail
    x = truth.draw(generator, rows, k, dtype=dtype)
    w = truth.draw(generator, len(splits), n, k, dtype=dtype, scale=k**-0.5)
    bias = truth.draw(generator, len(splits), n)
    scale = truth.draw(generator, rows)
    return x, w, bias, scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", truth.SPLITS)
@pytest.mark.parametrize("tail", [0, 3])
def test_forward_and_every_gradient(generator, name, dtype, tail):
    splits = truth.SPLITS[name]
    inputs = make(generator, splits, dtype, tail)
    ours = [t.clone().requires_grad_() for t in inputs]
    wanted = [truth.double(t) for t in inputs]
    x, w, bias, scale = ours
    y = moire.grouped_linear(x, w, moire.Groups(splits=splits), bias=bias, scale=scale)
    y_wanted = truth.linear(*wanted[:2], splits, *wanted[2:])
    truth.assert_close(y, y_wanted, dtype, 24, name="y")
    assert (y[sum(splits) :] == 0).all()
    grad = truth.draw(generator, *y.shape, dtype=dtype)
    y.backward(grad)
    y_wanted.backward(grad.double())
    for label, mine, reference in zip(("x", "w", "bias", "scale"), ours, wanted):
        assert mine.grad.dtype == mine.dtype
        terms = 40 if label in ("x", "scale") else max(splits)
        truth.assert_close(mine.grad, reference.grad, mine.dtype, terms + 1, name=f"grad_{label}")


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
def test_packed_and_listed_weights_of_both_orientations_agree(generator, listed, weight_layout):
    splits = truth.SPLITS["breakers"]
    x, w, bias, _ = make(generator, splits, torch.float32)
    groups = moire.Groups(splits=splits)
    wanted = moire.grouped_linear(x, w, groups, bias=bias)
    given = w if weight_layout == "out_in" else w.transpose(1, 2).contiguous()
    given = given.requires_grad_()
    arrays = [t.detach().clone().requires_grad_() for t in given] if listed else given
    y = moire.grouped_linear(x, arrays, groups, bias=bias, weight_layout=weight_layout)
    assert torch.equal(y, wanted)
    y.sum().backward()
    gradient = torch.stack([t.grad for t in arrays]) if listed else given.grad
    gradient = gradient if weight_layout == "out_in" else gradient.transpose(1, 2)
    columns = torch.stack([rows.sum(0) for rows in x.double().split(splits)])
    truth.assert_close(gradient, columns[:, None].expand(w.shape), torch.float32, max(splits))


@pytest.mark.parametrize("needed", [0, 1, 2, 3])
def test_each_gradient_alone(generator, needed):
    splits = truth.SPLITS["empty_middle"]
    inputs = make(generator, splits, torch.float32)
    everything = [t.clone().requires_grad_() for t in inputs]
    alone = [t.clone().requires_grad_(i == needed) for i, t in enumerate(inputs)]
    for x, w, bias, scale in (everything, alone):
        moire.grouped_linear(
            x, w, moire.Groups(splits=splits), bias=bias, scale=scale
        ).sin().sum().backward()
    for i, t in enumerate(alone):
        assert (t.grad is None) == (i != needed)
    assert torch.equal(alone[needed].grad, everything[needed].grad)


def test_strided_inputs_and_incoming_gradients(generator):
    splits = [3, 0, 6]
    x, w, bias, _ = make(generator, splits, torch.float32)
    groups = moire.Groups(splits=splits)
    wide = torch.cat([x, x], dim=1)[:, :24]  # rows a stride apart
    transposed = x.t().contiguous().t()  # columns contiguous
    for strided in (wide, transposed, x.repeat_interleave(2, 0)[::2]):
        assert not strided.is_contiguous()
        assert torch.equal(
            moire.grouped_linear(strided, w, groups), moire.grouped_linear(x, w, groups)
        )
    leaf = transposed.clone(memory_format=torch.preserve_format).requires_grad_()
    y = moire.grouped_linear(leaf, w.transpose(1, 2).contiguous().transpose(1, 2), groups)
    y.backward(torch.ones(()).expand(y.shape))  # strides 0
    truth.assert_close(
        leaf.grad,
        torch.cat([w[0].sum(0).expand(3, -1), w[2].sum(0).expand(6, -1)]).double(),
        torch.float32,
        40,
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gathered_rows_give_the_same_bits_and_the_same_gradient(generator, index):
    splits, tokens = [4, 0, 7], 6
    _, w, _, _ = make(generator, splits, torch.float32)
    x = truth.draw(generator, tokens, 24).requires_grad_()
    row_idx = torch.randint(tokens, (11 + 2,), generator=generator, dtype=index)
    row_idx[11:] = -1  # the tail
    groups = moire.Groups(splits=splits)
    gathered = moire.grouped_linear(x, w, groups, row_idx=row_idx)
    copied = moire.grouped_linear(x[row_idx.clamp(0)], w, groups)
    assert torch.equal(gathered, copied)
    (mine,) = torch.autograd.grad(gathered.sin().sum(), x)
    (theirs,) = torch.autograd.grad(copied.sin().sum(), x)
    truth.assert_close(mine, theirs.double(), torch.float32, 11)


def test_master_weights_get_fp32_gradients_of_bf16_products(generator):
    splits = [5, 2]
    x, w, _, _ = make(generator, splits, torch.float32)
    x, w = x.requires_grad_(), w.requires_grad_()
    groups = moire.Groups(splits=splits)
    y = moire.grouped_linear(x, w, groups, compute_dtype=torch.bfloat16)
    stored = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    wanted = moire.grouped_linear(*stored, groups)
    assert y.dtype == torch.float32 and torch.equal(y, wanted.float())
    grad = truth.draw(generator, *y.shape)
    y.backward(grad)
    wanted.backward(grad.bfloat16())
    assert w.grad.dtype == torch.float32 and x.grad.dtype == torch.float32
    assert torch.equal(w.grad.bfloat16(), stored[1].grad)  # the same sums, rounded once less
    assert not torch.equal(w.grad, stored[1].grad.float())


def test_autocast_runs_in_its_dtype_like_torch_linear(generator):
    x, w, bias, _ = make(generator, [5, 2], torch.float32)
    groups = moire.Groups(splits=[5, 2])
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = moire.grouped_linear(x, w, groups, bias=bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, moire.grouped_linear(x.bfloat16(), w.bfloat16(), groups, bias=bias))


def test_caller_buffer_and_untouched_tail(generator):
    x, w, _, _ = make(generator, [5, 2], torch.float32, tail=2)
    out = torch.full((9, 40), 7.0)
    y = moire.grouped_linear(x, w, moire.Groups(splits=[5, 2]), out=out, tail="untouched")
    assert y.data_ptr() == out.data_ptr() and (out[7:] == 7).all() and (out[:7] != 7).all()


def test_nan_in_one_group_stays_there_and_tails_are_not_read(generator):
    splits = [4, 5, 6]
    x, w, _, _ = make(generator, splits, torch.float32, tail=2)
    clean = moire.grouped_linear(x, w, moire.Groups(splits=splits))
    x[4:9], x[15:] = float("nan"), float("nan")
    y = moire.grouped_linear(x, w, moire.Groups(splits=splits))
    assert y[4:9].isnan().all()
    assert torch.equal(y[:4], clean[:4]) and torch.equal(y[9:], clean[9:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_lie", ["out_in", "in_out"])
def test_grouped_mm_ragged_rows_is_torch_grouped_mm(generator, dtype, weights_lie):
    splits = [8, 0, 16, 8]
    a = truth.draw(generator, 32, 32, dtype=dtype).requires_grad_()
    w = truth.draw(generator, 4, 16, 32, dtype=dtype)
    b_t = w.transpose(1, 2) if weights_lie == "out_in" else w.transpose(1, 2).contiguous()
    b_t = b_t.detach().requires_grad_()
    offs = torch.tensor(splits, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    y = moire.grouped_mm(a, b_t, offs)
    a64, b64 = truth.double(a), truth.double(b_t)
    wanted = truth.linear(a64, b64.transpose(1, 2), splits)
    truth.assert_close(y, wanted, dtype, 32)
    grad = truth.draw(generator, *y.shape, dtype=dtype)
    y.backward(grad)
    wanted.backward(grad.double())
    truth.assert_close(a.grad, a64.grad, dtype, 16, name="grad_a")
    truth.assert_close(b_t.grad, b64.grad, dtype, 16, name="grad_b")


def test_grouped_mm_ragged_contraction(generator):
    splits = [5, 0, 7]
    a = truth.draw(generator, 24, 12).requires_grad_()
    b = truth.draw(generator, 12, 16).requires_grad_()
    y = moire.grouped_mm(a, b, torch.tensor([5, 5, 12]))
    a64, b64 = truth.double(a), truth.double(b)
    wanted = torch.stack([p @ q for p, q in zip(a64.split(splits, 1), b64.split(splits, 0))])
    truth.assert_close(y, wanted, torch.float32, 7)
    assert (y[1] == 0).all()
    grad = truth.draw(generator, *y.shape)
    y.backward(grad)
    wanted.backward(grad.double())
    truth.assert_close(a.grad, a64.grad, torch.float32, 16, name="grad_a")
    truth.assert_close(b.grad, b64.grad, torch.float32, 24, name="grad_b")
