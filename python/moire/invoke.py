"""One call of a C entry: arrays into the argument struct, scratch, the call, its error raised.

Keyword names are the field names of moire.h. Some kinds of fields are other values there, or
spread over several keywords, so that all are plain (torch's op schemas have nothing else):

    moire_weight w      w=[tensor]: packed, rank 3; w=[t0, t1, ...]: one per group; w=[]: absent,
                        but w_layout=0 or 1 is said
    moire_quantized q   q=[data, scales]; E8M0 scales may be uint8 arrays
    moire_groups        offsets=int64 tensor, num_groups, capacity
    moire_prepared_weight p   p=memory, p_form=its other fields, as prepared_form() gives them
    moire_offsets_output outputs   outputs=[array, ...]; lists of numbers, one for each or none, are
                        outputs_multiplier and outputs_no_leading_zero
    moire_activation    activation=(kind, limit, alpha, offset); moire_glu_layout: (block, order)

Absent is None. Inputs whose rows are not row-strided are copied to be so; outputs must be.

Where it was built, and Torch has the DLPack C exchange API, python/invoke.cpp makes the calls whose
arrays are plain tensors; all others, and all errors, are made here.
"""

import functools
import os
import re
import struct

from . import context as contexts
from ._abi import extension, ffi, lib
from .dtypes import DTYPES, torch
from .errors import invalid
from .values import shown

_SIZE = ffi.typeof("size_t *")
ALIGNMENT = 256
_E8M0_OF_BYTES = {DTYPES["uint8"]: DTYPES["float8_e8m0fnu"]}
_PADDING = (None, (0, 0), (0,), ())  # of a shape, by its rank
_TYPES = {
    "void *": "P",
    "int64_t *": "P",
    "size_t": "N",
    "int32_t": "i",
    "int64_t": "q",
    "int64_t[3]": "qqq",
    "float": "f",
    "moire_tensor": "Piiqqqq",
}


def _types(kind):
    """Of a number, or of the fields of a plain C struct in their order, as struct writes them."""
    if kind not in _TYPES:
        members = [member.type.cname for _, member in ffi.typeof(kind).fields]
        _TYPES[kind] = "".join(_TYPES[member] for member in members)
        assert struct.calcsize(f"{_TYPES[kind]}0q") == ffi.sizeof(kind), kind
    return _TYPES[kind]


_pack_tensor, _pack_groups, _pack_workspace = (
    struct.Struct(_types(f"moire_{kind}")).pack_into for kind in ("tensor", "groups", "workspace")
)
_pack_pointer = struct.Struct("P").pack_into
_LIST, _LAYOUT = (ffi.offsetof("moire_weight", field) for field in ("list", "layout"))
_SCALES = ffi.offsetof("moire_quantized", "scales")
_PREPARED = "moire_prepared_weight"
_TYPES["form"] = _types(_PREPARED)[len(_types("moire_tensor")) :]
_FORM_AT = ffi.offsetof(_PREPARED, "version")
_OF_OFFSETS = ("multiplier", "no_leading_zero")  # of each of them, whose tensor comes first
# C types whose keyword is an array, and those whose keyword is a list of arrays.
ARRAYS = ("moire_tensor", _PREPARED, "uint8_t *", "int64_t *")
LISTS = ("moire_weight", "moire_quantized", "moire_offsets_output *")


class Indirect(Exception):
    """A call has arrays that need more than their addresses: Torch's dispatcher sees to them."""


