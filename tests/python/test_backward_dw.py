"""Weight gradients that come later: backward_dw."""

import copy
import functools
import pickle

import moire
import pytest
import torch
import truth
from moire import invoke, layers, nn
from samples_mlp import FORMS, SPLITS, E, F, H, make, run, weights
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("options", [{}, {"save_act": True}, {"compute_dtype": torch.bfloat16}])
def test_delayed_wgrad_is_the_same_gradient_later(generator, form, gathered, options):
    plain, x, probs = make(generator, **form, **options)
    run(plain, x, probs, gathered)
    layer, *_ = make(generator, delay_wgrad_compute=True, **form, **options)
    assert all(p.skip_backward_post_hook for p in weights(layer))
    order = []
    layer.fc1.register_wgrad_accumulation_and_reduce_hooks(lambda: order.append("fc1"))
    layer.fc2.register_wgrad_accumulation_and_reduce_hooks(lambda: order.append("fc2"))
    run(layer, x, probs, gathered)
    assert all(p.grad is None for p in weights(layer)) and not order
    layer.backward_dw()
    assert order == ["fc2", "fc1"]
    for mine, reference in zip(layer.parameters(), plain.parameters()):
        assert torch.equal(mine.grad, reference.grad)


def test_a_backward_that_leaves_everything_for_later_calls_nothing(generator, monkeypatch):
    called, real = [], invoke.invoke

    def noted(name, *args, **how):
        called.append(name)
        real(name, *args, **how)

    monkeypatch.setattr(invoke, "invoke", noted)
    layer = nn.GroupedLinear(E, H, F, delay_wgrad_compute=True)
    y = layer(truth.draw(generator, 9, H), SPLITS)
    del called[:]
    y.sum().backward()
    assert called == []
    layer.backward_dw()
    assert called == ["grouped_gemm_wgrad"]


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_backward_dw_is_of_the_oldest_backward_pass(generator, into_main_grad):
    plain, x, probs = make(generator)
    options = {"delay_wgrad_compute": True, "accumulate_into_main_grad": into_main_grad}
    layer, *_ = make(generator, **options)
    ran = []
    layer.fc1.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    for p in weights(layer):
        p.main_grad = torch.zeros_like(p)
    for scale in (1.0, 0.5):
        run(layer, scale * x, probs)
    for scale in (1.0, 0.5):
        run(plain, scale * x, probs)
        layer.backward_dw()
        for p, reference in zip(weights(layer), weights(plain)):
            found = p.main_grad if into_main_grad else p.grad
            truth.assert_close(found, reference.grad.double(), torch.float32, 18)
    layer.backward_dw()  # nothing waits any more
    assert ran == [1, 1]
    layer.fc1._trigger_wgrad_accumulation_and_reduce_hooks()  # Megatron's, after a captured one
    assert ran == [1, 1, 1]


def test_backward_dw_is_of_a_whole_backward_pass(generator):
    plain, x, probs = make(generator)
    layer, *_ = make(generator, delay_wgrad_compute=True)
    for module in (plain, layer):
        module(module(x, SPLITS, probs), SPLITS, probs).sin().sum().backward()
    layer.backward_dw()
    for p, reference in zip(weights(layer), weights(plain)):
        truth.assert_close(p.grad, reference.grad.double(), torch.float32, 18)


def test_data_parallelism_that_waits_for_backward_dw_finds_what_it_asserts(generator):
    """As Megatron's with overlap_grad_reduce: its hook wants a .grad, and drops it."""
    plain, x, probs = make(generator)
    run(plain, x, probs)
    options = {"delay_wgrad_compute": True, "accumulate_into_main_grad": True}
    layer, *_ = make(generator, **options)
    reduced = []

    def ready(p):
        assert p.grad is not None and p.grad_added_to_main_grad
        if p.zero_out_wgrad:
            p.main_grad += p.grad
        p.grad = None
        reduced.append(p.main_grad.clone())

    for i, fc in enumerate([layer.fc1, layer.fc2]):
        p = fc.weight
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
        p.zero_out_wgrad = i == 1
        fc.register_wgrad_accumulation_and_reduce_hooks(lambda p=p: ready(p))
    run(layer, x, probs)
    assert not reduced
    layer.backward_dw()
    for found, reference in zip(reduced, reversed(weights(plain))):
        assert torch.equal(found, reference.grad)


