"""Sequences, cursors and batches: the same batches from the same place, always.

Shapes: B sequences of a batch, S tokens of a sequence.

Sequence i of a view reads tokens [i·S, i·S + S] (S + 1 of them): inputs are the first S, targets
the last S, so neighbouring sequences overlap by one token and every token but the last few is an
input once. Each epoch visits all sequences once in a keyed order; the last batch of an epoch is
completed with the first sequences of the next. The position to resume from travels with each
batch, so that reading ahead never moves what a checkpoint records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moe.data.permutation import Permutation
from moe.data.source import token_outside_vocabulary
from moe.data.split import TokenView
from ops.errors import DataError

ALL_ROWS = slice(None)


@dataclass(frozen=True)
class Cursor:
    """A place in the stream of batches: `position` sequences into `epoch`, ordered by `seed`.

    `stream` identifies text and sequence length; it is empty until a `BatchStream` fills it in,
    and a stream refuses a cursor of another one. The batch size may change between runs.
    """

    epoch: int = 0
    position: int = 0
    seed: int = 1
    stream: str = ""

    def to_json(self) -> dict[str, int | str]:
        """The cursor as a dictionary of JSON values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "stream": self.stream,
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_json` saved; raises `DataError` when it is not one."""
        epoch, position, seed = (saved.get(key) for key in ("epoch", "position", "seed"))
        stream = saved.get("stream", "")
        sound = all(type(number) is int and number >= 0 for number in (epoch, position, seed))
        if not sound or not isinstance(stream, str):
            raise DataError(
                f"the saved data position {dict(saved)!r} is damaged: epoch, position and seed "
                "must be integers of at least 0 and stream a string"
            )
        return Cursor(epoch, position, seed, stream)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Sequences:
    """`tokens`, i32 [B, S], and `targets`, i32 [B, S]: the same shifted by one."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Batch(Sequences):
    """A training batch and the cursor of what follows it: save that to resume after it."""

    cursor_after: Cursor


@dataclass(frozen=True, eq=False)
class HeldOutBatch(Sequences):
    """A rank's part of an evaluation batch, which has `num_tokens` tokens on all ranks.

    The last batch of a text may be smaller, and a rank's part of it empty.
    """

    num_tokens: int


def num_sequences(view: TokenView, seq_len: int) -> int:
    """How many sequences of `seq_len` + 1 tokens, overlapping by one, the view holds."""
    return max(0, view.num_tokens - 1) // seq_len


class BatchStream:
    """Endless batches of a view from a cursor on.

    A stream is a deterministic function of (view, seq_len, batch_sequences, cursor). `rows`
    picks the rows of each global batch that this rank reads; the cursor counts global batches'
    sequences, so it means the same on every mesh. Tokens are checked against `vocab_size` when
    it is given. Not for several threads.
    """

    def __init__(
        self,
        view: TokenView,
        seq_len: int,
        batch_sequences: int,
        cursor: Cursor,
        *,
        vocab_size: int | None = None,
        rows: slice = ALL_ROWS,
    ) -> None:
        """Raises `DataError` when a batch is larger than the data or the cursor is not its own."""
        total = num_sequences(view, seq_len)
        if batch_sequences > total:
            raise DataError(
                f"{view.name} holds {view.num_tokens} tokens, that is {total} sequences of "
                f"{seq_len} tokens, but a batch needs {batch_sequences}; use more text, shorter "
                "sequences or a smaller batch"
            )
        identity = xxhash.xxh3_64_hexdigest(f"{view.digest} {seq_len}".encode())
        if cursor.stream not in ("", identity):
            raise DataError(
                f"the saved data position belongs to another text, held-out share or sequence "
                f"length than {view.name} in sequences of {seq_len}; restore those, or begin a run "
                "on this text with train.init_from set to an export of the checkpoint"
            )
        if not 0 <= cursor.position < total:
            raise DataError(
                f"the saved data position is sequence {cursor.position}, {view.name} holds {total}"
            )
        self.num_sequences = total
        self._view = view
        self._seq_len = seq_len
        self._batch_sequences = batch_sequences
        self._vocab_size = vocab_size
        self._rows = rows
        self._cursor = replace(cursor, stream=identity)
        self._order = Permutation(total, cursor.seed, cursor.epoch)

    @property
    def cursor(self) -> Cursor:
        """Where the next batch begins."""
        return self._cursor

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next()

    def next(self) -> Batch:
        """The next batch; raises `DataError` for a token outside of the vocabulary.

        An error does not move the cursor. May block on the disk behind a memory map.
        """
        first = self._cursor.position
        last = min(first + self._batch_sequences, self.num_sequences)
        ids_B = self._order(np.arange(first, last))
        cursor = replace(self._cursor, position=last)
        order = self._order
        if last == self.num_sequences:
            rest = first + self._batch_sequences - last
            cursor = replace(cursor, epoch=cursor.epoch + 1, position=rest)
            order = Permutation(self.num_sequences, cursor.seed, cursor.epoch)
            ids_B = np.concatenate([ids_B, order(np.arange(rest))])
        tokens, targets = _read_sequences(
            self._view, self._seq_len, ids_B[self._rows], self._vocab_size
        )
        self._cursor, self._order = cursor, order
        return Batch(tokens, targets, cursor)


def evaluation_batches(
    view: TokenView,
    seq_len: int,
    batch_sequences: int,
    eval_batches: int,
    *,
    vocab_size: int | None = None,
    rows: slice = ALL_ROWS,
) -> Iterator[HeldOutBatch]:
    """The first sequences of a view in their own order, as at most `eval_batches` batches.

    Each sequence comes at most once: where the view ends, so does the last batch, and ranks with
    later `rows` get fewer sequences of it, or none. Which sequences come depends on the sizes of
    the view and of the batch of all ranks, not on how ranks divide it, and the number of batches
    is the same on every rank. Raises `DataError` when the view does not hold one sequence.
    """
    total = num_sequences(view, seq_len)
    if total == 0:
        raise DataError(
            f"{view.name} holds {view.num_tokens} tokens, one sequence needs {seq_len + 1}; use "
            "more text, shorter sequences or a larger data.held_out_fraction"
        )
    for first in range(0, min(eval_batches * batch_sequences, total), batch_sequences):
        ids_B = np.arange(first, min(first + batch_sequences, total))
        own = _read_sequences(view, seq_len, ids_B[rows], vocab_size)
        yield HeldOutBatch(*own, num_tokens=len(ids_B) * seq_len)


def _read_sequences(
    view: TokenView, seq_len: int, ids_B: npt.NDArray[np.int64], vocab_size: int | None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    packed = np.empty((len(ids_B), seq_len + 1), dtype=np.int32)
    for row, sequence in enumerate(ids_B.tolist()):
        start = sequence * seq_len
        tokens = view.read(start, start + seq_len + 1)
        if vocab_size is not None and int(tokens.max()) >= vocab_size:
            offset = int(np.argmax(tokens >= vocab_size))
            position = view.source_position(start + offset)
            raise token_outside_vocabulary(view.source, position, int(tokens[offset]), vocab_size)
        packed[row] = tokens
    return np.ascontiguousarray(packed[:, :-1]), np.ascontiguousarray(packed[:, 1:])