class Entry:
    """A C entry: function, workspace twin, argument struct, and which arrays it reads and writes;
    the C types of its keywords are `kinds`. `writers` say how each keyword gets to its place:
    (keyword, function of a _Call, field, at, the same for invoke.cpp).
    """

    def __init__(self, name):
        members = dict(ffi.typeof(f"moire_{name}_args").fields)
        self.groups_at, self.workspace_at = (
            members[field].offset if field in members else 0 for field in ("groups", "workspace")
        )
        self.name = name
        role = functools.partial(lib.moire_field_role, name.encode())
        self.outputs = tuple(f for f in members if role(f.encode()) == lib.MOIRE_ROLE_OUT)
        self.function = getattr(lib, f"moire_{name}")
        self.workspace = getattr(lib, f"moire_{name}_workspace", None)
        self.pointer = ffi.typeof(f"moire_{name}_args *")
        self.struct_size = ffi.sizeof(f"moire_{name}_args")
        self.kinds, self.writers, self.inputs = {}, [], []
        for field, member in members.items():
            if field not in ("struct_size", "workspace", "num_outputs"):  # which nobody gives
                self._add_field(field, member.type.cname, member.offset)

    def _add_field(self, field, kind, at):
        key = field + "_" if field in ("from", "to") else field  # Python's own words
        if kind == "moire_groups":
            self.kinds.update(offsets="int64_t *", num_groups="int64_t", capacity="int64_t")
            self.inputs.append("offsets")
            return
        is_of_scales = field.endswith(("_scales", "_scales_recv")) or self.name == "convert_scales"
        write = _Call.scales if kind == "moire_tensor" and is_of_scales else None
        self._add(key, kind, field, at, write)
        if kind == "moire_weight":
            self._add(f"{key}_layout", "int32_t", field, at + _LAYOUT)
        if kind == _PREPARED:
            self._add(f"{key}_form", "form", field, at + _FORM_AT)
        if kind == "moire_offsets_output *":
            self.kinds.update(outputs_multiplier="form", outputs_no_leading_zero="flags")

    def _add(self, key, kind, field, at, write=None):
        write = write or _WRITERS.get(kind)
        how = write.__name__ if write else _types(kind)
        self.kinds[key] = kind
        if write and field not in self.outputs:
            self.inputs.append(key)
        self.writers.append((key, write or _writer_of_numbers(how), field, at, how))

    def compile(self, module):
        """What call() of invoke.cpp takes for this entry."""
        functions = (self.function, self.workspace or ffi.NULL)
        addresses = (int(ffi.cast("uintptr_t", function)) for function in functions)
        fields = [(key, at, how) for key, _, _, at, how in self.writers]
        return module.entry(*addresses, self.struct_size, self.workspace_at, self.groups_at, fields)


def invoke(name, values, fw, is_direct=False):
    """Runs moire_<name> on the keyword values of its fields, arrays of the kind of `fw`; what is
    no keyword of it is for other entries of the same mapping.

    A direct call, one that Torch's dispatcher has not seen, raises Indirect before anything is run
    where the dispatcher would do more than hand the tensors over.
    """
    if fw is compiled_for:
        code = compiled.call(COMPILED[name], values)
        if code is not None:
            contexts.raise_for(code)
            return
    entry, args, call = _filled(name, values, fw, is_direct)
    context = contexts.current(*fw.place(call.device))
    if entry.workspace is not None:
        needed = ffi.new(_SIZE)
        contexts.raise_for(entry.workspace(context, args, needed))
        if needed[0] != 0:
            memory, address = _scratch(fw, call.device, needed[0])
            call.alive.append(memory)
            _pack_workspace(call.buffer, entry.workspace_at, address, needed[0])
    contexts.raise_for(entry.function(context, args))


def describe(tensor, dtype, *shape):
    """A moire_tensor of these, in memory that nobody reads; dtype is moire_dtype."""
    tensor.data, tensor.dtype = ffi.cast("void *", ALIGNMENT), dtype
    tensor.rank, tensor.shape[0 : len(shape)] = len(shape), shape


def prepared_form(fw, device, dtype, shape, fields):
    """(bytes, p_form) of what prepare_weight makes there of a weight [G, out, in] with such fields.
    Shapes say it, so it is a constant of a graph of torch.compile.
    """
    _, args, _call = _filled("prepare_weight", fields, fw, False)
    describe(args.w.tensor, dtype, *shape)
    found, context = ffi.new(f"{_PREPARED} *"), contexts.current(*fw.place(device))
    contexts.raise_for(lib.moire_prepare_weight_form(context, args, found))
    return found.memory.shape[0], struct.unpack_from(_types("form"), ffi.buffer(found), _FORM_AT)


# As torch.compiler.assume_constant_result has it, which would import the compiler.
prepared_form._dynamo_marked_constant = True


