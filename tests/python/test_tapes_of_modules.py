"""Modules in training whose calls tapes.py makes again: beside one whose calls never are, the same
bits, versions, attributes, hooks and errors, whatever happens between the calls.
"""

import contextlib
import functools
import gc
import random
import weakref

import moire
import pytest
import torch
from moire import invoke, nn
from torch.utils.checkpoint import checkpoint

E, H, F, ROWS = 3, 32, 64, 12
SPLITS = ([5, 0, 7], [0, 12, 0], [2, 3, 4])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def replays(monkeypatch):
    """How many calls were made again."""
    if invoke.compiled_for is None:
        pytest.skip("invoke.cpp was not built, or this Torch has no DLPack C exchange API")

    class Watched:
        count = 0

        def __getattr__(self, name):
            return getattr(module, name)

        def replay(self, *args):
            self.count += 1
            return module.replay(*args)

    module, watched = invoke.compiled, Watched()
    monkeypatch.setattr(invoke, "compiled", watched)
    return watched


class Case:
    """A module and what happens to it, drawn by a generator of its own; `log` has what was seen."""

    def __init__(self, seed, kind, x_dtype=torch.bfloat16, **options):
        self.drawn, self.log, self.left = random.Random(seed), [], []
        torch.manual_seed(seed)
        self.is_linear, self.x_dtype = kind == "linear", x_dtype
        make = functools.partial(nn.GroupedLinear, E, H, F)
        if not self.is_linear:
            make = functools.partial(nn.GroupedMLP, E, H, F)
        self.module = make(**{"dtype": torch.bfloat16, **options})
        self.layers = [m for m in self.module.modules() if isinstance(m, nn.GroupedLinear)]
        self.weights = [p for layer in self.layers for p in layer._all("weight")]
        self.into = options.get("accumulate_into_main_grad", False)
        for i, layer in enumerate(self.layers):
            note = functools.partial(self.log.append, ("wgrad hook", i))
            layer.register_wgrad_accumulation_and_reduce_hooks(note)
        for i, p in enumerate(self.weights):
            p.register_post_accumulate_grad_hook(functools.partial(self.hooked, i))
            self.give_main_grad(p, torch.float32)

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape).to(dtype)

    def hooked(self, i, p):
        """As Megatron's data parallelism: a dummy is seen and dropped."""
        is_defined = getattr(p, "zero_out_wgrad", False) or not hasattr(p, "main_grad")
        dtype = None if p.grad is None else p.grad.dtype
        self.log.append(("hook", i, dtype, dtype and is_defined and p.grad.clone()))
        if hasattr(p, "grad_added_to_main_grad"):
            p.grad = None

    def give_main_grad(self, p, dtype):
        p.main_grad = self.normal(*p.shape, dtype=dtype)

    # ---- moves

    def call(self):
        """y, and what a gradient may be wanted of."""
        x = self.normal(ROWS, H, dtype=self.x_dtype).requires_grad_(self.drawn.random() < 0.9)
        given, leaves = {}, [x]
        if self.drawn.random() < 0.2:
            given["row_idx"] = torch.randint(0, ROWS, (ROWS,))
        if not self.is_linear and self.drawn.random() < 0.8:
            given["probs"] = torch.rand(ROWS).requires_grad_()
            leaves.append(given["probs"])
        groups = moire.Groups(splits=torch.tensor(self.drawn.choice(SPLITS)), capacity=ROWS)
        given["is_first_microbatch"] = self.drawn.choice([None, None, None, True])
        run = functools.partial(self.module, splits=groups, **given)
        if x.requires_grad and self.drawn.random() < 0.2:
            run = functools.partial(checkpoint, run, use_reentrant=self.drawn.random() < 0.7)
        y = run(x) + run(2 * x) if self.drawn.random() < 0.2 else run(x)
        return y, [leaf for leaf in leaves if leaf.requires_grad]

    def step(self):
        autocast = self.drawn.random() < 0.2
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            y, leaves = self.call()
        self.log.append(("y", y.detach().clone(), str(y.grad_fn).split("Backward")[0][:4]))
        grad = self.normal(*y.shape, dtype=y.dtype)
        self.left.append((leaves[0] if leaves else grad, grad))
        if not y.requires_grad:
            return
        way = self.drawn.choice(["all", "all", "all", "leaves", "inputs"])
        wanted = [p for p in self.weights if p.requires_grad][-1:] + leaves[:1]
        if way == "all" or not leaves:
            y.backward(grad)
        elif way == "leaves":
            self.log.append(torch.autograd.grad(y, leaves, grad))
        elif not self.into:  # of what goes elsewhere autograd may not be asked
            y.backward(grad, inputs=wanted)
        self.log.append([leaf.grad for leaf in leaves])

    def forward_alone(self):
        with torch.no_grad():
            self.log.append(self.call()[0])

    def backward_dw(self):
        self.module.backward_dw()

    def optimizer(self):
        for p in self.module.parameters():
            change = self.normal(*p.shape) * 0.01
            with torch.no_grad():
                values = p.dequantize() if isinstance(p, moire.GroupedTensor) else p
                p.copy_(values + change.to(values.dtype))
            p.grad = None

    def write_what_is_left(self):
        self.step()
        with torch.no_grad():
            self.drawn.choice(self.left[-1]).add_(1)
        self.backward_dw()

    def write_between(self):
        """Into a weight that a backward reads, which Torch refuses."""
        y, _ = self.call()
        with torch.no_grad():
            self.weights[-1].zero_()
        y.sum().backward()

    def toggle(self):
        p = self.drawn.choice(self.weights)
        name = self.drawn.choice(["overwrite_main_grad", "zero_out_wgrad"])
        setattr(p, name, not getattr(p, name, False))
        if self.drawn.random() < 0.5:
            p.grad_added_to_main_grad = False

    def freeze(self):
        p = self.drawn.choice(self.weights)
        p.requires_grad_(not p.requires_grad)

    def other_main_grads(self):
        dtype = self.drawn.choice([torch.float32, torch.bfloat16])
        for p in self.weights:
            self.give_main_grad(p, dtype)
            if self.drawn.random() < 0.3:
                self.log.append(("asked", None))
                p.get_main_grad = functools.partial(self.asked, p.main_grad.view(-1))

    def asked(self, buffer):
        self.log.append("get_main_grad")
        return buffer

    def bad_main_grad(self):
        """Absent, of another size, in two types, or in the memory of something else; for one
        step.
        """
        p = self.drawn.choice(self.weights)
        before = p.main_grad
        values = p.rowwise.data if isinstance(p, moire.GroupedTensor) else p.detach()
        others = [q.main_grad for q in self.weights if q is not p and q.shape == p.shape]
        p.main_grad = self.drawn.choice(
            [
                None,
                before[:1],
                before.to(torch.float16),
                before.mT,
                values.view(torch.uint8).view(-1)[: 4 * (values.nbytes // 4)].view(torch.float32),
                *others[:1],
            ]
        )
        try:
            self.step()
            self.backward_dw()
        finally:
            p.main_grad = before

    MOVES = (
        *(["step"] * 8 + ["backward_dw"] * 5 + ["optimizer"] * 2 + ["forward_alone"] * 2),
        *("write_what_is_left", "write_between", "toggle", "freeze", "other_main_grads"),
        "bad_main_grad",
    )

    def play(self, moves):
        for _ in range(moves):
            move = self.drawn.choice(self.MOVES)
            try:
                getattr(self, move)()
            except (moire.Error, RuntimeError) as e:
                is_torchs = not isinstance(e, moire.Error)
                said = "inplace operation" in str(e) if is_torchs else str(e)
                self.log.append((move, type(e), said or str(e)))
                for layer in filter(nn.GroupedLinear.need_backward_dw, self.layers):
                    layer._wgrad.queue.waiting = ()  # else what cannot be done stays
            self.log.append((move, *map(self.state, self.weights)))
        return self.log

    def state(self, p):
        added = getattr(p, "grad_added_to_main_grad", None)
        main_grad = p.main_grad.clone()
        grad = p.grad if p.grad is None else p.grad.clone()
        return main_grad, p.main_grad._version, grad, added, p._version


def difference(one, other, at=""):
    """Where two logs differ, or None."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if isinstance(one, moire.GroupedTensor):
            one, other = one.dequantize(), other.dequantize()
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and torch.equal(one.nan_to_num(), other.nan_to_num())
        return None if same else f"{at}: {one} but {other}"
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{at}: {len(one)} but {len(other)}"
        found = (difference(a, b, f"{at}[{i}]") for i, (a, b) in enumerate(zip(one, other)))
        return next((text for text in found if text is not None), None)
    return None if one == other else f"{at}: {one} but {other}"


MAIN_GRAD, DELAYED = {"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}
FP32 = {"dtype": torch.float32, "x_dtype": torch.float32}
KINDS = {
    "main_grad": MAIN_GRAD,
    "delayed": DELAYED,
    "both": {**MAIN_GRAD, **DELAYED},
    "listed": {**MAIN_GRAD, "packed": False, "bias": True},
    "listed, delayed": {**MAIN_GRAD, **DELAYED, "packed": False},
    "fp32": {**MAIN_GRAD, **FP32},
    "cast": {**MAIN_GRAD, **FP32, "compute_dtype": torch.bfloat16, "bias": True},
    "cast, without sinks": {**FP32, "compute_dtype": torch.bfloat16},
    "fp32, without sinks": FP32,
    "8 bits": {**MAIN_GRAD, "recipe": "mxfp8"},
    "8 bits, delayed": {**MAIN_GRAD, **DELAYED, "recipe": "mxfp8", "x_dtype": torch.float32},
    "primary": {"primary": "mxfp8", "x_dtype": torch.bfloat16},
    "primary, main_grad": {**MAIN_GRAD, "primary": "mxfp8"},
    "primary, both": {**MAIN_GRAD, **DELAYED, "primary": "mxfp8", "bias": True},
}


@pytest.mark.filterwarnings("ignore:.*decoded values")
@pytest.mark.parametrize("layer", ["linear", "mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_can_tell_that_calls_were_made_again(kind, layer, replays, monkeypatch):
    count = 0
    for _ in range(3):
        seed = random.randrange(2**32)
        print(f"{seed = }")
        before = replays.count
        found = Case(seed, layer, **KINDS[kind]).play(60)
        count += replays.count - before
        with monkeypatch.context() as patch:
            patch.setattr(invoke, "compiled_for", None)
            wanted = Case(seed, layer, **KINDS[kind]).play(60)
        assert difference(found, wanted) is None
    assert count > 40


def steps(kind, layer):
    """What each of nine steps gave, and how many calls of functions a step makes."""
    case = Case(7, layer, **KINDS[kind])
    groups, x = moire.Groups(splits=torch.tensor(SPLITS[0])), case.normal(ROWS, H)
    leaf, found = x.to(case.x_dtype).requires_grad_(), []
    for _ in range(9):
        y = case.module(leaf, groups)
        y.backward(torch.ones_like(y))
        case.module.backward_dw()
        found.append([y, leaf.grad, *map(case.state, case.weights)])
        leaf.grad = None
    waits = case.module.need_backward_dw()
    return found, 2 + (len(case.layers) if waits else 0)


@pytest.mark.parametrize("layer", ["linear", "mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_calls_of_a_step_are_made_again(kind, layer, replays, monkeypatch):
    before = replays.count
    found, calls = steps(kind, layer)
    assert replays.count - before >= 5 * calls  # once step by step, once recorded, one by one
    with monkeypatch.context() as patch:
        patch.setattr(invoke, "compiled_for", None)
        wanted, _ = steps(kind, layer)
    assert difference(found, wanted) is None


@pytest.mark.parametrize("kind", ["both", "primary, both", "listed"])
def test_tapes_keep_no_parameters(kind, replays):
    options = {name: value for name, value in KINDS[kind].items() if name != "x_dtype"}
    module = nn.GroupedMLP(E, H, F, **options)
    for p in module.parameters():
        p.main_grad = torch.zeros(p.shape)
    for _ in range(5):
        module(torch.randn(ROWS, H), SPLITS[0]).sum().backward()
        module.backward_dw()
    assert replays.count > 0
    alive = [weakref.ref(t) for p in module.parameters() for t in (p, p.main_grad)]
    del module, p
    gc.collect()
    assert not any(ref() is not None for ref in alive)
