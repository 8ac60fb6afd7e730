"""Where gradients of GroupedTensors go: through copies and views, never to a source whose values
were overwritten.
"""

import copy

import moire
import pytest
import torch
import truth

pytestmark = pytest.mark.usefixtures("device")

SPLITS = [10, 0, 45, 36]
ROWS, TAIL, K, N = sum(SPLITS), 3, 64, 96


@pytest.fixture
def groups():
    return moire.Groups(splits=SPLITS, capacity=ROWS + TAIL)


def draw_x(generator):
    return truth.draw(generator, ROWS + TAIL, K).requires_grad_()


def draw_w(generator):
    return truth.draw(generator, len(SPLITS), N, K)


def product(tensor, w, groups):
    return moire.grouped_linear(tensor, w, groups, recipe="mxfp8").sin().sum()


def gradient(tensor, w, groups, x):
    (found,) = torch.autograd.grad(product(tensor, w, groups), [x])
    return found


def is_linked(tensor, groups, w):
    return product(tensor, w, groups).requires_grad


CARRIES = {
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "to and back": lambda t: t.to("cpu").to(t.device),
    "copy_": lambda t: t.detach().clone().zero_().copy_(t),
    "clone of a clone": lambda t: t.clone().clone(),
    "requantize": lambda t: t.requantize(),
}


@pytest.mark.parametrize("how", CARRIES)
def test_copies_pass_the_gradient_on(generator, groups, how):
    x, w = draw_x(generator), draw_w(generator)
    wanted = gradient(moire.quantize(x, groups), w, groups, x)
    found = gradient(CARRIES[how](moire.quantize(x, groups)), w, groups, x)
    assert torch.equal(found, wanted) and wanted[:ROWS].abs().sum() > 0


def test_a_copy_of_gathered_rows_passes_the_gradient_on(generator, groups):
    x, w = truth.draw(generator, 20, K).requires_grad_(), draw_w(generator)
    row_idx = torch.randint(20, (ROWS + TAIL,), generator=generator)
    tensor = moire.quantize(x, groups, row_idx=row_idx)
    wanted = gradient(tensor, w, groups, x)
    assert torch.equal(gradient(tensor.clone(), w, groups, x), wanted)
    loss = product(tensor, w, groups)
    row_idx.zero_()
    with pytest.raises(RuntimeError, match="row_idx was modified by an inplace operation"):
        loss.backward()


def test_to_another_device_keeps_the_way_back(generator, groups):
    tensor = moire.quantize(draw_x(generator), groups).to("meta")
    assert tensor.requires_grad and tensor.device.type == "meta"


@pytest.mark.parametrize("split", [True, False])
def test_views_pass_the_gradient_of_their_rows_on(generator, groups, split):
    x, w = draw_x(generator), draw_w(generator)
    wanted = gradient(moire.quantize(x, groups, columnwise=True), w, groups, x)
    tensor = moire.quantize(x, groups, columnwise=True)
    views = tensor.split() if split else [tensor[g] for g in range(len(SPLITS))]
    losses = [
        product(view, w[g : g + 1], moire.Groups(splits=[SPLITS[g]]))
        for g, view in enumerate(views)
    ]
    (found,) = torch.autograd.grad(sum(losses), [x])
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6) and wanted.abs().sum() > 0
    one = tensor[2].clone()
    found = gradient(one, w[2:3], moire.Groups(splits=[45]), x)
    assert torch.allclose(found[10:55], wanted[10:55], rtol=1e-6, atol=1e-6)
    assert not found[:10].any() and not found[55:].any()


def test_gate_and_up_in_another_layout_pass_the_gradient_on(generator, groups):
    x, w = draw_x(generator), draw_w(generator)
    tensor = moire.convert_glu(moire.quantize(x, groups), "halves", 32, dim=1)
    moved = moire.convert_glu(x, "halves", 32, dim=1)
    wanted = gradient(moire.quantize(moved, groups), w, groups, x)
    assert torch.equal(gradient(tensor, w, groups, x), wanted)


def test_dequantize_passes_the_gradient_on_and_the_tail_has_none(generator, groups):
    x = draw_x(generator)
    weights = torch.full((ROWS + TAIL, K), float("nan"))
    weights[:ROWS] = truth.draw(generator, ROWS, K)
    for values in (moire.quantize(x, groups).dequantize(), moire.quantize(x, groups).clone()):
        is_quantized = isinstance(values, moire.GroupedTensor)
        values = values.dequantize(torch.bfloat16) if is_quantized else values
        (found,) = torch.autograd.grad(values, [x], weights.to(values.dtype))
        assert torch.equal(found[:ROWS], weights[:ROWS].to(values.dtype).float())
        assert not found[ROWS:].any()
    assert not moire.quantize(x, groups).detach().dequantize().requires_grad


