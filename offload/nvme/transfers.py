"""Transfers in flight: a bounded priority queue that workers draw requests from.

A transfer moves one block; it is cut into requests as workers become free, so the queue holds
transfers, not requests. The smallest `deadline` runs first, reads before writes on ties, then in
the order of submission: what is urgent waits for no more than the requests that workers have in
hand. A transfer that has to run after another one (a read of a block being written, a second write
of it) becomes ready when that one finishes, and lends it its own urgency.

Small ready transfers of one direction that are neighbours on the drive are handed out together, up
to the size of a request: whoever comes first takes the others along, whatever their deadlines.

Invariants: at most `num_transfers_max` transfers are admitted and not finished; a transfer finishes
exactly once, and never while a worker has a request of it. The first I/O failure is latched: from
then on nothing is admitted and everything queued finishes with that error, without I/O.

All methods want `lock` held, except where they say otherwise. This module does no I/O.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field

from offload.nvme.handle import Handle
from offload.nvme.table import StoredBlock
from offload.runs import Run
from ops.errors import StorageError

TAIL_SHARE = 4  # less than this part of a request left over is moved with the last one
NEIGHBOURS_MAX = 256  # in one system call: each may need two buffers, of 1024 that Linux takes


class Direction(enum.IntEnum):
    """Which way a transfer goes; the order is the order on ties."""

    READ = 0
    WRITE = 1


@dataclass(slots=True, eq=False)
class Transfer:
    """One block on its way: `data` holds (or receives) its `nbytes` logical bytes.

    `data` may be longer than `nbytes`: the rest is scratch for padding. `stored` is the version
    that is written or read; a read behind a write learns it when the write has finished. `runs` say
    what the bytes being written are.
    """

    direction: Direction
    block: str
    data: memoryview
    nbytes: int
    address: int
    cause: str
    deadline: int
    stored: StoredBlock | None
    handle: Handle
    runs: tuple[Run, ...] = ()
    runs_after: Transfer | None = None
    dependents: list[Transfer] = field(default_factory=list)
    next_start: int = 0
    exhausted: bool = False
    running: int = 0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes `[start, stop)` of a block, for one worker; `skip` when it failed already."""

    transfer: Transfer
    start: int
    stop: int
    skip: bool


