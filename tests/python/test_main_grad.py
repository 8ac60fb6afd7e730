"""Every way of a weight gradient into main_grad, on one path: added or overwritten, of packed,
listed and frozen weights, in every type and recipe, at once or delayed, eager or in a CUDA graph
whose splits change between replays.
"""

import itertools

import moire
import pytest
import torch
import truth
from graphs import captured
from moire import nn
from truth_recipes import Operands, products

pytestmark = pytest.mark.usefixtures("device", "one_thread")
E, IN, OUT, ROWS = 3, 40, 64, 44
SPLITS = [[33, 0, 7], [0, 44, 0]]
LAYERS = {
    "linear": lambda **options: nn.GroupedLinear(E, IN, OUT, **options),
    "mlp": lambda **options: nn.GroupedMLP(E, IN, OUT, **options),
}
# Of x and y, the parameters, main_grad; what products read, where it is another.
TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16, None),
    "mixed": (torch.bfloat16, torch.bfloat16, torch.float32, None),
    "fp32": (torch.float32, torch.float32, torch.float32, None),
    "cast": (torch.float32, torch.float32, torch.float32, torch.bfloat16),
}
# Whether an expert's main_grad is overwritten, and what the call says of its microbatch.
WHERE = {
    "accumulate": (lambda expert: False, None),
    "overwrite": (lambda expert: True, None),
    "per_expert": (lambda expert: expert % 2 == 0, False),
    "first_microbatch": (lambda expert: False, True),
}
FORMS = list(itertools.product(WHERE, ("packed", "listed", "frozen")))
FORMS.remove(("per_expert", "packed"))


@pytest.fixture
def one_thread():
    """Problems are so small that waking a second thread takes longer than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["eager", "graph"])
def again(request, device):
    """What runs a step again, of the step."""
    if request.param == "graph" and device == "cpu":
        pytest.skip("CPUs have no graphs")
    return (lambda step: captured(step)[0]) if request.param == "graph" else lambda step: step


class Layer:
    """A layer, its main_grads as they are before a step, and a step."""

    def __init__(self, make, problem, where=None, form="packed", delayed=False):
        self.problem, self.x = problem, problem["x"].clone().requires_grad_()
        self.module = make(packed=form == "packed", delay_wgrad_compute=delayed)
        torch.manual_seed(1)
        fcs = [m for m in self.module.modules() if isinstance(m, nn.GroupedLinear)]
        for fc in fcs:
            fc.reset_parameters()
        self.weights, self.starts = [p for fc in fcs for p in fc._all("weight")], {}
        self.biases = [p for fc in fcs if fc.has_bias for p in fc._all("bias")]
        self.delayed, self.is_first = delayed, None
        for i, p in enumerate(self.weights if where is not None else ()):
            overwrites, self.is_first = WHERE[where]
            p.overwrite_main_grad = overwrites(i % E)
            start = torch.randn_like(p, dtype=problem["main_grad"])
            if form == "frozen" and i % E == 2:
                p.requires_grad_(False)
            else:
                is_lost = p.overwrite_main_grad or self.is_first
                self.starts[i] = torch.full_like(start, torch.nan) if is_lost else start
                p.main_grad = torch.empty_like(start)

    def step(self):
        for p in (self.x, *self.module.parameters()):
            p.grad = None
        groups = moire.Groups(splits=self.problem["splits"], capacity=ROWS)
        y = self.module(self.x, groups, is_first_microbatch=self.is_first)
        y.backward(self.problem["grad_y"])
        self.y = y.detach()
        if self.delayed:
            self.module.backward_dw()

    def results(self, again):
        """What it gave once it ran again: y and gradients that autograd gets, main_grads."""
        for i, start in self.starts.items():
            self.weights[i].main_grad.copy_(start)
        again()
        found = [self.y, self.x.grad, *(b.grad for b in self.biases)]
        main_grads = [self.weights[i].main_grad for i in self.starts]
        assert all(p.grad is None for p in self.weights if self.starts)
        return [t.clone() for t in found], [t.clone() for t in main_grads]


def definition(layer, recipe):
    """The gradients of the weights in double: of a linear layer written out, of an MLP as autograd
    gets them.
    """
    if not isinstance(layer.module, nn.GroupedLinear):
        return [p.grad.double() for p in layer.weights]
    splits, values = layer.problem["splits"].tolist(), (layer.problem["grad_y"], layer.problem["x"])
    operands = Operands(recipe, splits).columns if recipe is not None else torch.Tensor.double
    found = products(splits, *map(operands, values))
    return [found] if len(layer.weights) == 1 else list(found)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "mxfp8_fast", "fp8_block"])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("where, form", FORMS, ids=map("-".join, FORMS))
def test_main_grad(generator, again, where, form, kind, types, recipe):
    dtype, parameters, main_grad, compute = TYPES[types]
    options = {"recipe": recipe, "dtype": parameters, "compute_dtype": compute}
    widths = {"x": IN, "grad_y": OUT if kind == "linear" else IN}
    problem = {n: truth.draw(generator, ROWS, w).bfloat16().to(dtype) for n, w in widths.items()}
    problem.update(main_grad=main_grad, splits=torch.tensor(SPLITS[0]))
    for bias in (False, True):
        options["bias"] = bias

        def make(**of_layer):
            return LAYERS[kind](**options, **of_layer)

        def accumulating(**of_layer):
            return make(accumulate_into_main_grad=True, **of_layer)

        plain = Layer(make, problem, None, "packed" if form == "packed" else "listed")
        eager, *others = (Layer(accumulating, problem, where, form, i == 2) for i in range(3))
        ways = [(layer, again(layer.step)) for layer in others]
        for splits in SPLITS:
            problem["splits"].copy_(torch.tensor(splits))
            autograd, _ = plain.results(plain.step)
            wanted = definition(plain, recipe)
            found, main_grads = eager.results(eager.step)
            assert all(map(torch.equal, found, autograd))
            for (i, start), mine in zip(eager.starts.items(), main_grads):
                before, name = start.double().nan_to_num(), f"main_grad {i} of {splits}"
                # Autograd's gradient of an MLP is rounded before it is added here.
                stored, summand = (main_grad, None) if kind == "linear" else (parameters, wanted[i])
                truth.assert_close(
                    mine, before + wanted[i], stored, ROWS, steps=2, name=name, summand=summand
                )
                if form != "packed" and splits[i % E] == 0:  # exact: zeros, or left as it was
                    assert torch.equal(mine, start.nan_to_num())
            for layer, run in ways:
                for mine, theirs in zip(layer.results(run), (found, main_grads)):
                    assert all(map(torch.equal, mine, theirs)), (splits, layer.delayed)
