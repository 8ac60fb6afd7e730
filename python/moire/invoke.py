"""One call of a C entry: arrays into the argument struct, scratch, the call, its error raised.

Keyword names are the field names of moire.h. Four kinds of fields are spread over several
keywords, so that all of them are plain values (torch's op schemas have nothing else):

    moire_weight w      w=[tensor]: packed, rank 3; w=[t0, t1, ...]: one per group; w=[]: absent,
                        but w_layout=0 or 1 is said
    moire_quantized q   q=[data, scales]; E8M0 scales may be uint8 arrays
    moire_groups        offsets=int64 tensor, num_groups, capacity
    moire_activation    activation=(kind, limit, alpha, offset); moire_glu_layout: (block, order)

Absent is None. Inputs whose rows are not row-strided are copied to be so; outputs must be.
"""

import numpy as np

from . import context as contexts
from ._abi import ffi, lib
from .errors import invalid
from .views import DTYPES, NumpyViews, TorchViews

_VOID = ffi.typeof("void *")
_BYTES = ffi.typeof("uint8_t *")
_OFFSETS = ffi.typeof("int64_t *")
_SIZE = ffi.typeof("size_t *")
_ALIGNMENT = 256
_cast = ffi.cast
_ABSENT = (ffi.NULL, 0, 0, (), 0)


class Entry:
    """A C entry: function, workspace twin, argument struct, its fields, and which it writes."""

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
        self.has_groups = any(kind == "moire_groups" for _, _, kind in self.fields)
        self.converters = {
            key: (field, _converter(name, field, kind)) for field, key, kind in self.fields
        }


def keyword(field):
    """The keyword of a field: its name, underscored where Python has that word for itself."""
    return field + "_" if field in ("from", "to") else field


def invoke(name, values):
    """Runs moire_<name> on the keyword values of its fields."""
    entry = ENTRIES[name]
    call = _Call(entry, values)
    struct = {"struct_size": entry.struct_size}
    converters = entry.converters
    for key, value in values.items():
        if value is None or key not in converters:  # w_layout and the parts of groups
            continue
        field, convert = converters[key]
        struct[field] = value if convert is None else convert(call, field, value)
    offsets = values.get("offsets")
    if entry.has_groups and offsets is not None:
        num_groups = values.get("num_groups", 0)
        address = _cast(_OFFSETS, call.vector("offsets", offsets, "int64", num_groups + 1))
        struct["groups"] = (address, num_groups, values.get("capacity", 0))
    context = contexts.current(*call.device)
    args = ffi.new(entry.pointer, struct)
    if entry.workspace is not None:
        needed = ffi.new(_SIZE)
        code = entry.workspace(context, args, needed)
        if code != 0:
            contexts.raise_for(code)
        if needed[0] != 0:
            args.workspace.data = call.scratch(needed[0])
            args.workspace.bytes = needed[0]
    code = entry.function(context, args)
    if code != 0:
        contexts.raise_for(code)


