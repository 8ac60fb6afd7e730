"""Calls that were made before: what a function checks and decides depends on the shapes, types and
devices of its tensors and on its other arguments, and those are the same from step to step.

The second call of a kind is recorded as what it came to: memory that it made, and entries of
moire.h that it called. Later ones are these steps, on tensors of their own, which python/tape.cpp
makes in a fraction of the time. A call that did anything else (read values, wrote into a buffer of
the caller, made a tensor by an op of Torch) goes its own way each time; so does every call while
somebody watches or rewrites Torch's ops, and where invoke.cpp was not built.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from . import context, invoke
from .dtypes import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_KINDS = 128  # that a function keeps, which differ in their keys
_made_of = {} if torch is None else {torch.dtype: ()}
_ONCE, _NEVER = "was made once", "cannot be recorded"


def learn(made_of):
    """Tells what calls are given besides tensors, numbers and strings: by type, the attributes that
    say all of its instances.
    """
    _made_of.update(made_of)
    if invoke.compiled is not None:
        invoke.compiled.learn(_made_of)


class Tape(NamedTuple):
    """The steps of a call, and what it returns of the tensors that it was given and then made."""

    steps: tuple
    device: Any
    end: Any

    def replay(self, tensors, options):
        context.raise_for(invoke.compiled.replay(self.steps, self.device, tensors))
        return self.end(tensors, options)


class _Recording:
    def __init__(self, tensors):
        self.tensors, self.steps, self.is_whole = list(tensors), [], True
        self.result = self.end = None  # of a call that autograd differentiates

    def tape(self, result):
        """Of the call that returned `result`."""
        if self.end is None:
            self.end = invoke.compiled.picker(result, self.tensors)
        elif _ids(self.result) != _ids(result):
            self.end = None
        if not self.is_whole or self.end is None:
            return _NEVER
        return Tape(tuple(self.steps), self.tensors[0].device, self.end)


class _OfThread(threading.local):
    recording = None


_thread = _OfThread()


def recording():
    """What this thread records, or None."""
    return _thread.recording


def spoil():
    """Says that a call did what is no step, and would not be done again."""
    if _thread.recording is not None:
        _thread.recording.is_whole = False


def made(tensor):
    """Notes memory that a call made."""
    now = _thread.recording
    if now is not None:
        how = {"dtype": tensor.dtype, "device": tensor.device}
        shape = tuple(tensor.shape), tensor.stride()  # sooner than torch.empty
        now.steps.append((torch.empty_strided, shape, how))
        now.tensors.append(tensor)
    return tensor


def converted(source, result):
    """Notes that a call made `result` of a tensor, or of what autograd has of it, by a cast."""
    now, dtype = _thread.recording, result.dtype
    if now is None:
        return result
    found = [i for i, tensor in enumerate(now.tensors) if tensor is source]
    if now.result is source and now.end is not None:
        end, now.result = now.end, result
        now.end = lambda tensors, options: end(tensors, options).to(dtype)
    elif found:
        how = torch.Tensor.to if torch.is_grad_enabled() else lambda t, to: t.detach().to(to)
        now.steps.append((how, found[0], dtype))
        now.tensors.append(result)
    return result


def ran(name, fields):
    """Notes an entry that a call ran."""
    now = _thread.recording
    if now is not None:
        now.steps.append(invoke.compiled.step(invoke.COMPILED[name], fields, now.tensors))
        now.is_whole &= now.steps[-1] is not None


def differentiated(end, result):
    """Notes that autograd has the call's result: end(tensors, options) gives it again, of the
    call's keywords, or is None.
    """
    now = _thread.recording
    now.is_whole &= end is not None and now.end is None  # of two, one could not be given again
    now.result, now.end = result, end


def _ids(result):
    return [id(tensor) for tensor in (result if isinstance(result, tuple) else [result])]


def replayed(function: _Function) -> _Function:
    """The function, whose calls are recorded and made again."""
    if torch is None:
        return function
    tapes = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        fw = invoke.compiled_for
        if fw is None or fw.is_watched() or _thread.recording is not None:  # steps of another call
            return function(*args, **kwargs)
        given = args, kwargs, fw.autocast_dtypes(), context.settings_now().implementation
        found = invoke.compiled.sign(given, torch.is_grad_enabled())
        if found is None:
            return function(*args, **kwargs)
        key, tensors = found
        tape = tapes.get(key)
        if isinstance(tape, Tape):
            return tape.replay(tensors, kwargs)
        if tape is None:
            if len(tapes) >= _MOST_KINDS:  # all go: other threads read and write them as well
                tapes.clear()
            tapes[key] = _ONCE
        if tape is not _ONCE:
            return function(*args, **kwargs)
        _thread.recording = _Recording(tensors)
        try:
            result = function(*args, **kwargs)
            tapes[key] = _thread.recording.tape(result)
        finally:
            _thread.recording = None
        return result

    return cast(_Function, call)
