"""Finding the library, and Python's view of the contract being the header's."""

import re

import pytest
from moire import _abi, invoke
from moire.errors import Code, LibraryNotFound


def test_search_order_is_package_then_build_tree(tmp_path):
    package, tree = tmp_path / "python" / "moire", tmp_path
    places = _abi.search_places(package, tree)
    assert [str(library.relative_to(tmp_path)) for library, _ in places] == [
        "python/moire/lib/libmoire.so",
        "build/release/lib/libmoire.so",
        "build/cuda/lib/libmoire.so",
    ]
    for library, header in reversed(places):
        library.parent.mkdir(parents=True, exist_ok=True)
        header.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        header.touch()
        assert _abi.find_library(places) == (library, header)


def test_a_missing_library_says_where_it_was_looked_for_and_how_to_build_it(tmp_path):
    places = _abi.search_places(tmp_path / "python" / "moire", tmp_path)
    with pytest.raises(LibraryNotFound) as e:
        _abi.find_library(places)
    for library, header in places:
        assert f"{library} with {header}" in str(e.value)
    assert "cmake --preset release && cmake --build --preset release" in str(e.value)
    assert isinstance(e.value, ImportError)


def test_a_foreign_header_is_refused(tmp_path):
    (tmp_path / "moire.h").write_text("int f(void);")
    with pytest.raises(LibraryNotFound, match="it is not moire's header"):
        _abi.contract(tmp_path / "moire.h")


def test_a_header_of_another_version_is_refused(tmp_path):
    header = tmp_path / "moire.h"
    text = _abi.header_path.read_text()
    header.write_text(re.sub(r"(#define MOIRE_VERSION_NUMBER )\d+", r"\g<1>999999", text))
    with pytest.raises(LibraryNotFound, match="has version .* but .* has 999999; rebuild with"):
        _abi._open(_abi.library_path, header)


def test_codes_are_the_headers():
    for code in Code:
        assert getattr(_abi.lib, f"MOIRE_{code.name}") == code


def test_every_op_with_arguments_is_bound_and_writes_something():
    header = _abi.contract(_abi.header_path)
    assert set(re.findall(r"typedef struct moire_(\w+)_args", header)) == set(invoke.ENTRIES)
    assert all(entry.outputs for entry in invoke.ENTRIES.values())
    assert invoke.ENTRIES["permute"].outputs == ("rows", "probs")
