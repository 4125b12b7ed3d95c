"""Whole tensors from the pieces of all ranks, whatever way they were cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe.assemble import Header, assemble
from offload.blocks import TensorSpec, UnitSpec
from offload.shards import share_of
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank

ROWS, COLS = 6, 10


def whole(name: str, rows: int = ROWS, cols: int = COLS) -> np.ndarray:
    seed = sum(name.encode())
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def blocks(op: int, index: int) -> list[TensorSpec]:
    """What one operator-parallel rank holds: rows of `a`, columns of `b`, all of the norm `n`,
    and its rows of the two slices of the vocabulary matrix `v`."""
    rows, cols = ROWS // op, COLS // op
    return [
        TensorSpec("a", (rows, COLS), False, True, 0.02, row0=index * rows),
        TensorSpec("b", (ROWS, cols), False, True, 0.02, col0=index * cols, num_cols=COLS),
        TensorSpec("n", (COLS,), True, False, None, replicas=op),
        TensorSpec("v", (4 // op, COLS), False, True, 0.02, row0=index * 4 // op),
        TensorSpec("v", (2 // op, COLS), False, True, 0.02, row0=4 + index * 2 // op),
    ]


def values_of(block: TensorSpec) -> np.ndarray:
    if block.name == "n":
        return whole("n", 1)[0]
    rows, cols = block.shape
    source = whole(block.name)
    return source[block.row0 : block.row0 + rows, block.col0 : block.col0 + cols].reshape(-1)


def pieces(op: int, dp: int, rank: int) -> list[tuple[TensorSpec, np.ndarray]]:
    """The pieces of world rank `rank`, in the engine's order."""
    index, share = rank % op, rank // op
    held = []
    for number, block in enumerate(blocks(op, index)):
        unit = UnitSpec(f"u{number}", 0, None, (block,))
        layout = share_of(unit, "bfloat16", "bfloat16", "float32", rank=share, size=dp)
        for place in layout.places:
            if place.spec.name:
                flat = values_of(block)
                held.append((place.spec, flat[place.spec.flat0 :][: place.spec.size]))
    return sorted(held, key=lambda row: (row[0].name.encode(), *row[0].position))


def assembled(world: World, op: int, dp: int) -> list[tuple[str, int, np.ndarray]]:
    held = pieces(op, dp, world.rank)
    return list(assemble(world, [tensor for tensor, _ in held], held))


@pytest.mark.parametrize(("op", "dp"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 4)])
def test_the_pieces_of_all_ranks_make_the_tensors(op, dp):
    size = op * dp
    results = run_local(size, assembled, op, dp) if size > 1 else [assembled(SingleRank(), 1, 1)]
    assert not any(results[1:])
    tensors: dict[str, list[np.ndarray]] = {}
    for name, _, values in results[0]:
        tensors.setdefault(name, []).append(values)
    assert list(tensors) == ["a", "b", "n", "v"]
    for name in "abv":
        assert (np.concatenate(tensors[name]) == whole(name)).all()
    assert (tensors["n"][0] == whole("n", 1)).all()


def test_a_header_survives_json():
    block = TensorSpec("é", (3, 4), False, True, 0.02, row0=6, col0=8, num_cols=20)
    for tensor in (block, replace(block, shape=(5,), piece_of=block, flat0=2)):
        header = Header.of(tensor)
        assert Header.from_json(header.to_json()) == header
        assert (header.row0, header.col0, header.shape, header.num_cols) == (6, 8, (3, 4), 20)
