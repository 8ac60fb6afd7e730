"""Ranks that reach each other's memory: what dispatch and combine of moire.h run on."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from . import context as contexts
from ._abi import ffi, lib
from .arrays import DEFAULT
from .dtypes import AnyArray, Device, torch
from .errors import invalid, unsupported
from .values import integer, torch_device, wrong

_DTYPES = (np.dtype, type) if torch is None else (torch.dtype,)


class OfThisProcess:
    """What a copied model has as well, and a pickled one cannot have."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise unsupported(
            f"{type(self).__name__}: its ranks are of this process and cannot be pickled; save the "
            "state_dict of the layer, and build it anew"
        )


class Communicator(OfThisProcess, contextlib.AbstractContextManager):
    """One rank of several: `rank` of `size`, with a `window` of bytes that the others reach while
    this rank is in `dispatch` or `combine`. `with communicator:` closes it at the end, which others
    that wait for this rank are told at once, instead of at the end of timeout_ms.

    moire.ExpertParallel and moire.nn.MoE take one as their group. Calls of moire.h are those of
    this rank inside moire.settings(communicator=...); divide() has tensors of the window for them.
    On CUDA they run on Torch's current stream, and what their kernels find, this rank's next call
    or moire.check() raises.
    """

    def __init__(self, pointer: Any, ranks_there: int = 1, made_with: Any = None) -> None:
        """ranks_there: how many are on its device. made_with: what those of one threads() share."""
        self.pointer, self._process = pointer, os.getpid()
        found = [ffi.new("int32_t *") for _ in range(3)]
        contexts.raise_for(lib.moire_communicator_rank(pointer, *found))
        self.rank, self.size, index = (number[0] for number in found)
        self.made_with, self.threads_of_calls = made_with or object(), set()  # marks of context.py
        is_on_cuda = index >= 0
        self._shares_device = is_on_cuda and ranks_there > 1
        options, key = ffi.new("moire_context_options *"), None
        options.struct_size = ffi.sizeof("moire_context_options")
        options.num_threads, options.communicator = 1, pointer
        if is_on_cuda:
            options.device, options.index = lib.MOIRE_CUDA, index
            key = ("cuda", index, None)  # the rank's others share its device state
            contexts.make_first_on(index)
        # A rank's memory stays while it has a context. So those go when the last view has gone.
        keeper = contexts.output("moire_context *", lib.moire_context_create, options)
        self.contexts = {key: keeper}  # as those in context.py
        data, num_bytes = ffi.new("void **"), ffi.new("size_t *")
        contexts.raise_for(lib.moire_communicator_window(pointer, data, num_bytes))
        self._meets_threads = is_on_cuda and made_with is not None and self.size > 1
        gone = functools.partial(_gone, self.contexts, self._process, self._meets_threads)
        held = ffi.gc(data[0], gone)
        if not is_on_cuda:
            window = np.frombuffer(ffi.buffer(held, max(num_bytes[0], 1)), np.uint8)
            self.window: AnyArray = DEFAULT.from_numpy(window[: num_bytes[0]])
        else:
            device = torch.device("cuda", index)
            self.window = torch.as_tensor(_OnDevice(held, num_bytes[0]), device=device)
        self._closed = weakref.finalize(self, lib.moire_communicator_destroy, pointer)
        contexts.communicators[id(self)] = self

    @classmethod
    def threads(
        cls,
        num_ranks: int,
        window_bytes: int,
        *,
        timeout_ms: int = 0,
        devices: Optional[Sequence[Device]] = None,
        num_multiprocessors: int = 0,
    ) -> list[Communicator]:
        """Ranks that are threads of this process: one for each, rank 0 first. They are on the CPU,
        or each on one of `devices`, of CUDA, of which several may be the same: ranks that share one
        wait for each other there, and each needs a stream of its own. A call waits timeout_ms for
        another rank, ten minutes if it is 0. On CUDA its rows are moved by num_multiprocessors,
        which leaves the others to what runs beside it; all if it is 0.
        """
        call = "Communicator.threads"
        options = _options(call, window_bytes, timeout_ms, num_multiprocessors, devices is not None)
        options.num_ranks = integer(f"{call}: num_ranks", num_ranks, 1, 1024)
        places = [None] * options.num_ranks
        if devices is not None:
            places = _cuda_devices(call, options.num_ranks, devices)
            indices = ffi.new("int32_t[]", [place.index for place in places])
            options.indices = indices
        _give_back()
        made = ffi.new("moire_communicator *[]", options.num_ranks)
        contexts.raise_for(lib.moire_communicator_threads(options, made))
        made_with = object()
        return [cls(pointer, places.count(at), made_with) for pointer, at in zip(made, places)]

    @classmethod
    def from_process_group(
        cls,
        process_group: Optional[Any] = None,
        *,
        window_bytes: int,
        timeout_ms: int = 0,
        num_multiprocessors: int = 0,
    ) -> Communicator:
        """This rank of a torch.distributed process group (None: the default one) with a backend
        nccl, on Torch's current CUDA device: a call of all its ranks. They are connected anew, by
        NCCL since 2.29.2; the group may go. The numbers are those of threads().
        """
        call = "Communicator.from_process_group"
        options = _options(call, window_bytes, timeout_ms, num_multiprocessors, on_cuda=True)
        from .process_groups import nccl_ranks  # which needs Torch

        rank, size, nccl_id = nccl_ranks(call, process_group, options.window_bytes)
        indices = ffi.new("int32_t[]", [torch.cuda.current_device()])
        nccl_id = ffi.from_buffer(nccl_id)
        options.rank, options.num_ranks = rank, size
        options.indices, options.nccl_id = indices, nccl_id
        return cls._of_nccl(options)

    @classmethod
    def from_nccl(
        cls, comm: int, *, window_bytes: int, timeout_ms: int = 0, num_multiprocessors: int = 0
    ) -> Communicator:
        """This rank of an ncclComm_t of NCCL since 2.29.2, whose address is `comm`, on its device:
        a call of all its ranks, with the same window_bytes. The numbers are those of threads().

        The ncclComm_t stays the caller's, who destroys it when the Communicator, the layers that
        have it and the last tensor of its window have gone: only then this rank's memory, which it
        knows, is given back. close() alone gives nothing back.
        """
        call = "Communicator.from_nccl"
        options = _options(call, window_bytes, timeout_ms, num_multiprocessors, on_cuda=True)
        name = f"{call}: comm, the address of an ncclComm_t,"
        options.nccl_comm = ffi.cast("void *", integer(name, comm, 1, 2**64 - 1))
        return cls._of_nccl(options)

    @classmethod
    def _of_nccl(cls, options):
        return cls(contexts.output("moire_communicator *", lib.moire_communicator_nccl, options))

    def contexts_of_calls(self, stream: int) -> dict:
        """Those that its calls run on; an error where they cannot."""
        is_forked = os.getpid() != self._process
        if is_forked or not self._closed.alive:
            found = "is of the process that forked this one" if is_forked else "is closed"
            raise invalid(f"communicator: rank {self.rank} of {self.size} {found}")
        if stream == 0 and self._shares_device and not contexts.is_explaining():
            raise invalid(
                f"communicator: rank {self.rank} of {self.size} calls on the default stream of "
                f"{self.window.device}, which other ranks share, where its call might wait for one "
                "behind it; needs a stream of its own: with torch.cuda.stream(...)"
            )
        self.threads_of_calls.add(contexts.this_thread.mark)
        return self.contexts

    def divide(
        self, *parts: tuple[tuple[int, ...], Any], half: Optional[int] = None
    ) -> list[AnyArray]:
        """A tensor for each (shape, dtype), one behind the other from the window's beginning, or
        that of one of its halves (0 or 1): the same parts lie at the same place on every rank.
        """
        places, end = [], 0
        for shape, dtype in parts:
            elements = math.prod(integer("communicator: a size", n) for n in shape)
            if not isinstance(dtype, _DTYPES):
                raise wrong("communicator: a dtype", dtype, f"a {_DTYPES[0].__module__}.dtype")
            size = elements * self.window[:0].view(dtype).itemsize
            places.append((slice(end, end + size), dtype, shape))
            end += size + -size % 256
        window, needed = self.window, end if half is None else 2 * end
        if half is not None:
            size = len(window) // 512 * 256
            window = window[integer("communicator: half", half, 0, 1) * size :][:size]
        if contexts.is_explaining():  # how large it has to be is what is asked
            contexts.note_window(needed)
            window = np.empty(end, np.uint8) if torch is None else window.new_empty(end)
        if end > len(window):
            raise invalid(
                f"communicator: the window has {len(self.window):,} bytes, needs {needed:,} for "
                + ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in parts)
            )
        return [window[place].view(dtype).reshape(shape) for place, dtype, shape in places]

    def close(self) -> None:
        """This rank leaves: calls of the others fail from now on, at once. Its window stays."""
        self._closed()
        _give_back()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._closed.alive else ", closed"
        return f"Communicator(rank {self.rank} of {self.size}, {len(self.window):,} bytes{state})"


