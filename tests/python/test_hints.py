"""Type hints: every parameter and result of the public names has one, each can be evaluated on any
Python that is promised, and a type checker takes a program that uses them.
"""

import enum
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import moire
import pytest

PACKAGE = Path(moire.__file__).resolve().parent


def public_functions():
    """(name, function) of all that `import moire` offers, methods and constructors included."""
    for module in (moire, moire.nn, moire.hf):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value) and not issubclass(value, enum.Enum):
                yield from methods(f"{module.__name__}.{name}", value)


def methods(where, cls):
    """Of the class and of those that it is made of, as far as moire defines them."""
    for base in cls.__mro__:
        if not base.__module__.startswith("moire"):
            continue
        for name, member in vars(base).items():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            is_public = name in ("__init__", "__getitem__", "__iter__") or not name.startswith("_")
            is_written = inspect.isfunction(member) and member.__module__.startswith("moire")
            if is_public and is_written:
                yield f"{where}.{name}", member


FUNCTIONS = dict(public_functions())


def test_there_are_public_functions():
    assert {"moire.grouped_mlp", "moire.nn.GroupedMLP.forward", "moire.hf.register"} <= {*FUNCTIONS}
    assert {"moire.GroupedTensor.state_dict", "moire.Groups.splits", "moire.Plan.groups"} <= {
        *FUNCTIONS
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_and_result_has_a_hint_that_can_be_evaluated(name):
    function = FUNCTIONS[name]
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters)
    if parameters and parameters[0] in ("self", "cls"):
        del parameters[0]
    missing = [parameter for parameter in (*parameters, "return") if parameter not in hints]
    assert not missing


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hints_are_those_of_python_3_9(name):
    for hint in FUNCTIONS[name].__annotations__.values():
        assert hint is None or (isinstance(hint, str) and " | " not in hint)


def test_type_checkers_are_told():
    assert (PACKAGE / "py.typed").is_file()


def test_hints_need_no_torch():
    program = (
        "import sys, typing; sys.modules['torch'] = None; import moire\n"
        "for f in (moire.moe, moire.quantize, moire.Groups.to, moire.GroupedTensor.to):\n"
        "    assert 'return' in typing.get_type_hints(f)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PROGRAM = """
import moire
import numpy as np
import torch

x, w1, w2 = torch.ones(4, 8), torch.ones(2, 16, 8), torch.ones(2, 8, 8)
groups = moire.Groups(splits=[1, 3])
y = moire.grouped_mlp(x, w1, [w2[0], w2[1]], groups, recipe=moire.Recipe("mxfp8"))
reveal_type(y)
reveal_type(moire.glu(np.ones((4, 16), np.float32)))
quantized = moire.quantize(x, groups, columnwise=True)
reveal_type(quantized)
reveal_type(moire.grouped_linear(quantized, w1, groups, recipe="mxfp8"))
plan = moire.make_plan(torch.zeros(4, 1, dtype=torch.int64), 2)
reveal_type(moire.permute(x, plan))
reveal_type(moire.permute(x, plan, topk_weights=torch.ones(4, 1)))
reveal_type(moire.nn.GroupedMLP(2, 8, 8).weights_changed())
reveal_type(moire.grouped_linear(quantized, moire.quantize(w1), groups, recipe="mxfp8"))
reveal_type(moire.explain(moire.glu, x).saved_bytes)
moire.hf.register("mine", recipe="mxfp8")
with moire.strict(), moire.settings(num_threads=2):
    print(moire.__version__, moire.info()["version"])
moire.glu(5)  # wrong
moire.Groups(splits="ab", capacity="c")  # wrong
"""
REVEALED = [
    "torch._tensor.Tensor",
    "numpy.ndarray[",
    "moire.grouped_tensor.GroupedTensor",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "tuple[torch._tensor.Tensor, torch._tensor.Tensor]",
    "None",
    "torch._tensor.Tensor",
    "int",
]


@pytest.mark.slow
def test_a_type_checker_takes_a_program(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", tmp_path]
    done = subprocess.run(
        [*command, program], capture_output=True, text=True, env={"MYPYPATH": str(PACKAGE.parent)}
    )
    lines = PROGRAM.splitlines()
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(revealed) == len(REVEALED)
    for line, wanted in zip(revealed, REVEALED):
        assert f'Revealed type is "{wanted}' in line
    errors = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    assert errors == {i + 1 for i, line in enumerate(lines) if line.endswith("# wrong")}
