"""House rules that a machine can check: sizes, docstrings, asserts, environment, tensors."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import LAYERS, OTHERS, ROOT, files, functions, tree

FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 80
PRODUCT = files(*LAYERS)
EVERYTHING = files(*LAYERS, *OTHERS)
PURE_CALLS = """
abs all any bool callable dict enumerate float frozenset getattr hasattr id int isinstance
issubclass len list max min range repr round set sorted str sum tuple type zip
""".split()  # noqa: SIM905
PURE_METHODS = """
all any count endswith get is_alive is_set isfinite items keys locked startswith values
""".split()  # noqa: SIM905
# Logic of `operator` and of LLVM's builder, named so because Python keeps the bare words.
KEYWORDS = ("and_", "or_", "not_", "is_")


@pytest.mark.parametrize("path", EVERYTHING, ids=str)
def test_a_file_can_be_held_in_the_head(path: Path) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES_MAX


@pytest.mark.parametrize("path", EVERYTHING, ids=str)
def test_a_function_fits_a_screen(path: Path) -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for node in functions(path)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert not long


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_every_module_and_public_name_has_a_docstring(path: Path) -> None:
    contracts = contract_methods()
    bare = [
        f"{path}:{line} {name}"
        for name, line in without_docstring(tree(path))
        if name not in contracts
    ]
    if not ast.get_docstring(tree(path)):
        bare.append(f"{path}: the module")
    assert not bare


@functools.cache
def contract_methods() -> frozenset[str]:
    """Methods that a Protocol of the product describes; their implementations need not again."""
    return frozenset(
        method.name
        for path in PRODUCT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    )


def without_docstring(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Public classes and functions of a module or class that have none; nested functions are
    private by nature, and `__init__` is described by its class."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        is_overload = any("overload" in ast.dump(item) for item in child.decorator_list)
        if child.name.startswith("_") or is_overload or is_setter(child):
            continue
        if not ast.get_docstring(child):
            yield child.name, child.lineno
        if isinstance(child, ast.ClassDef):
            yield from without_docstring(child)


def is_setter(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is the second half of a property that is described already."""
    return any(
        isinstance(item, ast.Attribute) and item.attr == "setter" for item in node.decorator_list
    )


@pytest.mark.parametrize("path", files("ops", "offload", "moe"), ids=str)
def test_no_environment_variable_is_read_below_launch(path: Path) -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    found = [
        f"{path}:{node.lineno}"
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {item.name for item in node.names})
    ]
    assert not found


@pytest.mark.parametrize("path", files("ops", "offload", "moe"), ids=str)
def test_no_tensor_is_changed_in_place(path: Path) -> None:
    """MindSpore's in-place operations (`add_`, `copy_`, ...) silently do nothing on CPU."""
    found = [
        f"{path}:{node.lineno} {node.func.attr}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and re.fullmatch(r"[a-z]\w*[a-z0-9]_", node.func.attr)
        and node.func.attr not in KEYWORDS
    ]
    assert not found


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_no_assert_contains_a_call_with_an_effect(path: Path) -> None:
    """`python -O` removes asserts, and with them whatever they called."""
    found = [
        f"{path}:{call.lineno} {ast.unparse(call)}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and not is_pure(call)
    ]
    assert not found


def is_pure(call: ast.Call) -> bool:
    """Whether the call is known to change nothing."""
    if isinstance(call.func, ast.Name):
        return call.func.id in PURE_CALLS
    return isinstance(call.func, ast.Attribute) and call.func.attr in PURE_METHODS
