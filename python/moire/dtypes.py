"""Torch, where there is one; the types of arrays by the names that NumPy and Torch share; and what
public functions are annotated with, on any Python since 3.9: without Torch its types are Any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Union

import numpy as np

try:
    import torch
    from torch import Tensor
    from torch import device as TorchDevice
    from torch import dtype as TorchDtype
except ModuleNotFoundError:
    torch = None
    if not TYPE_CHECKING:
        Tensor = TorchDevice = TorchDtype = Any

no_grad = contextlib.nullcontext if torch is None else torch.no_grad

# moire_dtype of moire.h, by the names that NumPy and Torch share.
DTYPES = {
    "float32": 1,
    "bfloat16": 2,
    "float16": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
    "float8_e8m0fnu": 6,  # Torch has it since 2.7
    "uint8": 16,
    "int32": 17,
    "int64": 18,
    "float64": 19,
}

# torch.compile(fullgraph=True) takes moire's functions since this version of torch.
COMPILES_WHOLE_GRAPHS = torch is not None and [
    int(part) for part in torch.__version__.split(".")[:2]
] >= [2, 11]

# All arrays of a call are of one kind. Of a call with nothing but GroupedTensors, which do not say
# theirs, type checkers take the first.
Array = TypeVar("Array", Tensor, np.ndarray)
AnyArray = Union[np.ndarray, Tensor]
Integers = Union[Sequence[int], np.ndarray, Tensor]
Device = Union[TorchDevice, str, int]
Dtype = Union[TorchDtype, np.dtype, type]
