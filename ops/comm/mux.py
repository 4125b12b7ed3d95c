"""Many channels over one ordered stream of bytes between each pair of ranks.

For transports that know neither groups nor tags and whose receive blocks the whole process until
something has come (MindSpore's CPU library: a pending receive holds up every kernel, so two threads
that wait on different communicators would wait in a circle). Here a receive is made only for what
is known to lie at the receiver: the sender counts a message in a shared counter after it was
delivered, and the receiver polls the counter, in pauses. What came for another channel waits in
memory until its receiver asks.

A message is a first frame of fixed size (group, tag, bytes, and the content if it is short), then
the content itself if it is longer. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ops.comm.base import U8
from ops.comm.watchdog import Watchdog
from ops.errors import CommError

COLLECTIVE = -1
"""The tag of messages that belong to a collective; all others count as outstanding until taken."""

_FRAME_BYTES = 1024
_HEADER_BYTES = 24
_SHORT_BYTES = _FRAME_BYTES - _HEADER_BYTES

_PAUSE_MIN_SECONDS = 200e-6
_PAUSE_MAX_SECONDS = 5e-3
_LISTEN_SECONDS = 0.5
_GRACE_SECONDS = 2.0
_HANGS, _LEFT = "hangs", "left"


class Line(Protocol):
    """What a transport provides to a `Mux`, which calls it from one thread at a time."""

    @property
    def rank(self) -> int:
        """This rank among all."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def put(self, message: U8, to: int) -> None:
        """Begin to deliver bytes (at least one) to world rank `to`; they stay as they are."""

    def flush(self) -> None:
        """Return when all that was put is delivered; does not wait for anyone to take it."""

    def take(self, message: U8, source: int) -> None:
        """Take the next bytes of world rank `source`; called only when they were delivered."""

    def add(self, counter: str, amount: int) -> int:
        """Add to a counter that all ranks share, from 0; its new value. Does not wait for ranks.

        Raises `CommError` when the counters are lost, because the rank that keeps them ended.
        """


class Mux:
    """Channels between the ranks of `line`; a channel is (source, group, tag)."""

    def __init__(self, line: Line, watchdog: Watchdog, outstanding_bytes_max: int) -> None:
        self.watchdog = watchdog
        self._line = line
        self._outstanding_bytes_max = outstanding_bytes_max
        self._lock = threading.Lock()
        self._inbox: defaultdict[tuple[int, int, int], deque[U8]] = defaultdict(deque)
        self._taken = [0] * line.size
        self._posted_bytes = 0
        self._hangs = 0
        self._closing = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="comm-listener", daemon=True)
        self._listener.start()

    def send(self, messages: Sequence[tuple[int, U8]], group: int, tag: int) -> None:
        """Deliver (world rank, message) pairs; they can be reused at once."""
        me = self._line.rank
        with self._lock:
            frames = [_frame(group, tag, message) for _, message in messages]
            for (to, message), frame in zip(messages, frames):
                self._line.put(frame, to)
                if message.size > _SHORT_BYTES:
                    self._line.put(message, to)
            self._line.flush()
            for to, _ in messages:
                self._line.add(f"{me} to {to}", 1)
                self._line.add(f"to {to}", 1)

    def post(self, message: U8, to: int, group: int, tag: int, what: str) -> None:
        """Deliver a message that may wait for its receiver, within the bound on all such."""
        wait, pause = self.watchdog.wait(what), _PAUSE_MIN_SECONDS
        room = max(self._outstanding_bytes_max - message.size, 0)
        with self._lock:
            self._posted_bytes += message.size
            posted = self._posted_bytes
        while posted - message.size - self._taken_of_ours() > room:
            wait.check()
            pause = _rest(pause)
        self.send([(to, message)], group, tag)
        while message.size > self._outstanding_bytes_max and self._taken_of_ours() < posted:
            wait.check()
            pause = _rest(pause)

    def receive(self, out: U8, source: int, group: int, tag: int, what: str) -> None:
        """Wait for the next message of the channel; `CommError` when its size is another."""
        wait, pause = self.watchdog.wait(what), _PAUSE_MIN_SECONDS
        waiting = self._inbox_of(source, group, tag)
        while not waiting:
            with self._lock:
                came = self._pump()
            if not came and not waiting:
                wait.check()
                pause = _rest(pause)
        message = waiting.popleft()
        if tag != COLLECTIVE and message.size:
            with self._lock:
                self._line.add(f"taken of {source}", message.size)
        if message.size != out.size:
            raise CommError(
                f"{what}: rank {source} sent {message.size} bytes, {out.size} were expected"
            )
        np.copyto(out, message)

    def tell_others(self, message: str) -> None:
        """Have all other ranks print their stacks; gives them time to."""
        with self._lock:
            self._line.add(_HANGS, 1)
            self._hangs += 1
        time.sleep(_GRACE_SECONDS)

    def close(self, what: str) -> None:
        """Stop using the line; rank 0, which may hold the counters, returns last."""
        self._closing.set()
        self._listener.join()
        with self._lock:
            left = self._line.add(_LEFT, 1)
        wait, pause = self.watchdog.wait(what), _PAUSE_MIN_SECONDS
        while self._line.rank == 0 and left < self._line.size:
            wait.check()
            pause = _rest(pause)
            left = self._line.add(_LEFT, 0)

    def _inbox_of(self, source: int, group: int, tag: int) -> deque[U8]:
        with self._lock:
            return self._inbox[source, group, tag]

    def _taken_of_ours(self) -> int:
        with self._lock:
            return self._line.add(f"taken of {self._line.rank}", 0)

    def _pump(self) -> bool:
        """Take everything that was delivered; whether there was anything. The lock is held."""
        me = self._line.rank
        if self._line.add(f"to {me}", 0) == sum(self._taken):
            return False
        for source in range(self._line.size):
            if source == me:
                continue
            sent = self._line.add(f"{source} to {me}", 0)
            while self._taken[source] < sent:
                frame = np.empty(_FRAME_BYTES, np.uint8)
                self._line.take(frame, source)
                group, tag, num_bytes = frame[:_HEADER_BYTES].view(np.int64).tolist()
                message = frame[_HEADER_BYTES : _HEADER_BYTES + num_bytes]
                if num_bytes > _SHORT_BYTES:
                    message = np.empty(num_bytes, np.uint8)
                    self._line.take(message, source)
                self._inbox[source, group, tag].append(message)
                self._taken[source] += 1
        return True

    def _listen(self) -> None:
        """Print this rank's stacks when another rank says that it waited too long."""
        while not self._closing.wait(_LISTEN_SECONDS):
            try:
                with self._lock:
                    hangs = self._line.add(_HANGS, 0)
                    news, self._hangs = hangs > self._hangs, hangs
            except CommError as error:
                self.watchdog.dump(str(error))
                return
            if news:
                self.watchdog.dump("another rank waited too long")


def _frame(group: int, tag: int, message: U8) -> U8:
    frame = np.zeros(_FRAME_BYTES, np.uint8)
    frame[:_HEADER_BYTES].view(np.int64)[:] = group, tag, message.size
    if message.size <= _SHORT_BYTES:
        frame[_HEADER_BYTES : _HEADER_BYTES + message.size] = message
    return frame


def _rest(pause: float) -> float:
    time.sleep(pause)
    return min(pause * 1.5, _PAUSE_MAX_SECONDS)