class _OnDevice:
    """Memory of a CUDA device, which Torch takes with all that keeps it."""

    def __init__(self, held, num_bytes):
        address = int(ffi.cast("uintptr_t", held))
        says = {"version": 2, "shape": (num_bytes,), "typestr": "|u1", "data": (address, False)}
        self.held, self.__cuda_array_interface__ = held, says


def _options(call, window_bytes, timeout_ms, num_multiprocessors, on_cuda):
    options = ffi.new("moire_communicator_options *")
    options.struct_size = ffi.sizeof("moire_communicator_options")
    options.window_bytes = integer(f"{call}: window_bytes", window_bytes)
    options.timeout_ms = integer(f"{call}: timeout_ms", timeout_ms)
    name = f"{call}: num_multiprocessors"
    options.num_multiprocessors = integer(name, num_multiprocessors, 0, 2**31 - 1)
    if on_cuda and torch is None:
        raise invalid(f"{call}: windows of CUDA are tensors of Torch, which is not installed")
    if on_cuda:  # where nothing has no address
        options.device, options.window_bytes = lib.MOIRE_CUDA, max(options.window_bytes, 1)
    return options


def _cuda_devices(call, num_ranks, devices):
    """A torch.device with its index for each rank."""
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise wrong(f"{call}: devices", devices, "a list of CUDA devices, one for each rank")
    if len(devices) != num_ranks:
        raise invalid(f"{call}: devices has {len(devices)}, needs {num_ranks}, one for each rank")
    places = []
    for rank, device in enumerate(devices):
        name = f"{call}: devices[{rank}]"
        if isinstance(device, int):
            device = f"cuda:{integer(name, device)}"
        places.append(torch_device(name, device))
        if places[-1].type != "cuda":
            raise invalid(f"{name} is {device}, must be one of CUDA; without devices it is the CPU")
    if not torch.cuda.is_available():
        raise unsupported(f"{call}: devices are given, but Torch finds none of CUDA")
    current = torch.cuda.current_device()
    return [torch.device("cuda", current) if p.index is None else p for p in places]


