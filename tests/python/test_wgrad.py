"""Weight gradients that go elsewhere: main_grad."""

import moire
import pytest
import torch
import truth
from moire import nn
from samples_mlp import FORMS, SPLITS, E, F, H, make, run, weights

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulates_into_main_grad_and_returns_a_dummy(generator, form, dtype):
    plain, x, probs = make(generator, **form)
    run(plain, x, probs)
    layer, *_ = make(generator, accumulate_into_main_grad=True, **form)
    start = []
    for p in weights(layer):
        p.main_grad = truth.draw(generator, *p.shape, dtype=dtype)
        p.grad_added_to_main_grad, p.zero_out_wgrad = False, True
        start.append(p.main_grad.double())
    fired = []
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    run(layer, x, probs)
    for p, reference, before in zip(weights(layer), weights(plain), start):
        truth.assert_close(
            p.main_grad, before + reference.grad.double(), dtype, 9, name="main_grad"
        )
        assert p.grad_added_to_main_grad is True and (p.grad == 0).all() and p.grad.shape == p.shape
    assert len(fired) == len(list(layer.parameters()))
    for mine, reference in zip(layer.fc1._names("bias"), plain.fc1._names("bias")):
        assert torch.equal(getattr(layer.fc1, mine).grad, getattr(plain.fc1, reference).grad)


def test_overwrite_main_grad_per_parameter_and_empty_experts(generator):
    plain, x, probs = make(generator, packed=False)
    run(plain, x, probs)
    layer, *_ = make(generator, packed=False, accumulate_into_main_grad=True)
    for i, p in enumerate(weights(layer)):
        p.main_grad = torch.ones_like(p)
        p.overwrite_main_grad = i % E != 0
    run(layer, x, probs)
    for i, (p, reference) in enumerate(zip(weights(layer), weights(plain))):
        if i % E == 1:  # no rows: exact zeros where overwriting
            assert (p.main_grad == 0).all()
        start = 0.0 if p.overwrite_main_grad else 1.0
        truth.assert_close(p.main_grad, reference.grad.double() + start, torch.float32, 9)


def test_get_main_grad_is_asked(generator):
    layer, x, probs = make(generator, accumulate_into_main_grad=True)
    buffers = [torch.zeros_like(p) for p in weights(layer)]
    for p, buffer in zip(weights(layer), buffers):
        p.get_main_grad = lambda buffer=buffer: buffer
    run(layer, x, probs)
    assert all(b.abs().sum() > 0 for b in buffers)


def test_main_grad_messages(generator):
    layer, x, probs = make(generator, accumulate_into_main_grad=True)
    with pytest.raises(moire.InvalidArgument, match="neither main_grad nor get_main_grad"):
        run(layer, x, probs)
    for p in weights(layer):
        p.main_grad = torch.zeros(2, 2)
    with pytest.raises(moire.InvalidArgument, match=r"main_grad: the buffer is \[2, 2\]"):
        run(layer, x, probs)


def test_the_backward_of_a_first_microbatch_overwrites_main_grad(generator):
    plain, x, probs = make(generator)
    run(plain, x, probs)
    for delayed in (False, True):
        options = {"delay_wgrad_compute": delayed, "accumulate_into_main_grad": True}
        layer, *_ = make(generator, **options)
        for p in weights(layer):
            p.main_grad = torch.full_like(p, torch.nan)
        for is_first in (True, False):
            layer(x, SPLITS, probs, is_first_microbatch=is_first).sin().sum().backward()
        if delayed:
            layer.backward_dw()
            for p, reference in zip(weights(layer), weights(plain)):
                assert torch.equal(p.main_grad, reference.grad)
            layer.backward_dw()
        for p, reference in zip(weights(layer), weights(plain)):
            wanted = 2 * reference.grad.double()
            truth.assert_close(p.main_grad, wanted, torch.float32, 18, name=f"delayed {delayed}")


@pytest.mark.parametrize(
    "options", [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}]
)
def test_a_linear_layer_alone(generator, options):
    torch.manual_seed(0)
    plain = nn.GroupedLinear(E, H, F, bias=True)
    layer = nn.GroupedLinear(E, H, F, bias=True, **options)
    layer.load_state_dict(plain.state_dict())
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = truth.draw(generator, 9, H)
    for module in (plain, layer):
        module(x, SPLITS).sin().sum().backward()
    if "delay_wgrad_compute" in options:
        layer.backward_dw()
    found = layer.weight.main_grad if "accumulate_into_main_grad" in options else layer.weight.grad
    assert torch.equal(found, plain.weight.grad) and torch.equal(layer.bias.grad, plain.bias.grad)


