"""What a moire_tensor needs to know of an array, for NumPy arrays and for Torch tensors."""

import numpy as np

try:
    import torch
except ModuleNotFoundError:
    torch = None


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

_MEANS = "moire_dtype"
# torch.compile(fullgraph=True) takes moire's functions since this version of torch.
COMPILES_WHOLE_GRAPHS = torch is not None and version_of_torch() >= (2, 11)


class NumpyViews:
    """Of numpy.ndarray; BF16 arrays are of ml_dtypes' bfloat16."""

    kind = np.ndarray
    types = (np.ndarray,)  # the usual ones, of which nothing more need be asked
    codes = {}  # of dtypes that say all; code() is asked of others
    may_be_read_only = True

    @staticmethod
    def address(array):
        return array.__array_interface__["data"][0]

    @staticmethod
    def device(array):
        return "cpu"

    @staticmethod
    def place(device):
        """(kind, index) of a device, or of none."""
        return "cpu", 0

    @staticmethod
    def code(array):
        dtype = array.dtype
        if dtype.metadata is not None:
            return DTYPES.get(dtype.metadata.get(_MEANS, dtype.name))
        return DTYPES.get(dtype.name) if dtype.isnative else None

    @staticmethod
    def fp8(array, dtype):
        """A view that says which FP8 type the bytes are of; without ml_dtypes NumPy has none."""
        if array.dtype != np.uint8:
            return array
        return array.view(np.dtype(np.uint8, metadata={_MEANS: dtype}))

    @staticmethod
    def is_writable(array):
        return array.flags.writeable

    @staticmethod
    def is_lazy(array):
        return False

    @staticmethod
    def is_contiguous(array):
        return array.flags.c_contiguous

    @staticmethod
    def row_stride(array):
        """Elements between rows, 0 where contiguous; None where no moire_tensor can say it."""
        if array.flags.c_contiguous:
            return 0
        strides = [divmod(stride, array.itemsize) for stride in array.strides]
        if any(rest for _, rest in strides):  # a field of a packed struct
            return None
        return _row_stride(array.shape, [elements for elements, _ in strides])

    @staticmethod
    def contiguous(array):
        return np.ascontiguousarray(array)

    @staticmethod
    def scratch(device, size):
        """(memory that nobody has written, its address)."""
        memory = np.empty(size, np.uint8)
        return memory, NumpyViews.address(memory)


class TorchViews:
    """Of torch.Tensor; as NumpyViews."""

    if torch is not None:
        kind = torch.Tensor
        types = (torch.Tensor, torch.nn.Parameter)
        may_be_read_only = False
        codes = {getattr(torch, n): code for n, code in DTYPES.items() if hasattr(torch, n)}
        address = torch.Tensor.data_ptr
        device = torch.Tensor.device.__get__
        _places = {None: ("cpu", 0)}

    @staticmethod
    def is_lazy(array):
        """Whether memory is not what the tensor shows: it is to be negated when it is read (an
        imaginary part may be), or there is none, for zeros.
        """
        return array.is_neg() or array._is_zerotensor()

    @staticmethod
    def is_contiguous(array):
        """Whether its values lie in memory in their order, and as they are."""
        # is_lazy(), without a call: this is asked of every array of every call.
        return array.is_contiguous() and not (array.is_neg() or array._is_zerotensor())

    @staticmethod
    def is_plain(array):
        """Whether its memory is all there is to it."""
        return type(array) in TorchViews.types and (array.is_cpu or array.is_cuda)

    @staticmethod
    def place(device):
        place = TorchViews._places.get(device)
        if place is None:  # kept, because asking a device for its type takes longer than most calls
            place = TorchViews._places[device] = (device.type, device.index or 0)
        return place

    @staticmethod
    def code(array):
        return TorchViews.codes.get(array.dtype)

    @staticmethod
    def fp8(array, dtype):
        return array if array.dtype != torch.uint8 else array.view(getattr(torch, dtype))

    @staticmethod
    def row_stride(array):
        if TorchViews.is_lazy(array):
            return None
        return 0 if array.is_contiguous() else _row_stride(array.shape, array.stride())

    @staticmethod
    def contiguous(array):
        if not torch.compiler.is_compiling() and array._is_zerotensor():
            return torch.zeros(array.shape, dtype=array.dtype, device=array.device)
        return array.resolve_conj().resolve_neg().contiguous()

    @staticmethod
    def scratch(device, size):
        memory = torch.UntypedStorage(size, device=device)
        return memory, memory.data_ptr()


def _row_stride(shape, strides):
    if len(shape) not in (2, 3) or 0 in shape or strides[-1] != 1 or strides[-2] < shape[-1]:
        return None
    if len(shape) == 3 and strides[0] != shape[1] * strides[1]:
        return None
    return strides[-2]