REPLACED = {
    "loaded": lambda layer, state: layer.load_state_dict(state),
    "assigned": lambda layer, state: layer.load_state_dict(state, assign=True),
    "re-pointed": lambda layer, state: [
        setattr(p, "data", state[name]) for name, p in layer.named_parameters()
    ],
    "cast": lambda layer, state: layer.bfloat16(),
}


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("has_grad", [True, False])
def test_weights_replaced_after_backward_leave_what_they_leave_where_nothing_waits(
    generator, how, has_grad
):
    """In the parameters of the call and in those that the layer has now."""
    found = {}
    for later in (False, True):
        layer, x, probs = make(generator, delay_wgrad_compute=later)
        before, state = weights(layer), make(generator)[0].double().float().state_dict()
        for p in before if has_grad else ():
            p.grad = torch.ones_like(p)
        run(layer, torch.ones_like(x), torch.ones_like(probs))
        REPLACED[how](layer, state)
        layer.backward_dw()
        found[later] = [p.grad for p in (*before, *weights(layer))]
    for mine, wanted in zip(found[True], found[False]):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)


def test_delayed_wgrad_is_added_in_place(generator):
    plain, x, probs = make(generator)
    layer, *_ = make(generator, delay_wgrad_compute=True)
    views = []
    for p, reference in zip(weights(layer), weights(plain)):
        p.grad = truth.draw(generator, *p.shape)
        reference.grad = p.grad.clone()
        views.append(p.grad)
    for module in (plain, layer):
        run(module, x, probs)
    layer.backward_dw()
    for p, view, reference in zip(weights(layer), views, weights(plain)):
        assert p.grad is view and torch.equal(view, reference.grad)


RECIPES = [None, "mxfp8", "fp8_block", moire.Recipe("mxfp8", save="input")]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("is_mlp", [False, True])
@pytest.mark.parametrize("delayed", [(True, False), (False, True), (True, True)])
def test_layers_that_delay_beside_layers_that_do_not(generator, delayed, is_mlp, recipe):
    """In a chain with a frozen expert; in an MLP in order, gathered and routed: the same bits."""
    options = {"bias": True, "recipe": recipe, "packed": is_mlp, "dtype": torch.bfloat16}
    plain = nn.GroupedMLP(E, H, F, **options)
    fc1 = nn.GroupedLinear(E, H, 2 * F, delay_wgrad_compute=delayed[0], **options)
    fc2 = nn.GroupedLinear(E, F, H, delay_wgrad_compute=delayed[1], **options)
    chain = [fc1, nn.ScaledGLU(), fc2]
    layer = nn.fuse(chain) if is_mlp else nn.Sequential(*chain)
    for mine, theirs in ((fc1, plain.fc1), (fc2, plain.fc2)):
        mine.load_state_dict(theirs.state_dict())
        mine._all("weight")[-1].requires_grad_(is_mlp)
    x, probs = truth.draw(generator, 9, H, dtype=torch.bfloat16), torch.rand(9, generator=generator)
    rows, topk_idx = torch.randint(9, (9,), generator=generator), torch.tensor([[0, 2], [2, -1]])

    def in_order(module):
        return module(x, SPLITS, probs)

    def gathered(module):
        return module(x, SPLITS, probs, row_idx=rows)

    def routed(module):
        return module.route(x[:2], topk_idx, probs[:2, None].expand(2, 2))

    for call in (in_order, gathered, routed) if is_mlp else (in_order,):
        for module in (plain, layer):
            module.zero_grad()
            call(module).sin().sum().backward()
        layer.backward_dw()
        for mine, theirs in ((fc1, plain.fc1), (fc2, plain.fc2)):
            for (name, p), reference in zip(mine.named_parameters(), theirs.parameters()):
                same = p.requires_grad and torch.equal(p.grad, reference.grad)
                assert same or (not p.requires_grad and p.grad is None), name


