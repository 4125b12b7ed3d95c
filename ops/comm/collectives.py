"""Every collective in terms of one operation: a round of messages between pairs of ranks.

A transport derives from `Collectives` and moves bytes (`_exchange`, `_post`, `_take`); what is
sent to whom, and in which order values are added, is decided here once, so all transports give the
same bits. Bounds on memory: one scratch buffer of `PIECE_BYTES` (or one element a rank, where that
is more), allocated at the first reduction that needs it.

With `checked`, ranks compare what they are about to do before each call (`ops/comm/agreement.py`).
"""

from __future__ import annotations

import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ops import clock
from ops.comm import agreement
from ops.comm.base import (
    MAX,
    MIN,
    PIECE_BYTES,
    SUM,
    U8,
    ReduceOp,
    as_bytes,
    check_reducible,
    check_same_dtype,
)
from ops.comm.stats import CommStats
from ops.errors import CommError

Messages = Sequence[tuple[int, U8]]
"""Group rank and bytes; one a rank at most, none empty, none for this rank itself."""

# Up to here every rank receives everything and reduces it itself: one round instead of two.
_WHOLE_BYTES = 4 << 10
_TAGS = 1000

_COMBINE: dict[ReduceOp, Callable[..., Any]] = {SUM: np.add, MAX: np.maximum, MIN: np.minimum}


