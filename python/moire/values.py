"""Plain arguments: each function returns a value of the right type, or raises InvalidArgument with
the call, what was found and what is needed.
"""

import contextlib
import math
import numbers
import operator
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .dtypes import torch
from .errors import invalid

_LARGEST = 2**63 - 1
_SHOWN = (str, numbers.Number, np.generic, *([] if torch is None else [torch.dtype]))


def described(value):
    """How a message calls a value of the wrong type."""
    if isinstance(value, np.ndarray):
        return "a NumPy array"
    if torch is not None and isinstance(value, torch.Tensor):
        return getattr(value, "kind_name", "a Torch tensor")
    if isinstance(value, int) and value.bit_length() > 1024:  # Python prints none beyond a limit
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, _SHOWN):
        return repr(value)
    return f"a {type(value).__name__}"


def wrong(name, value, needs):
    return invalid(f"{name} is {described(value)}, must be {needs}")


def tensors_of(fields):
    """(name, tensor) of the Torch tensors, and of those in lists, of a call's mapping."""
    for name, value in fields.items():
        values = value if isinstance(value, (list, tuple)) else (value,)
        for i, tensor in enumerate(values):
            if isinstance(tensor, torch.Tensor):
                yield name if len(values) == 1 else f"{name}[{i}]", tensor


def dtype_name(array):
    """What NumPy and Torch both call an array's type."""
    return str(array.dtype).removeprefix("torch.")


def shown(array):
    return f"{dtype_name(array)} {list(array.shape)}"


def integer(name, value, lowest=0, highest=_LARGEST):
    """An int in lowest ... highest; NumPy's integers are welcome, True and 3.0 are not."""
    if torch is not None and isinstance(value, torch.SymInt):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        found = operator.index(value)
        if lowest <= found <= highest:
            return found
    needs = "a positive integer" if lowest == 1 else f"an integer, at least {lowest}"
    if highest != _LARGEST:
        needs = f"an integer, {lowest} to {highest}"
    raise wrong(name, value, needs)


def integers(name, values):
    """A list of them, from 0; names are made up only for the bad one."""
    return [
        v if type(v) is int and 0 <= v <= _LARGEST else integer(f"{name}[{i}]", v)
        for i, v in enumerate(values)
    ]


def number(name, value):
    """A finite float."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if -math.inf < value < math.inf:  # which torch.compile traces of a symbolic one, too
            return value
    raise wrong(name, value, "a finite number")


def flag(name, value):
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise wrong(name, value, "True or False")


def choice(name, value, names):
    """One of these names."""
    if isinstance(value, str) and value in names:
        return value
    raise wrong(name, value, f"one of {', '.join(names)}")


def file_path(name, value):
    """A Path that may be a file's."""
    with contextlib.suppress(TypeError, ValueError):
        found = Path(value)
        if found.name and b"\0" not in os.fsencode(found):
            return found
    raise wrong(name, value, "the path of a file")


def torch_device(name, value):
    if torch is None:
        raise invalid(f"{name} is given, but devices are Torch's, which is not installed")
    try:
        return torch.device(value)
    except (TypeError, ValueError, RuntimeError):
        raise wrong(name, value, "a device, such as 'cpu'") from None


def mapping(name, value, needs="a dict"):
    if isinstance(value, Mapping):
        return value
    raise wrong(name, value, needs)


def pickled(name, state, fields):
    """These fields of what was pickled of a `name`, which anybody may have written."""
    state = mapping(f"{name}: the state in the pickle", state)
    missing = [field for field in fields if field not in state]
    if missing:
        raise invalid(f"{name}: the state in the pickle has no {missing[0]!r}")
    return {field: state[field] for field in fields}
