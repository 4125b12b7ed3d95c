"""Where every element of a unit lies on another mesh: the arithmetic of resharding.

Each element has a place in its whole tensor, whatever part of the tensor a rank holds. So a layout
is a list of intervals of whole tensors, and what one layout takes from others is their
intersection. Elements that several ranks hold are taken from the first of them.

Pure: no I/O, no communication. Costs O(rows) of what operator parallelism cuts by columns, else
O(tensors).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload.blocks import Field, TensorPlace, TensorSpec, UnitLayout
from ops.checksum import CHUNK_BYTES

I64 = npt.NDArray[np.int64]
_NONE: I64 = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Runs:
    """Elements `source[i] .. source[i] + length[i]` of one flat order that are elements
    `target[i] .. ` of another one; i64, ascending in `target`, apart from each other."""

    target: I64
    source: I64
    length: I64

    @property
    def num_elements(self) -> int:
        """Elements in all runs."""
        return int(self.length.sum())


@dataclass(frozen=True)
class Copies:
    """Bytes `source[i] .. source[i] + nbytes[i]` of a block that are bytes `target[i] ..` of
    another one; i64, ascending in `source`."""

    target: I64
    source: I64
    nbytes: I64

    def chunks(self) -> list[int]:
        """The checksum chunks of the source that hold any of the bytes, ascending."""
        if not len(self.source):
            return []
        first, last = self.source // CHUNK_BYTES, (self.source + self.nbytes - 1) // CHUNK_BYTES
        marks = np.zeros(int(last.max()) + 2, np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, last + 1, -1)
        return np.flatnonzero(np.cumsum(marks)[:-1]).tolist()

    def in_chunk(self, chunk: int) -> Iterator[tuple[int, int, int]]:
        """(target, source within the chunk, bytes) of what lies in one chunk."""
        lo, hi = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        first = int(np.searchsorted(self.source + self.nbytes, lo, "right"))
        last = int(np.searchsorted(self.source, hi, "left"))
        for i in range(first, last):
            start, nbytes = int(self.source[i]), int(self.nbytes[i])
            begin, end = max(start, lo), min(start + nbytes, hi)
            yield int(self.target[i]) + begin - start, begin - lo, end - begin


@dataclass(frozen=True)
class _Intervals:
    """Disjoint intervals [lo, hi) of a space of all tensors, ascending; `local` is the place of
    each one's first element in a layout's flat order."""

    lo: I64
    hi: I64
    local: I64

    def holding(self, points: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
        """The interval that begins at or before each point, and whether it holds the point."""
        if not len(self.lo):
            return np.zeros(len(points), np.int64), np.zeros(len(points), bool)
        index = np.searchsorted(self.lo, points, "right") - 1
        safe = np.maximum(index, 0)
        return safe, (index >= 0) & (points < self.hi[safe])


class UnitSources:
    """What `target`, a layout of a unit, takes from each of `sources`, other layouts of it.

    `runs[i]` are the elements that come from source i. `missing` names tensors, with the number of
    their elements that no source has. ValueError when the layouts are of other dtypes.
    """

    def __init__(self, target: UnitLayout, sources: Sequence[UnitLayout]) -> None:
        for source in sources:
            if (source.weight_dtype, source.frozen) != (target.weight_dtype, target.frozen):
                raise ValueError(f"{target.name}: layouts of other dtypes")
        bases = _bases([target, *sources])
        left = _intervals(target, bases)
        self.runs: list[Runs] = []
        for source in sources:
            runs, left = _take(left, _intervals(source, bases))
            self.runs.append(runs)
        self.missing = _names(left, bases)


def copies(
    runs: Runs, target: UnitLayout, source: UnitLayout, part: str, without: Container[str] = ()
) -> Copies:
    """The bytes of block `part` that `runs` are: of every component but those `without`, in the
    source's order."""
    rows: list[tuple[I64, I64, I64]] = []
    for field in target.fields[part]:
        if field.component in without:
            continue
        other = source.field(part, field.component)
        lo, hi = _span(target, field)
        low, _ = _span(source, other)
        # A run may go on from the split elements to the kept ones.
        begin = np.maximum(runs.target, lo)
        count = np.minimum(runs.target + runs.length, hi) - begin
        at = runs.source + begin - runs.target
        inside, size = count > 0, field.item_bytes
        rows.append(
            (
                field.offset + (begin[inside] - lo) * size,
                other.offset + (at[inside] - low) * size,
                count[inside] * size,
            )
        )
    if not rows:
        return Copies(_NONE, _NONE, _NONE)
    to, came, nbytes = (np.concatenate(column) for column in zip(*rows))
    order = np.argsort(came, kind="stable")
    return Copies(to[order], came[order], nbytes[order])