class Collectives(ABC):
    """The calls of `Communicator` over a transport's messages; see the protocol for contracts."""

    def __init__(
        self, name: str, rank: int, ranks: tuple[int, ...], stats: CommStats, *, checked: bool
    ) -> None:
        """`rank` is the number in the group, `ranks` are the members' world ranks."""
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._stats = stats
        self._checked = checked
        self._entered = threading.Lock()
        self._num_collectives = 0
        self._sent_bytes = 0
        self._scratch: U8 = np.empty(0, np.uint8)

    @abstractmethod
    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        """Move these messages, and return when all of `sends` can be reused and all came.

        Every rank of the group enters, with matching lists. `what` names the call in errors.
        """

    def _gather_small(self, own: U8, out: U8, what: str) -> None:
        """Everyone's `own` [n] into `out` [size * n] of all, n of a few KiB at most.

        A transport that has something faster than pairs of messages for it says so here.
        """
        parts = _cut(out, self.size)
        np.copyto(parts[self._rank], own)
        others = self._others()
        self._exchange([(i, own) for i in others], [(i, parts[i]) for i in others], what)

    @abstractmethod
    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        """Send a message as `Communicator.send` does. It may be empty."""

    @abstractmethod
    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        """Receive the next message of `source` with `tag`; its size must be the message's."""

    @abstractmethod
    def free(self) -> None:
        """See `Communicator`."""

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def name(self) -> str:
        return self._name

    @property
    def stats(self) -> CommStats:
        return self._stats

    def all_reduce(self, array: np.ndarray, op: ReduceOp = SUM) -> None:
        check_reducible(array)
        as_bytes("array", array, writes=True)
        flat = array.reshape(-1)
        with self._collective("all_reduce", f"{op.value} {flat.dtype} x {flat.size}") as what:
            if self.size == 1 or flat.size == 0:
                return
            if flat.nbytes <= _WHOLE_BYTES:
                self._reduce_whole(flat, _COMBINE[op], what)
                return
            step = max(PIECE_BYTES // flat.itemsize, self.size)
            for lo in range(0, flat.size, step):
                self._reduce_piece(flat[lo : lo + step], _COMBINE[op], what)

    def all_gather(self, shard: np.ndarray, out: np.ndarray) -> None:
        check_same_dtype(shard, out, "shard and out")
        part, parts = as_bytes("shard", shard), as_bytes("out", out, writes=True)
        _check_times("out", out, "shard", shard, self.size)
        with self._collective("all_gather", f"{shard.dtype} x {shard.size}") as what:
            self._gather(part, _cut(parts, self.size), what)

    def reduce_scatter(self, array: np.ndarray, out: np.ndarray) -> None:
        check_reducible(array)
        check_same_dtype(array, out, "array and out")
        as_bytes("array", array)
        as_bytes("out", out, writes=True)
        _check_times("array", array, "out", out, self.size)
        rows, result = array.reshape(self.size, out.size), out.reshape(-1)
        step = max(PIECE_BYTES // (array.itemsize * self.size), 1)
        with self._collective("reduce_scatter", f"{out.dtype} x {out.size}") as what:
            for lo in range(0, out.size, step):
                piece = rows[:, lo : lo + step]
                self._reduce_rows(list(piece), result[lo : lo + step], np.add, what)

    def all_to_all(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        recv: np.ndarray,
        recv_counts: Sequence[int],
    ) -> None:
        check_same_dtype(send, recv, "send and recv")
        sends = _cut_uneven("send", as_bytes("send", send), send_counts, send, self.size)
        target = as_bytes("recv", recv, writes=True)
        receives = _cut_uneven("recv", target, recv_counts, recv, self.size)
        with self._collective("all_to_all", f"{send.dtype}") as what:
            if self._checked:
                self._check_counts(send_counts, recv_counts, what)
            self._swap(sends, receives, what)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        self._check_peer("root", root, itself=True)
        flat = as_bytes("array", array, writes=self.rank != root)
        with self._collective("broadcast", f"{array.dtype} x {array.size} of {root}") as what:
            if flat.size <= _WHOLE_BYTES:
                others = self._others() if self.rank == root else []
                source = [] if self.rank == root or not flat.size else [(root, flat)]
                self._round([(i, flat) for i in others if flat.size], source, what)
                return
            # Each rank gets one part of the root and the others from their owners, so that the
            # root sends the array twice and not once for each rank.
            parts = _cut_evenly(flat, self.size)
            own = parts[self.rank]
            if self.rank == root:
                others = self._others()
                self._round([(i, parts[i]) for i in others if parts[i].size], [], what)
            else:
                self._round([], [(root, own)] if own.size else [], what)
            self._gather(own, parts, what)

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        self._check_peer("to", to)
        _check_tag(tag)
        flat = as_bytes("array", array)
        with self._call("send") as what:
            if self._checked:
                self._post(agreement.message(f"{array.dtype} x {array.size}"), to, tag, what)
            self._post(flat, to, tag, what)
            self._sent_bytes += flat.size

    def recv(self, array: np.ndarray, source: int, tag: int = 0) -> None:
        self._check_peer("source", source)
        _check_tag(tag)
        flat = as_bytes("array", array, writes=True)
        with self._call("recv") as what:
            if self._checked:
                sent = agreement.empty()
                self._take(sent, source, tag, what)
                agreement.require_message(
                    sent, f"{array.dtype} x {array.size}", f"{what} of rank {source}, tag {tag}"
                )
            self._take(flat, source, tag, what)

    def all_gather_object(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with self._collective("all_gather_object", "") as what:
            lengths = np.empty(self.size, np.int64)
            own = np.array([text.size], np.int64)
            self._small(own.view(np.uint8), lengths.view(np.uint8), what)
            texts = [np.empty(int(length), np.uint8) for length in lengths]
            self._gather(text, texts, what)
            return [json.loads(item.tobytes()) for item in texts]

    def barrier(self) -> None:
        with self._collective("barrier", "") as what:
            self._small(np.zeros(1, np.uint8), np.empty(self.size, np.uint8), what)

    # -- one call -------------------------------------------------------------------------------

    @contextmanager
    def _call(self, kind: str) -> Iterator[str]:
        """Count a call and refuse a second thread; gives its name for errors."""
        what = f"{kind} of group {self._name!r} (rank {self._ranks[self._rank]})"
        if not self._entered.acquire(blocking=False):
            raise CommError(f"{what} was entered while another thread is in a call of this group")
        start, self._sent_bytes = clock.seconds(), 0
        try:
            yield what
        finally:
            self._stats.add(kind, self._sent_bytes, clock.seconds() - start)
            self._entered.release()

    @contextmanager
    def _collective(self, kind: str, detail: str) -> Iterator[str]:
        """A call that all ranks enter: compares what they enter when `checked`."""
        with self._call(kind) as what:
            self._num_collectives += 1
            if self._checked and self.size > 1:
                own = agreement.message(f"{kind} {detail}".rstrip())
                all_of_them = np.empty((self.size, own.size), np.uint8)
                self._small(own, all_of_them.reshape(-1), what)
                agreement.require_same(
                    all_of_them, self._ranks, f"call {self._num_collectives} of {self._name!r}"
                )
            yield what

    def _check_counts(
        self, send_counts: Sequence[int], recv_counts: Sequence[int], what: str
    ) -> None:
        own = np.array([send_counts, recv_counts], np.int64)
        counts = np.empty((self.size, *own.shape), np.int64)
        self._small(as_bytes("counts", own), as_bytes("counts", counts), what)
        agreement.require_counts(counts[:, 0], counts[:, 1], self._ranks, what)

    def _check_peer(self, name: str, rank: int, *, itself: bool = False) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} is {rank}, the group has ranks 0 to {self.size - 1}")
        if rank == self._rank and not itself:
            raise ValueError(f"{name} is {rank}, which is this rank itself")

    def _others(self) -> list[int]:
        """The other ranks, beginning behind this one, so that not all begin with rank 0."""
        return [(self._rank + i) % self.size for i in range(1, self.size)]

    # -- rounds of messages ---------------------------------------------------------------------

    def _round(self, sends: Messages, receives: Messages, what: str) -> None:
        self._sent_bytes += sum(message.size for _, message in sends)
        if self.size > 1:
            self._exchange(sends, receives, what)

    def _swap(self, sends: Sequence[U8], receives: Sequence[U8], what: str) -> None:
        """Part i of `sends` to rank i, what it has for us into part i of `receives`."""
        others = self._others()
        _copy(receives[self._rank], sends[self._rank])
        self._round(
            [(i, sends[i]) for i in others if sends[i].size],
            [(i, receives[i]) for i in reversed(others) if receives[i].size],
            what,
        )

    def _small(self, own: U8, out: U8, what: str) -> None:
        if self.size == 1:
            np.copyto(out, own)
        else:
            self._sent_bytes += own.size * (self.size - 1)
            self._gather_small(own, out, what)

    def _gather(self, own: U8, parts: Sequence[U8], what: str) -> None:
        """Everyone's `own` into the parts of all; sizes may differ from rank to rank."""
        others = self._others()
        _copy(parts[self._rank], own)
        self._round(
            [(i, own) for i in others if own.size],
            [(i, parts[i]) for i in reversed(others) if parts[i].size],
            what,
        )

    # -- reductions -----------------------------------------------------------------------------

    def _buffer(self, num_bytes: int) -> U8:
        if self._scratch.size < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes]

    def _reduce_whole(self, flat: np.ndarray, combine: Callable[..., Any], what: str) -> None:
        everyone = self._buffer(flat.nbytes * self.size)
        self._small(flat.view(np.uint8), everyone, what)
        _fold([part.view(flat.dtype) for part in _cut(everyone, self.size)], flat, combine)

    def _reduce_piece(self, piece: np.ndarray, combine: Callable[..., Any], what: str) -> None:
        """Rank i reduces part i of the piece and gives it to all."""
        parts = _cut_evenly(piece, self.size)
        self._reduce_rows(parts, parts[self._rank], combine, what)
        rows = [part.view(np.uint8) for part in parts]
        self._gather(rows[self._rank], rows, what)

    def _reduce_rows(
        self, parts: Sequence[np.ndarray], out: np.ndarray, combine: Callable[..., Any], what: str
    ) -> None:
        """Reduce part i of all ranks at rank i into `out`, which may be the own part itself."""
        rows = _cut(self._buffer(out.nbytes * self.size), self.size)
        self._swap([part.view(np.uint8) for part in parts], rows, what)
        _fold([row.view(out.dtype) for row in rows], out, combine)


def _fold(rows: Sequence[np.ndarray], out: np.ndarray, combine: Callable[..., Any]) -> None:
    """Combine the rows of ranks 0, 1, ... in this order; the order makes the bits."""
    combine(rows[0], rows[1], out=out) if len(rows) > 1 else np.copyto(out, rows[0])
    for row in rows[2:]:
        combine(out, row, out=out)


def _copy(target: U8, source: U8) -> None:
    if target.ctypes.data != source.ctypes.data:
        np.copyto(target, source)


def _cut(flat: U8, size: int) -> list[U8]:
    """Equal parts of an array whose length is a multiple of `size`."""
    return list(flat.reshape(size, -1)) if flat.size else [flat] * size


def _cut_evenly(flat: np.ndarray, size: int) -> list[np.ndarray]:
    """Parts that differ by one element at most; the first are the longer ones."""
    least, longer = divmod(flat.size, size)
    ends = itertools.accumulate(least + (i < longer) for i in range(size))
    return [flat[end - least - (i < longer) : end] for i, end in enumerate(ends)]


def _cut_uneven(
    name: str, flat: U8, counts: Sequence[int], array: np.ndarray, size: int
) -> list[U8]:
    """Parts of `counts` elements; raises ValueError unless they cover the array."""
    if len(counts) != size or min(counts) < 0 or sum(counts) != array.size:
        raise ValueError(
            f"{name}_counts is {list(counts)}; {size} counts of at least 0 with the sum "
            f"{array.size} are needed"
        )
    ends = itertools.accumulate(int(count) * array.itemsize for count in counts)
    return [flat[end - int(n) * array.itemsize : end] for n, end in zip(counts, ends)]


def _check_times(big: str, array: np.ndarray, small: str, part: np.ndarray, size: int) -> None:
    if array.size != part.size * size:
        raise ValueError(
            f"{big} has {array.size} elements; {small} has {part.size}, and with {size} ranks "
            f"{part.size * size} are needed"
        )


def _check_tag(tag: int) -> None:
    if not 0 <= tag < _TAGS:
        raise ValueError(f"tag is {tag}, allowed is 0 to {_TAGS - 1}")
