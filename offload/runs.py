"""What the bytes of a block are: typed runs, one for each component in it.

The cold store takes blocks as bytes; a codec does better when it knows where the numbers of one
kind lie and how long they are. Bytes between runs (alignment gaps) are of no kind.

Pure; knows neither tiers nor codecs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.blocks import UnitLayout

ITEM_BYTES = (1, 2, 4)
UNTYPED = "bytes"
"""The component of a block of which nothing is known."""

GAP = ""
"""The component of bytes between runs."""


class Run(NamedTuple):
    """Bytes `[start, stop)` of a block: elements of `component`, `item_bytes` each."""

    component: str
    item_bytes: int
    start: int
    stop: int


class Piece(NamedTuple):
    """`nbytes` in a row of one component, part of a run or of a gap."""

    component: str
    item_bytes: int
    nbytes: int


def runs_of(layout: UnitLayout, part: str) -> tuple[Run, ...]:
    """The runs of one block (`weight`, `state`, `grad`) of a unit, in order."""
    return tuple(
        Run(item.component, item.item_bytes, item.offset, item.offset + item.nbytes)
        for item in layout.fields[part]
        if item.nbytes
    )


def untyped(nbytes: int) -> tuple[Run, ...]:
    """One run of single bytes over a whole block."""
    return (Run(UNTYPED, 1, 0, nbytes),) if nbytes else ()


def checked_runs(runs: Sequence[Run] | None, nbytes: int) -> tuple[Run, ...]:
    """The runs of a block of `nbytes`; without any given, plain bytes.

    Raises ValueError unless they are in order, apart from each other and inside the block.
    """
    if runs is None:
        return untyped(nbytes)
    end = 0
    for run in runs:
        if not end <= run.start <= run.stop <= nbytes:
            raise ValueError(f"{run} does not follow byte {end} of a block of {nbytes} bytes")
        if run.item_bytes not in ITEM_BYTES:
            raise ValueError(f"{run}: items of 1, 2 or 4 bytes are possible")
        end = run.stop
    return tuple(runs)


def pieces_of(runs: Sequence[Run], start: int, stop: int) -> list[Piece]:
    """What bytes `[start, stop)` of a block with these `runs` are; the pieces cover them."""
    pieces, at = [], start
    for run in runs:
        low, high = max(run.start, start), min(run.stop, stop)
        if low >= high:
            continue
        if low > at:
            pieces.append(Piece(GAP, 1, low - at))
        pieces.append(Piece(run.component, run.item_bytes, high - low))
        at = high
    if at < stop:
        pieces.append(Piece(GAP, 1, stop - at))
    return pieces
