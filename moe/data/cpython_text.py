"""The default text: what every CPython documents about itself; nothing is downloaded.

Documents are the topics behind `help()` (`pydoc_data.topics`) and, for each module of the
standard library, its docstrings. Modules are parsed, never imported. One Python installation
always gives the same documents in the same order; different versions give different ones, which
the source's digest shows.

Tokens are bytes (UTF-8), with token 256 after each document.
"""

from __future__ import annotations

import ast
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe.data.source import (
    BYTE_SEPARATOR,
    BYTE_VOCAB_SIZE,
    TokenSource,
    source_from_documents,
)
from ops.errors import DataError

_SKIPPED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_BYTES_MIN = 100_000


def cpython_source(library: Path | None = None) -> TokenSource:
    """The documentation of this Python as a byte-level source in memory (vocabulary 257).

    `library` is the directory of the standard library's sources (None: this Python's own). Takes
    about 1.5 seconds of one core, less than a cache would be worth. Raises `DataError` when this
    Python carries no documentation.
    """
    if library is None:
        library = Path(sysconfig.get_path("stdlib"))
    documents = [np.frombuffer(text, dtype=np.uint8) for text in iter_documents(library)]
    num_bytes = sum(len(document) for document in documents)
    if num_bytes < _BYTES_MIN:
        raise DataError(
            f"this Python carries only {num_bytes} bytes of documentation (standard library at "
            f"{library}); make a token file of your own text with "
            "`headrace data prepare TEXT --out FILE` and name it in data.source"
        )
    name = f"documentation of CPython {platform.python_version()}"
    return source_from_documents(name, documents, BYTE_VOCAB_SIZE, BYTE_SEPARATOR)


def iter_documents(library: Path) -> Iterator[bytes]:
    """The default text's documents in order: help topics by name, then modules by path."""
    for name, text in sorted(_topics().items()):
        yield _encode(f"{name}\n\n{text.strip()}\n")
    for path in _module_paths(library):
        text = _module_text(library, path)
        if text:
            yield _encode(text)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        # Some distributions package it apart.
        return {}
    return dict(topics)


def _module_paths(library: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(library):
        names[:] = sorted(name for name in names if name not in _SKIPPED_DIRECTORIES)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(directory, name)


def _module_text(library: Path, path: Path) -> str:
    """All docstrings of a module under their qualified names; empty when it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""
    parts = path.relative_to(library).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    sections = [f"{where}\n\n{text}\n" for where, text in _docstrings(tree, name)]
    return "\n".join(sections)


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")
