"""The package's modules import each other in one direction, inside functions too."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import moire

PACKAGE = Path(moire.__file__).resolve().parent


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imports(nodes):
    """The import statements anywhere below, but for those that only type checkers see."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(ast.iter_child_nodes(node))


def imported(name, path):
    """The modules of the package that this one imports."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in imports(ast.parse(path.read_text(encoding="utf-8")).body):
        if node.level == 0:
            continue
        base = [*package[: len(package) + 1 - node.level], *filter(None, [node.module])]
        for alias in node.names:
            whole = ".".join([*base, alias.name])
            yield whole if whole in MODULES else ".".join(base) or "__init__"


def test_no_module_imports_one_that_imports_it():
    graph = {name: {*imported(name, path)} - {name} for name, path in MODULES.items()}
    assert {"invoke", "autograd"} <= graph["operands"] | graph["ops"] | graph["routing"]
    assert set().union(*graph.values()) <= set(MODULES)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        raise AssertionError(" -> ".join(reversed(e.args[1]))) from None