def other_of(generator, groups):
    return moire.quantize(truth.draw(generator, ROWS + TAIL, K), groups)


DROPS = {
    "copy_": lambda t, other: t.copy_(other),
    "load_state_dict": lambda t, other: t.load_state_dict(other.state_dict()),
    "zero_": lambda t, other: t.zero_(),
    "import_scales": lambda t, other: t.import_scales(other.export_scales()),
    "quantize_": lambda t, other: t.quantize_(other.dequantize()),
    "detach": lambda t, other: t.detach(),
}


@pytest.mark.parametrize("how", DROPS)
def test_what_was_overwritten_has_no_gradient_of_the_old_source(generator, groups, how):
    x, w = draw_x(generator), draw_w(generator)
    tensor = moire.quantize(x, groups)
    assert is_linked(tensor, groups, w)
    assert not is_linked(DROPS[how](tensor, other_of(generator, groups)), groups, w)


def test_in_place_the_gradient_goes_to_the_new_source(generator, groups):
    x, y, w = draw_x(generator), draw_x(generator), draw_w(generator)
    for write in (
        lambda t: t.copy_(moire.quantize(y, groups)),
        lambda t: t.quantize_(y),
    ):
        tensor = write(moire.quantize(x, groups))
        loss = product(tensor, w, groups)
        of_x, of_y = torch.autograd.grad(loss, [x, y], allow_unused=True)
        assert of_x is None and torch.equal(of_y, gradient(tensor.clone(), w, groups, y))
    with torch.no_grad():
        tensor = moire.quantize(x, groups).copy_(moire.quantize(y, groups))
    assert not is_linked(tensor, groups, w)


WRITES = {
    "a view": lambda t: t[2].zero_(),
    "a view's view": lambda t: t[2][0].quantize_(torch.ones(45, K)),
    "detached": lambda t: t.detach().zero_(),
    "an array": lambda t: t.rowwise.scales.fill_(3),
}


@pytest.mark.parametrize("how", WRITES)
def test_what_was_overwritten_behind_its_back_says_so(generator, groups, how):
    x, w = draw_x(generator), draw_w(generator)
    tensor = moire.quantize(x, groups)
    before = tensor[3]
    WRITES[how](tensor)
    for use in (
        lambda: is_linked(tensor, groups, w),
        lambda: tensor.clone(),
        lambda: tensor.dequantize(),
        lambda: before.clone(),
        lambda: tensor[0].dequantize(),
        lambda: tensor.detach().clone().copy_(tensor),
        lambda: moire.convert_glu(tensor, "halves", 32, dim=1),
    ):
        with pytest.raises(moire.InvalidArgument, match="passes a gradient on was overwritten"):
            use()
    with torch.no_grad():
        tensor.clone()
    assert not is_linked(tensor.detach(), groups, w)
    assert is_linked(tensor.quantize_(x), groups, w)


def test_a_gradient_does_not_go_into_a_view_alone(generator, groups):
    x = truth.draw(generator, 45, K).requires_grad_()
    tensor = other_of(generator, groups)
    before = tensor.clone()
    for write, call in (
        (lambda: tensor[2].quantize_(x), "quantize_"),
        (lambda: tensor[2].copy_(moire.quantize(x)), "copy_"),
    ):
        with pytest.raises(moire.InvalidArgument, match=f"{call}: the values want a gradient, but"):
            write()
        assert torch.equal(tensor.dequantize(), before.dequantize())
    tensor[2].quantize_(x.detach())
    with torch.no_grad():
        tensor[2].quantize_(x)
    tensor[2].clone().quantize_(x)
    copy.copy(tensor[2]).detach().zero_()


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("uniform", [True, False])
def test_a_backward_notices_imported_scales(generator, groups, uniform, direction, strided):
    x, w = draw_x(generator), draw_w(generator).requires_grad_()
    tensor = moire.quantize(w if uniform else x, None if uniform else groups, columnwise=True)
    copies = {name: getattr(tensor, name) for name in ("rowwise", "columnwise")}
    if strided:
        copies = {name: (c.data, doubled(c.scales)) for name, c in copies.items()}
    tensor = moire.GroupedTensor("mxfp8", **copies, groups=tensor.groups)
    given = (x, w) if uniform else (tensor, w)
    options = {"recipe": "mxfp8"} | ({"w_quantized": tensor} if uniform else {})
    y = moire.grouped_linear(*given, groups, **options)
    # The backward reads the column-wise copies of both.
    before = getattr(tensor, direction).scales._version
    found = tensor.import_scales(tensor.export_scales("padded", direction), "padded", direction)
    assert found is tensor and getattr(tensor, direction).scales._version > before
    if direction == "columnwise":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def doubled(array):
    """The same values with a gap after each."""
    wide = torch.zeros(*array.shape[:-1], 2 * array.shape[-1], dtype=array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]
