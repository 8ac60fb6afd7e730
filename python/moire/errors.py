"""Exceptions: each has the library's code and a sentence on what was found and what was needed."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """moire_code of moire.h."""

    INVALID_ARGUMENT = 10
    UNSUPPORTED = 20
    OUT_OF_MEMORY = 30
    DEVICE = 40
    IO = 50
    INTERNAL = 60
    RANK_FAILED = 70


class Error(RuntimeError):
    """A failed call: `code` says the kind, `message` is one sentence."""

    def __init__(self, code: int, message: str) -> None:
        self.args = (message,)  # by super(), torch.compile would raise an error of its own
        self.code = Code(code)
        self.message = message

    def __reduce__(self):
        return error, (int(self.code), self.message)


class InvalidArgument(Error, ValueError):
    """The call is wrong: shape, dtype, device, layout, splits."""


class Unsupported(Error, NotImplementedError):
    """The call is right, but this build or device has no implementation for it."""


class OutOfMemory(Error, MemoryError):
    """A workspace is too small, or memory could not be allocated."""


class LibraryNotFound(ImportError):
    """libmoire.so or moire.h is not where the package looks, or they do not match."""


_CLASSES = {
    Code.INVALID_ARGUMENT: InvalidArgument,
    Code.UNSUPPORTED: Unsupported,
    Code.OUT_OF_MEMORY: OutOfMemory,
}


def error(code, message):
    return _CLASSES.get(Code(code), Error)(code, message)


def invalid(message):
    return InvalidArgument(Code.INVALID_ARGUMENT, message)


def unsupported(message):
    return Unsupported(Code.UNSUPPORTED, message)