def _span(layout: UnitLayout, field: Field) -> tuple[int, int]:
    """The elements of the flat order that a field covers."""
    if field.component in ("exp_avg", "exp_avg_sq", "grad"):
        return 0, layout.size
    if field.component == "master":
        return layout.num_split, layout.size
    return 0, layout.num_split


def _bases(layouts: Sequence[UnitLayout]) -> dict[str, int]:
    """Where each tensor begins in the space of all of them."""
    ends: dict[str, int] = {}
    for layout in layouts:
        for place in layout.places:
            if place.spec.name:
                ends[place.spec.name] = max(ends.get(place.spec.name, 0), _end(place.spec))
    bases, base = {}, 0
    for name, end in ends.items():
        bases[name] = base
        base += end
    return bases


def _shape(spec: TensorSpec) -> tuple[int, int, int]:
    """(rows, columns held, columns of the whole tensor) of the block that a tensor or piece is."""
    block = spec.piece_of or spec
    rows, cols = (block.shape[0], block.size // block.shape[0]) if block.size else (0, 0)
    return rows, cols, block.num_cols or cols


def _end(spec: TensorSpec) -> int:
    """Behind the last element of the whole tensor that the block could hold."""
    rows, _, stride = _shape(spec)
    return (spec.row0 + rows) * stride


def _intervals(layout: UnitLayout, bases: dict[str, int]) -> _Intervals:
    rows = [_place(place, bases) for place in layout.places if place.spec.name and place.spec.size]
    if not rows:
        return _Intervals(_NONE, _NONE, _NONE)
    lo, length, local = (np.concatenate(column) for column in zip(*rows))
    order = np.argsort(lo, kind="stable")
    lo, length, local = lo[order], length[order], local[order]
    return _Intervals(lo, lo + length, local)


def _place(place: TensorPlace, bases: dict[str, int]) -> tuple[I64, I64, I64]:
    """(start in the space of all tensors, length, place in the flat order) of each run."""
    spec = place.spec
    _, cols, stride = _shape(spec)
    first = bases[spec.name] + spec.row0 * stride + spec.col0
    begin, end = spec.flat0, spec.flat0 + spec.size
    if cols == stride:
        return tuple(np.array([x], np.int64) for x in (first + begin, spec.size, place.start))  # type: ignore[return-value]
    rows = np.arange(begin // cols, (end - 1) // cols + 1, dtype=np.int64)
    lo = np.maximum(rows * cols, begin)
    hi = np.minimum((rows + 1) * cols, end)
    return first + rows * stride + (lo - rows * cols), hi - lo, place.start + lo - begin


def _take(wanted: _Intervals, offered: _Intervals) -> tuple[Runs, _Intervals]:
    """What `offered` has of `wanted`, and what is left of that."""
    cuts = np.unique(np.concatenate([wanted.lo, wanted.hi, offered.lo, offered.hi]))
    if len(cuts) < 2:
        return Runs(_NONE, _NONE, _NONE), wanted
    lo, hi = cuts[:-1], cuts[1:]
    at, is_wanted = wanted.holding(lo)
    source_at, is_offered = offered.holding(lo)
    both, rest = is_wanted & is_offered, is_wanted & ~is_offered
    target = wanted.local[at[both]] + lo[both] - wanted.lo[at[both]]
    source = offered.local[source_at[both]] + lo[both] - offered.lo[source_at[both]]
    runs = _joined(target, source, hi[both] - lo[both])
    local = wanted.local[at[rest]] + lo[rest] - wanted.lo[at[rest]] if rest.any() else _NONE
    return runs, _Intervals(lo[rest], hi[rest], local)


def _joined(target: I64, source: I64, length: I64) -> Runs:
    """Runs in order of their target, neighbours on both sides joined."""
    order = np.argsort(target, kind="stable")
    target, source, length = target[order], source[order], length[order]
    if not len(target):
        return Runs(target, source, length)
    end, source_end = target + length, source + length
    begins = np.ones(len(target), bool)
    begins[1:] = (target[1:] != end[:-1]) | (source[1:] != source_end[:-1])
    first = np.flatnonzero(begins)
    return Runs(target[first], source[first], np.add.reduceat(length, first))


def _names(left: _Intervals, bases: dict[str, int]) -> dict[str, int]:
    """Elements of each tensor in these intervals."""
    if not len(left.lo):
        return {}
    names, starts = list(bases), np.array(list(bases.values()), np.int64)
    index = np.searchsorted(starts, left.lo, "right") - 1
    counts: dict[str, int] = {}
    for at, nbytes in zip(index.tolist(), (left.hi - left.lo).tolist()):
        counts[names[at]] = counts.get(names[at], 0) + nbytes
    return counts
