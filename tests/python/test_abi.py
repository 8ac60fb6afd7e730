"""Finding the library, and Python's view of the contract being the header's."""

import itertools
import re

import pytest
from moire import _abi, context, dtypes, groups, invoke, layouts, operands, recipes, routing, travel
from moire.errors import Code, LibraryNotFound
from moire.grouped_interchange import _LAYOUTS as layouts_of_scales
from moire.recipes import FORMATS, Recipe


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


TYPES = ("FP32", "BF16", "FP16", "E4M3", "E5M2", "E8M0", "UINT8", "INT32", "INT64", "FP64")


def names(prefix, words):
    return [f"{prefix}{word}".upper() for word in words]


@pytest.mark.parametrize(
    "found, enumerators",
    [
        (dtypes.DTYPES.values(), TYPES),
        ([f.scaling for f in FORMATS.values()], names("scaling_", FORMATS)),
        ([recipes.ROWWISE, recipes.COLUMNWISE], names("", recipes.DIRECTIONS)),
        (
            [Recipe(name).fields["recipe"] for name in recipes._QUANTIZED],
            names("recipe_", recipes._QUANTIZED),
        ),
        (range(2), names("", layouts.WEIGHT_LAYOUTS)),
        (range(3), names("", layouts._ORDERS)),
        (range(5), names("", layouts._ACTIVATIONS)),
        (range(4), names("scales_", layouts_of_scales)),
        (range(2), names("router_", routing._ROUTER_KINDS)),
        (range(3), names("", groups._KINDS)),
        (range(2), names("tail_", operands._TAILS)),
        (range(2), names("overflow_", travel.OVERFLOW)),
        (context._KINDS.values(), names("", context._KINDS)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and isinstance(value[0], str) else "",
)
def test_numbers_that_have_names_are_the_headers(found, enumerators):
    assert list(found) == [getattr(_abi.lib, f"MOIRE_{name}") for name in enumerators]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_shapes_of_scales_are_those_of_c(format):
    shape = _abi.ffi.new("int64_t[2]")
    for rows, k, g in itertools.product((0, 1, 127, 128, 129, 1000), (1, 32, 127, 4096), (1, 3)):
        for direction in (recipes.ROWWISE, recipes.COLUMNWISE):
            given = format.scaling, direction, _abi.lib.MOIRE_SCALES_CANONICAL, rows, k, g
            assert _abi.lib.moire_scales_shape(*given, shape) == 0
            assert format.scales_shape(direction, (rows, k), g) == tuple(shape)


def test_every_op_with_arguments_is_bound_and_writes_something():
    header = _abi.contract(_abi.header_path)
    assert set(re.findall(r"typedef struct moire_(\w+)_args", header)) == set(invoke.ENTRIES)
    assert all(entry.outputs for entry in invoke.ENTRIES.values())
    assert invoke.ENTRIES["permute"].outputs == ("rows", "probs")
