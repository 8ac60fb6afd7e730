"""The two kinds of arrays that functions take, NumPy's and Torch's, behind one small interface."""

import contextlib

import numpy as np

try:
    import ml_dtypes
except ModuleNotFoundError:
    ml_dtypes = None

from . import invoke, tapes
from .context import is_explaining, settings_now
from .dtypes import COMPILES_WHOLE_GRAPHS, DTYPES, torch
from .errors import invalid, unsupported
from .values import shown, wrong

if torch is not None:
    from torch._C import _is_any_autocast_enabled
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch.autograd import forward_ad
    from torch.compiler import is_compiling

    from . import ops

    _STRIDED = torch.strided

_MEANS = "moire_dtype"
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = {DTYPES[name] for name in (*COMPUTE_DTYPES, "float64")}


# Numpy and Torch are namespaces: nothing is an instance of them, and their functions have no self.


class Numpy:
    """NumPy arrays; BF16 is ml_dtypes.bfloat16, never a view of uint16: no dtype is guessed."""

    kind, kind_name = np.ndarray, "a NumPy array"
    types = (np.ndarray,)  # the usual ones, of which nothing more need be asked
    codes = {}  # of dtypes that say all; code() is asked of others
    may_be_read_only = True
    float32, int32, int64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
    contiguous, copy, concatenate = np.ascontiguousarray, np.copy, np.concatenate
    from_numpy = np.asarray

    # ---- what a moire_tensor needs to know of an array

    def address(array):
        return array.__array_interface__["data"][0]

    def device(array):
        return "cpu"

    def place(device):
        """(kind, index) of a device, or of none."""
        return "cpu", 0

    def code(array):
        dtype = array.dtype
        if dtype.metadata is not None:
            return DTYPES.get(dtype.metadata.get(_MEANS, dtype.name))
        return DTYPES.get(dtype.name) if dtype.isnative else None

    def is_lazy(array):
        return False

    def is_contiguous(array):
        return array.flags.c_contiguous

    def row_stride(array):
        """Elements between rows; None where no moire_tensor can say it."""
        strides = [divmod(stride, array.itemsize) for stride in array.strides]
        if any(rest for _, rest in strides):  # a field of a packed struct
            return None
        return _row_stride(array.shape, [elements for elements, _ in strides])

    def scratch(device, size):
        """(memory that nobody has written, its address)."""
        memory = np.empty(size, np.uint8)
        return memory, Numpy.address(memory)

    # ---- what functions do with arrays

    def run(name, fields):
        """The C entry on what of the mapping are fields of its struct."""
        invoke.invoke(name, fields, Numpy)

    def empty(like, shape, dtype):
        return np.empty(shape, dtype)

    def check(call, name, array):
        """What every array of a call has to be, besides of one kind."""
        if array.dtype.hasobject or isinstance(array, np.ma.MaskedArray):
            found = "of objects" if array.dtype.hasobject else "with a mask, which nothing reads"
            raise invalid(
                f"{call}: {name} is a NumPy array {found}, must be a plain one of numbers"
            )

    def check_beside(call, **arrays):
        """That no array of a call is where others are not."""

    def written(*arrays):
        """Says that a caller's buffers were overwritten."""

    def cast(array, dtype):
        return array if array is None or dtype is None else array.astype(dtype, copy=False)

    def compute_dtype(name, dtype):
        """A type that products are computed in, or InvalidArgument."""
        with contextlib.suppress(TypeError):
            if dtype is not None and np.dtype(dtype).name in COMPUTE_DTYPES:
                return np.dtype(dtype)
        raise wrong(name, dtype, "the dtype float32, float16 or ml_dtypes.bfloat16")

    def integers(values):
        return np.asarray(values, np.int64)

    def dtype(name):
        """Of that name; without ml_dtypes FP8 types are uint8 that says which of them it is."""
        if ml_dtypes is None and name == "bfloat16":
            raise unsupported("bfloat16 is a type of ml_dtypes, which NumPy needs for it")
        if ml_dtypes is None and name.startswith("float8"):
            return np.dtype(np.uint8, metadata={_MEANS: name})
        return np.dtype(name)

    def with_memory_of_its_own(array):
        """Itself, or a copy if it is a view of more; NumPy pickles what a view shows."""
        return array

    detached = with_memory_of_its_own

    def stand_in(like, shape, dtype):
        """An array of this shape and type that takes no memory and is not read."""
        return np.broadcast_to(np.zeros((), dtype), shape)


