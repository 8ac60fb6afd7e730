"""One call of a C entry: arrays into the argument struct, scratch, the call, its error raised.

Keyword names are the field names of moire.h. Four kinds of fields are spread over several
keywords, so that all of them are plain values (torch's op schemas have nothing else):

    moire_weight w      w=[tensor]: packed, rank 3; w=[t0, t1, ...]: one per group; w=[]: absent,
                        but w_layout=0 or 1 is said
    moire_quantized q   q=[data, scales]; E8M0 scales may be uint8 arrays
    moire_groups        offsets=int64 tensor, num_groups, capacity
    moire_prepared_weight p   p=memory, p_form=its other fields, as prepared_form() gives them
    moire_activation    activation=(kind, limit, alpha, offset); moire_glu_layout: (block, order)

Absent is None. Inputs whose rows are not row-strided are copied to be so; outputs must be.
"""

import re
import struct

from . import context as contexts
from ._abi import ffi, lib
from .dtypes import DTYPES
from .errors import invalid
from .values import shown

_SIZE = ffi.typeof("size_t *")
_ALIGNMENT = 256
_E8M0_OF_BYTES = {DTYPES["uint8"]: DTYPES["float8_e8m0fnu"]}
_PADDING = (None, (0, 0), (0,), ())  # of a shape, by its rank
_CODES = {
    "void *": "P",
    "int64_t *": "P",
    "size_t": "N",
    "int32_t": "i",
    "int64_t": "q",
    "int64_t[3]": "3q",
}


def _packer(name):
    """What writes all fields of a plain C struct at once, in the order of the header."""
    members = [member for _, member in ffi.typeof(name).fields]
    packer = struct.Struct("".join(_CODES[member.type.cname] for member in members))
    assert packer.size == ffi.sizeof(name), name
    return packer.pack_into


_pack_tensor, _pack_groups = _packer("moire_tensor"), _packer("moire_groups")
_pack_workspace = _packer("moire_workspace")
_pack_pointer = struct.Struct("P").pack_into
_pack_int = struct.Struct("i").pack_into
_LIST, _LAYOUT = (ffi.offsetof("moire_weight", field) for field in ("list", "layout"))
_SCALES = ffi.offsetof("moire_quantized", "scales")
_PREPARED, _FORM = "moire_prepared_weight", struct.Struct("8i3q")
_FORM_AT = ffi.offsetof(_PREPARED, "version")


class Indirect(Exception):
    """A call has arrays that need more than their addresses: Torch's dispatcher sees to them."""


class Entry:
    """A C entry: function, workspace twin, argument struct, its fields, and which it writes; the C
    types of its keywords are `kinds`.
    """

    def __init__(self, name):
        members = dict(ffi.typeof(f"moire_{name}_args").fields)
        self.groups_at, self.workspace_at = (
            members[field].offset if field in members else None for field in ("groups", "workspace")
        )
        fields = {f: m for f, m in members.items() if f not in ("struct_size", "workspace")}
        self.name = name
        self.outputs = tuple(f for f in fields if _role(name, f) == lib.MOIRE_ROLE_OUT)
        self.function = getattr(lib, f"moire_{name}")
        self.workspace = getattr(lib, f"moire_{name}_workspace", None)
        self.pointer = ffi.typeof(f"moire_{name}_args *")
        self.struct_size = ffi.sizeof(f"moire_{name}_args")
        self.fields = [(field, keyword(field), m.type.cname) for field, m in fields.items()]
        self.kinds, self.writers = {}, []  # of these (keyword, method of _Call, field, at)
        for field, key, kind in self.fields:
            at = fields[field].offset
            if kind == "moire_groups":
                self.kinds.update(offsets="int64_t *", num_groups="int64_t", capacity="int64_t")
                continue
            if kind == "moire_weight":
                self.kinds[f"{key}_layout"] = "int32_t"
                self.writers.append((f"{key}_layout", _Call.weight_layout, field, at))
            if kind == _PREPARED:
                self.kinds[f"{key}_form"] = "form"
                self.writers.append((f"{key}_form", _Call.form, field, at + _FORM_AT))
            is_of_scales = field.endswith("_scales") or name == "convert_scales"
            write = _WRITERS.get(kind, _Call.number)
            if write is _Call.tensor and is_of_scales:
                write = _Call.scales
            self.kinds[key] = kind
            self.writers.append((key, write, field, at))


def _role(name, field):
    return lib.moire_field_role(name.encode(), field.encode())


