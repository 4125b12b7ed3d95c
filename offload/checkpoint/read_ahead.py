"""Requests made ahead of whoever reads: threads, buffers, and which request is next.

Requests start in the order in which they were announced, as buffers come free, across blocks and
parts: so a drive is kept busy while what came before is used. Memory: `BUFFERS` buffers of a
request, and one more for each request whose turn comes before it could start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from offload.nvme.aligned import aligned_buffer
from offload.nvme.inspect import REQUEST_BYTES
from offload.nvme.verify import Damage

READERS = 6
BUFFERS = 7  # one is being used while all readers read: 28 MiB
_ALIGNMENT_BYTES = 1 << 20  # the largest a store may have

Read = Callable[[memoryview], list[memoryview | Damage]]
"""Reads the chunks of one request into a buffer of `REQUEST_BYTES`; returns what came."""


class Request:
    """One request, from when it is announced until it is given back."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.buffer: memoryview | None = None
        self.coming: Future[list[memoryview | Damage]] | None = None  # None: not started


class ReadAhead:
    """Reading threads and their buffers, made when first needed; several parts may share one.

    Any thread may call. The threads end with the last part.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_parts = 0
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[memoryview] = []
        self._num_made = 0
        self._waiting: dict[Request, None] = {}  # in order

    def announce(self, read: Read) -> Request:
        """A request that starts once all that were announced before it have."""
        request = Request(read)
        with self._lock:
            self._waiting[request] = None
            self._start_waiting()
        return request

    def result(self, request: Request) -> list[memoryview | Damage]:
        """What the request brought, valid until `give_back`; blocks. Starts it if need be."""
        with self._lock:
            if request in self._waiting:
                del self._waiting[request]
                self._start(request)
            coming = request.coming
        assert coming is not None, "the request was given back"
        return coming.result()

    def give_back(self, request: Request) -> None:
        """Nobody wants what the request brings, or brought, any more; again: nothing."""
        with self._lock:
            self._waiting.pop(request, None)
            coming, request.coming = request.coming, None
        if coming is None:
            return
        coming.exception()  # until then its buffer is being filled
        assert request.buffer is not None
        with self._lock:
            if self._num_made > BUFFERS:
                self._num_made -= 1
            else:
                self._idle.append(request.buffer)
            self._start_waiting()

    def join(self) -> None:
        """Count one more part that reads."""
        with self._lock:
            self._num_parts += 1

    def leave(self) -> None:
        """Count one part less; the last one ends the threads, after what they have begun."""
        with self._lock:
            self._num_parts -= 1
            if self._num_parts:
                return
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _start_waiting(self) -> None:
        while self._waiting and (self._idle or self._num_made < BUFFERS):
            request = next(iter(self._waiting))
            del self._waiting[request]
            self._start(request)

    def _start(self, request: Request) -> None:
        if not self._idle:
            self._idle.append(aligned_buffer(REQUEST_BYTES, _ALIGNMENT_BYTES).data)
            self._num_made += 1
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "checkpoint-reader")
        request.buffer = self._idle.pop()
        request.coming = self._pool.submit(request.read, request.buffer)
