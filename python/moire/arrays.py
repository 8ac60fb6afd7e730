"""The two kinds of arrays that functions take, behind one small interface: NumPy arrays and Torch
tensors.
"""

import numpy as np

from . import invoke
from .errors import invalid
from .views import torch

if torch is not None:
    from . import ops  # noqa: F401  (registers torch.ops.moire)


# A type that the library knows for each element size, for ops that only move bytes.
_WIDTHS = {1: "uint8", 2: "float16", 4: "int32", 8: "int64"}


class Numpy:
    """NumPy arrays; BF16 is ml_dtypes.bfloat16 (never a view of uint16: a dtype cannot be
    guessed).
    """

    kind, kind_name = np.ndarray, "a NumPy array"
    float32, int32, int64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)

    @staticmethod
    def run(name, **values):
        invoke.invoke(name, values)

    @staticmethod
    def empty(like, shape, dtype):
        return np.empty(shape, dtype)

    @staticmethod
    def written(array):
        """Says that a caller's buffer was overwritten."""

    @staticmethod
    def cast(array, dtype):
        return (
            array if array is None or dtype is None or array.dtype == dtype else array.astype(dtype)
        )

    @staticmethod
    def integers(values):
        return np.asarray(values, np.int64)

    @staticmethod
    def as_bytes_of_same_width(array):
        return np.ascontiguousarray(array).view(_WIDTHS.get(array.itemsize, array.dtype))


class Torch:
    """Torch tensors; calls go through torch.ops.moire."""

    if torch is not None:
        kind, kind_name = torch.Tensor, "a Torch tensor"
        float32, int32, int64 = torch.float32, torch.int32, torch.int64

    @staticmethod
    def run(name, **values):
        getattr(torch.ops.moire, name)(**values)

    @staticmethod
    def empty(like, shape, dtype):
        return like.new_empty(shape, dtype=dtype)

    @staticmethod
    def written(array):
        """Says that a caller's buffer was overwritten, so that autograd refuses what needed it."""
        if array is not None and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(array)

    @staticmethod
    def cast(array, dtype):
        return array if array is None or dtype is None or array.dtype == dtype else array.to(dtype)

    @staticmethod
    def integers(values):
        return torch.tensor(values, dtype=torch.int64)

    @staticmethod
    def as_bytes_of_same_width(array):
        width = _WIDTHS.get(array.element_size())
        return array.contiguous().view(array.dtype if width is None else getattr(torch, width))


def framework_of(call, name, array):
    """Numpy or Torch, by the type of an argument; anything else is an error."""
    if isinstance(array, np.ndarray):
        return Numpy
    if torch is not None and isinstance(array, torch.Tensor):
        return Torch
    kinds = "a NumPy array" if torch is None else "a Torch tensor or a NumPy array"
    raise invalid(f"{call}: {name} is a {type(array).__name__}, must be {kinds}")


def check_kind(fw, call, arrays):
    """The optional arrays of a call are of its first argument's kind."""
    for name, array in arrays.items():
        if array is not None and not isinstance(array, fw.kind):
            found = type(array).__name__
            raise invalid(
                f"{call}: {name} is a {found}, must be {fw.kind_name} as the first argument is"
            )


def default_framework():
    """For values that come as plain lists."""
    return Numpy if torch is None else Torch