class _Call:
    """One call's arrays: of one kind, on one device, alive until the call is over."""

    def __init__(self, entry, values):
        self.name = entry.name
        self.outputs = entry.outputs
        self.values = values
        self.type = self.device = None
        self.alive = []

    def tensor(self, field, array):
        if type(array) is not self.type or self.views.device(array) != self.device:
            self._check_place(field, array)
        views, shape, stride = self.views, array.shape, 0
        rank = len(shape)
        if not 1 <= rank <= 3:
            raise invalid(f"{self.name}: {field} has rank {rank}, must be 1 to 3")
        if not views.is_contiguous(array):
            stride = views.row_stride(array)
            if stride is None:
                array, stride = self._copied(field, array), 0
        code = views.code(array) or self._refuse_dtype(field, array)
        if field in self.outputs and not views.is_writable(array):
            raise invalid(f"{self.name}: {field} is read-only, needs an array that may be written")
        return _cast(_VOID, views.address(array)), code, rank, shape, stride

    def weight(self, field, arrays):
        layout = self.values.get(f"{field}_layout", 0)
        if not arrays:
            return _ABSENT, ffi.NULL, layout
        first = arrays[0]
        if len(arrays) == 1 and first.ndim == 3:
            return self.tensor(field, first), ffi.NULL, layout
        addresses = []
        for i, array in enumerate(arrays):
            array = self._dense(field, array)
            if array.shape != first.shape or array.dtype != first.dtype:
                raise invalid(
                    f"{self.name}: {field}[{i}] is {_named(array)} but {field}[0] is "
                    f"{_named(first)}; the weights of a list must be alike"
                )
            addresses.append(_cast(_VOID, self.views.address(array)))
        pointers = ffi.new("void *[]", addresses)
        self.alive.append(pointers)
        code = self.views.code(first) or self._refuse_dtype(field, first)
        return (ffi.NULL, code, 3, (len(arrays), *first.shape), 0), pointers, layout

    def quantized(self, field, arrays):
        data, scales = arrays
        return self.tensor(field, data), self.scales(field, scales)

    def scales(self, field, array):
        """As moire_tensor; bytes are E8M0."""
        address, code, *shape = self.tensor(field, array)
        return address, DTYPES["float8_e8m0fnu"] if code == DTYPES["uint8"] else code, *shape

    def bytes_pointer(self, field, array):
        num_groups = self.values.get("num_groups", 0)
        return _cast(_BYTES, self.vector(field, array, "uint8", num_groups))

    def offsets_outputs(self, field, array):
        outputs = ffi.new("moire_offsets_output[]", [{"offsets": self.tensor(field, array)}])
        self.alive.append(outputs)
        return outputs

    def activation(self, field, value):
        return (int(value[0]), *value[1:])

    def pair(self, field, value):
        return tuple(value)

    def vector(self, field, array, dtype, size):
        """The address of a contiguous vector of exactly this dtype and size."""
        array = self._dense(field, array)
        if self.views.code(array) != DTYPES[dtype] or tuple(array.shape) != (size,):
            raise invalid(f"{self.name}: {field} is {_named(array)}, needs {dtype} [{size}]")
        return self.views.address(array)

    def scratch(self, size):
        """A 256-byte aligned address with `size` bytes behind it."""
        memory = self.views.empty_bytes(self.example, size + _ALIGNMENT)
        self.alive.append(memory)
        return _cast(_VOID, -(-self.views.address(memory) // _ALIGNMENT) * _ALIGNMENT)

    def _dense(self, field, array):
        self._check_place(field, array)
        return array if self.views.is_contiguous(array) else self._copied(field, array)

    def _copied(self, field, array):
        if field in self.outputs:
            raise invalid(
                f"{self.name}: output {field} is not contiguous, and outputs are not copied"
            )
        array = self.views.contiguous(array)
        self.alive.append(array)
        return array

    def _check_place(self, field, array):
        if self.device is None:
            self.views = NumpyViews if isinstance(array, np.ndarray) else TorchViews
            self.example, self.type = array, type(array)
            self.device = self.views.device(array)
        elif isinstance(array, np.ndarray) != (self.views is NumpyViews):
            raise invalid(
                f"{self.name}: {field} is a {type(array).__name__} but the other arguments are of "
                f"type {type(self.example).__name__}; all must be of one kind"
            )
        elif (device := self.views.device(array)) != self.device:
            raise invalid(
                f"{self.name}: {field} is on {_place(device)} but the other arguments are on "
                f"{_place(self.device)}; all must be on one device"
            )

    def _refuse_dtype(self, field, array):
        raise invalid(
            f"{self.name}: {field} has dtype {array.dtype}, needs float32, bfloat16 or float16 "
            "(indices: int32 or int64)"
        )


def _place(device):
    return device[0] if device[0] == "cpu" else f"{device[0]}:{device[1]}"


def _named(array):
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


_CONVERTERS = {
    "moire_tensor": _Call.tensor,
    "moire_weight": _Call.weight,
    "moire_quantized": _Call.quantized,
    "moire_activation": _Call.activation,
    "moire_glu_layout": _Call.pair,
    "moire_offsets_output *": _Call.offsets_outputs,
    "uint8_t *": _Call.bytes_pointer,
}


def _converter(entry, field, kind):
    if kind == "moire_tensor" and (field.endswith("_scales") or entry == "convert_scales"):
        return _Call.scales
    return _CONVERTERS.get(kind)


_OUTPUTS = {
    "splits_to_offsets": ("outputs",),
    "glu": ("act",),
    "glu_backward": ("grad_z", "act", "grad_probs"),
    "convert_glu": ("target",),
    "grouped_gemm": ("d",),
    "grouped_gemm_wgrad": ("d",),
    "quantize": ("rowwise", "columnwise"),
    "quantize_weight": ("rowwise", "columnwise"),
    "dequantize": ("target",),
    "requantize": ("target",),
    "convert_scales": ("target",),
    "router": ("topk_idx", "topk_weights"),
    "router_backward": ("grad_logits",),
    "permute_plan": ("offsets", "gather_idx", "scatter_idx"),
    "permute": ("rows", "probs"),
    "unpermute": ("y", "topk_weights"),
    "unpermute_backward": ("grad_rows", "grad_weights"),
    "grouped_linear": ("y", "x_columnwise"),
    "grouped_linear_backward": ("grad_x", "grad_w", "grad_bias", "grad_scale"),
    "grouped_mlp": ("z", "act", "y", "x_columnwise", "act_columnwise"),
    "grouped_mlp_backward": (
        *("act", "grad_z", "grad_x", "grad_w1", "grad_b1", "grad_w2", "grad_b2", "grad_probs"),
        *("act_columnwise", "grad_z_columnwise"),
    ),
}
ENTRIES = {name: Entry(name, outputs) for name, outputs in _OUTPUTS.items()}