def keyword(field):
    """The keyword of a field: its name, underscored where Python has that word for itself."""
    return field + "_" if field in ("from", "to") else field


def invoke(name, values, fw, is_direct=False):
    """Runs moire_<name> on the keyword values of its fields, arrays of the kind of `fw`; what is
    no keyword of it is for other entries of the same mapping.

    A direct call, one that Torch's dispatcher has not seen, raises Indirect before anything is run
    where the dispatcher would do more than hand the tensors over.
    """
    entry, args, call, context = _filled(name, values, fw, is_direct)
    if entry.workspace is not None:
        needed = ffi.new(_SIZE)
        code = entry.workspace(context, args, needed)
        if code != 0:
            contexts.raise_for(code)
        if needed[0] != 0:
            call.take_scratch(needed[0])
    code = entry.function(context, args)
    if code != 0:
        contexts.raise_for(code)


def prepared_form(values, fw):
    """(bytes, p_form) of what prepare_weight makes of such values."""
    _, args, _call, context = _filled("prepare_weight", values, fw, False)
    found = ffi.new(f"{_PREPARED} *")
    code = lib.moire_prepare_weight_form(context, args, found)
    if code != 0:
        contexts.raise_for(code)
    return found.memory.shape[0], _FORM.unpack_from(ffi.buffer(found), _FORM_AT)


def _filled(name, values, fw, is_direct):
    """(the entry, its struct, what that refers to, a context for it)."""
    entry = ENTRIES[name]
    args = ffi.new(entry.pointer)
    args.struct_size = entry.struct_size
    call = _Call(entry, args, values, fw, is_direct)
    values_of = values.get
    for key, write, field, at in entry.writers:
        value = values_of(key)
        if value is not None:
            write(call, field, at, value)
    if entry.groups_at is not None and values.get("offsets") is not None:
        call.groups(entry.groups_at)
    return entry, args, call, contexts.current(*fw.place(call.device))