def test_autograd_gets_a_dummy_only_where_somebody_waits_for_it(generator):
    layer, x, probs = make(generator, accumulate_into_main_grad=True)
    fired = []
    for p in weights(layer):
        p.main_grad = torch.zeros_like(p)
        p.register_post_accumulate_grad_hook(fired.append)
    layer.fc2.weight.grad_added_to_main_grad = False
    for _ in range(2):  # what the first pass leaves changes nothing for the second
        fired.clear()
        run(layer, x, probs)
        assert layer.fc1.weight.grad is None
        assert not hasattr(layer.fc1.weight, "grad_added_to_main_grad")
        assert layer.fc2.weight.grad.shape == layer.fc2.weight.shape
        assert layer.fc2.weight.grad_added_to_main_grad
        assert any(p is layer.fc2.weight for p in fired)
    biases = [layer.fc1.bias, layer.fc2.bias]
    wanted = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in biases]))
    layer.fc2.weight.grad = None  # as its hooks would have it
    assert torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0).isclose(wanted)


def test_main_grad_is_marked_once_it_is_written(generator):
    layer, x, probs = make(generator, accumulate_into_main_grad=True)
    for p in weights(layer):
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
    layer.fc1.weight.main_grad = torch.zeros(2, 2)
    with pytest.raises(moire.InvalidArgument, match="main_grad"):
        run(layer, x, probs)
    assert not any(p.grad_added_to_main_grad for p in weights(layer))


@pytest.mark.parametrize("delayed", [False, True])
def test_a_frozen_expert_beside_main_grads_of_another_type(generator, delayed):
    form = {"packed": False, "dtype": torch.bfloat16}
    plain, x, probs = make(generator, **form)
    x = x.bfloat16()
    run(plain, x, probs)
    layer, *_ = make(generator, **form, accumulate_into_main_grad=True, delay_wgrad_compute=delayed)
    for p in weights(layer):
        p.main_grad = torch.zeros(p.shape, dtype=torch.float32)
    frozen = layer.fc1.weight0, layer.fc2.weight2
    for p in frozen:
        del p.main_grad
        p.requires_grad_(False)
    run(layer, x, probs)
    if delayed:
        layer.backward_dw()
    for p, reference in zip(weights(layer), weights(plain)):
        if any(p is f for f in frozen):
            assert p.grad is None
        else:
            truth.assert_close(p.main_grad, reference.grad.double(), torch.bfloat16, 9)


def test_main_grads_of_one_layer_have_one_type(generator):
    layer, x, probs = make(generator, packed=False, accumulate_into_main_grad=True)
    for p in weights(layer):
        p.main_grad = torch.zeros_like(p)
    layer.fc1.weight2.main_grad = torch.zeros_like(layer.fc1.weight2, dtype=torch.bfloat16)
    with pytest.raises(
        moire.InvalidArgument,
        match="buffer of weight2 is torch.bfloat16 but that of weight0 is torch.float32",
    ):
        run(layer, x, probs)


SHARING = [
    (lambda m, x: (m.fc1.weight, m.fc1.weight), "of fc1.weight shares memory with fc1.weight"),
    (lambda m, x: (m.fc2.weight, m.fc1.weight), "of fc2.weight shares memory with fc1.weight"),
    (lambda m, x: (m.fc2.weight, m.fc1.weight.main_grad), "of fc2.weight shares memory with the"),
    (lambda m, x: (m.fc2.weight, x), "of fc2.weight shares memory with x"),
]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("pair, message", SHARING, ids=[m for _, m in SHARING])
def test_main_grad_has_memory_of_its_own(generator, pair, message, delayed):
    torch.manual_seed(3)
    # All memory is large enough for every main_grad; weights are not saved as they are.
    layer = nn.GroupedMLP(
        *(E, 8, 4),
        accumulate_into_main_grad=True,
        delay_wgrad_compute=delayed,
        compute_dtype=torch.bfloat16,
    )
    x = torch.randn(24, 8)
    for p in weights(layer):
        p.main_grad = torch.zeros_like(p)
    of, memory = pair(layer, x)
    of.main_grad = memory.detach().flatten()[: of.numel()].view(of.shape)
    before = [p.clone() for p in weights(layer)]
    if delayed and memory is not of:  # each layer is one call then
        pytest.skip("backward_dw sees one layer at a time")
    if memory is x:
        layer.fc1.compute_dtype = layer.fc2.compute_dtype = None  # x is saved itself
    with pytest.raises(moire.InvalidArgument) as e:
        layer(x, [10, 0, 14]).sin().sum().backward()
        layer.backward_dw()
    assert message.replace("fc1.", "" if delayed else "fc1.") in str(e.value)
    assert all(torch.equal(p, b) for p, b in zip(weights(layer), before))


