"""The project's Python files as syntax trees, for the tests of the architecture."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("ops", "offload", "moe", "launch")
OTHERS = ("tests", "benchmarks", "examples")


def files(*folders: str) -> list[Path]:
    """Python files below the folders, relative to the root, sorted."""
    return sorted(
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """`ops/nn/__init__.py` is `ops.nn`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, with their lines.

    With `at_import_time`, only what runs when the module is imported: nothing inside functions,
    nothing under `if TYPE_CHECKING`.
    """
    yield from _imports(path, tree(path), at_import_time)


def _imports(path: Path, node: ast.AST, at_import_time: bool) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if at_import_time and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if at_import_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, child.lineno
        elif isinstance(child, ast.ImportFrom):
            base = _base(path, child)
            for alias in child.names:
                # Either a module of a package or a name of a module: the longer is tried first.
                yield f"{base}.{alias.name}", child.lineno
        else:
            yield from _imports(path, child, at_import_time)


def _base(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folder = path.parent.parts
    package = folder[: len(folder) - node.level + 1]
    return ".".join((*package, node.module) if node.module else package)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a file, nested ones too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
