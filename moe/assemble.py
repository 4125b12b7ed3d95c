"""Whole tensors on rank 0, one after the other, from the pieces that all ranks hold.

Every rank offers its pieces in one order (by name as UTF-8, then place). What each of them has is
told once, at the start; a piece that several ranks hold comes from the first of them. After that
rank 0 only has to receive, and no rank keeps more than one block of a tensor at a time: all
columns of those rows that one unit of one operator-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from offload.blocks import TensorSpec
from ops.comm.base import World

_TAG = 7
Piece = tuple[TensorSpec, np.ndarray]


@dataclass(frozen=True)
class Header:
    """Where a piece lies: in the block of `shape` at (row0, col0) of a tensor with `num_cols`
    columns, its elements flat0 .. flat0 + size."""

    name: str
    row0: int
    col0: int
    flat0: int
    size: int
    shape: tuple[int, int]
    num_cols: int

    @staticmethod
    def of(tensor: TensorSpec) -> Header:
        """The header of a tensor, a block of one, or a piece of either."""
        block = tensor.piece_of or tensor
        rows, cols = block.shape if len(block.shape) == 2 else (1, block.size)
        num_cols = cols if block.num_cols is None else block.num_cols
        place = (block.row0, block.col0, tensor.flat0)
        return Header(tensor.name, *place, tensor.size, (rows, cols), num_cols)

    @property
    def key(self) -> tuple[bytes, int, int, int]:
        """What pieces are sorted by."""
        return self.name.encode(), self.row0, self.col0, self.flat0

    def to_json(self) -> list[Any]:
        """As JSON data."""
        return [self.name, self.row0, self.col0, self.flat0, self.size, *self.shape, self.num_cols]

    @staticmethod
    def from_json(row: Sequence[Any]) -> Header:
        """What `to_json` made."""
        name, row0, col0, flat0, size, rows, cols, num_cols = row
        return Header(name, row0, col0, flat0, size, (rows, cols), num_cols)


def assemble(
    world: World, tensors: Sequence[TensorSpec], pieces: Iterable[Piece]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield (name, first row, fp32 [rows, columns]) of all tensors on rank 0, nothing elsewhere.

    `tensors` are this rank's pieces, `pieces` the same with their values (fp32, flat), both sorted
    as `OffloadEngine.masters` does. Entered by all ranks, and to be exhausted by all of them.
    """
    own = [Header.of(tensor) for tensor in tensors]
    told = world.all_gather_object([header.to_json() for header in own])
    headers = [[Header.from_json(row) for row in rows] for rows in told]
    first: dict[tuple[bytes, int, int, int], int] = {}
    for rank in reversed(range(world.size)):
        first.update((header.key, rank) for header in headers[rank])
    mine = _checked(own, pieces)
    if world.rank:
        for header, values in mine:
            if first[header.key] == world.rank:
                world.send(np.ascontiguousarray(values, np.float32), 0, _TAG)
        return
    wanted = sorted(
        ((h, rank) for rank, rows in enumerate(headers) for h in rows if first[h.key] == rank),
        key=lambda row: row[0].key,
    )
    for (name, row0), group in groupby(wanted, key=lambda row: (row[0].name, row[0].row0)):
        yield name, row0, _block(world, list(group), mine)


def _checked(own: Sequence[Header], pieces: Iterable[Piece]) -> Iterator[tuple[Header, np.ndarray]]:
    for header, (tensor, values) in zip(own, pieces, strict=True):
        came = Header.of(tensor)
        assert came == header, f"{header} was told, {came} came"
        yield header, values


def _block(
    world: World,
    group: Sequence[tuple[Header, int]],
    mine: Iterator[tuple[Header, np.ndarray]],
) -> np.ndarray:
    """The rows that the pieces of `group` cover, all columns."""
    last = group[-1][0]
    whole = np.empty((last.shape[0], last.num_cols), np.float32)
    for col0, parts in groupby(group, key=lambda row: row[0].col0):
        members = list(parts)
        rows, cols = members[0][0].shape
        flat = np.empty(rows * cols, np.float32)
        for header, rank in members:
            target = flat[header.flat0 : header.flat0 + header.size]
            if rank:
                world.recv(target, rank, _TAG)
            else:
                target[:] = next(values for have, values in mine if have == header)
        whole[:, col0 : col0 + cols] = flat.reshape(rows, cols)
    return whole