def test_slices_of_one_buffer_are_main_grads(generator):
    plain, x, probs = make(generator, packed=False)
    run(plain, x, probs)
    layer, *_ = make(generator, packed=False, accumulate_into_main_grad=True)
    ends = torch.tensor([p.numel() for p in weights(layer)]).cumsum(0).tolist()
    buffer = torch.zeros(ends[-1])
    for p, end in zip(weights(layer), ends):
        p.main_grad = buffer[end - p.numel() : end].view(p.shape)
    run(layer, x, probs)
    for p, reference in zip(weights(layer), weights(plain)):
        assert torch.equal(p.main_grad, reference.grad)


def test_frozen_weights_get_nothing(generator):
    for options in ({"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}):
        layer, x, probs = make(generator, **options)
        layer.fc1.weight.requires_grad_(False)
        layer.fc2.weight.main_grad = torch.zeros_like(layer.fc2.weight)
        run(layer, x, probs)
        if "delay_wgrad_compute" in options:
            layer.backward_dw()
        assert layer.fc1.weight.grad is None and not hasattr(
            layer.fc1.weight, "grad_added_to_main_grad"
        )


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_only_weights_that_a_backward_asks_for_get_a_gradient(generator, delayed, into):
    plain, x, probs = make(generator, packed=False)
    run(plain, x, probs)
    options = {"delay_wgrad_compute": delayed, "accumulate_into_main_grad": into}
    layer, *_ = make(generator, packed=False, **options)
    for p in weights(layer):
        p.main_grad = torch.zeros_like(p)
    x.requires_grad_()
    chosen = layer.fc1.weight2

    def found():
        return [p.grad if not into else p.main_grad for p in weights(layer)]

    y = layer(x, SPLITS, probs).sin().sum()
    torch.autograd.grad(y, [x], retain_graph=True)
    layer.backward_dw()
    assert all(grad is None or not grad.any() for grad in found())
    y.backward(inputs=[chosen])
    layer.backward_dw()
    for p, grad, reference in zip(weights(layer), found(), weights(plain)):
        if p is chosen:
            assert torch.equal(grad, reference.grad)
        else:
            assert grad is None or not grad.any()


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_go_to_the_weights_of_the_call(generator, delayed, into):
    """Which torch.func.functional_call puts in the place of the layer's."""
    plain, layer = (
        nn.GroupedLinear(E, H, F, accumulate_into_main_grad=i, delay_wgrad_compute=d)
        for i, d in ((False, False), (into, delayed))
    )
    given = plain.weight.detach().clone().requires_grad_()
    x = truth.draw(generator, 9, H)
    for p in (given, layer.weight):
        p.main_grad = torch.zeros_like(p)
    plain(x, SPLITS).sin().sum().backward()
    torch.func.functional_call(layer, {"weight": given}, (x, SPLITS)).sin().sum().backward()
    layer.backward_dw()
    assert torch.equal(given.main_grad if into else given.grad, plain.weight.grad)
    assert layer.weight.grad is None and not layer.weight.main_grad.any()


@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad_compute"])
def test_weights_that_are_computed_have_no_gradient_elsewhere(generator, option):
    layer, x = nn.GroupedLinear(E, H, F, **{option: True}), truth.draw(generator, 9, H)
    computed = {"weight": layer.weight * 2}
    with torch.no_grad():
        assert torch.func.functional_call(layer, computed, (x, SPLITS)).shape == (9, F)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
    for call in (lambda: layer(x, SPLITS), lambda: nn.Sequential(layer)(x, SPLITS)):
        with pytest.raises(
            moire.InvalidArgument, match=f"Linear: {option} is on, but a weight is comp"
        ):
            call()
    with torch.no_grad():
        assert layer(x, SPLITS).shape == (9, F)


@pytest.mark.parametrize("delayed", [False, True])
def test_main_grad_of_weights_that_are_8_bits(generator, delayed):
    options = {"primary": "mxfp8", "recipe": "mxfp8", "dtype": torch.bfloat16}
    found = []
    for into in (False, True):
        torch.manual_seed(3)
        later = {"accumulate_into_main_grad": into, "delay_wgrad_compute": into and delayed}
        layer = nn.GroupedLinear(E, H, F, **options, **later)
        layer.weight.main_grad = torch.zeros(E, F, H)
        layer.weight.grad_added_to_main_grad, layer.weight.zero_out_wgrad = False, True
        x = truth.draw(generator.manual_seed(5), 9, H, dtype=torch.bfloat16)
        layer(x, SPLITS).sin().sum().backward()
        layer.backward_dw()
        found.append(
            (layer.weight.grad, layer.weight.main_grad, layer.weight.grad_added_to_main_grad)
        )
    (grad, _, was_added), (dummy, main_grad, is_added) = found
    truth.assert_close(main_grad, grad.double(), torch.bfloat16, 9)
    assert not dummy.any() and is_added and not was_added
