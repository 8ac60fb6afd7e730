"""moire.call: any C entry on arrays that the caller has, by the names of moire.h."""

import ml_dtypes
import moire
import numpy as np
import pytest
import torch
import truth

H, F, SPLITS = 12, 8, [4, 0, 5]


def make(generator):
    return [truth.draw(generator, *shape) for shape in ((9, H), (3, 2 * F, H), (3, H, F), (9, H))]


def fields_of(x, w1, w2, grad_y, offsets):
    """Of grouped_mlp_backward, but for z and the outputs."""
    fields = {"x": x, "w1": w1, "w2": w2, "grad_y": grad_y, "offsets": offsets}
    return {**fields, "num_groups": 3, "capacity": 9, "layout": "halves"}


@pytest.mark.parametrize("is_numpy", [False, True])
def test_a_backward_has_the_bits_of_autograd(generator, is_numpy):
    *leaves, grad_y = make(generator)
    for leaf in leaves:
        leaf.requires_grad_()
    groups = moire.Groups(splits=SPLITS)
    wanted = torch.autograd.grad(moire.grouped_mlp(*leaves, groups), leaves, grad_y)
    x, w1, w2 = (t.detach() for t in leaves) if is_numpy else leaves
    arrays = [x, w1, w2, grad_y, groups.offsets]
    empty = torch.empty
    if is_numpy:
        arrays, empty = [t.numpy() for t in arrays], lambda *shape: np.empty(shape, np.float32)
    fields, z = fields_of(*arrays), empty(9, 2 * F)
    shared = {name: fields[name] for name in ("x", "offsets", "num_groups", "capacity")}
    moire.call("grouped_linear", w=list(fields["w1"]), y=z, **shared)
    outputs = empty(9, H), empty(3, 2 * F, H), empty(3, H, F)
    names = "grad_x", "grad_w1", "grad_w2"
    moire.call(
        "grouped_mlp_backward", z=z, activation="swiglu", **fields, **dict(zip(names, outputs))
    )
    for found, expected in zip(outputs, wanted):
        assert np.array_equal(np.asarray(found), expected.numpy())


def test_copies_in_8_bits_are_data_and_scales(generator, device):
    x = torch.randn(9, 64, generator=generator)
    wanted = moire.quantize(x, element="e5m2")
    data, scales = (torch.empty_like(t) for t in wanted.rowwise)
    moire.call("quantize", source=x, scaling=1, rowwise=(data, scales), columnwise=None)
    assert torch.equal(data.view(torch.uint8), wanted.rowwise.data.view(torch.uint8))
    assert torch.equal(scales, wanted.rowwise.scales)


@pytest.mark.parametrize("is_numpy", [False, True])
def test_quantize_sums_a_bias_to_the_bits_of_bias_backward(generator, device, is_numpy):
    if is_numpy and device == "cuda":
        pytest.skip("NumPy's are a CPU's")
    grad_y, offsets = torch.randn(9, 64, generator=generator), moire.Groups(splits=SPLITS).offsets
    copy, sums = moire.quantize(grad_y).rowwise, torch.ones(2, 3, 64)
    data, scales = (torch.empty_like(t).view(torch.uint8) for t in copy)
    arrays = [grad_y, offsets, data, scales, *sums]
    if is_numpy:
        arrays = [t.numpy() for t in arrays]
        arrays[2] = arrays[2].view(ml_dtypes.float8_e4m3fn)
    else:
        arrays[2] = data.view(copy.data.dtype)
    grad_y, offsets, *copy, found, wanted = arrays
    groups = {"offsets": offsets, "num_groups": 3, "capacity": 9, "beta": 1}
    moire.call("quantize", source=grad_y, scaling=1, rowwise=copy, grad_bias=found, **groups)
    moire.call("bias_backward", grad_y=grad_y, grad_bias=wanted, **groups)
    assert torch.equal(*sums) and not torch.equal(sums[0], torch.ones(3, 64))
    assert torch.equal(data, moire.quantize(torch.as_tensor(grad_y)).rowwise.data.view(torch.uint8))


def test_what_autograd_needed_and_a_call_overwrote_is_noticed(generator):
    z = truth.draw(generator, 9, 2 * F)
    act, x = torch.empty(9, F), truth.draw(generator, 9, F).requires_grad_()
    y = x * act
    moire.call("glu", z=z, act=act)
    assert torch.equal(act, moire.glu(z))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_explain_says_what_would_run_and_nothing_is_written():
    z, act = torch.ones(9, 2 * F), torch.full((9, F), 3.0)
    version = act._version
    steps = moire.explain(moire.call, "glu", z=z, act=act)
    assert [step["op"] for step in steps] == ["glu"]
    assert (act == 3).all() and act._version == version


Z, ACT = torch.ones(9, 2 * F), torch.empty(9, F)
WRONG = [
    (("nothing",), {}, r"call: name is 'nothing', must be one of .*grouped_mlp_backward"),
    ((3,), {}, r"call: name is 3, must be one of"),
    (("glu",), {"zz": Z}, r"glu: 'zz' is no field of it, which are act, activation, capacity"),
    (("glu",), {"z": Z, "act": 3}, r"glu: act is 3, must be a Torch tensor"),
    (("glu",), {"z": Z, "act": ACT.numpy()}, r"glu: act is a NumPy array, must be a Torch tensor"),
    (("glu",), {"z": Z, "act": ACT, "tail": "x"}, r"glu: tail is 'x', must be an integer"),
    (("glu",), {"z": Z, "act": ACT, "activation": 5}, r"glu: activation is 5, must be one of"),
    (("glu",), {"z": Z}, r"glu: act"),
    (("grouped_linear",), {"w": [Z, 3]}, r"grouped_linear: w\[1\] is 3, must be a Torch tensor"),
    (("quantize",), {"rowwise": Z}, r"quantize: rowwise is a Torch tensor, must be \(data, scales"),
    (("router",), {"logits": Z, "scale": "a"}, r"router: scale is 'a', must be a finite number"),
]


@pytest.mark.parametrize("args, fields, message", WRONG, ids=[m for *_, m in WRONG])
def test_what_is_wrong_is_said(args, fields, message):
    with pytest.raises(moire.InvalidArgument, match=message):
        moire.call(*args, **fields)
