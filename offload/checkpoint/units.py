"""One way to read a unit of a commit, whatever mesh made it and whatever mesh wants it.

A unit is put together in memory, block for block, from the ranks that stored parts of it. Only the
checksum chunks that hold a needed byte are read, each of them once. Parts may be of different
versions, because one rank has caught up on what an idle unit missed and another has not; what is
behind is replayed, by the instructions that a run would have used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offload.arena import Buffer
from offload.blocks import UnitLayout
from offload.checkpoint.layout import Runs, UnitSources, copies
from offload.ledger import Ledger
from offload.nvme.extents import Extent
from offload.unit_values import MOMENTS
from offload.update_job import groups, replay
from ops.errors import StorageError
from ops.kernels.pool import KernelPool

PARTS = ("weight", "state")


class SavedBlock(Protocol):
    """What is known of a block before it is read."""

    @property
    def nbytes(self) -> int:
        """Logical bytes."""

    @property
    def version(self) -> int:
        """The optimizer step whose content it has."""


class SavedPart(Protocol):
    """One rank's part of a commit."""

    @property
    def blocks(self) -> Mapping[str, SavedBlock]:
        """Every block by name."""

    def read_chunks(self, block: str, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """The verified bytes of these checksum chunks, ascending; valid until the next one."""


@dataclass(frozen=True)
class _Piece:
    """What one rank gives to a unit."""

    rank: int
    layout: UnitLayout
    runs: Runs
    version: int


class UnitReader:
    """Puts units together from the parts of a commit.

    `layouts[r][name]` is what rank r of the saved mesh stores of a unit. `parts` has the ranks that
    can be read, the preferred ones first; elements that several have come from the first. What a
    unit missed is in `ledger`; with `replays` false nothing is replayed (idle units skip steps).
    """

    def __init__(
        self,
        parts: Mapping[int, SavedPart],
        layouts: Mapping[int, Mapping[str, UnitLayout]],
        ledger: Ledger,
        weight_decay: float,
        pool: KernelPool,
        *,
        replays: bool = True,
    ) -> None:
        self._parts = parts
        self._layouts = layouts
        self._ledger = ledger
        self._weight_decay = weight_decay
        self._pool = pool
        self._replays = replays

    def fill(
        self,
        target: UnitLayout,
        weight: np.ndarray,
        state: np.ndarray | None,
        until: int | None = None,
        moments: bool = True,
    ) -> int:
        """Fill the `weight` and `state` block of `target`; returns the version they now have.

        `weight`, `state`: u8, at least the bytes of the block; None for a frozen unit's state.
        With `until` everything is replayed up to that optimizer step, else only as far as the
        newest piece is. Without `moments` they are not read, and zero, where no replay needs them.
        Raises StorageError when the commit lacks an element, or is of another
        model, or when a chunk does not verify.
        """
        blocks = {"weight": weight, "state": state}
        pieces = self._pieces(target)
        version = max((piece.version for piece in pieces), default=0)
        if until is None or state is None or not self._replays:
            until = version
        is_replayed = state is not None and self._replays
        behind = [piece for piece in pieces if is_replayed and piece.version < until]
        without = () if moments or behind else MOMENTS
        for part in PARTS:
            block = blocks[part]
            if block is None:
                continue
            block[:] = 0  # what pads is zero
            for piece in pieces:
                self._copy(piece, target, part, block, without)
        if behind:
            assert state is not None
            buffers = (_buffer(weight), _buffer(state))
            for since, lo, hi in _spans(target, pieces, behind):
                self._catch_up(target, *buffers, since, until, lo, hi)
        return until

    def needed(self, target: UnitLayout) -> dict[tuple[int, str], list[int]]:
        """The chunks that `fill` reads: of each (rank, block), ascending. Nothing is read."""
        found: dict[tuple[int, str], list[int]] = {}
        for piece in self._pieces(target):
            for part in PARTS:
                if piece.layout.fields[part]:
                    chunks = copies(piece.runs, target, piece.layout, part).chunks()
                    if chunks:
                        found[piece.rank, _block(target.name, part)] = chunks
        return found

    def _pieces(self, target: UnitLayout) -> list[_Piece]:
        ranks = [rank for rank in self._parts if target.name in self._layouts[rank]]
        layouts = [self._layouts[rank][target.name] for rank in ranks]
        sources = UnitSources(target, layouts)
        if sources.missing:
            name, count = next(iter(sources.missing.items()))
            raise StorageError(
                f"no rank of the commit has {count} elements of {name}, of unit {target.name}"
            )
        return [
            _Piece(rank, layout, runs, self._version(rank, layout))
            for rank, layout, runs in zip(ranks, layouts, sources.runs)
            if runs.num_elements
        ]

    def _version(self, rank: int, layout: UnitLayout) -> int:
        """The version of a unit's blocks on a rank; StorageError when they make no unit."""
        versions = set()
        for part in PARTS:
            if not layout.fields[part]:
                continue
            block = self._parts[rank].blocks.get(_block(layout.name, part))
            if block is None or block.nbytes != layout.nbytes(part):
                raise StorageError(
                    f"the commit's part of rank {rank} has {block.nbytes if block else 0} bytes, "
                    f"the model needs {layout.nbytes(part)}: it is a commit of another model",
                    block=_block(layout.name, part),
                )
            versions.add(block.version)
        if len(versions) != 1 or max(versions) > self._ledger.step:
            raise StorageError(
                f"the blocks of {layout.name} on rank {rank} are of steps {sorted(versions)}, the "
                f"commit is of {self._ledger.step}"
            )
        return versions.pop()

    def _copy(
        self,
        piece: _Piece,
        target: UnitLayout,
        part: str,
        block: np.ndarray,
        without: Sequence[str],
    ) -> None:
        table = copies(piece.runs, target, piece.layout, part, without)
        read = self._parts[piece.rank].read_chunks(_block(target.name, part), table.chunks())
        for chunk, data in read:
            source = np.frombuffer(data, np.uint8)
            for to, came, nbytes in table.in_chunk(chunk):
                block[to : to + nbytes] = source[came : came + nbytes]

    def _catch_up(
        self, target: UnitLayout, weight: Buffer, state: Buffer, since: int, until: int,
        begin: int, end: int,
    ) -> None:  # fmt: skip
        """Replay the steps after `since` on the elements [begin, end)."""
        for lo, hi, kept, decay in groups(target):
            lo, hi = max(lo, begin), min(hi, end)
            if lo < hi:
                rate = self._weight_decay if decay else 0.0
                missed = self._ledger.table(since, until, rate)
                replay(target, weight, state, (lo, hi, kept), missed, self._pool)


def _spans(
    target: UnitLayout, pieces: Sequence[_Piece], behind: Sequence[_Piece]
) -> Iterator[tuple[int, int, int]]:
    """(version, first element, one behind the last) of what has to be replayed."""
    if len({piece.version for piece in pieces}) == 1:
        yield behind[0].version, 0, target.size
        return
    for piece in behind:
        for lo, length in zip(piece.runs.target.tolist(), piece.runs.length.tolist()):
            yield piece.version, lo, lo + length


def _block(unit: str, part: str) -> str:
    return f"{unit}/{part}"


def _buffer(array: np.ndarray) -> Buffer:
    return Buffer(Extent(0, array.size), array)
