"""Transfers in flight: a bounded priority queue that workers draw requests from.

A transfer moves one block; it is cut into requests as workers become free, so the queue holds
transfers, not requests. The smallest `deadline` runs first, reads before writes on ties, then in
the order of submission. A transfer that has to run after another one (a read of a block being
written, a second write of it) becomes ready when that one finishes, and lends it its own urgency.

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
from dataclasses import dataclass, field

from offload.nvme.handle import Handle
from offload.nvme.table import StoredBlock
from ops.errors import StorageError


class Direction(enum.IntEnum):
    """Which way a transfer goes; the order is the order on ties."""

    READ = 0
    WRITE = 1


@dataclass(slots=True, eq=False)
class Transfer:
    """One block on its way: `data` holds (or receives) its `nbytes` logical bytes.

    `data` may be longer than `nbytes`: the rest is scratch for padding. `stored` is the version
    that is written or read; a read behind a write learns it when the write has finished.
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
        before = transfer.runs_after
        if before is None:
            self.make_ready(transfer)
            return
        before.dependents.append(transfer)
        while before is not None and before.deadline > transfer.deadline:
            before.deadline = transfer.deadline
            if before.runs_after is None and not before.exhausted:
                self._push(before)
            before = before.runs_after

    def make_ready(self, transfer: Transfer) -> None:
        """Let workers take requests of `transfer`."""
        transfer.runs_after = None
        self._push(transfer)
        self._work.notify(-(-transfer.nbytes // self._request_bytes) or 1)

    def take(self) -> Request | None:
        """For workers: wait for the most urgent request; None when the queue was stopped.

        Raises nothing. `lock` must not be held.
        """
        with self.lock:
            while True:
                request = self._next()
                if request is not None:
                    return request
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

    def _next(self) -> Request | None:
        """Cut the next request off the first transfer that still has one."""
        while self._ready:
            transfer = self._ready[0][3]
            if transfer.exhausted or transfer.error is not None:
                # Pushed twice (it was lent urgency), or failed in another worker: that one ends it.
                heapq.heappop(self._ready)
                continue
            if self.failure is not None:
                heapq.heappop(self._ready)
                transfer.error = self.failure
                transfer.exhausted = True
                if transfer.running:
                    continue
                transfer.running = 1
                return Request(transfer, 0, 0, skip=True)
            start = transfer.next_start
            stop = min(start + self._request_bytes, transfer.nbytes)
            transfer.next_start = stop
            transfer.running += 1
            if stop == transfer.nbytes:
                transfer.exhausted = True
                heapq.heappop(self._ready)
            return Request(transfer, start, stop, skip=False)
        return None
