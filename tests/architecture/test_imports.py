"""Imports point down, never round, and foreign packages stay in their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.sources import LAYERS, files, imports, module_name

# A folder ends in a slash. `torch` is a peer in benchmarks, never a part of the product.
HOMES = {
    "mindspore": (
        "ops/backend.py",
        "ops/nn/",
        "ops/comm/mindspore.py",
        "ops/comm/mindspore_device.py",
    ),
    "mpi4py": ("ops/comm/mpi.py",),
    "lz4": ("ops/codec.py",),
    "safetensors": ("moe/weights/",),
    "torch": (),
    "transformers": (),
    "typer": ("launch/",),
    "rich": ("launch/",),
    "yaml": ("launch/",),
}
PRODUCT = files(*LAYERS)


def top(name: str) -> str:
    """The package a dotted name belongs to."""
    return name.split(".")[0]


def is_in(path: Path, home: str) -> bool:
    """Whether `path` is the file `home`, or lies below the folder `home/`."""
    return str(path).startswith(home) if home.endswith("/") else str(path) == home


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_imports_point_down(path: Path) -> None:
    rank = LAYERS.index(path.parts[0])
    up = [
        f"{path}:{line} imports {name}"
        for name, line in imports(path)
        if (top(name) in LAYERS and LAYERS.index(top(name)) > rank) or top(name) == "tests"
    ]
    assert not up


@pytest.mark.parametrize("package", HOMES)
def test_foreign_packages_are_imported_only_in_their_homes(package: str) -> None:
    homes = HOMES[package]
    strays = [
        f"{path}:{line}"
        for path in PRODUCT
        for name, line in imports(path)
        if top(name) == package and not any(is_in(path, home) for home in homes)
    ]
    assert not strays, f"{package} may be imported only in {homes or 'no file of the product'}"


def test_mindspore_is_not_loaded_by_planning() -> None:
    """What `launch.build` imports at import time must not reach MindSpore."""
    graph = import_graph()
    seen: set[str] = set()
    todo = ["launch.cli", "launch.build"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(graph.get(name, ()))
    loaders = {
        module_name(path)
        for path in PRODUCT
        if any(top(name) == "mindspore" for name, _ in imports(path, at_import_time=True))
    }
    assert not seen & loaders


def import_graph() -> dict[str, set[str]]:
    """Module to the modules of the product that it imports at import time."""
    modules = {module_name(path) for path in PRODUCT}
    graph: dict[str, set[str]] = {}
    for path in PRODUCT:
        found = set()
        for name, _ in imports(path, at_import_time=True):
            target = name
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target:
                found.add(target)
        graph[module_name(path)] = found - {module_name(path)}
    return graph


def test_no_import_cycles() -> None:
    graph = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())
