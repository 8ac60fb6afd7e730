"""explain leaves no trace: what calls would have written, counted, kept or set off is as before."""

import moire
import pytest
import torch
import truth
from moire import nn

pytestmark = pytest.mark.usefixtures("device")

E, H, F = 3, 8, 6
SPLITS = [2, 0, 3]


def draw_x(generator, **options):
    return truth.draw(generator, 5, H, **options)


def ops_of(steps):
    return [step["op"] for step in steps if step["op"] != "splits_to_offsets"]


def test_nothing_called_is_said():
    assert str(moire.explain(lambda: None)) == "moire was not called"


@pytest.mark.parametrize("accumulate", [False, True])
def test_delayed_gradients_do_not_wait(generator, accumulate):
    options = {"delay_wgrad_compute": True, "accumulate_into_main_grad": accumulate}
    plain, layer = nn.GroupedLinear(E, H, F), nn.GroupedLinear(E, H, F, **options)
    layer.load_state_dict(plain.state_dict())
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, fired = draw_x(generator), []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))

    def step():
        layer(x, SPLITS).sum().backward()
        for _ in range(2):  # that of the pass before, and this one's
            layer.backward_dw()

    layer(x, SPLITS).sum().backward()
    assert ops_of(moire.explain(layer.backward_dw)) == ["grouped_gemm_wgrad"]  # and it still waits
    steps = moire.explain(step)
    assert ops_of(steps) == ["grouped_gemm"] + 2 * ["grouped_gemm_wgrad"] and not fired
    layer.backward_dw()
    plain(x, SPLITS).sum().backward()
    layer.backward_dw()  # nothing waits of what was explained
    found = layer.weight.main_grad if accumulate else layer.weight.grad
    assert torch.equal(found, plain.weight.grad) and fired == [1]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "backward", [torch.Tensor.backward, torch.autograd.backward], ids=["method", "function"]
)
def test_no_gradient_is_accumulated_and_no_hook_fires(generator, before, backward):
    layer, head = nn.GroupedMLP(E, H, F, bias=True), torch.nn.Linear(H, 4)
    x = draw_x(generator).requires_grad_()
    leaves = [x, *layer.parameters(), *head.parameters()]
    if before:
        for p in leaves:
            p.grad = truth.draw(generator, *p.shape)
    wanted = [p.grad if p.grad is None else p.grad.clone() for p in leaves]
    same = [p.grad for p in leaves]
    fired = []
    for p in leaves:
        p.register_post_accumulate_grad_hook(fired.append)
    try:
        steps = moire.explain(lambda: backward(head(layer(x, SPLITS)).sum()))
    except moire.Unsupported:
        pytest.skip("this Torch says nothing when torch.autograd.backward begins")
    assert "grouped_gemm_glu_backward" in ops_of(steps) and not fired
    for p, grad, value in zip(leaves, same, wanted):
        assert p.grad is grad and (grad is None or torch.equal(grad, value))


def test_a_backward_pass_that_begins_unseen_is_refused(generator):
    layer, x = nn.GroupedLinear(E, H, F), draw_x(generator)

    def backward():  # as pipelines that dropped the output's memory do
        y = layer(x, SPLITS)
        engine = torch.autograd.Variable._execution_engine
        options = {"allow_unreachable": True, "accumulate_grad": True}
        engine.run_backward((y,), (torch.ones_like(y),), False, False, (), **options)

    with pytest.raises(moire.Unsupported, match="begin it with Tensor.backward"):
        moire.explain(backward)
    assert layer.weight.grad is None
    backward()
    assert layer.weight.grad is not None


def test_gradients_can_be_asked_for(generator):
    layer, x = nn.GroupedLinear(E, H, F), draw_x(generator).requires_grad_()
    found = []
    moire.explain(
        lambda: found.extend(torch.autograd.grad(layer(x, SPLITS).sum(), [x, layer.weight]))
    )
    assert [g.shape for g in found] == [x.shape, layer.weight.shape]
    with pytest.raises(RuntimeError, match="does not require grad"):
        moire.explain(torch.ones(()).backward)


