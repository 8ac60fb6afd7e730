"""glu and the conversions between layouts of gate and up."""

import moire
import pytest
import torch
import truth

pytestmark = pytest.mark.usefixtures("device")

LAYOUTS = [
    (0, "gate_first"),
    (0, "up_first"),
    (1, "gate_first"),
    (4, "up_first"),
    (8, "gate_first"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ["swiglu", "geglu_tanh", "clamped_swiglu", "reglu", "reglu2"])
@pytest.mark.parametrize("layout", [*LAYOUTS, (0, "ungated")])
def test_forward_and_gradients(generator, act, layout, dtype):
    z = truth.draw(generator, 11, 48, dtype=dtype, scale=4.0).requires_grad_()
    probs = torch.rand(11, generator=generator).requires_grad_()
    z64, probs64 = truth.double(z), truth.double(probs)
    y = moire.glu(z, probs, act=act, layout=moire.GluLayout(*layout))
    wanted = truth.glu(z64, probs64, act, layout)
    truth.assert_close(y, wanted, dtype, 1)
    grad = truth.draw(generator, *y.shape, dtype=dtype)
    y.backward(grad)
    wanted.backward(grad.double())
    truth.assert_close(z.grad, z64.grad, dtype, 1, name="grad_z")
    truth.assert_close(probs.grad, probs64.grad, torch.float32, 24, name="grad_probs")


@pytest.mark.parametrize(
    "name, function",
    [
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda z: torch.nn.functional.gelu(z, approximate="tanh")),
        ("relu", torch.relu),
        ("relu2", lambda z: torch.relu(z) ** 2),
    ],
)
def test_an_activation_without_a_gate_has_its_own_name(generator, name, function):
    z = truth.draw(generator, 5, 9, scale=3.0).requires_grad_()
    z64 = truth.double(z)
    y = moire.glu(z, act=name, layout="ungated")
    truth.assert_close(y, function(z64), torch.float32, 1)
    y.sum().backward()
    function(z64).sum().backward()
    truth.assert_close(z.grad, z64.grad, torch.float32, 1, name="grad_z")


def test_what_has_no_gate_is_refused_where_halves_are_needed(generator):
    z = truth.draw(generator, 3, 8)
    with pytest.raises(moire.InvalidArgument) as e:
        moire.convert_glu(z, "ungated", "halves", dim=1)
    wanted = "convert_glu: from.order is 2 (ungated), which has no halves to move"
    assert str(e.value) == wanted
    with pytest.raises(moire.InvalidArgument) as e:
        moire.GluLayout(4, "ungated")
    assert str(e.value) == "GluLayout: block is 4, must be 0 of the order 'ungated'"
    layout = moire.GluLayout.of("ungated")
    assert moire.GluLayout.parse(str(layout)) == layout


def test_a_tail_is_not_read_and_is_zero(generator):
    z = truth.draw(generator, 6, 8)
    z[4:] = float("nan")
    y = moire.glu(z, groups=moire.Groups(splits=[1, 3]))
    assert (y[4:] == 0).all() and torch.equal(y[:4], moire.glu(z[:4]))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (0, 3), (2, 0)])
