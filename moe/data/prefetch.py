"""Batches read ahead by one thread, in order, each with the cursor that follows it.

With a window of zero nothing is started and `next` is the plain stream; the batches are the same
for every window. An error is an item like any other: it is raised by the `next` that would have
returned the batch, and by every later one.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType

from moe.data.stream import Batch, BatchStream

_POLL_S = 0.1


class PrefetchedBatches:
    """Up to `window` batches of `stream` held ready; owns one thread when `window` is above 0.

    The stream belongs to this object from now on. `next` and `close` are called from one thread.
    """

    def __init__(self, stream: BatchStream, window: int) -> None:
        """`window` in batches, at least 0; raises ValueError below that."""
        if window < 0:
            raise ValueError(f"a window of {window} batches")
        self._stream = stream
        self._items: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=max(1, window))
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if window:
            self._thread = threading.Thread(target=self._fill, name="batches", daemon=True)
            self._thread.start()

    def next(self) -> Batch:
        """The next batch; blocks until it is there and raises what reading it raised."""
        if self._stop.is_set():
            raise RuntimeError("next after close")
        if self._error is not None:
            raise self._error
        if self._thread is None:
            return self._stream.next()
        item = self._items.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        return item

    def close(self) -> None:
        """Stop reading ahead and wait for the thread; harmless twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> PrefetchedBatches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while not self._stop.is_set():
            item: Batch | BaseException
            try:
                item = self._stream.next()
            except BaseException as error:
                item = error
            while not self._stop.is_set():
                try:
                    self._items.put(item, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
