"""Contexts, one per device, thread count or stream, kept from first use on; and settings.

On a CPU the number of threads is torch.get_num_threads() at the time of the call (without Torch:
all cores). Beside a Torch that computes on OpenMP threads, moire runs on the same ones. On a GPU
calls run on Torch's current stream of that device; all its contexts share one device state.
`strict` and `settings` hold for this thread's calls inside the `with` block, backwards included.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import threading
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ._abi import ffi, header_path, lib, library_path, text
from .dtypes import torch
from .errors import error, invalid, unsupported
from .values import dtype_name, flag, integer, wrong

_KINDS = {"cpu": 0, "cuda": 1}
_MOST_THREADS = 4096
calls_of_torch = "cffi"  # or "invoke.cpp": what info() says

_contexts = {}  # (kind, index, threads or stream, strict, implementation, plan_for): context
communicators = weakref.WeakValueDictionary()  # by id: each has contexts of its own
_first_on = {}  # (kind, index, plan_for): the context whose device state the others share
_contexts_lock = threading.Lock()
_is_forked = False


class _Settings(NamedTuple):
    num_threads: Any = None  # None: torch.get_num_threads()
    strict: bool = False
    implementation: Any = None
    plan_for: Any = None  # a GPU that need not be here: calls can be explained, not run
    recording: Any = None  # a Recording while explain() runs
    communicator: Any = None  # whose rank this thread is
    keeps_gradients: bool = False  # inside a backward pass that leaves none anywhere


_DEFAULT = _Settings()


class Recording(NamedTuple):
    """A running explain()."""

    found: Any  # the Explanation, but for the steps
    contexts: dict  # by (kind, index): the explaining context, which holds the steps
    undo: list  # what calls changed that were not run: (object, its attributes before)


class _Thread(threading.local):
    def __init__(self):
        self.settings = None  # of the block that the thread is in
        self.mark = object()  # of this thread alone, which an ident would not be for long


this_thread = _Thread()


class _OfTorchsThread:
    """The settings of this thread, and of the threads on which autograd runs its backward passes on
    GPUs: Torch carries what is stashed here over to those. Where no GPU is used nothing is stashed:
    a thread that ends takes the GIL for it, and ends the process if Python ends just then.
    """

    _KEY = "moire.settings"

    def __init__(self):
        # Torch gives a stashed object's reference back when another takes its place; versions
        # before 2.13 (2.11 was seen) take none of their own.
        probe = object()
        before = sys.getrefcount(probe)
        torch._C._stash_obj_in_tls("moire.probe", probe)
        self._needs_reference = sys.getrefcount(probe) <= before
        if self._needs_reference:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))

    def get(self):
        """Those of the innermost block that this thread is in, or was carried over from."""
        value = this_thread.settings
        if value is None:
            return self._stashed() or _DEFAULT
        self._give_gpus(value)
        return value

    def set(self, value):
        """Returns what reset() takes at the end of the block."""
        before = this_thread.settings, self._stashed()
        this_thread.settings = value
        self._give_gpus(value)  # or get() does
        return before

    def reset(self, before):
        this_thread.settings, stashed = before
        if self._stashed() is not stashed:
            self._stash(stashed or _DEFAULT)

    def _give_gpus(self, value):
        # NOTE: Dynamo of torch 2.4 miscompiles a get() that asks this itself: it returns None.
        if torch.cuda.is_initialized() and self._stashed() is not value:
            self._stash(value)

    def _stashed(self):
        has_some = torch._C._is_key_in_tls(self._KEY)
        return torch._C._get_obj_in_tls(self._KEY) if has_some else None

    def _stash(self, value):
        if self._needs_reference:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        torch._C._stash_obj_in_tls(self._KEY, value)


_settings = _OfTorchsThread() if torch is not None else ContextVar("settings", default=_DEFAULT)
settings_now = _settings.get


def raise_for(code):
    """Turns a code of the library into the exception that belongs to it."""
    if code != 0:
        raise error(code, text(lib.moire_last_error()))


def output(kind, function, *args):
    """What a C function writes where its last argument, a pointer to this type, points to."""
    found = ffi.new(f"{kind} *")
    raise_for(function(*args, found))
    return found[0]


def current(kind="cpu", index=0):
    """The context that a call on this device runs on, as a cdata pointer."""
    now = _settings.get()
    communicator = now.communicator
    if now.plan_for is not None:  # whatever device the tensors are on
        kind, index, where, communicator = "cuda", 0, 0, None
    elif kind == "cuda":
        where = _current_stream(index)
    else:
        where = now.num_threads or (torch.get_num_threads() if torch is not None else 0)
    key = (kind, index, where, now.strict, now.implementation, now.plan_for)
    made = _contexts if communicator is None else communicator.contexts_of_calls(where)
    context = made.get(key) or _create(key, made, communicator)
    if now.recording is None:
        return context
    explaining = now.recording.contexts
    if (kind, index) not in explaining:
        explaining[kind, index] = output("moire_context *", lib.moire_context_explaining, context)
    return explaining[kind, index]


def _openmp_of_torch():
    """GOMP_parallel of the OpenMP run-time that Torch is linked against; NULL where there is none.

    Its threads spin for milliseconds after each of Torch's operations, on the cores of other pools.
    """
    # NOTE: an OpenMP run-time that was used before a fork waits for ever for the parent's threads.
    if torch is None or _is_forked or not torch.backends.openmp.is_available():
        return ffi.NULL
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return ffi.NULL
    return ffi.cast("void (*)(void (*)(void *), void *, unsigned, unsigned)", address)


def _create(key, contexts, communicator):
    kind, index, where, strict, implementation, plan_for = key
    if kind not in _KINDS:
        raise invalid(f"context: tensors are on {kind}:{index}; moire runs on cpu and cuda")
    options = ffi.new("moire_context_options *")
    options.struct_size = ffi.sizeof("moire_context_options")
    options.device, options.index, options.strict = _KINDS[kind], index, int(strict)
    named = [ffi.new("char[]", n.encode()) if n else ffi.NULL for n in (implementation, plan_for)]
    options.implementation, options.plan_for = named
    if kind == "cpu":
        options.num_threads, options.parallel = where, _openmp_of_torch()
    else:
        options.stream = ffi.cast("void *", where)
    if communicator is not None:
        options.communicator = communicator.pointer
    with _contexts_lock:
        if key not in contexts:
            # Shared, a context for a stream that is being captured needs nothing of the device. A
            # rank's share its own state, or another's call would raise what its kernels find.
            first_on = _first_on if communicator is None else contexts
            options.sharing = first_on.get((kind, index, plan_for), ffi.NULL)
            contexts[key] = output("moire_context *", lib.moire_context_create, options)
            if kind == "cuda" and communicator is None:
                _first_on.setdefault((kind, index, plan_for), contexts[key])
        return contexts[key]


def make_first_on(index):
    """The context that others of a CUDA device share, of calls without a communicator: made ahead,
    for what it allocates may wait for all kernels there, of which a rank's wait for other ranks.
    """
    if ("cuda", index, None) not in _first_on:
        _create(("cuda", index, _current_stream(index), False, None, None), _contexts, None)


def _forget_contexts_of_parent():
    # NOTE: they stay as they are: to destroy one would wait for ever for threads, which a forked
    # child has not got.
    global _contexts_lock, _is_forked
    _is_forked = True
    _contexts.clear()
    _first_on.clear()
    _contexts_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_contexts_of_parent)


def settings(
    *,
    num_threads: Optional[int] = None,
    strict: Optional[bool] = None,
    implementation: Optional[str] = None,
    plan_for: Optional[str] = None,
    communicator: Optional[Any] = None,
) -> contextlib.AbstractContextManager[None]:
    """Inside the block, this thread's calls use these values; what is None stays as it was.

    `plan_for` names a GPU that need not be here ("sm80", "sm90", ...): `explain` says what it would
    run, of tensors on any device, and calls that would run are refused. `communicator` is the rank
    whose calls of moire.h these are.
    """
    given = {}
    if num_threads is not None:
        given["num_threads"] = integer("settings: num_threads", num_threads, 1, _MOST_THREADS)
    if strict is not None:
        given["strict"] = flag("settings: strict", strict)
    for key, value, needs in (
        ("implementation", implementation, "a name such as 'cpu'"),
        ("plan_for", plan_for, "the name of a GPU such as 'sm90'"),
    ):
        if value is not None:
            if not (isinstance(value, str) and re.fullmatch("[ -~]+", value)):
                raise wrong(f"settings: {key}", value, needs)
            given[key] = value
    if communicator is not None:
        if not hasattr(communicator, "contexts_of_calls"):
            raise wrong("settings: communicator", communicator, "a moire.Communicator")
        given["communicator"] = communicator
    return changed(**given)


@contextlib.contextmanager
def changed(**values):
    """Inside the block, this thread's settings have these values."""
    token = _settings.set(_settings.get()._replace(**values))
    try:
        yield
    finally:
        _settings.reset(token)