@pytest.mark.parametrize("width", [0, 48])
def test_leading_dimensions_are_rows(generator, shape, width):
    z, probs = truth.draw(generator, *shape, width), torch.rand(shape, generator=generator)
    grad = truth.draw(generator, *shape, width // 2)
    leaves = z.clone().requires_grad_(), probs.clone().requires_grad_()
    y = moire.glu(*leaves, layout=8)
    y.backward(grad)
    rows = [z.clone().reshape(probs.numel(), width), probs.clone().flatten()]
    rows = [t.requires_grad_() for t in rows]
    wanted = moire.glu(*rows, layout=8)
    wanted.backward(grad.reshape(wanted.shape))
    assert y.shape == (*shape, width // 2) and torch.equal(y.reshape(wanted.shape), wanted)
    for leaf, row in zip(leaves, rows):
        assert torch.equal(leaf.grad, row.grad.reshape(leaf.shape))
    assert torch.equal(moire.glu(z), moire.glu(z, torch.ones(shape)))
    numpy = moire.glu(z.cpu().numpy(), probs.cpu().numpy(), layout=8)
    assert numpy.shape == y.shape
    if not z.is_cuda:
        assert torch.equal(torch.from_numpy(numpy), y.detach())


def test_leading_dimensions_may_have_any_strides(generator):
    z, probs = truth.draw(generator, 4, 3, 16), torch.rand(3, 4, generator=generator)
    y = moire.glu(z.transpose(0, 1), probs)
    assert torch.equal(y, moire.glu(z.transpose(0, 1).contiguous(), probs))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool]
)
@pytest.mark.parametrize(
    "shape, dim", [((16,), 0), ((16, 5), 0), ((3, 16, 5), 1), ((2, 3, 5, 16), -1)]
)
def test_interleave_is_transformer_engines_reshape_and_its_inverse(generator, dtype, shape, dim):
    t = torch.randint(0, 100, shape, generator=generator).to(dtype)
    for block in (1, 2, 4, 8):
        mixed = moire.interleave_glu_tensor(t, block, dim)
        parts = t.movedim(dim, 0).reshape(2, 8 // block, block, -1).transpose(0, 1)
        wanted = parts.reshape(t.movedim(dim, 0).shape).movedim(0, dim)
        assert torch.equal(mixed, wanted) and mixed.dtype == dtype and mixed.is_contiguous()
        assert torch.equal(moire.deinterleave_glu_tensor(mixed, block, dim), t)


def test_the_last_dimension_is_that_of_columns_and_no_row_an_element(generator):
    (step,) = moire.explain(
        lambda: moire.convert_glu(truth.draw(generator, 7, 32), "halves", 1, -1)
    )
    assert "[7, 32]" in step["problem"]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_convert_between_any_two_layouts_keeps_the_activation(generator, source, target):
    z = truth.draw(generator, 7, 32)
    source, target = moire.GluLayout(*source), moire.GluLayout(*target)
    converted = moire.convert_glu(z, source, target, dim=1)
    assert torch.equal(moire.glu(converted, layout=target), moire.glu(z, layout=source))
    assert torch.equal(moire.convert_glu(converted, target, source, dim=1), z)


def test_strided_inputs_and_the_gradient_is_the_inverse_permutation(generator):
    t = truth.draw(generator, 5, 16).t()
    assert torch.equal(
        moire.interleave_glu_tensor(t, 4), moire.interleave_glu_tensor(t.contiguous(), 4)
    )
    leaf = t.clone().requires_grad_()
    grad = truth.draw(generator, 16, 5)
    moire.interleave_glu_tensor(leaf, 4).backward(grad)
    assert torch.equal(leaf.grad, moire.deinterleave_glu_tensor(grad, 4))


def test_meta_tensors_have_shapes():
    t = torch.empty(16, 3, device="meta", dtype=torch.bfloat16)
    mixed = moire.interleave_glu_tensor(t, 8)
    assert mixed.is_meta and mixed.shape == t.shape and mixed.dtype == t.dtype


@pytest.mark.parametrize("function", [moire.interleave_glu_tensor, moire.deinterleave_glu_tensor])
def test_messages(function):
    name = function.__name__
    cases = [
        ((torch.ones(16), 0), "interleave_size is 0, must be a positive integer"),
        ((torch.ones(16), True), "interleave_size is True, must be a positive integer"),
        ((torch.ones(16), 2.0), "interleave_size is 2.0, must be a positive integer"),
        ((torch.ones(12), 4), "tensor has size 12 along dim 0, must be a multiple of 8"),
        ((torch.ones(()), 4), "tensor has rank 0, must have at least 1"),
        ((torch.ones(8, 8), 4, 2), "dim is 2, must be an integer, -2 to 1"),
        (([1.0], 4), "tensor is a list, must be a Torch tensor or a NumPy array"),
    ]
    for args, message in cases:
        with pytest.raises(moire.InvalidArgument) as e:
            function(*args)
        assert str(e.value) == f"{name}: {message}"