class TransferQueue:
    """The queue and its lock, which also guards the table and the counters of the store."""

    def __init__(self, request_bytes: int, num_transfers_max: int) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # a transfer finished, a failure, closing
        self.num_transfers = 0
        self.num_transfers_max = num_transfers_max
        self.num_transfers_peak = 0
        self.failure: BaseException | None = None
        self.closing = False
        self._work = threading.Condition(self.lock)
        self._stopped = False
        self._request_bytes = request_bytes
        self._ready: list[tuple[int, int, int, Transfer]] = []
        self._sequence = itertools.count()
        self._unfinished: dict[Handle, Transfer] = {}
        # The small transfers that are ready, by where they begin and end on the disk.
        self._small_from: dict[tuple[Direction, int, int], Transfer] = {}
        self._small_to: dict[tuple[Direction, int, int], Transfer] = {}

    def check(self) -> None:
        """Raise the latched failure, or StorageError after close has begun."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.closing:
            raise StorageError("the store is closed")

    def admit(self) -> None:
        """Wait for room for one transfer and take it; raises as `check` does."""
        self.check()
        while self.num_transfers >= self.num_transfers_max:
            self.changed.wait()
            self.check()
        self.num_transfers += 1
        self.num_transfers_peak = max(self.num_transfers_peak, self.num_transfers)

    def leave(self, num_transfers: int = 1) -> None:
        """Give back the room of transfers, finished or never added."""
        self.num_transfers -= num_transfers
        self.changed.notify_all()

    def add(self, transfer: Transfer) -> None:
        """Queue an admitted transfer; it becomes ready once `runs_after` has finished."""
        self._unfinished[transfer.handle] = transfer
        before = transfer.runs_after
        if before is None:
            self.make_ready(transfer)
            return
        before.dependents.append(transfer)
        self._lend(transfer.deadline, before)

    def hurry(self, handle: Handle, deadline: int) -> None:
        """Make a transfer, and what it waits for, at least as urgent as `deadline`."""
        self._lend(deadline, self._unfinished.get(handle))

    def make_ready(self, transfer: Transfer) -> None:
        """Let workers take requests of `transfer`, whose `stored` is known by now."""
        transfer.runs_after = None
        self._push(transfer)
        stored = transfer.stored
        assert stored is not None
        if self._is_small(transfer, stored):
            start, end = _range_on_disk(transfer, stored)
            self._small_from[start], self._small_to[end] = transfer, transfer
        num_requests = -(-transfer.nbytes // self._request_bytes) or 1
        self._work.notify(max(num_requests, len(stored.extents)))

    def unfinished(self) -> list[Transfer]:
        """The transfers that were added and have not been settled, in that order."""
        return list(self._unfinished.values())

    def settled(self, transfer: Transfer) -> None:
        """Forget `transfer`: it has finished."""
        del self._unfinished[transfer.handle]

    def take(self) -> list[Request] | None:
        """For workers: wait for the most urgent request; None when the queue was stopped.

        Several come together when they are neighbours on the drive, in the order of their places.
        Raises nothing. `lock` must not be held.
        """
        with self.lock:
            while True:
                requests = self._next()
                if requests:
                    return requests
                if self._stopped:
                    return None
                self._work.wait()

    def latch(self, failure: BaseException) -> None:
        """Keep the first failure and wake everybody who waits for room."""
        if self.failure is None:
            self.failure = failure
            self.changed.notify_all()

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self.num_transfers:
            self.changed.wait()

    def stop(self) -> None:
        """Let the workers go once the queue is empty."""
        self._stopped = True
        self._work.notify_all()

    def _lend(self, deadline: int, transfer: Transfer | None) -> None:
        """Give `deadline` to `transfer` and all it runs after, where it is more urgent."""
        while transfer is not None and transfer.deadline > deadline:
            transfer.deadline = deadline
            if transfer.runs_after is None and not transfer.exhausted:
                self._push(transfer)
            transfer = transfer.runs_after

    def _push(self, transfer: Transfer) -> None:
        order = (transfer.deadline, int(transfer.direction), next(self._sequence), transfer)
        heapq.heappush(self._ready, order)
        if len(self._ready) > 2 * self.num_transfers_max:
            # Drop what lent urgency left behind, so that the heap is bounded too. Sorted is a heap.
            most_urgent: dict[int, tuple[int, int, int, Transfer]] = {}
            for entry in sorted(self._ready):
                if not entry[3].exhausted and entry[3].error is None:
                    most_urgent.setdefault(id(entry[3]), entry)
            self._ready = list(most_urgent.values())

    def _next(self) -> list[Request]:
        """Cut the next request off the first transfer that still has one; none: empty."""
        while self._ready:
            transfer = self._ready[0][3]
            if transfer.exhausted or transfer.error is not None:
                # Pushed twice (it was lent urgency), or failed in another worker: that one ends it.
                heapq.heappop(self._ready)
                continue
            if self.failure is not None:
                heapq.heappop(self._ready)
                transfer.error = self.failure
                self._exhaust(transfer)
                if transfer.running:
                    continue
                transfer.running = 1
                return [Request(transfer, 0, 0, skip=True)]
            neighbours = self._neighbours(transfer)
            if len(neighbours) > 1:
                return [self._cut(neighbour, neighbour.nbytes) for neighbour in neighbours]
            assert transfer.stored is not None
            start = transfer.next_start
            stop = start + self._request_bytes
            if transfer.nbytes - stop < self._request_bytes // TAIL_SHARE:
                stop = transfer.nbytes
            return [self._cut(transfer, transfer.stored.one_drive_until(start, stop))]
        return []

    def _cut(self, transfer: Transfer, stop: int) -> Request:
        request = Request(transfer, transfer.next_start, stop, skip=False)
        transfer.next_start = stop
        transfer.running += 1
        if stop == transfer.nbytes:
            self._exhaust(transfer)  # and stays in the heap until it comes up there
        return request

    def _exhaust(self, transfer: Transfer) -> None:
        transfer.exhausted = True
        if transfer.stored is not None and self._is_small(transfer, transfer.stored):
            start, end = _range_on_disk(transfer, transfer.stored)
            for index, key in ((self._small_from, start), (self._small_to, end)):
                if index.get(key) is transfer:  # and not another read of the same block
                    del index[key]

    def _is_small(self, transfer: Transfer, stored: StoredBlock) -> bool:
        if stored.encoded_bytes is not None:  # is moved frame by frame
            return False
        return 0 < transfer.nbytes < self._request_bytes and len(stored.extents) == 1

    def _neighbours(self, transfer: Transfer) -> list[Transfer]:
        """`transfer` and the small ready ones beside it, by their places, a request at most."""
        run = deque([transfer])
        stored = transfer.stored
        assert stored is not None
        if not self._is_small(transfer, stored):
            return [transfer]
        start, end = _range_on_disk(transfer, stored)
        room = self._request_bytes - stored.extents[0].nbytes
        for index, place, append in (
            (self._small_from, end, run.append),
            (self._small_to, start, run.appendleft),
        ):
            while len(run) < NEIGHBOURS_MAX and (other := index.get(place)) is not None:
                assert other.stored is not None
                room -= other.stored.extents[0].nbytes
                if room < 0:
                    break
                append(other)
                ends = _range_on_disk(other, other.stored)
                place = ends[1] if index is self._small_from else ends[0]
        return list(run)


def _range_on_disk(
    transfer: Transfer, stored: StoredBlock
) -> tuple[tuple[Direction, int, int], tuple[Direction, int, int]]:
    """Keys of where a transfer of one extent begins and where it ends."""
    extent, direction = stored.extents[0], transfer.direction
    end = extent.offset + extent.nbytes
    return (direction, extent.drive, extent.offset), (direction, extent.drive, end)