def test_a_delayed_gradient_keeps_the_copies_that_it_reads(generator):
    """An x in BF16 may be overwritten where its copy in 8 bits is kept; that copy may not."""
    layer = nn.GroupedLinear(E, H, F, delay_wgrad_compute=True, recipe="mxfp8")
    plain = nn.GroupedLinear(E, H, F, recipe="mxfp8")
    plain.load_state_dict(layer.state_dict())
    x, grad_y = truth.draw(generator, 9, H), truth.draw(generator, 9, F)
    for module in (plain, layer):
        module(x, SPLITS).backward(grad_y)
    x.zero_()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    groups = moire.Groups(splits=SPLITS)
    quantized = moire.quantize(grad_y[:, :H].contiguous(), groups, columnwise=True)
    layer(quantized, groups).backward(grad_y)
    quantized.zero_()
    with pytest.raises(moire.InvalidArgument, match=r"x_columnwise\[0\] was overwritten in place"):
        layer.backward_dw()


def test_operands_last_until_another_stream_has_read_them(generator, device):
    """Megatron overlaps backward_dw with communication on a stream of its own."""
    if device != "cuda":
        pytest.skip("CPUs have no streams")
    plain, layer = (nn.GroupedLinear(E, 256, 256, delay_wgrad_compute=d) for d in (False, True))
    layer.load_state_dict(plain.state_dict())
    leaf = truth.draw(generator, 999, 256).requires_grad_()
    for module in (plain, layer):
        module(leaf * 2, [500, 0, 499]).sin().sum().backward()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        layer.backward_dw()
    others = [torch.full((999, 256), torch.nan) for _ in range(8)]  # where they were, if it is free
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(layer.weight.grad, plain.weight.grad) and len(others) == 8


@pytest.mark.parametrize("name", ["x", "row_idx", "grad_y"])
def test_an_operand_overwritten_before_backward_dw_is_an_error(generator, name):
    layer = nn.GroupedLinear(E, H, F, delay_wgrad_compute=True)
    given = {"x": truth.draw(generator, 9, H), "row_idx": torch.arange(9)}
    given["grad_y"] = truth.draw(generator, 9, F)
    layer(given["x"], SPLITS, row_idx=given["row_idx"]).backward(given["grad_y"])
    given[name].zero_()
    with pytest.raises(
        moire.InvalidArgument, match=f"backward_dw: {name} was overwritten in place after backward"
    ):
        layer.backward_dw()
    assert layer.weight.grad is None


def test_what_fails_in_backward_dw_can_be_done_again(generator):
    plain, x, probs = make(generator)
    options = {"delay_wgrad_compute": True, "accumulate_into_main_grad": True}
    layer, *_ = make(generator, **options)
    for _ in range(2):
        run(plain, x, probs)
        run(layer, x, probs)
    with pytest.raises(moire.InvalidArgument, match="neither main_grad nor get_main_grad"):
        layer.backward_dw()
    for p in weights(layer):
        p.main_grad = torch.zeros_like(p)
    for _ in range(2):
        layer.backward_dw()
    for p, reference in zip(weights(layer), weights(plain)):
        truth.assert_close(p.main_grad, reference.grad.double(), torch.float32, 18)


ADD = "more than one element of the written-to tensor"