class Torch:
    """Torch tensors; calls go through torch.ops.moire where anybody watches or rewrites ops."""

    if torch is not None:
        kind, kind_name = torch.Tensor, "a Torch tensor"
        types, may_be_read_only = (torch.Tensor, torch.nn.Parameter), False
        codes = {getattr(torch, n): code for n, code in DTYPES.items() if hasattr(torch, n)}
        address, device = torch.Tensor.data_ptr, torch.Tensor.device.__get__
        copy, from_numpy = torch.clone, torch.from_numpy
        _places = {None: ("cpu", 0)}
        float32, int32, int64 = torch.float32, torch.int32, torch.int64
        compute_dtypes = tuple(getattr(torch, name) for name in COMPUTE_DTYPES)

    # ---- what a moire_tensor needs to know of an array

    def is_lazy(array):
        """Whether memory is not what the tensor shows: it is to be negated when it is read (an
        imaginary part may be), or there is none, for zeros.
        """
        return array.is_neg() or array._is_zerotensor()

    def is_contiguous(array):
        """Whether its values lie in memory in their order, and as they are."""
        return array.is_contiguous() and not Torch.is_lazy(array)

    def is_plain(array):
        """Whether its memory is all there is to it."""
        return type(array) in Torch.types and (array.is_cpu or array.is_cuda)

    def place(device):
        place = Torch._places.get(device)
        if place is None:  # kept, because asking a device for its type takes longer than most calls
            place = Torch._places[device] = (device.type, device.index or 0)
        return place

    def code(array):
        return Torch.codes.get(array.dtype)

    def row_stride(array):
        return None if Torch.is_lazy(array) else _row_stride(array.shape, array.stride())

    def contiguous(array):
        if not is_compiling() and array._is_zerotensor():
            return torch.zeros(array.shape, dtype=array.dtype, device=array.device)
        return array.resolve_conj().resolve_neg().contiguous()

    def scratch(device, size):
        memory = torch.UntypedStorage(size, device=device)
        return memory, memory.data_ptr()

    # ---- what functions do with arrays

    def run(name, fields):
        try:
            if not ops.is_dispatching():
                invoke.invoke(name, fields, Torch, is_direct=True)
                tapes.ran(name, fields)
                return
        except invoke.Indirect:
            pass
        ops.dispatch(name, fields)

    def is_watched():
        """Whether a call has to be made step by step, for somebody sees or changes what it does."""
        return ops.is_dispatching() or forward_ad._current_level >= 0 or settings_now().recording

    def autocast_dtypes():
        """What torch.autocast makes of the operands on each device; None where it is off."""
        if not _is_any_autocast_enabled():
            return None
        is_on, dtype_on = torch.is_autocast_enabled, torch.get_autocast_dtype
        return [dtype_on(device) if is_on(device) else None for device in ("cpu", "cuda")]

    def concatenate(arrays, join=torch and torch.cat):
        """By torch.cat or torch.stack, which autocast has refuse other 16 bits than its own."""
        is_on, device = _is_any_autocast_enabled() and not arrays[0].is_meta, arrays[0].device.type
        with torch.autocast(device, enabled=False) if is_on else contextlib.nullcontext():
            return join(arrays)

    def empty(like, shape, dtype):
        return tapes.made(like.new_empty(shape, dtype=dtype))

    def check(call, name, array):
        if array.layout is not _STRIDED or array.is_nested:
            if hasattr(array, "kind_name"):
                raise invalid(
                    f"{call}: {name} is {array.kind_name}, must be a Torch tensor of values; "
                    f"dequantize() gives one"
                )
            found = "nested" if array.is_nested else str(array.layout)
            raise invalid(f"{call}: {name} is a {found} tensor, must be a dense (strided) one")
        if type(array) not in Torch.types and hasattr(array, "device_mesh"):
            raise unsupported(
                f"{call}: {name} is a DTensor, of which this process has a part, and moire takes "
                f"whole tensors; apply fully_shard to the module whose forward is called (a "
                f"GroupedMLP, not its fc1 or fc2), or give full_tensor()"
            )
        # Without this test tangents would be dropped, and zeros look like derivatives.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None:
            raise unsupported(
                f"{call}: {name} carries a forward-mode tangent (torch.func.jvp, "
                f"torch.autograd.forward_ad), and moire differentiates backward only; use "
                f"torch.autograd.grad or backward()"
            )
        if not is_compiling() and is_functorch_wrapped_tensor(array):
            raise unsupported(
                f"{call}: {name} is inside a transform of torch.func (vmap, grad, ...), which "
                f"moire has no rules for; instead of vmap give the batch as groups, instead of "
                f"grad use torch.autograd.grad or backward()"
            )

    def check_beside(call, **arrays):
        if not is_compiling():
            ops.check_beside(call, arrays)

    def written(*arrays):
        """Says that buffers were overwritten, so that autograd refuses what needed them."""
        tapes.spoil()
        if is_compiling() or settings_now().recording is not None:  # then they were not
            return
        for array in arrays:
            if array is not None and not array.is_inference():
                torch.autograd.graph.increment_version(array)

    def cast(array, dtype):
        if array is None or dtype is None or array.dtype == dtype:
            return array
        return tapes.converted(array, array.to(dtype))

    def compute_dtype(name, dtype):
        if isinstance(dtype, torch.dtype) and dtype in Torch.compute_dtypes:
            return dtype
        raise wrong(name, dtype, "torch.float32, torch.bfloat16 or torch.float16")

    def integers(values):
        return torch.tensor(values, dtype=torch.int64)

    def dtype(name):
        return getattr(torch, name)

    def with_memory_of_its_own(array):
        if array.is_meta or array.untyped_storage().nbytes() == array.nbytes:
            return array
        return array.clone()

    def stand_in(like, shape, dtype):
        return like.new_zeros((1,) * len(shape), dtype=dtype).expand(shape)

    def detached(array):
        return array.detach()


