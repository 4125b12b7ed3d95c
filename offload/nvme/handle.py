"""The promise that a transfer finishes: wait for it, ask it, or be called back.

Invariants: a handle completes exactly once, with or without an error, and only when no worker
touches the transfer's buffer any more. It knows neither files nor blocks beyond a name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)


class Handle:
    """One transfer in flight. Any thread may wait, several at once, and as often as they like."""

    def __init__(self, block: str, before_block: Callable[[], None]) -> None:
        """`before_block` is called before a wait that would block; it raises to refuse it."""
        self.block = block
        self._before_block = before_block
        self._done = False
        self._finished: threading.Event | None = None  # made for the first who waits
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Handle], None]] = []

    def done(self) -> bool:
        """Whether the transfer has finished, well or not; never blocks."""
        return self._done

    def error(self) -> BaseException | None:
        """What went wrong; None while in flight and after success; never blocks."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer has finished; raise its error if it failed.

        Waiting again returns (or raises) at once. Raises TimeoutError after `timeout` seconds, the
        transfer then still being in flight, and RuntimeError when a worker of the same store would
        have to wait (in a callback).
        """
        if not self._done:
            self._before_block()
            with self._lock:
                if self._finished is None:
                    self._finished = threading.Event()
                finished = self._finished
                if self._done:
                    finished.set()
            if not finished.wait(timeout):
                raise TimeoutError(f"transfer of block {self.block!r} unfinished after {timeout} s")
        if self._error is not None:
            # The same object every time: drop the traceback of earlier waits.
            raise self._error.with_traceback(None)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(handle)` once the transfer has finished; at once if it has already.

        Runs on a worker thread (or here, if already done) and must not block or call the store.
        What it raises is logged, not passed on.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def complete(self, error: BaseException | None) -> None:
        """For the store: finish, wake the waiters, run the callbacks."""
        with self._lock:
            assert not self._done
            self._error = error
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            if self._finished is not None:
                self._finished.set()
        for callback in callbacks:
            self._call(callback, BaseException)  # a worker has other handles to complete

    def _call(
        self, callback: Callable[[Handle], None], logged: type[BaseException] = Exception
    ) -> None:
        try:
            callback(self)
        except logged:
            log.exception("callback of the transfer of block %r failed", self.block)


def wait_all(handles: Iterable[Handle]) -> None:
    """Wait for every handle, then raise the first error there was; no handles is fine.

    When it returns or raises, no worker touches any of the buffers.
    """
    first: BaseException | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first.with_traceback(None)
