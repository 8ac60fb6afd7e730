"""The C contract in Python: cffi in ABI mode over moire.h, for which nothing is compiled.

The header is parsed as it is (between its "cffi: begin" and "cffi: end" marks), so structs and
entries are written down once, in C. Names of its enumerators here have their numbers, by a test.
Library and header are looked for, in this order:

1. inside the package: moire/lib/libmoire.so and moire/include/moire.h (an installed wheel);
2. in the package's source tree: build/release/lib, then build/cuda/lib, with include/moire.h.
"""

import importlib.util
import re
from pathlib import Path

import cffi

from .errors import LibraryNotFound

_PACKAGE = Path(__file__).resolve().parent
_TREE = _PACKAGE.parent.parent


def search_places(package=_PACKAGE, tree=_TREE):
    """(library, header) pairs in the order in which they are tried."""
    header = tree / "include" / "moire.h"
    return [
        (package / "lib" / "libmoire.so", package / "include" / "moire.h"),
        (tree / "build" / "release" / "lib" / "libmoire.so", header),
        (tree / "build" / "cuda" / "lib" / "libmoire.so", header),
    ]


def find_library(places):
    """The first pair whose two files exist, or LibraryNotFound with all that was looked for."""
    for library, header in places:
        if library.is_file() and header.is_file():
            return library, header
    looked_for = "".join(f"\n  {library} with {header}" for library, header in places)
    raise LibraryNotFound(
        f"moire: the library was not found; looked for, in this order:{looked_for}\n"
        "Build it in the source tree with: cmake --preset release && cmake --build --preset release"
    )


def contract(header):
    """The declarations that cffi parses: the marked part of moire.h without its export macro."""
    text = header.read_text(encoding="utf-8")
    match = re.search(r"/\* cffi: begin.*?\*/(.*)/\* cffi: end \*/", text, re.DOTALL)
    if match is None:
        raise LibraryNotFound(
            f"moire: {header} has no 'cffi: begin' and 'cffi: end' marks; it is not moire's header"
        )
    return match.group(1).replace("MOIRE_API ", "")


def _open(library, header):
    interface = cffi.FFI()
    try:
        interface.cdef(contract(header))
        text = header.read_text(encoding="utf-8")
        wanted = int(re.search(r"#define MOIRE_VERSION_NUMBER (\d+)", text)[1])
    except (OSError, ValueError, TypeError, cffi.FFIError, cffi.CDefError) as e:
        raise LibraryNotFound(f"moire: {header} could not be read as moire's header: {e}") from e
    try:
        opened = interface.dlopen(str(library))
        found = opened.moire_version_number()
    except (OSError, AttributeError) as e:
        raise LibraryNotFound(
            f"moire: {library} could not be opened as moire's library: {e}"
        ) from e
    if found != wanted:
        raise LibraryNotFound(
            f"moire: {library} has version {found} but {header} has {wanted}; "
            "rebuild with: cmake --build --preset release"
        )
    return interface, opened


library_path, header_path = find_library(search_places())
ffi, lib = _open(library_path, header_path)
_number = lib.moire_version_number()
version = f"{_number // 10000}.{_number // 100 % 100}.{_number % 100}"


def text(pointer):
    """A C string as str."""
    return ffi.string(pointer).decode()


def extension():
    """python/invoke.cpp as a module, or None: it was not built, or not for this Python, which is
    older than 3.10 or free-threaded and has another ABI.
    """
    path = library_path.with_name("moire_invoke.abi3.so")
    spec = importlib.util.spec_from_file_location("moire.moire_invoke", path)
    if spec is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module