_KINDS = (Numpy,) if torch is None else (Torch, Numpy)
DEFAULT = _KINDS[0]  # for values that come as plain lists
if torch is not None:
    ops.define(Torch)
    invoke.use_compiled(Torch)
if torch is not None and not COMPILES_WHOLE_GRAPHS:
    # An older torch.compile fails on ops that write into lists of tensors (before 2.7), or on what
    # autograd functions keep. There ops run as they are, between graphs; where a whole graph is
    # asked for, the error shows this name.
    Torch.run.__qualname__ = "moire's ops, which are part of a graph since torch 2.11"
    Torch.run = torch.compiler.disable(Torch.run)


def _row_stride(shape, strides):
    if len(shape) not in (2, 3) or 0 in shape or strides[-1] != 1 or strides[-2] < shape[-1]:
        return None
    if len(shape) == 3 and strides[0] != shape[1] * strides[1]:
        return None
    return strides[-2]


def framework_of(call, required, optional=None):
    """Numpy or Torch: what the first array of a call is, and what all others have to be.

    Both are dicts of name to array; optional ones may be None. Everything that a public function
    is given as an array passes here.
    """
    name, first = next(iter(required.items()))
    framework = _KINDS[0] if isinstance(first, _KINDS[0].kind) else _KINDS[-1]
    if not isinstance(first, framework.kind):
        raise wrong(f"{call}: {name}", first, " or ".join(fw.kind_name for fw in _KINDS))
    for name, array in required.items():
        check_array(framework, call, name, array)
    for name, array in (optional or {}).items():
        if array is not None:
            check_array(framework, call, name, array)
    return framework


def check_array(fw, call, name, array, because="as the first array is"):
    """One more array of a call whose others are of kind `fw`."""
    if type(array) not in fw.types and not isinstance(array, fw.kind):
        raise wrong(f"{call}: {name}", array, f"{fw.kind_name} {because}")
    fw.check(call, name, array)


def check_rank(call, name, array, rank):
    if array.ndim != rank:
        raise invalid(f"{call}: {name} is {list(array.shape)}, must have rank {rank}")
    return array


def as_fp32(fw, call, name, array):
    """An optional array of floats (probabilities, scales) as FP32."""
    if array is None or array.dtype == fw.float32:
        return array
    return fw.cast(check_floats(fw, call, name, array), fw.float32)


def check_floats(fw, call, name, array):
    """What may be converted to FP32, BF16 or FP16."""
    if fw.code(array) not in _FLOATS:
        raise invalid(f"{call}: {name} is {shown(array)}, must be of a floating-point type")
    return array


def empty_indices(fw, like, shape, dtype):
    """Memory for indices; where calls are only explained, zeros, which index something."""
    made = fw.empty(like, shape, dtype)
    if is_explaining():
        made[...] = 0
    return made


def assign(target, source, non_blocking=False):
    """target[...] = source, unless calls are only explained; of Torch's devices as copy_() does."""
    if is_explaining():
        return
    if non_blocking and isinstance(target, torch.Tensor):
        target.copy_(source, non_blocking=True)
    else:
        target[...] = source


def on_device(tensor, device, non_blocking):
    """There; at once where a CPU is to read it, whatever non_blocking says."""
    return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")


def version_of(array):
    """Torch's count of the writes into an array; None where nobody counts, as in a graph."""
    if array is None or is_compiling() or array.is_inference():
        return None
    return array._version


def was_written(array, since):
    """Whether it was, as far as anybody counted, `since` version_of() said that."""
    now = version_of(array)
    return now != since and None not in (now, since)