class _Call:
    """One call's arrays, of one kind and on one device: into the argument struct, and alive until
    the call is over. `at` is where in the struct, in bytes.
    """

    __slots__ = ("alive", "args", "buffer", "device", "entry", "is_direct", "values", "fw")

    def __init__(self, entry, args, values, fw, is_direct):
        self.entry, self.args, self.buffer = entry, args, ffi.buffer(args)
        self.values, self.fw, self.is_direct = values, fw, is_direct
        self.device, self.alive = None, []

    def tensor(self, field, at, array, code_of=None):
        fw, stride = self.fw, 0
        if type(array) not in fw.types or fw.device(array) != self.device:
            self._check_place(field, array)
        shape = array.shape
        rank = len(shape)
        if not 1 <= rank <= 3:
            raise self._invalid(f"{field} has rank {rank}, must be 1 to 3")
        if not fw.is_contiguous(array):
            stride = fw.row_stride(array)
            if stride is None:
                array, stride = self._copied(field, array), 0
        code = fw.codes.get(array.dtype) or self._code(field, array)
        if code_of is not None:
            code = code_of.get(code, code)
        if fw.may_be_read_only and field in self.entry.outputs and not fw.is_writable(array):
            raise self._invalid(f"{field} is read-only, needs an array that may be written")
        address, padding = fw.address(array), _PADDING[rank]
        _pack_tensor(self.buffer, at, address, code, rank, *shape, *padding, stride)

    def weight(self, field, at, arrays):
        if not arrays:
            return
        first = arrays[0]
        if len(arrays) == 1 and first.ndim == 3:
            self.tensor(field, at, first)
            return
        fw, shape, dtype = self.fw, first.shape, first.dtype
        addresses = []
        for i, array in enumerate(arrays):
            array = self._dense(field, array)
            if array.shape != shape or array.dtype != dtype:
                raise self._invalid(
                    f"{field}[{i}] is {shown(array)} but {field}[0] is {shown(first)}; "
                    f"the weights of a list must be alike"
                )
            addresses.append(fw.address(array))
        pointers = ffi.new("uintptr_t[]", addresses)
        self.alive.append(pointers)
        code = self._code(field, first)
        shape = (len(arrays), *shape)
        _pack_tensor(self.buffer, at, 0, code, 3, *shape, *_PADDING[len(shape)], 0)
        _pack_pointer(self.buffer, at + _LIST, int(ffi.cast("uintptr_t", pointers)))

    def weight_layout(self, field, at, layout):
        if layout != 0:
            _pack_int(self.buffer, at + _LAYOUT, layout)

    def form(self, field, at, numbers):
        if len(numbers) != 0:
            _FORM.pack_into(self.buffer, at, *numbers)

    def quantized(self, field, at, arrays):
        data, scales = arrays
        self.tensor(field, at, data)
        self.scales(field, at + _SCALES, scales)

    def scales(self, field, at, array):
        """As moire_tensor; bytes are E8M0."""
        self.tensor(field, at, array, _E8M0_OF_BYTES)

    def bytes_pointer(self, field, at, array):
        num_groups = self.values.get("num_groups", 0)
        _pack_pointer(self.buffer, at, self.vector(field, array, "uint8", num_groups))

    def groups(self, at):
        values = self.values
        num_groups = values.get("num_groups", 0)
        address = self.vector("offsets", values["offsets"], "int64", num_groups + 1)
        _pack_groups(self.buffer, at, address, num_groups, values.get("capacity", 0))

    def offsets_output(self, field, at, array):
        output = ffi.new("moire_offsets_output *")
        self.alive.append(output)
        self.args.outputs = output
        whole, self.buffer = self.buffer, ffi.buffer(output)
        self.tensor(field, ffi.offsetof("moire_offsets_output", "offsets"), array)
        self.buffer = whole

    def numbers(self, field, at, values):
        """A struct of them, of which the first is an integer."""
        if any(values):
            setattr(self.args, field, (int(values[0]), *values[1:]))

    def number(self, field, at, value):
        if value != 0:
            setattr(self.args, field, value)

    def vector(self, field, array, dtype, size):
        """The address of a contiguous vector of exactly this dtype and size."""
        array = self._dense(field, array)
        if self.fw.code(array) != DTYPES[dtype] or array.shape != (size,):
            raise self._invalid(f"{field} is {shown(array)}, needs {dtype} [{size}]")
        return self.fw.address(array)

    def take_scratch(self, size):
        """A 256-byte aligned workspace of `size` bytes."""
        memory, address = self.fw.scratch(self.device, size + _ALIGNMENT)
        self.alive.append(memory)
        aligned = address + -address % _ALIGNMENT
        _pack_workspace(self.buffer, self.entry.workspace_at, aligned, size)

    def _dense(self, field, array):
        fw = self.fw
        if type(array) not in fw.types or fw.device(array) != self.device:
            self._check_place(field, array)
        return array if fw.is_contiguous(array) else self._copied(field, array)

    def _copied(self, field, array):
        if field in self.entry.outputs:
            is_lazy = self.fw.is_lazy(array)
            found = "negated when it is read" if is_lazy else "not contiguous"
            raise self._invalid(f"output {field} is {found}, and outputs are not copied")
        array = self.fw.contiguous(array)
        self.alive.append(array)
        return array

    def _check_place(self, field, array):
        fw = self.fw
        if self.is_direct and not fw.is_plain(array):
            raise Indirect
        if not isinstance(array, fw.kind):
            raise self._invalid(
                f"{field} is a {type(array).__name__} but the other arguments are of type "
                f"{fw.kind.__name__}; all must be of one kind"
            )
        device = fw.device(array)
        if self.device is None:
            self.device = device
        elif device != self.device:
            raise self._invalid(
                f"{field} is on {device} but the other arguments are on {self.device}; "
                f"all must be on one device"
            )

    def _code(self, field, array):
        code = self.fw.code(array)
        if code is None:
            is_index = field.endswith(("idx", "splits", "offsets"))
            needs = "int32 or int64" if is_index else "float32, bfloat16 or float16"
            raise self._invalid(f"{field} is {shown(array)}, needs {needs}")
        return code

    def _invalid(self, text):
        return invalid(f"{self.entry.name}: {text}")


_WRITERS = {
    "moire_tensor": _Call.tensor,
    "moire_weight": _Call.weight,
    "moire_quantized": _Call.quantized,
    _PREPARED: _Call.tensor,
    "moire_activation": _Call.numbers,
    "moire_glu_layout": _Call.numbers,
    "moire_offsets_output *": _Call.offsets_output,
    "uint8_t *": _Call.bytes_pointer,
}

# Of every op that moire.h has a struct for, by name.
_STRUCTS = (re.fullmatch(r"moire_(\w+)_args", name) for name in ffi.list_types()[0])
ENTRIES = {found[1]: Entry(found[1]) for found in _STRUCTS if found}
