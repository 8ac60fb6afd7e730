"""The C entries as torch ops: torch.ops.moire.<entry>, with the keywords that invoke.py has.

Schemas are made from moire.h itself. Every op writes into outputs that it is given and returns
nothing, like its C entry, so mutations are declared and the fake kernel has nothing to do;
gradients are in autograd.py.
"""

import functools

import torch
import torch.utils.checkpoint
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.utils.flop_counter import register_flop_formula

from . import invoke
from .errors import invalid
from .values import tensors_of

_SCHEMA_OF_KIND = {
    **dict.fromkeys(invoke.ARRAYS, "Tensor{alias}? {key}=None"),
    **dict.fromkeys(invoke.LISTS, "Tensor{alias}[]? {key}=None"),
    **dict.fromkeys(("moire_glu_layout", "form", "flags"), "SymInt[] {key}=[]"),
    "moire_activation": "float[] {key}=[]",
    "int32_t": "int {key}=0",
    "int64_t": "SymInt {key}=0",
    "float": "float {key}=0.0",
}


def schema_of(entry):
    aliases, parts = iter("abcdefghijklmnopqrstuvwxyz"), []
    for key, kind in entry.kinds.items():
        alias = f"({next(aliases)}!)" if key in entry.outputs else ""
        parts.append(_SCHEMA_OF_KIND[kind].format(key=key, alias=alias))
    # Which kernel runs is decided by tensors and by lists of them, but not by optional lists: an op
    # that begins with one would take meta and fake tensors for real ones.
    if parts[0].startswith("Tensor[]?"):
        parts[0] = parts[0].replace("[]?", "[]").replace("=None", "")
    return f"{entry.name}(*, {', '.join(parts)}) -> ()"


def dispatch(name, values):
    """Runs the op on what of the mapping it has keywords for."""
    known = invoke.ENTRIES[name].kinds
    given = {key: value for key, value in values.items() if key in known}
    if not torch.compiler.is_compiling():
        check_beside(name, given)
    getattr(torch.ops.moire, name)(**given)


def check_beside(name, given):
    """That tensors are on one device, and fake ones alone, unless their mode allows for others."""
    fakes, devices = {}, {}
    for key, tensor in tensors_of(given):
        fakes.setdefault(hasattr(tensor, "fake_mode"), (key, tensor))
        devices.setdefault(tensor.device, key)
    if len(fakes) == 2 and not fakes[True][1].fake_mode.allow_non_fake_inputs:
        mixed = f"{fakes[True][0]} is a FakeTensor, without values, but {fakes[False][0]} is not"
        raise invalid(f"{name}: {mixed}; all must be of one FakeTensorMode, or none")
    if len(devices) > 1:
        (first, a), (second, b) = list(devices.items())[:2]
        raise invalid(
            f"{name}: {a} is on {first} but {b} is on {second}; all must be on one device"
        )


def _fake(name, /, **values):
    """Outputs are given: nothing to make, and what the dispatcher leaves out to check."""
    check_beside(name, values)


def is_dispatching():
    """Whether ops have to pass Torch's dispatcher, because a compiler, a mode, a transform, a
    profiler or a tracer is there to see them. It costs as much as a small op.
    """
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() != 0
        or _len_torch_function_stack() != 0
        or peek_interpreter_stack() is not None
        or _profiler_enabled()
        or _get_tracing_state() is not None
    )


_library = torch.library.Library("moire", "DEF")


def define(fw):
    """Every entry as an op on tensors, which `fw` knows (arrays.Torch)."""
    for name, entry in invoke.ENTRIES.items():
        _library.define(schema_of(entry))
        _library.impl(name, functools.partial(_run, name, fw), "CompositeExplicitAutograd")
        torch.library.register_fake(f"moire::{name}", functools.partial(_fake, name), lib=_library)
    for name, products in _PRODUCTS.items():
        formula = functools.partial(_flops, products)
        register_flop_formula(getattr(torch.ops.moire, name))(formula)
    # Their results are writes, of which a policy of selective checkpoints would save nothing.
    ignored = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set())
    ignored.update(getattr(torch.ops.moire, name).default for name in invoke.ENTRIES)


def _run(name, fw, /, **values):
    invoke.invoke(name, values, fw)


# All for which grad_y goes through W2.
_ACT = ("grad_x", "grad_w1", "grad_b1", "grad_probs", "grad_z", "grad_z_columnwise")
_PRODUCTS = {  # with which weight, and what is made of each where it is asked for
    "grouped_gemm": {"b": [("d",)]},
    "grouped_gemm_wgrad": {"d": [("d",)]},
    "grouped_linear": {"w": [("y",)]},
    "grouped_linear_backward": {"w": [("grad_x",), ("grad_w",)]},
    "grouped_mlp": {"w1": [("y",)], "w2": [("y",)]},
    "grouped_mlp_backward": {"w1": [("grad_x",), ("grad_w1",)], "w2": [_ACT, ("grad_w2",)]},
}


def _flops(products, *, capacity=0, out_shape=None, **shapes):
    """What FlopCounterMode counts, of all rows: splits may lie on the device and are not read.
    Torch leaves out what has its default, as no rows have.
    """
    total = 0
    for weight, made in products.items():
        forms = (weight, f"{weight}_quantized", f"{weight}_prepared_form", f"grad_{weight}")
        shape = next((shapes[form] for form in forms if shapes.get(form)), (0, 0))  # of none made
        out, inner = (shape[0] if isinstance(shape[0], tuple) else shape)[-2:]
        count = sum(any(shapes.get(name) for name in names) for names in made)
        total += count * 2 * capacity * out * inner
    return total


def rows_to_tokens(grad_rows, row_idx, shape, dtype):
    """The gradient of x[row_idx]: rows summed back to those of x, in FP32, rounded once."""
    # Rows of the tail are zeros, wherever their index points. On a GPU index_add_ adds in the order
    # in which its threads come; index_put_ sorts, on a GPU and nowhere else.
    total = torch.zeros(shape, dtype=torch.float32, device=grad_rows.device)
    if shape[0] != 0:
        tokens, rows = row_idx.long().clamp(0, shape[0] - 1), grad_rows.float()
        if total.is_cuda:
            total.index_put_((tokens,), rows, accumulate=True)
        else:
            total.index_add_(0, tokens, rows)
    return total.to(dtype)


# An op, for Inductor would compile index_put_ to additions in any order.
_library.define(
    "rows_to_tokens(Tensor grad_rows, Tensor row_idx, SymInt[] shape, ScalarType dtype) -> Tensor"
)
_library.impl("rows_to_tokens", rows_to_tokens, "CompositeExplicitAutograd")


@torch.library.register_fake("moire::rows_to_tokens", lib=_library)
def _(grad_rows, row_idx, shape, dtype):
    return grad_rows.new_empty(shape, dtype=dtype)