def strict() -> contextlib.AbstractContextManager[None]:
    """Inside the block, a call that would not run the device's fastest fails, and says why."""
    return settings(strict=True)


def is_explaining():
    """Whether values of arrays mean nothing now, because the steps that write them do not run."""
    if torch is not None and torch.compiler.is_compiling():
        return False
    return _settings.get().recording is not None


def note_saved(kept, made):
    """Tells a running explain() what a forward keeps, by name; by reference, if it was not made."""
    if not is_explaining():
        return
    saved = _settings.get().recording.found.saved
    for name, value in kept.items():
        for tensor in value if isinstance(value, list) else [value]:
            if tensor is not None:
                entry = {"name": name, "dtype": dtype_name(tensor), "shape": list(tensor.shape)}
                saved.append({**entry, "bytes": tensor.nbytes, "by_reference": name not in made})


def note_weight(name, copies):
    """Tells a running explain() that a call was given copies of a weight, and their bytes."""
    if is_explaining():
        _settings.get().recording.found.weights[name] = copies.nbytes


def note_window(num_bytes):
    """Tells a running explain() what a call takes of a communicator's window."""
    found = _settings.get().recording.found
    found.window_bytes = max(found.window_bytes, num_bytes)


def note_not_fused(what, reason):
    """Tells a running explain() that modules run one by one; inside strict() it is an error."""
    if torch.compiler.is_compiling():
        return
    now = _settings.get()
    if now.strict:
        raise unsupported(f"{what} would not be one fused call, as strict asks: {reason}")
    if now.recording is not None:
        now.recording.found.not_fused.append(f"{what}: {reason}")


