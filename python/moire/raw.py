"""moire.call: every C entry, on arrays that the caller has."""

from __future__ import annotations

from typing import Any

from .arrays import default_framework, framework_of
from .errors import invalid
from .invoke import ENTRIES
from .layouts import Activation, GluLayout
from .values import choice, described, integer, number

_ARRAYS = ("moire_tensor", "moire_offsets_output *", "uint8_t *", "int64_t *")
_LISTS = ("moire_weight", "moire_quantized")


def call(name: str, /, **fields: Any) -> None:
    """Runs moire_<name> on the fields of its struct in moire.h: `call("grouped_mlp_backward", x=x,
    ..., grad_x=grad_x)`.

    Arrays are all Torch tensors, whatever autograd thinks of them, or all NumPy arrays. A weight is
    one packed array or a list of matrices, with <weight>_layout beside it; a moire_quantized is
    (data, scales), E8M0 scales may be uint8; moire_groups are offsets, num_groups and capacity, the
    activation and the layout of gate and up what Activation and GluLayout take; from and to are
    from_ and to_. What is left out is zero. Nothing is made, cast or returned: outputs ("out",
    "in/out" in moire.h) are arrays of the caller, overwritten as the entry says, and the workspace
    is seen to. explain() knows the call, strict() and settings() hold for it.
    """
    entry = ENTRIES[choice("call: name", name, tuple(ENTRIES))]
    for key in fields:
        if key not in entry.kinds:
            keywords = ", ".join(sorted(entry.kinds))
            raise invalid(f"{name}: {key!r} is no field of it, which are {keywords}")
    fields = {key: value for key, value in fields.items() if value is not None}
    arrays = {}
    for key, value in fields.items():
        arrays.update(_arrays_of(name, key, value, entry.kinds[key]))
    fw = framework_of(name, arrays) if arrays else default_framework()
    values = {k: _value(fw, name, k, v, entry.kinds[k]) for k, v in fields.items()}
    fw.run(name, values)
    for field in entry.outputs:
        given = values.get(field)
        for array in given if isinstance(given, list) else (given,):
            fw.written(array)


def _arrays_of(name, key, value, kind):
    """The arrays of one field, by what a message calls them."""
    if kind in _ARRAYS:
        return {key: value}
    if kind not in _LISTS:
        return {}
    is_list = isinstance(value, (list, tuple))
    if kind == "moire_quantized":
        if not is_list or len(value) != 2:
            raise invalid(f"{name}: {key} is {described(value)}, must be (data, scales)")
        return {f"{key}.data": value[0], f"{key}.scales": value[1]}
    return {f"{key}[{i}]": array for i, array in enumerate(value)} if is_list else {key: value}


def _value(fw, name, key, value, kind):
    """As invoke.py takes it."""
    called = f"{name}: {key}"
    if kind in _ARRAYS:
        return fw.detached(value)
    if kind in _LISTS:
        return [fw.detached(a) for a in (value if isinstance(value, (list, tuple)) else [value])]
    if kind == "moire_activation":
        return Activation.of(value, called).fields
    if kind == "moire_glu_layout":
        return GluLayout.of(value, called).fields
    if kind == "float":
        return number(called, value)
    most = 2 ** (63 if kind == "int64_t" else 31)
    return integer(called, value, -most, most - 1)
