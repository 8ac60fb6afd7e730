"""x, weights and incoming gradients that are quantised already; torch.compile; NumPy; wrong use."""

import moire
import numpy as np
import pytest
import torch
import truth
import truth_fp8
from moire.dtypes import COMPILES_WHOLE_GRAPHS
from truth_recipes import FORMS

pytestmark = pytest.mark.usefixtures("device")

RECIPES = list(FORMS)
SPLITS = [33, 0, 7]
H, F = 40, 72


def make(generator, dtype=torch.bfloat16):
    x = truth.draw(generator, 40, H, dtype=dtype)
    w1 = truth.draw(generator, 3, 2 * F, H, scale=H**-0.5)
    w2 = truth.draw(generator, 3, H, F, scale=F**-0.5)
    return [t.requires_grad_() for t in (x, w1, w2)]


def gradients(y, *leaves):
    return torch.autograd.grad(y.float().sin().sum(), leaves)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_in_both_directions_gives_the_same_bits(generator, recipe):
    x, w1, w2 = make(generator)
    groups = moire.Groups(splits=SPLITS)
    y = moire.grouped_mlp(x, w1, w2, groups, recipe=recipe)
    wanted = gradients(y, x, w1, w2)
    tensor = moire.quantize(x, groups, recipe, columnwise=True)
    found = moire.grouped_mlp(tensor, w1, w2, groups, recipe=recipe)
    assert torch.equal(found, y) and found.dtype == torch.bfloat16
    assert same(gradients(found, x, w1, w2), wanted)
    again = moire.grouped_linear(tensor, w1, groups, recipe=recipe)
    assert torch.equal(again, moire.grouped_linear(x, w1, groups, recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_in_rows_only_is_requantised_for_the_weight_gradient(generator, recipe):
    x, w1, w2 = make(generator)
    groups = moire.Groups(splits=SPLITS)
    rows = moire.quantize(x, groups, recipe)
    both = moire.quantize(x, groups, recipe).requantize()
    for function, weights in ((moire.grouped_linear, (w1,)), (moire.grouped_mlp, (w1, w2))):
        found, wanted = (function(t, *weights, groups, recipe=recipe) for t in (rows, both))
        assert torch.equal(found, wanted)
        assert same(gradients(found, x, *weights), gradients(wanted, x, *weights))
    assert not rows.has_columnwise


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_are_quantised_once_and_gathered_by_the_products(generator, recipe):
    x, w1, w2 = (t.detach() for t in make(generator))
    row_idx = torch.randint(40, (40,), generator=generator)
    groups = moire.Groups(splits=SPLITS)
    tokens = moire.quantize(x, recipe=recipe)
    found = moire.grouped_mlp(tokens, w1, w2, groups, recipe=recipe, row_idx=row_idx)
    assert torch.equal(found, moire.grouped_mlp(x, w1, w2, groups, recipe=recipe, row_idx=row_idx))
    topk_idx, weights = torch.randint(3, (40, 2), generator=generator), torch.rand(40, 2)
    found = moire.moe(tokens, w1, w2, topk_idx, weights, recipe=recipe)
    assert torch.equal(found, moire.moe(x, w1, w2, topk_idx, weights, recipe=recipe))


def test_gathered_while_quantising(generator):
    x, w1, _ = make(generator)
    row_idx = torch.randint(40, (40,), generator=generator)
    groups = moire.Groups(splits=SPLITS)
    tensor = moire.quantize(x, groups, columnwise=True, row_idx=row_idx)
    found = moire.grouped_linear(tensor, w1, groups, recipe="mxfp8")
    wanted = moire.grouped_linear(x, w1, groups, recipe="mxfp8", row_idx=row_idx)
    assert torch.equal(found, wanted)
    assert same(gradients(found, x, w1), gradients(wanted, x, w1))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
def test_copies_of_weights_stand_in_for_them(generator, recipe, weight_layout):
    x, w1, w2 = make(generator)
    if weight_layout == "in_out":
        w1, w2 = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (w1, w2))
    groups, options = (
        moire.Groups(splits=SPLITS),
        {"recipe": recipe, "weight_layout": weight_layout},
    )
    y = moire.grouped_mlp(x, w1, w2, groups, **options)
    wanted = gradients(y, x, w1, w2)
    q1, q2 = (moire.quantize(w, recipe=recipe, columnwise=True) for w in (w1, w2))
    copies = {"w1_quantized": q1, "w2_quantized": q2}
    found = moire.grouped_mlp(x, w1, w2, groups, **copies, **options)
    assert torch.equal(found, y) and same(gradients(found, x, w1, w2), wanted)
    topk_idx, weights = torch.randint(3, (40, 2), generator=generator), torch.rand(40, 2)
    routed = moire.moe(x, w1, w2, topk_idx, weights, **copies, **options)
    assert torch.equal(routed, moire.moe(x, w1, w2, topk_idx, weights, **options))
    # Without masters: no weight gradients, and x has its own.
    frozen = moire.grouped_mlp(x, q1, q2, groups, **options)
    assert torch.equal(frozen, y) and torch.equal(gradients(frozen, x)[0], wanted[0])
    # Forward copies alone: the backward makes its own of the masters.
    forward = {"rowwise": weight_layout == "out_in", "columnwise": weight_layout == "in_out"}
    alone = [moire.quantize(w, recipe=recipe, **forward) for w in (w1, w2)]
    found = moire.grouped_mlp(
        x, w1, w2, groups, w1_quantized=alone[0], w2_quantized=alone[1], **options
    )
    assert torch.equal(found, y) and same(gradients(found, x, w1, w2), wanted)


def test_a_copy_that_changed_before_the_backward_is_noticed(generator):
    x, w1, _ = make(generator)
    groups, copy = moire.Groups(splits=SPLITS), moire.quantize(w1, columnwise=True)
    y = moire.grouped_linear(x, w1, groups, recipe="mxfp8", w_quantized=copy)
    copy.quantize_(2 * w1.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- NumPy, and the backward steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_numpy_gives_the_bits_of_torch(generator, recipe):
    x, w1, w2 = (t.detach() for t in make(generator, torch.float32))
    if x.is_cuda:
        pytest.skip("NumPy's are a CPU's")
    groups = moire.Groups(splits=SPLITS)
    topk_idx, weights = torch.randint(3, (40, 2), generator=generator), torch.rand(40, 2)
    calls = [
        lambda a, b, c, i, p: moire.grouped_linear(a, b, groups, recipe=recipe),
        lambda a, b, c, i, p: moire.grouped_mlp(a, b, c, groups, recipe=recipe),
        lambda a, b, c, i, p: moire.moe(a, b, c, i, p, recipe=recipe),
        lambda a, b, c, i, p: moire.grouped_linear(
            moire.quantize(a, groups, recipe),
            moire.quantize(b, recipe=recipe),
            groups,
            recipe=recipe,
        ),
    ]
    given = (x, w1, w2, topk_idx, weights)
    for call in calls:
        wanted, found = call(*given), call(*(t.numpy() for t in given))
        assert isinstance(found, np.ndarray) and np.array_equal(found, wanted.numpy())


@pytest.mark.parametrize("is_numpy", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_incoming_gradient_may_be_quantised(generator, is_numpy, recipe):
    x, w1, w2 = make(generator, torch.float32)
    if is_numpy and x.is_cuda:
        pytest.skip("NumPy's are a CPU's")
    groups, grad_y = moire.Groups(splits=SPLITS), truth.draw(generator, 40, H)
    y = moire.grouped_mlp(x, w1, w2, groups, recipe=recipe)
    wanted = torch.autograd.grad(y, (x, w1, w2), grad_y)
    act = truth.draw(generator, 40, F)
    arrays = [t.detach().numpy() if is_numpy else t.detach() for t in (x, w1, w2, grad_y, act)]
    x, w1, w2, grad_y, act = arrays
    quantized = moire.quantize(grad_y, groups, recipe, columnwise=True)
    pairs = []
    for given in (grad_y, quantized):
        grads = moire.grouped_mlp_backward(given, x, w1, w2, groups, recipe=recipe)
        for found, expected in zip((grads.x, grads.w1, grads.w2), wanted):
            assert torch.equal(torch.as_tensor(found), expected)
        grads = moire.grouped_linear_backward(given, act, w2, groups, recipe=recipe)
        pairs.append((torch.as_tensor(grads.x), torch.as_tensor(grads.w)))
    assert same(*pairs)
    with pytest.raises(moire.InvalidArgument, match="grad_y: the GroupedTensor has no columnwise"):
        rows = moire.quantize(grad_y, groups, recipe)
        moire.grouped_linear_backward(rows, act, w2, groups, recipe=recipe)
    wrong = [
        ([33, 7], "backward: grad_y was quantised for 2 groups, but groups has 3"),
        (None, "backward: grad_y was quantised for 1 groups, but groups has 3"),
    ]
    if is_numpy or not x.is_cuda:  # whose offsets nobody reads
        said = r"backward: grad_y was quantised for other groups: offsets\[1\] was 10, and"
        wrong.append(([10, 23, 7], said))
    for splits, said in wrong:
        others = None if splits is None else moire.Groups(splits=splits)
        other = moire.quantize(grad_y, others, recipe, columnwise=True)
        with pytest.raises(moire.InvalidArgument, match=said):
            moire.grouped_linear_backward(other, act, w2, groups, recipe=recipe)


# ---- torch.compile


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["arrays", "quantised_inside", "given", "moe"])
def test_compiles_as_one_graph(generator, recipe, form):
    torch._dynamo.reset()
    splits = torch.tensor(SPLITS)
    topk_idx, weights = torch.randint(3, (40, 2), generator=generator), torch.rand(40, 2)
    x, w1, w2 = make(generator)
    copies = [moire.quantize(w, recipe=recipe, columnwise=True) for w in (w1, w2)]

    def layer(x, w1, w2, q1, q2):
        groups = moire.Groups(splits=splits)
        if form == "moe":
            return moire.moe(x, w1, w2, topk_idx, weights, recipe=recipe)
        given = {"w1_quantized": q1, "w2_quantized": q2} if form == "given" else {}
        if form == "quantised_inside":
            x = moire.quantize(x, groups, recipe, columnwise=True)
        return moire.grouped_mlp(x, w1, w2, groups, recipe=recipe, **given)

    compiled = torch.compile(layer, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    wanted, found = layer(x, w1, w2, *copies), compiled(x, w1, w2, *copies)
    assert torch.equal(found, wanted)
    assert same(gradients(found, x, w1, w2), gradients(wanted, x, w1, w2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantising_weights_compiles_as_one_graph(generator, recipe):
    torch._dynamo.reset()
    x, w, _ = make(generator)
    splits = torch.tensor(SPLITS)

    def layer(x, w):
        copy = moire.quantize(w, recipe=recipe, columnwise=True)
        groups = moire.Groups(splits=splits)
        return moire.grouped_linear(x, w, groups, recipe=recipe, w_quantized=copy)

    compiled = torch.compile(layer, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    wanted, found = layer(x, w), compiled(x, w)
    assert torch.equal(found, wanted)
    assert same(gradients(found, x, w), gradients(wanted, x, w))


def test_quantising_compiles_as_one_graph(generator):
    torch._dynamo.reset()

    def there_and_back(x, splits):
        tensor = moire.quantize(x, moire.Groups(splits=splits), columnwise=True)
        return tensor.dequantize(), tensor.dequantize(direction="columnwise")

    compiled = torch.compile(there_and_back, fullgraph=COMPILES_WHOLE_GRAPHS, backend="aot_eager")
    x = truth.draw(generator, 40, H)
    for splits in (SPLITS, [0, 39, 1]):
        splits = torch.tensor(splits)
        assert same(compiled(x, splits), there_and_back(x, splits))


# ---- wrong use

GROUPS = moire.Groups(splits=[2, 4])
X, W1, W2 = torch.ones(6, 64), torch.ones(2, 128, 64), torch.ones(2, 64, 64)
QX = moire.quantize(X, GROUPS, columnwise=True)
Q1, Q2 = (moire.quantize(w, columnwise=True, layout="halves") for w in (W1, W2))


def mlp(x=X, w1=W1, w2=W2, groups=GROUPS, recipe="mxfp8", **options):
    return moire.grouped_mlp(x, w1, w2, groups, recipe=recipe, **options)


def moe(x=X, **options):
    idx, weights = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    return moire.moe(x, W1, W2, idx, weights, recipe="mxfp8", **options)


LEAF = torch.ones(2, 128, 64, requires_grad=True)
BAD = [
    (lambda: mlp(QX, recipe=None), "x is quantised as mxfp8, but the recipe is 'as_stored', which"),
    (lambda: mlp(QX, recipe="fp8_block"), "but the recipe is 'fp8_block', which needs fp8_block"),
    (lambda: mlp(moire.quantize(X, GROUPS, rowwise=False, columnwise=True)), "no rowwise copy"),
    (
        lambda: mlp(QX, groups=moire.Groups(splits=[6])),
        "x was quantised for 2 groups, but groups has 1",
    ),
    (
        lambda: mlp(QX, groups=moire.Groups(splits=[3, 3])),
        "x was quantised for other groups: offsets[1] was 2, and is 3 now",
    ),
    (
        lambda: mlp(moire.quantize(X, columnwise=True)),
        "x was quantised for 1 groups, but groups has 2",
    ),
    (lambda: mlp(QX, row_idx=torch.arange(6)), "row_idx is given beside an x that was quantised"),
    (
        lambda: mlp(moire.quantize(X), LEAF, row_idx=torch.arange(6)),
        "reads x column-wise in the order of the groups, but x has only rows of tokens",
    ),
    (lambda: moe(QX), "row_idx is given beside an x that was quantised for groups or column-wise"),
    (lambda: mlp(Q1), "x is [2, 128, 64], must have rank 2"),
    (lambda: mlp(w1=QX), "w1 is [6, 64], must have rank 3"),
    (lambda: mlp(w1=Q1, w1_quantized=Q1), "w1 is quantised itself, so w1_quantized is too much"),
    (lambda: mlp(w1_quantized=W1), "w1_quantized is a Torch tensor, must be a GroupedTensor"),
    (lambda: mlp(w1_quantized=Q2), "w1_quantized is [2, 64, 64] but w1 is [2, 128, 64]"),
    (lambda: mlp(w2_quantized=Q2, recipe=None), "w2_quantized is quantised as mxfp8, but the rec"),
    (lambda: mlp(w2_quantized=Q2, recipe="fp8_block"), "which needs fp8_tile"),
    (
        lambda: mlp(w1=Q1, layout=8),
        "w1 was quantised with gate and up in 'halves, gate first', but",
    ),
    (lambda: moe(w1_quantized=Q1, layout=8), "w1_quantized was quantised with gate and up in"),
    (
        lambda: mlp(w2=moire.quantize(W2, rowwise=False, columnwise=True)),
        "w2: the GroupedTensor has no rowwise copy",
    ),
    (
        lambda: mlp(X.clone().requires_grad_(), w2=moire.quantize(W2)),
        "the gradient of x reads w2 in blocks along its outputs, which the GroupedTensor does not",
    ),
    (lambda: mlp(w1=moire.quantize(W1.numpy())), "w1 is a NumPy array, must be a Torch tensor"),
    (lambda: moire.grouped_linear(X, Q1, GROUPS), "w is quantised as mxfp8, but the recipe is"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m[:40] for _, m in BAD])
def test_wrong_use_is_refused_with_the_reason(call, message):
    if torch.get_default_device().type == "cuda":
        pytest.skip("the operands are a CPU's")
    with pytest.raises(moire.InvalidArgument) as e:
        call()
    assert message in str(e.value), str(e.value)


def test_wrong_scales_from_outside_are_refused():
    data, scales = QX.rowwise
    for wrong in (scales[:, :1], scales[1:], scales.float()):
        with pytest.raises(moire.InvalidArgument, match="GroupedTensor: rowwise.scales is "):
            moire.GroupedTensor("mxfp8", rowwise=(data, wrong), groups=GROUPS)
    truth_fp8.assert_same_bytes(
        moire.GroupedTensor("mxfp8", rowwise=QX.rowwise, columnwise=QX.columnwise, groups=GROUPS),
        QX,
    )
