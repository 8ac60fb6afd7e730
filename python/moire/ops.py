"""The C entries as torch ops: torch.ops.moire.<entry>, with the fields of its struct as keywords
(see invoke.py).

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

from . import invoke
from .errors import invalid
from .values import tensors_of

_SCHEMA_OF_KIND = {
    "moire_tensor": "Tensor{alias}? {name}=None",
    "moire_weight": "Tensor{alias}[]? {name}=None, int {name}_layout=0",
    "moire_quantized": "Tensor{alias}[]? {name}=None",
    "moire_prepared_weight": "Tensor{alias}? {name}=None, SymInt[] {name}_form=[]",
    "moire_groups": "Tensor? offsets=None, SymInt num_groups=0, SymInt capacity=0",
    "moire_offsets_output *": "Tensor{alias}[]? {name}=None, "
    "SymInt[] {name}_multiplier=[], SymInt[] {name}_no_leading_zero=[]",
    "uint8_t *": "Tensor? {name}=None",
    "moire_activation": "float[] {name}=[]",
    "moire_glu_layout": "SymInt[] {name}=[]",
    "int32_t": "int {name}=0",
    "int64_t": "SymInt {name}=0",
    "float": "float {name}=0.0",
}


def schema_of(entry):
    """The torch schema of a C entry."""
    aliases = iter("abcdefghijklmnopqrstuvwxyz")
    parts = [
        _SCHEMA_OF_KIND[kind].format(
            name=key, alias=f"({next(aliases)}!)" if field in entry.outputs else ""
        )
        for field, key, kind in entry.fields
    ]
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
        _check_fakes(name, given)
    getattr(torch.ops.moire, name)(**given)


def _check_fakes(name, given):
    """That tensors without values are not beside others, unless their mode allows for it."""
    found = {}
    for key, tensor in tensors_of(given):
        found.setdefault(hasattr(tensor, "fake_mode"), (key, tensor))
    if len(found) == 2 and not found[True][1].fake_mode.allow_non_fake_inputs:
        mixed = f"{found[True][0]} is a FakeTensor, without values, but {found[False][0]} is not"
        raise invalid(f"{name}: {mixed}; all must be of one FakeTensorMode, or none")


def _fake(name, /, **values):
    """Outputs are given: nothing to make, and one check that the dispatcher leaves out."""
    devices = {}
    for key, tensor in tensors_of(values):
        devices.setdefault(tensor.device, key)
    if len(devices) > 1:
        (first, a), (second, b) = list(devices.items())[:2]
        raise invalid(
            f"{name}: {a} is on {first} but {b} is on {second}; all must be on one device"
        )


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
        run = functools.partial(_run, name, fw)
        _library.define(schema_of(entry))
        _library.impl(name, run, "CompositeExplicitAutograd")
        fake = functools.partial(_fake, name)
        torch.library.register_fake(f"moire::{name}", fake, lib=_library)
    # Their results are writes, of which a policy of selective checkpoints would save nothing.
    ignored = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set())
    ignored.update(getattr(torch.ops.moire, name).default for name in invoke.ENTRIES)


def _run(name, fw, /, **values):
    invoke.invoke(name, values, fw)