def test_a_weight_whose_gradient_cannot_be_added_leaves_the_others_added_once(generator):
    plain, x, probs = make(generator, packed=False)
    layer, *_ = make(generator, packed=False, delay_wgrad_compute=True)
    for p, reference in zip(weights(layer), weights(plain)):
        p.grad = truth.draw(generator, *p.shape)
        reference.grad = p.grad.clone()
    run(plain, x, probs)
    run(layer, x, probs)
    last, ran = layer.fc1.weight2, []
    kept, last.grad = last.grad, last.grad.new_zeros(()).expand(last.shape)
    layer.fc1.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ADD):
            layer.backward_dw()
    moire.explain(layer.backward_dw)
    assert not ran
    last.grad = kept
    layer.backward_dw()
    for p, reference in zip(weights(layer), weights(plain)):
        assert torch.equal(p.grad, reference.grad)
    assert ran == [1]


def test_what_fails_is_of_one_backward_pass_in_all_layers_when_it_is_done_again(generator):
    plain, x, probs = make(generator)
    layer, *_ = make(generator, delay_wgrad_compute=True)
    for scale in (1.0, 0.5):
        run(layer, scale * x, probs)
    layer.fc1.weight.grad = torch.zeros(()).expand(layer.fc1.weight.shape)
    with pytest.raises(RuntimeError, match=ADD):
        layer.backward_dw()
    layer.fc1.weight.grad = None
    for scale in (1.0, 0.5):
        run(plain, scale * x, probs)
        layer.backward_dw()
        for p, reference in zip(weights(layer), weights(plain)):
            assert torch.equal(p.grad, reference.grad)


@pytest.mark.parametrize("hooked", [0, 1, 2])
def test_a_hook_that_raised_is_where_the_next_call_begins(generator, hooked):
    """Hooks, layers and passes before it have been, and those behind it wait."""
    plain, layer = (
        nn.Sequential(*(nn.GroupedLinear(E, H, H, delay_wgrad_compute=later) for _ in range(3)))
        for later in (False, True)
    )
    plain.load_state_dict(layer.state_dict())
    order, fails, x = [], [2], truth.draw(generator, sum(SPLITS), H)

    def hook(i, name):
        if (i, name) == (hooked, "second") and fails[0]:
            fails[0] -= 1
            raise RuntimeError("a hook")
        order.append((i, name, layer[i].weight.grad.clone()))

    for i, linear in enumerate(layer):
        for name in ("first", "second", "third"):
            call = functools.partial(hook, i, name)
            linear.register_wgrad_accumulation_and_reduce_hooks(call)
    for scale in (1.0, 0.5):
        layer(scale * x, SPLITS).square().sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a hook"):
            layer.backward_dw()
        moire.explain(layer.backward_dw)
    layer.backward_dw()
    layer.backward_dw()
    layer.backward_dw()  # there is nothing left
    wanted = []
    for scale in (1.0, 0.5):
        plain(scale * x, SPLITS).square().sum().backward()
        wanted += [
            (i, name, plain[i].weight.grad.clone())
            for i in (2, 1, 0)
            for name in ("first", "second", "third")
        ]
    assert [called[:2] for called in order] == [called[:2] for called in wanted]
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(order, wanted))


def test_a_layer_of_two_containers_keeps_no_pass(generator):
    """Whichever of them asks first, as often as there were passes."""
    made = [nn.GroupedLinear(E, H, H, delay_wgrad_compute=True) for _ in range(3)]
    first, second = (nn.Sequential(made[0], torch.nn.Tanh(), other) for other in made[1:])
    x = truth.draw(generator, sum(SPLITS), H)
    for order in ((first, second), (second, first)):
        for container in (first, second):
            container(x, SPLITS).sum().backward()
        for container in order:
            container.backward_dw()
        assert not any(layer._wgrad.queue.waiting for layer in made)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("fails", [1, 2, 4, 5])
