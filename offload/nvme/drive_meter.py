"""How fast the drive really is: bytes over the time it was busy, each direction for itself.

Several transfers run at once and none of them alone shows what the drive carries. So time counts
while anything is in flight, shared between the directions by how many transfers each has in flight
at the moment. Old measurements fade: what is reported is about the last few busy seconds.

Any thread may call. The clock is given. This module does not know blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.files import Buffers, OpenFile, StorageFile
from offload.nvme.transfers import Direction
from ops import clock

KNOWN_BYTES_MIN = 4 << 20
"""A direction that moved less has no speed yet."""

_FADE_S = 2.0


class DriveMeter:
    """Watches transfers from their start to their end."""

    def __init__(self, seconds: Callable[[], float] = clock.seconds) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running = [0, 0]
        self._busy_s = [0.0, 0.0]
        self._bytes = [0.0, 0.0]
        self._known = [False, False]
        self._last_s = 0.0

    def start(self, direction: Direction) -> None:
        """A transfer begins."""
        with self._lock:
            self._advance()
            self._running[direction] += 1

    def finish(self, direction: Direction, nbytes: int) -> None:
        """A transfer that began has ended and moved `nbytes` (0 if it failed)."""
        with self._lock:
            self._advance()
            self._running[direction] -= 1
            self._bytes[direction] += nbytes
            if self._bytes[direction] >= KNOWN_BYTES_MIN:
                self._known[direction] = True
            if self._known[direction] and self._busy_s[direction] > _FADE_S:
                self._busy_s[direction] /= 2
                self._bytes[direction] /= 2

    def speed(self) -> DriveSpeed:
        """The speeds now; a direction that has not moved enough yet is unknown (0)."""
        with self._lock:
            return DriveSpeed(self._per_s(Direction.READ), self._per_s(Direction.WRITE))

    def _advance(self) -> None:
        now_s = self._seconds()
        running = self._running[0] + self._running[1]
        if running:
            for direction in Direction:
                share = self._running[direction] / running
                self._busy_s[direction] += share * (now_s - self._last_s)
        self._last_s = now_s

    def _per_s(self, direction: Direction) -> float:
        busy_s = self._busy_s[direction]
        return self._bytes[direction] / busy_s if self._known[direction] and busy_s else 0.0


class MeteredFile:
    """A `StorageFile` whose transfers are watched by `meter`."""

    def __init__(self, inner: StorageFile, meter: DriveMeter) -> None:
        self._inner = inner
        self._meter = meter

    @property
    def path(self) -> str:
        return self._inner.path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        return self._watch(self._inner.readv_into, Direction.READ, buffers, offset)

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        return self._watch(self._inner.writev_from, Direction.WRITE, buffers, offset)

    def sync(self) -> None:
        self._inner.sync()

    def truncate(self, nbytes: int) -> None:
        self._inner.truncate(nbytes)

    def allocate(self, offset: int, nbytes: int) -> None:
        self._inner.allocate(offset, nbytes)

    def close(self) -> None:
        self._inner.close()

    def _watch(
        self,
        call: Callable[[Buffers, int], int],
        direction: Direction,
        buffers: Buffers,
        offset: int,
    ) -> int:
        moved_bytes = 0
        self._meter.start(direction)
        try:
            moved_bytes = call(buffers, offset)
        finally:
            self._meter.finish(direction, moved_bytes)
        return moved_bytes


def metered(open_file: OpenFile, meter: DriveMeter) -> OpenFile:
    """`open_file`, with every file it opens watched by `meter`: several drives are one."""
    return lambda path, direct: MeteredFile(open_file(path, direct), meter)