def check_backward(grads):
    """That no incoming gradient is a batch, and that explain() saw the backward pass begin that is
    running: what such a pass leaves in `.grad`, no one could take back.
    """
    for grad in grads if not torch.compiler.is_compiling() else ():
        is_usual = grad is None or torch._C._has_storage(grad)  # sooner found than the rest
        if not is_usual and "Batched" in str(torch._C._dispatch_keys(grad)):
            raise unsupported(
                "backward: the incoming gradients are a batch (is_grads_batched=True, "
                "vectorize=True, torch.func), which moire has no rules for; give one at a time"
            )
    if is_explaining() and not _settings.get().keeps_gradients:
        raise unsupported(
            "explain: a backward pass was begun in a way that cannot be seen, and would accumulate "
            "gradients that were never computed; begin it with Tensor.backward or "
            "torch.autograd.grad"
        )


def restored_after_explaining(target, *names):
    """Says that a call will change these attributes of `target`: where calls are only explained,
    explain() puts them back.
    """
    if is_explaining():
        values = {name: getattr(target, name) for name in names}
        _settings.get().recording.undo.append((target, values))


def check() -> None:
    """Waits for the work of every context of this process and raises the first error that a device
    reported, or InvalidArgument if infinities or NaN were quantised since the last check.

    On a thread that is a rank of Communicator.threads() it leaves out those that other threads are,
    and what runs on their GPUs in streams that are not this rank's: they may be waiting for it, and
    what they find is theirs to raise.
    """
    ranks = [rank for ref in communicators.valuerefs() if (rank := ref())]
    for context in _checked_here(ranks):  # which stay while these do
        raise_for(lib.moire_context_check(context))


def _checked_here(ranks):
    """The contexts that check() waits for on this thread, of those without a rank and of these."""
    own = [rank for rank in ranks if this_thread.mark in rank.threads_of_calls]
    made_here = {rank.made_with for rank in own}
    others = {rank for rank in ranks if rank.made_with in made_here}.difference(own)
    gpus = {key[:2] for rank in others for key in _on_cuda(rank.contexts)}
    streams = {key[:3] for rank in own for key in _on_cuda(rank.contexts)}
    streams.update((*gpu, _current_stream(gpu[1])) for gpu in gpus)
    # Ranks that have been, closed, may have made calls in a stream that is another thread's now.
    made = _contexts, *(rank.contexts for rank in ranks if rank not in others)
    made = [item for contexts in made for item in list(contexts.items())]
    return [c for k, c in made if k is None or k[:2] not in gpus or k[:3] in streams]


def _on_cuda(made):
    return [key for key in list(made) if key is not None and key[0] == "cuda"]


def _current_stream(index):
    """Torch's; before it is initialised no tensor is there yet."""
    return torch._C._cuda_getCurrentRawStream(index) if torch.cuda.is_initialized() else 0


def info() -> dict[str, Any]:
    """Version, compiler and backends of the library, where it is, the devices that it can use, and
    what makes `calls_of_torch` (on plain tensors): "invoke.cpp" or "cffi"; as a dict.
    """
    found = json.loads(text(lib.moire_build_info()))
    found.update(library=str(library_path), header=str(header_path))
    found.update(calls_of_torch=calls_of_torch, devices=[])
    for kind in _KINDS.values():
        for index in range(output("int32_t", lib.moire_device_count, kind)):
            found["devices"].append(json.loads(sized_text(lib.moire_device_info, kind, index)))
    return found


def sized_text(function, *args):
    """Calls a C function that fills a buffer of a size it first has to be asked for."""
    size = output("size_t", function, *args, ffi.NULL, 0)
    buffer = ffi.new("char[]", size)
    raise_for(function(*args, buffer, size, ffi.NULL))
    return text(buffer)
