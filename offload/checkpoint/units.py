"""One way to read a unit of a commit, whatever mesh made it and whatever mesh wants it.

A unit is put together in memory, block for block, from the ranks that stored parts of it. Only the
checksum chunks that hold a needed byte are read, each of them once. Parts may be of different
versions, because one rank has caught up on what an idle unit missed and another has not; what is
behind is replayed, by the instructions that a run would have used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offload.arena import Buffer
from offload.blocks import UnitLayout
from offload.checkpoint.layout import Copies, Runs, UnitSources, copies
from offload.ledger import Ledger
from offload.nvme.extents import Extent
from offload.unit_values import MOMENTS
from offload.update_job import groups, replay
from ops.errors import StorageError
from ops.kernels.pool import KernelPool

PARTS = ("weight", "state")
_CHUNKS_AHEAD = 32  # more than the buffers of a `ReadAhead` take


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

    def expect(self, block: str, chunks: Sequence[int]) -> None:
        """These chunks of the block will be read, after what has been expected before."""

    def read_chunks(self, block: str, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """The verified bytes of these checksum chunks, ascending; valid until the next one."""


@dataclass(frozen=True)
class _Piece:
    """What one rank gives to a unit."""

    rank: int
    layout: UnitLayout
    runs: Runs
    version: int


@dataclass(frozen=True)
class _Read:
    """Chunks of a rank's block that hold bytes of a unit's block `part`."""

    part: str
    rank: int
    block: str
    copies: Copies
    chunks: list[int]


@dataclass(frozen=True)
class _Plan:
    """How a unit is put together, `until` an optimizer step; `behind`: what is replayed."""

    target: UnitLayout
    options: tuple[int | None, bool, bool]
    until: int
    pieces: list[_Piece]
    behind: list[_Piece]
    reads: list[_Read]
    gaps: list[tuple[str, int, int]]
    """What of its blocks (part, first byte, one behind the last) is padding: zero."""

    def is_for(self, target: UnitLayout, options: tuple[int | None, bool, bool]) -> bool:
        """Whether it is the plan of this call of `fill`."""
        return self.target is target and self.options == options

    @property
    def num_chunks(self) -> int:
        """How many chunks are read."""
        return sum(len(read.chunks) for read in self.reads)


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
        self._coming: Iterator[_Plan] = iter(())
        self._planned: deque[_Plan] = deque()

    def expect(
        self, targets: Iterable[UnitLayout], until: int | None = None, moments: bool = True
    ) -> None:
        """Read ahead across units: `fill` will be called for `targets` in their order, with these
        options and, unless it is frozen, with a state. Another call of it drops what was expected.
        """
        self._planned.clear()
        self._coming = (self._plan(x, (until, moments, not x.frozen)) for x in targets)

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
        newest piece is. Without `moments`, and where no replay needs them, they are not read, and
        their place is left as it was. Raises StorageError when the commit lacks an element, or is
        of another model, or when a chunk does not verify.
        """
        plan = self._next_plan(target, (until, moments, state is not None))
        blocks = {"weight": weight, "state": state}
        for part, lo, hi in plan.gaps:
            block = blocks[part]
            assert block is not None
            block[lo:hi] = 0
        for read in plan.reads:
            to = blocks[read.part]
            assert to is not None
            for chunk, data in self._parts[read.rank].read_chunks(read.block, read.chunks):
                source = np.frombuffer(data, np.uint8)
                for at, came, nbytes in read.copies.in_chunk(chunk):
                    to[at : at + nbytes] = source[came : came + nbytes]
        if plan.behind:
            assert state is not None
            buffers = (_buffer(weight), _buffer(state))
            for since, lo, hi in _spans(target, plan.pieces, plan.behind):
                self._catch_up(target, *buffers, since, plan.until, lo, hi)
        return plan.until

    def _next_plan(self, target: UnitLayout, options: tuple[int | None, bool, bool]) -> _Plan:
        """The plan of a unit that is filled now; what is to come is planned and read ahead."""
        self._look_ahead(1)
        if not self._planned or not self._planned[0].is_for(target, options):
            self._coming = iter(())
            self._planned.clear()
            return self._plan(target, options)
        plan = self._planned.popleft()
        self._look_ahead(_CHUNKS_AHEAD)
        return plan

    def _look_ahead(self, num_chunks: int) -> None:
        """Plan, and announce to the parts, until so many chunks are to come."""
        ahead = sum(plan.num_chunks for plan in self._planned)
        while ahead < num_chunks:
            plan = next(self._coming, None)
            if plan is None:
                return
            self._planned.append(plan)
            ahead += plan.num_chunks
            for read in plan.reads:
                self._parts[read.rank].expect(read.block, read.chunks)

    def _plan(self, target: UnitLayout, options: tuple[int | None, bool, bool]) -> _Plan:
        asked, moments, has_state = options
        pieces = self._pieces(target)
        version = max((piece.version for piece in pieces), default=0)
        is_replayed = has_state and self._replays
        until = asked if asked is not None and is_replayed else version
        behind = [piece for piece in pieces if is_replayed and piece.version < until]
        for piece in behind:
            if not self._ledger.covers(piece.version):
                raise StorageError(
                    f"the blocks of {target.name} on rank {piece.rank} are of step "
                    f"{piece.version}, and the ledger tells of what they missed only from step "
                    f"{self._ledger.first}"
                )
        without = () if moments or behind else MOMENTS
        reads, gaps = [], []
        for part in PARTS if has_state else PARTS[:1]:
            tables = [copies(x.runs, target, x.layout, part, without) for x in pieces]
            for piece, table in zip(pieces, tables):
                block = _block(target.name, part)
                reads.append(_Read(part, piece.rank, block, table, table.chunks()))
            gaps += [(part, lo, hi) for lo, hi in _gaps(target, part, tables, without)]
        return _Plan(target, options, until, pieces, behind, reads, gaps)

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


def _gaps(
    target: UnitLayout, part: str, tables: Sequence[Copies], without: Sequence[str]
) -> list[tuple[int, int]]:
    """The bytes [lo, hi) of a block that nothing is copied to, but for the fields left out."""
    left = [x for x in target.fields[part] if x.component in without]
    lo = np.concatenate([[x.offset for x in left], *(table.target for table in tables)])
    nbytes = np.concatenate([[x.nbytes for x in left], *(table.nbytes for table in tables)])
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order].astype(np.int64), (lo + nbytes)[order].astype(np.int64)
    begin, end = np.append(0, hi), np.append(lo, target.nbytes(part))
    inside = begin < end
    return list(zip(begin[inside].tolist(), end[inside].tolist()))


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