@pytest.mark.parametrize("ask", ["backward", "grad"])
def test_a_graph_is_still_there(generator, ask):
    layer, x = nn.GroupedLinear(E, H, F), draw_x(generator)
    y = layer(x, SPLITS).sum()
    asks = {"backward": y.backward, "grad": lambda: torch.autograd.grad(y, layer.weight)}
    assert ops_of(moire.explain(asks[ask])) == ["grouped_gemm_wgrad"]
    y.backward()
    wanted = torch.stack([part.sum(0).expand(F, H) for part in x.split(SPLITS)])
    torch.testing.assert_close(layer.weight.grad, wanted)


def test_main_grad_is_not_marked(generator):
    layer = nn.GroupedLinear(E, H, F, accumulate_into_main_grad=True)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    layer.weight.grad_added_to_main_grad = False
    version = layer.weight.main_grad._version
    moire.explain(lambda: layer(draw_x(generator), SPLITS).sum().backward())
    assert layer.weight.grad_added_to_main_grad is False and layer.weight.grad is None
    assert (layer.weight.main_grad == 1).all() and layer.weight.main_grad._version == version


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_callers_buffer_keeps_its_version_and_history(generator, needs_grad):
    w = truth.draw(generator, E, F, H).requires_grad_(needs_grad)
    x, out = draw_x(generator), torch.full((5, F), 3.0)
    version = out._version
    moire.explain(moire.grouped_linear, x, w, moire.Groups(splits=SPLITS), out=out)
    assert (out == 3).all() and out._version == version
    assert out.grad_fn is None and not out.requires_grad


@pytest.mark.parametrize("first", [None, True])
def test_weights_in_8_bits_are_neither_written_nor_counted(generator, first):
    layer, x = nn.GroupedLinear(E, 32, F, recipe="mxfp8"), truth.draw(generator, 5, 32)
    y = layer(x, SPLITS, is_first_microbatch=first)
    wanted = y.detach().clone()
    with torch.no_grad():
        layer.weight.neg_()
    steps = moire.explain(layer, x, SPLITS, is_first_microbatch=first)
    assert ops_of(steps)[0] == "quantize_weight"
    if first:  # the copies are those of the first microbatch
        assert torch.equal(layer(x, SPLITS, is_first_microbatch=False), wanted)
    y.sum().backward()  # and were not overwritten since the forward


def test_grouped_tensors_stay_as_they_are(generator):
    groups, x = moire.Groups(splits=SPLITS), truth.draw(generator, 5, 32).requires_grad_()
    tensor = moire.quantize(x, groups, "mxfp8")
    other = moire.quantize(draw_x(generator).new_ones(5, 32), groups, "mxfp8")
    wanted = tensor.dequantize()

    def change():
        tensor.quantize_(other.dequantize(), moire.Groups(splits=[1, 1, 3]))
        tensor.copy_(other)
        tensor.import_scales(other.export_scales())
        tensor.zero_()
        tensor.requantize()

    moire.explain(change)
    assert tensor.groups is groups and not tensor.has_columnwise
    assert torch.equal(tensor.dequantize(), wanted)
    assert tensor.dequantize().requires_grad


def test_random_numbers_go_on_where_they_were(generator):
    state = torch.get_rng_state()
    moire.explain(lambda: torch.nn.functional.dropout(draw_x(generator)))
    assert torch.equal(torch.get_rng_state(), state)


def test_indices_made_meanwhile_index_something(generator):
    x = truth.draw(generator, 5, 32)

    def route():
        idx, weights = moire.router(x[:, :E].contiguous(), 2)
        torch.nn.functional.one_hot(idx, E).sum()
        plan = moire.make_plan(idx, E)
        rows = moire.permute(x, plan)
        assert x[plan.gather_idx].shape == rows.shape
        groups = moire.Groups(splits=SPLITS)
        moire.quantize(x, groups, "mxfp8", columnwise=True).split()

    for _ in range(3):  # memory that was used before has any values
        torch.full((4096,), -7).sum()
        moire.explain(route)
