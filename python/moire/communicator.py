"""Ranks that reach each other's memory: what dispatch and combine of moire.h run on."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from typing import Any, Optional

import numpy as np

from . import context as contexts
from ._abi import ffi, lib
from .dtypes import AnyArray, torch
from .errors import invalid, unsupported
from .values import integer, wrong

_as_array = np.asarray if torch is None else torch.from_numpy
_DTYPES = (np.dtype, type) if torch is None else (torch.dtype,)


class Communicator(contextlib.AbstractContextManager):
    """One rank of several: `rank` of `size`, with a `window` of bytes that the others reach while
    this rank is in `dispatch` or `combine`. `with communicator:` closes it at the end, which others
    that wait for this rank are told at once, instead of at the end of timeout_ms.

    moire.ExpertParallel and moire.nn.MoE take one as their group. Calls of moire.h are those of
    this rank inside moire.settings(communicator=...); divide() has tensors of the window for them.
    """

    def __init__(self, pointer: Any, rank: int, size: int) -> None:
        self.pointer, self._process, self.rank, self.size = pointer, os.getpid(), rank, size
        options = ffi.new("moire_context_options *")
        options.struct_size = ffi.sizeof("moire_context_options")
        options.num_threads, options.communicator = 1, pointer
        keeper, data = ffi.new("moire_context **"), ffi.new("void **")
        num_bytes = ffi.new("size_t *")
        contexts.raise_for(lib.moire_context_create(options, keeper))
        contexts.raise_for(lib.moire_communicator_window(pointer, data, num_bytes))
        # A rank's memory stays while it has a context. So those go when the last view has gone.
        self.contexts = {None: keeper[0]}  # as those in context.py
        held = ffi.gc(data[0], functools.partial(_destroy, self.contexts, self._process))
        window = np.frombuffer(ffi.buffer(held, max(num_bytes[0], 1)), np.uint8)[: num_bytes[0]]
        self.window: AnyArray = _as_array(window)
        self._closed = weakref.finalize(self, lib.moire_communicator_destroy, pointer)
        contexts.communicators[id(self)] = self

    @classmethod
    def threads(
        cls, num_ranks: int, window_bytes: int, *, timeout_ms: int = 0
    ) -> list[Communicator]:
        """Ranks that are threads of this process, on the CPU: one for each, rank 0 first. A call
        waits timeout_ms for another rank, ten minutes if it is 0.
        """
        call = "Communicator.threads"
        options = ffi.new("moire_communicator_options *")
        options.struct_size = ffi.sizeof("moire_communicator_options")
        options.num_ranks = integer(f"{call}: num_ranks", num_ranks, 1, 1024)
        options.window_bytes = integer(f"{call}: window_bytes", window_bytes)
        options.timeout_ms = integer(f"{call}: timeout_ms", timeout_ms)
        made = ffi.new("moire_communicator *[]", options.num_ranks)
        contexts.raise_for(lib.moire_communicator_threads(options, made))
        return [cls(pointer, rank, len(made)) for rank, pointer in enumerate(made)]

    @classmethod
    def from_process_group(
        cls, process_group: Optional[Any] = None, *, window_bytes: int, timeout_ms: int = 0
    ) -> Communicator:
        """This rank of a torch.distributed process group of GPUs: not from Python yet."""
        raise unsupported(
            "Communicator.from_process_group: Python has windows of threads of the CPU alone; "
            "give the process group itself to moire.ExpertParallel or moire.nn.MoE"
        )

    def contexts_of_calls(self) -> dict:
        """Those that its calls run on; an error where they cannot."""
        is_forked = os.getpid() != self._process
        if is_forked or not self._closed.alive:
            found = "is of the process that forked this one" if is_forked else "is closed"
            raise invalid(f"communicator: rank {self.rank} of {self.size} {found}")
        return self.contexts

    def divide(self, *parts: tuple[tuple[int, ...], Any]) -> list[AnyArray]:
        """A tensor for each (shape, dtype), one behind the other from the window's beginning: the
        same parts lie at the same place on every rank.
        """
        places, end = [], 0
        for shape, dtype in parts:
            elements = math.prod(integer("communicator: a size", n) for n in shape)
            if not isinstance(dtype, _DTYPES):
                raise wrong("communicator: a dtype", dtype, f"a {_DTYPES[0].__module__}.dtype")
            size = elements * self.window[:0].view(dtype).itemsize
            places.append((slice(end, end + size), dtype, shape))
            end += size + -size % 256
        window = self.window
        if contexts.is_explaining():  # how large it has to be is what is asked
            contexts.note_window(end)
            window = _as_array(np.empty(end, np.uint8))
        if end > len(window):
            raise invalid(
                f"communicator: the window has {len(window):,} bytes, needs {end:,} for "
                + ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in parts)
            )
        return [window[place].view(dtype).reshape(shape) for place, dtype, shape in places]

    def close(self) -> None:
        """This rank leaves: calls of the others fail from now on, at once. Its window stays."""
        self._closed()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._closed.alive else ", closed"
        return f"Communicator(rank {self.rank} of {self.size}, {len(self.window):,} bytes{state})"


def _destroy(contexts_of_calls, process, data):
    # NOTE: a forked child has its parent's memory and none of its threads, and leaves it alone.
    for context in contexts_of_calls.values() if os.getpid() == process else ():
        lib.moire_context_destroy(context)
