"""Train and held-out text: which tokens belong to which, and reading either as one stream.

Documents are held out whole, chosen by a hash of their index with a fixed key, so that every seed
and every run is judged on the same text. Where that cannot work (a book in one document,
a handful of documents of very different length) the end of the text is held out instead. The choice
depends on the documents and the fraction only, never on the sequence length.

A view is a list of runs (ranges of source positions); tokens are never copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moe.data.permutation import mix64, mix64_array
from moe.data.source import CHUNK_TOKENS, TokenSource, iter_chunks

_HELD_OUT_KEY = mix64(0x68656C64)
# A hashed choice is kept while the share it holds out is within this factor of the one asked for.
_SHARE_FACTOR_MAX = 2.0


class TokenView:
    """Some tokens of a source, read as if they were contiguous.

    `starts_R` and `stops_R` (i64 [R]) are the ranges of source positions, in order. `digest`
    identifies source and ranges. `name` is what messages call it.
    """

    def __init__(
        self,
        name: str,
        source: TokenSource,
        starts_R: npt.NDArray[np.int64],
        stops_R: npt.NDArray[np.int64],
    ) -> None:
        self.name = name
        self.source = source
        self._starts_R = starts_R
        self._ends_R = np.cumsum(stops_R - starts_R, dtype=np.int64)
        hasher = xxhash.xxh3_64(source.digest.encode())
        hasher.update(np.ascontiguousarray(starts_R, dtype="<i8").view(np.uint8).data)
        hasher.update(np.ascontiguousarray(stops_R, dtype="<i8").view(np.uint8).data)
        self.digest = hasher.hexdigest()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the view."""
        return int(self._ends_R[-1]) if len(self._ends_R) else 0

    def source_position(self, position: int) -> int:
        """Position in the source of the view's token `position`."""
        run = int(np.searchsorted(self._ends_R, position, side="right"))
        before = int(self._ends_R[run - 1]) if run else 0
        return int(self._starts_R[run]) + position - before

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop) of the view, [stop - start] in the source's dtype.

        Raises ValueError outside of the view; may block on the disk behind a memory map.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} of a view of {self.num_tokens}")
        parts = []
        run = int(np.searchsorted(self._ends_R, start, side="right"))
        while start < stop:
            length = min(stop, int(self._ends_R[run])) - start
            first = self.source_position(start)
            parts.append(self.source.tokens[first : first + length])
            start += length
            run += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else self.source.tokens[:0]

    def chunks(self, size: int = CHUNK_TOKENS) -> Iterator[npt.NDArray[Any]]:
        """All tokens in order, in pieces of at most `size`."""
        for start in range(0, self.num_tokens, size):
            yield self.read(start, min(start + size, self.num_tokens))


@dataclass(frozen=True, eq=False)
class Split:
    """Disjoint views that together are the whole source; `whole_documents` says how it was cut."""

    train: TokenView
    held_out: TokenView
    whole_documents: bool


def whole_view(source: TokenSource) -> TokenView:
    """The whole source as one view."""
    return TokenView(source.name, source, _i64(0), _i64(source.num_tokens))


def split_held_out(source: TokenSource, held_out_fraction: float) -> Split:
    """Divide `source` so that about `held_out_fraction` of its tokens is held out.

    Deterministic in (documents, fraction). May block for one pass over `document_ends`.
    """
    starts_R, stops_R = _held_out_runs(source, held_out_fraction)
    held_out_tokens = int((stops_R - starts_R).sum())
    share = held_out_tokens / source.num_tokens
    lowest, highest = held_out_fraction / _SHARE_FACTOR_MAX, held_out_fraction * _SHARE_FACTOR_MAX
    whole_documents = lowest <= share <= highest and held_out_tokens < source.num_tokens
    if not whole_documents:
        cut, whole_documents = _tail_cut(source, held_out_fraction)
        starts_R, stops_R = _i64(cut), _i64(source.num_tokens)
    train_starts_R = np.concatenate([_i64(0), stops_R])
    train_stops_R = np.concatenate([starts_R, _i64(source.num_tokens)])
    filled_R = train_stops_R > train_starts_R
    return Split(
        TokenView(
            f"{source.name} (train)", source, train_starts_R[filled_R], train_stops_R[filled_R]
        ),
        TokenView(f"{source.name} (held out)", source, starts_R, stops_R),
        whole_documents,
    )


def _i64(value: int) -> npt.NDArray[np.int64]:
    return np.array([value], dtype=np.int64)


def _held_out_runs(
    source: TokenSource, fraction: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Token ranges of the documents whose hashed index falls below the fraction, merged."""
    threshold = np.uint64(int(fraction * 2.0**64))
    starts, stops = [], []
    first = 0
    before = np.uint64(0)
    for ends_D in iter_chunks(source.document_ends):
        index_D = np.arange(first, first + len(ends_D), dtype=np.uint64)
        held_D = mix64_array(index_D ^ np.uint64(_HELD_OUT_KEY)) < threshold
        starts_D = np.concatenate([np.array([before], dtype=np.uint64), ends_D[:-1]])
        starts.append(starts_D[held_D].astype(np.int64))
        stops.append(ends_D[held_D].astype(np.int64))
        first += len(ends_D)
        before = ends_D[-1]
    starts_R, stops_R = np.concatenate(starts), np.concatenate(stops)
    joined_R = starts_R[1:] == stops_R[:-1]
    if not joined_R.any():
        return starts_R, stops_R
    keep = np.array([True])
    return (
        starts_R[np.concatenate([keep, ~joined_R])],
        stops_R[np.concatenate([~joined_R, keep])],
    )


def _tail_cut(source: TokenSource, fraction: float) -> tuple[int, bool]:
    """Where the held-out end of the text begins, and whether that is a document's border."""
    length = source.num_tokens
    cut = length - round(length * fraction)
    index = int(np.searchsorted(source.document_ends, np.uint64(cut)))
    near = [int(end) for end in source.document_ends[max(0, index - 1) : index + 1]]
    lowest, highest = fraction / _SHARE_FACTOR_MAX, fraction * _SHARE_FACTOR_MAX
    borders = [end for end in near if 0 < end < length and lowest <= 1 - end / length <= highest]
    if borders:
        return min(borders, key=lambda end: abs(end - cut)), True
    return min(max(cut, 0), length), False