_kept = []  # contexts of ranks that have gone, as _gone says
# NOTE: cffi looks a function up under a lock, which the thread may hold on which the garbage
# collector comes to _gone: it would wait for itself.
_destroy_context = lib.moire_context_destroy


def _gone(contexts_of_calls, process, meets_threads, data):
    """The last view of a rank's window has gone, which the garbage collector may have found on any
    thread. Giving back memory that GPUs reach waits for all of them: that of ranks that are threads
    is kept while one of their kernels may be waiting for a rank whose thread this is.
    """
    # NOTE: a forked child has its parent's memory and none of its threads, and leaves it alone; so
    # does an interpreter that ends, whose modules are empty.
    if getattr(os, "getpid", int)() != process:
        return
    if meets_threads:
        _kept.append(contexts_of_calls)
        _give_back()
    else:
        _destroy(contexts_of_calls)


def _give_back():
    """What was kept, if no rank is open that another thread's may wait for."""
    ranks = [ref() for ref in contexts.communicators.valuerefs()] if _kept else ()
    if any(rank and rank._meets_threads and rank._closed.alive for rank in ranks):
        return
    while _kept:
        with contextlib.suppress(IndexError):  # another thread was faster
            _destroy(_kept.pop())


def _destroy(contexts_of_calls):
    for context in contexts_of_calls.values():
        _destroy_context(context)