def test_parts_of_a_call_are_added_once_whichever_fails(
    device, generator, monkeypatch, adds, is_first, fails
):
    """Three of each weight's: a failure of the second, say, does not add the first again."""
    devices = None if device == "cpu" else [device]
    (rank,) = moire.Communicator.threads(1, 1 << 20, devices=devices)
    group = moire.ExpertParallel(rank, num_experts=E, max_tokens=9)
    options = {"accumulate_into_main_grad": adds, "delay_wgrad_compute": True}
    x, idx = truth.draw(generator, 9, H), torch.arange(9)[:, None] % E
    found, left, real = [], [0], layers._later

    def failing(*args):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("a part")
        real(*args)

    monkeypatch.setattr(layers, "_later", failing)
    for fails_once in (False, True):
        layer, *_ = make(generator, **options)
        for p in weights(layer):
            p.main_grad = torch.ones_like(p)
        routed = {"group": group, "micro_batches": 3, "is_first_microbatch": is_first}
        layer.route(x, idx, torch.ones(9, 1), **routed).sin().sum().backward()
        if fails_once:
            left[0] = fails
            with pytest.raises(MemoryError, match="a part"):
                layer.backward_dw()
        moire.explain(layer.backward_dw)
        layer.backward_dw()
        layer.backward_dw()  # there is nothing left
        found.append([p.main_grad if adds else p.grad for p in weights(layer)])
    assert all(map(torch.equal, *found))


def test_copies_of_a_layer_wait_for_nothing(generator):
    layer = nn.GroupedLinear(E, H, F, delay_wgrad_compute=True)
    layer(truth.draw(generator, 9, H), SPLITS).sum().backward()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    twin.backward_dw()
    assert twin.weight.grad is None
    layer.backward_dw()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("delayed", [False, True])
def test_need_backward_dw_says_whether_there_is_something_to_do(generator, delayed):
    layer, x, probs = make(generator, delay_wgrad_compute=delayed)
    moe = nn.MoE(layer, nn.Router(H, E, 2))
    for module in (layer.fc1, layer, nn.Sequential(layer), moe):
        assert module.need_backward_dw() == delayed
    run(layer, x, probs)
    before = [p.grad for p in weights(layer)]
    assert (before == [None, None]) == delayed
    moe.backward_dw()
    assert delayed or all(p.grad is grad for p, grad in zip(weights(layer), before))
    options = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delayed}
    assert make(generator, **options)[0].need_backward_dw() == delayed
    assert all(p.grad is not None for p in weights(layer))


def test_weights_that_come_later_are_marked_for_data_parallelism():
    layer = nn.GroupedLinear(E, H, F, bias=True, delay_wgrad_compute=True, device="meta")
    layer.to_empty(device="cpu")
    assert layer.weight.skip_backward_post_hook
    layer.weight = torch.nn.Parameter(torch.zeros(E, F, H))
    assert layer.weight.skip_backward_post_hook and not hasattr(
        layer.bias, "skip_backward_post_hook"
    )
    assert copy.deepcopy(layer).weight.skip_backward_post_hook


def test_a_pass_within_another_keeps_both(generator):
    """Of a checkpoint within one: the inner runs a backward before the outer goes on with its."""
    x, found = truth.draw(generator, 9, H), []
    for delayed in (False, True):
        torch.manual_seed(0)
        chain = [nn.GroupedLinear(E, H, H, delay_wgrad_compute=delayed) for _ in range(2)]
        layers_of_both = nn.Sequential(*chain)

        def twice(t, both=layers_of_both):
            return checkpoint(lambda u: both(u, SPLITS), both(t, SPLITS), use_reentrant=True)

        y = checkpoint(twice, x.clone().requires_grad_(), use_reentrant=True)
        y.sin().sum().backward()
        for _ in range(2 if delayed else 0):
            layers_of_both.backward_dw()
        found.append([p.grad for p in layers_of_both.parameters()])
    for plain, later in zip(*found):
        torch.testing.assert_close(later, plain)
