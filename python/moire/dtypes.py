"""Torch, where there is one, and the types of arrays by the names that NumPy and Torch share."""

import contextlib

try:
    import torch
except ModuleNotFoundError:
    torch = None

no_grad = contextlib.nullcontext if torch is None else torch.no_grad


def version_of_torch():
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


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
COMPILES_WHOLE_GRAPHS = torch is not None and version_of_torch() >= (2, 11)
