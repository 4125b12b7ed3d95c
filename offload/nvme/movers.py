"""The threads that make the system calls, one after the other, and nothing else.

A worker leaves its call here and sleeps, or hashes, until the call has been made. So on a drive
that is busy one call follows the other at once: between them stand a few steps of the interpreter
and no wake-up of another thread. With calls of 4 MiB on a drive of 5 GB/s a slow hand-over costs a
tenth (`make bench-store`).

Invariants: at most `calls_max` calls are in the system at once; they begin in the order in which
they were left here, at most one by each worker. What a call raises, its caller gets. This module
knows no files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Call:
    """One call that was left with `Movers.start`; its owner must `wait`, once."""

    __slots__ = ("_error", "_finished", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._finished = threading.Lock()  # held until the call has been made
        self._finished.acquire()

    def wait(self) -> None:
        """Block until the call has been made; raise what it raised."""
        self._finished.acquire()
        if self._error is not None:
            raise self._error

    def make(self) -> None:
        """For the mover: make the call and wake its owner."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._finished.release()


class Movers:
    """`calls_max` threads; started on construction, ended by `stop`."""

    def __init__(self, calls_max: int) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._run,
                name=f"nvme-call-{index}",
                daemon=True,  # as the workers
            )
            for index in range(calls_max)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, work: Callable[[], None]) -> Call:
        """Have `work` done by the next thread that is free; does not block."""
        call = Call(work)
        self._calls.put(call)
        return call

    def stop(self) -> None:
        """Make the calls left here, end the threads and wait for them; the last use."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
            del call  # no buffer is kept while waiting for work