def _scratch(fw, device, size):
    """(memory, where a 256-byte aligned workspace of `size` bytes lies in it)."""
    memory, address = fw.scratch(device, size + ALIGNMENT)
    return memory, address + -address % ALIGNMENT


def _filled(name, values, fw, is_direct):
    """(the entry, its struct, what that refers to)."""
    entry = ENTRIES[name]
    args = ffi.new(entry.pointer)
    args.struct_size = entry.struct_size
    call = _Call(entry, args, values, fw, is_direct)
    for key, write, field, at, _ in entry.writers:
        value = values.get(key)
        if value is not None:
            write(call, field, at, value)
    if entry.groups_at != 0 and values.get("offsets") is not None:
        call.groups(entry.groups_at)
    return entry, args, call


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
        if fw.may_be_read_only and field in self.entry.outputs and not array.flags.writeable:
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

    def offsets_outputs(self, field, at, arrays):
        outputs = ffi.new("moire_offsets_output[]", len(arrays))
        self.alive.append(outputs)
        self.args.outputs, self.args.num_outputs = outputs, len(arrays)
        for name in _OF_OFFSETS:
            numbers = self.values.get(f"{field}_{name}") or ()
            if len(numbers) not in (0, len(arrays)):
                found = f"{field}_{name} has {len(numbers)} numbers"
                raise self._invalid(f"{found}, but there are {len(arrays)} {field}")
            for output, number in zip(outputs, numbers):
                setattr(output, name, number)
        whole, self.buffer = self.buffer, ffi.buffer(outputs)
        for i, array in enumerate(arrays):
            self.tensor(field, i * ffi.sizeof("moire_offsets_output"), array)
        self.buffer = whole

    def vector(self, field, array, dtype, size):
        """The address of a contiguous vector of exactly this dtype and size."""
        array = self._dense(field, array)
        if self.fw.code(array) != DTYPES[dtype] or array.shape != (size,):
            raise self._invalid(f"{field} is {shown(array)}, needs {dtype} [{size}]")
        return self.fw.address(array)

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


def _writer_of_numbers(types):
    """Of one, or of a sequence that begins with an integer and may be empty."""
    pack = struct.Struct(types).pack_into
    if len(types) == 1:
        return lambda call, field, at, value: pack(call.buffer, at, value)
    return lambda call, field, at, values: (
        len(values) and pack(call.buffer, at, int(values[0]), *values[1:])
    )


_WRITERS = {
    "moire_tensor": _Call.tensor,
    "moire_weight": _Call.weight,
    "moire_quantized": _Call.quantized,
    _PREPARED: _Call.tensor,
    "moire_offsets_output *": _Call.offsets_outputs,
    "uint8_t *": _Call.bytes_pointer,
}

# Of every op that moire.h has a struct for, by name.
_STRUCTS = (re.fullmatch(r"moire_(\w+)_args", name) for name in ffi.list_types()[0])
ENTRIES = {found[1]: Entry(found[1]) for found in _STRUCTS if found}

compiled_for = None  # the kind of arrays whose plain calls invoke.cpp makes
compiled = None  # invoke.cpp, as a module
COMPILED = {}  # its entries, by name


def use_compiled(fw):
    """Takes invoke.cpp for Torch's tensors, if that can be."""
    global compiled_for, compiled
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    module = exchange and extension()
    if module is None:
        return

    # Of a context: a pointer is the same number for as long as it is one.
    address_of = functools.cache(lambda pointer: int(ffi.cast("uintptr_t", pointer)))

    def context_on(device):
        return address_of(contexts.current(*fw.place(device)))

    places = context_on, functools.partial(_scratch, fw)
    usual = contexts.settings_now, contexts.settings_now(), torch.get_num_threads
    types = {code: torch.empty(0, dtype=dtype) for dtype, code in fw.codes.items()}
    if module.start(exchange, *fw.types, torch.Tensor.is_neg, *places, *usual, types):
        os.register_at_fork(after_in_child=module.forget)  # contexts, as context.py
        COMPILED.update((name, entry.compile(module)) for name, entry in ENTRIES.items())
        compiled_for, compiled = fw, module
        contexts.calls_of_torch = "invoke.cpp"
