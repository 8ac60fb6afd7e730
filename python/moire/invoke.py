"""One call of a C entry: arrays into the argument struct, scratch, the call, and its error as an
exception.

Keyword names are the field names of moire.h. Three kinds of fields are spread over several
keywords, so that all of them are plain values (torch.library schemas have nothing else):

    moire_weight w      w=[tensor]: packed, rank 3; w=[t0, t1, ...]: one matrix per group;
    w_layout=0 or 1 moire_groups        offsets=int64 tensor, num_groups, capacity moire_activation
    activation=(kind, limit, alpha, offset); moire_glu_layout: (block, order)

Absent is None. Inputs whose rows are not row-strided are copied to be so; outputs must be.
"""

import numpy as np

from . import context as contexts
from ._abi import ffi, lib
from .errors import invalid, unsupported

_VOID = ffi.typeof("void *")
_BYTES = ffi.typeof("uint8_t *")
_OFFSETS = ffi.typeof("int64_t *")
_ALIGNMENT = 256

NUMPY_DTYPES = {
    "float32": 1,
    "bfloat16": 2,
    "float16": 3,
    "uint8": 16,
    "int32": 17,
    "int64": 18,
    "float64": 19,
}
TORCH_DTYPES = {}  # filled by ops.py where Torch is
TORCH_UINT8 = []


class Entry:
    """A C entry: function, workspace twin, argument struct, the kind of each of its fields, which
    it writes.
    """

    def __init__(self, name, outputs):
        struct = ffi.typeof(f"moire_{name}_args")
        self.name = name
        self.outputs = outputs
        self.function = getattr(lib, f"moire_{name}")
        self.workspace = getattr(lib, f"moire_{name}_workspace", None)
        self.pointer = ffi.typeof(f"moire_{name}_args *")
        self.struct_size = ffi.sizeof(struct)
        self.fields = [
            (field, keyword(field), member.type.cname)
            for field, member in struct.fields
            if field not in ("struct_size", "workspace")
        ]


def keyword(field):
    """The keyword of a field: its name, underscored where Python has that word for itself."""
    return field + "_" if field in ("from", "to") else field


def _entries():
    outputs = {
        "splits_to_offsets": ("outputs",),
        "glu": ("act",),
        "glu_backward": ("grad_z", "act", "grad_probs"),
        "convert_glu": ("target",),
        "grouped_gemm": ("d",),
        "grouped_gemm_wgrad": ("d",),
        "router": ("topk_idx", "topk_weights"),
        "router_backward": ("grad_logits",),
        "permute_plan": ("offsets", "gather_idx", "scatter_idx"),
        "permute": ("rows", "probs"),
        "unpermute": ("y", "topk_weights"),
        "unpermute_backward": ("grad_rows", "grad_weights"),
        "grouped_linear": ("y",),
        "grouped_linear_backward": ("grad_x", "grad_w", "grad_bias", "grad_scale"),
        "grouped_mlp": ("z", "act", "y"),
        "grouped_mlp_backward": (
            *("act", "grad_z", "grad_x", "grad_w1", "grad_b1", "grad_w2", "grad_b2", "grad_probs"),
        ),
    }
    return {name: Entry(name, written) for name, written in outputs.items()}


ENTRIES = _entries()


def is_numpy(array):
    return isinstance(array, np.ndarray)


def invoke(name, values):
    """Runs moire_<name> on the keyword values of its fields."""
    entry = ENTRIES[name]
    place = _Place(entry)
    struct = {"struct_size": entry.struct_size}
    for field, key, kind in entry.fields:
        value = values.get(key)
        if kind == "moire_groups":
            if (offsets := values.get("offsets")) is not None:
                address = ffi.cast(_OFFSETS, place.dense_address("offsets", offsets))
                struct[field] = (address, values.get("num_groups", 0), values.get("capacity", 0))
        elif value is not None:
            struct[field] = place.convert(field, kind, value, values)
    context = contexts.current(*place.device)
    args = ffi.new(entry.pointer, struct)
    if entry.workspace is not None:
        needed = ffi.new("size_t *")
        contexts.raise_for(entry.workspace(context, args, needed))
        if needed[0] != 0:
            args.workspace.data = place.scratch(needed[0])
            args.workspace.bytes = needed[0]
    contexts.raise_for(entry.function(context, args))


