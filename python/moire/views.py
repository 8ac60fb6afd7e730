"""What a moire_tensor needs to know of an array, for NumPy arrays and for Torch tensors."""

import numpy as np

try:
    import torch
except ModuleNotFoundError:
    torch = None

# moire_dtype of moire.h, by the names that NumPy and Torch share.
DTYPES = {
    "float32": 1,
    "bfloat16": 2,
    "float16": 3,
    "uint8": 16,
    "int32": 17,
    "int64": 18,
    "float64": 19,
}


class NumpyViews:
    """Of numpy.ndarray; BF16 arrays are of ml_dtypes' bfloat16."""

    @staticmethod
    def address(array):
        return array.__array_interface__["data"][0]

    @staticmethod
    def device(array):
        return _CPU

    @staticmethod
    def code(array):
        return DTYPES.get(array.dtype.name)

    @staticmethod
    def is_contiguous(array):
        return array.flags.c_contiguous

    @staticmethod
    def is_row_strided(array):  # of an array that is not contiguous
        return _has_rows(array.shape, [stride // array.itemsize for stride in array.strides])

    @staticmethod
    def row_stride(array):
        return 0 if array.flags.c_contiguous else array.strides[-2] // array.itemsize

    @staticmethod
    def contiguous(array):
        return np.ascontiguousarray(array)

    @staticmethod
    def empty_bytes(like, size):
        return np.empty(size, np.uint8)


class TorchViews:
    """Of torch.Tensor."""

    if torch is not None:
        codes = {getattr(torch, name): code for name, code in DTYPES.items()}

    @staticmethod
    def address(array):
        return array.data_ptr()

    @staticmethod
    def device(array):
        return _CPU if array.is_cpu else (array.device.type, array.device.index or 0)

    @staticmethod
    def code(array):
        return TorchViews.codes.get(array.dtype)

    @staticmethod
    def is_contiguous(array):
        return array.is_contiguous()

    @staticmethod
    def is_row_strided(array):
        return _has_rows(array.shape, array.stride())

    @staticmethod
    def row_stride(array):
        return 0 if array.is_contiguous() else array.stride(-2)

    @staticmethod
    def contiguous(array):
        return array.contiguous()

    @staticmethod
    def empty_bytes(like, size):
        return like.new_empty(size, dtype=torch.uint8)


_CPU = ("cpu", 0)


def _has_rows(shape, strides):
    """Last dimension contiguous, rows a fixed stride apart: what a moire_tensor can say."""
    if len(shape) not in (2, 3) or 0 in shape:
        return False
    if strides[-1] != 1 or strides[-2] < shape[-1]:
        return False
    return len(shape) == 2 or strides[0] == shape[-2] * strides[1]