class _Place:
    """One call's arrays: all on one device, as initialisers of the struct's fields, alive until the
    call is over.
    """

    def __init__(self, entry):
        self.call = entry.name
        self.outputs = entry.outputs
        self.device = None
        self.example = None
        self.alive = []

    def convert(self, field, kind, value, values):
        if kind == "moire_tensor":
            return self.view(field, value)
        if kind == "moire_weight":
            return self.weight(field, value, values.get(f"{field}_layout") or 0)
        if kind == "uint8_t *":
            return ffi.cast(_BYTES, self.dense_address(field, value))
        if kind == "moire_activation":
            return (int(value[0]), *value[1:])
        if kind == "moire_glu_layout":
            return tuple(value)
        if kind == "moire_offsets_output *":
            outputs = ffi.new("moire_offsets_output[]", [{"offsets": self.view(field, value)}])
            self.alive.append(outputs)
            return outputs
        return value

    def view(self, field, array):
        array = self._placed(field, array, is_row_strided)
        rank = array.ndim
        if not 1 <= rank <= 3:
            raise invalid(f"{self.call}: {field} has rank {rank}, must be 1 to 3")
        code = self._code(field, array)
        if is_numpy(array):
            stride = (
                array.strides[-2] // array.itemsize
                if rank > 1 and not array.flags.c_contiguous
                else 0
            )
        else:
            stride = 0 if rank == 1 or array.is_contiguous() else array.stride(-2)
        return ffi.cast(_VOID, _address(array)), code, rank, tuple(array.shape), stride

    def weight(self, field, arrays, layout):
        if len(arrays) == 1 and arrays[0].ndim == 3:
            return self.view(field, arrays[0]), ffi.NULL, layout
        addresses, first = [], arrays[0]
        for i, array in enumerate(arrays):
            array = self._placed(field, array, is_contiguous)
            if array.shape != first.shape or array.dtype != first.dtype:
                raise invalid(
                    f"{self.call}: {field}[{i}] is {_named(array)} but {field}[0] is "
                    f"{_named(first)}; "
                    "the weights of a list must be alike"
                )
            addresses.append(ffi.cast(_VOID, _address(array)))
        pointers = ffi.new("void *[]", addresses)
        self.alive.append(pointers)
        return (
            (ffi.NULL, self._code(field, first), 3, (len(arrays), *first.shape), 0),
            pointers,
            layout,
        )

    def dense_address(self, field, array):
        return _address(self._placed(field, array, is_contiguous))

    def scratch(self, size):
        """A 256-byte aligned address with `size` bytes behind it."""
        if is_numpy(self.example):
            memory = np.empty(size + _ALIGNMENT, np.uint8)
        else:
            memory = self.example.new_empty(size + _ALIGNMENT, dtype=TORCH_UINT8[0])
        self.alive.append(memory)
        return ffi.cast(_VOID, (_address(memory) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT)

    def _placed(self, field, array, usable):
        device = _device(array)
        if self.device is None:
            self.device, self.example = device, array
        elif device != self.device or is_numpy(array) != is_numpy(self.example):
            raise invalid(
                f"{self.call}: {field} is {_kind(array)} on {_place_name(device)} but the "
                f"other arguments are "
                f"{_kind(self.example)} on {_place_name(self.device)}; all must be of one "
                f"kind, on one device"
            )
        if usable(array):
            return array
        if field in self.outputs:
            raise invalid(
                f"{self.call}: output {field} is not contiguous, and outputs are not copied"
            )
        array = np.ascontiguousarray(array) if is_numpy(array) else array.contiguous()
        self.alive.append(array)
        return array

    def _code(self, field, array):
        codes, dtype = (
            (NUMPY_DTYPES, array.dtype.name) if is_numpy(array) else (TORCH_DTYPES, array.dtype)
        )
        if dtype not in codes:
            raise unsupported(
                f"{self.call}: {field} has dtype {dtype}, needs float32, bfloat16 or float16 "
                f"(indices: int32 or int64)"
            )
        return codes[dtype]


def is_contiguous(array):
    return array.flags.c_contiguous if is_numpy(array) else array.is_contiguous()


def is_row_strided(array):
    """Last dimension contiguous, rows a fixed stride apart: what a moire_tensor can say."""
    if is_contiguous(array):
        return True
    if array.ndim not in (2, 3) or 0 in array.shape:
        return False
    strides = [s // array.itemsize for s in array.strides] if is_numpy(array) else array.stride()
    rows, columns = array.shape[-2:]
    if strides[-1] != 1 or strides[-2] < columns:
        return False
    return array.ndim == 2 or strides[0] == rows * strides[1]


def _address(array):
    return array.ctypes.data if is_numpy(array) else array.data_ptr()


def _device(array):
    if is_numpy(array) or array.is_cpu:
        return "cpu", 0
    return array.device.type, array.device.index or 0


def _kind(array):
    return "a NumPy array" if is_numpy(array) else "a Torch tensor"


def _place_name(device):
    return device[0] if device[0] == "cpu" else f"{device[0]}:{device[1]}"


def _named(array):
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
