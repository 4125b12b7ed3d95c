"""Ends the process with SIGKILL at a chosen instant inside a named phase of a run.

A `KillPoint` stands behind the seams a run has anyway: `open_file` and `directory_files` of the
store (`KillingFile`, `KillingDirectoryFiles`) and `EngineParts.delay` (`KillPoint.lane`). It counts
the calls of every phase; the one it waits for is the last thing the process does.

Phases: `read`, `write` and `fsync` of data files (and `fsync` of manifests), `update` of a unit,
`rename` of a manifest, and `publish`: a manifest is written, or its name made durable.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload.nvme.aligned import ALIGNMENT_BYTES_MIN
from offload.nvme.files import (
    Buffers,
    OpenFile,
    OsDirectoryFiles,
    StorageFile,
    open_os_file,
    slice_buffers,
)
from ops.units import round_up

PHASES = ("read", "update", "write", "fsync", "rename", "publish")
MANNERS = ("before", "within", "after")


def kill_this_process() -> None:
    """SIGKILL: nothing is flushed, closed or told; does not return."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class KillPoint:
    """Where the process ends: at call number `at` (from 0) of `phase`; never for phase ``.

    `manner`: `before` the call, `after` it, or `within`: a write is torn in the middle, of anything
    else `delay_s` passes while it is under way. Thread-safe.
    """

    phase: str = ""
    at: int = 0
    manner: str = "before"
    delay_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strikes(self, phase: str) -> bool:
        """Count a call of `phase`; whether it is the one."""
        with self._lock:
            number = self.counts[phase]
            self.counts[phase] += 1
        return phase == self.phase and number == self.at

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """The body is a call of `phase`."""
        if not self.strikes(phase):
            yield
            return
        if self.manner == "before":
            kill_this_process()
        if self.manner == "within":
            self._kill_later()
        yield
        if self.manner == "after":
            kill_this_process()

    def lane(self, lane: str) -> None:
        """An `EngineParts.delay`: an update is about to begin, or a transfer."""
        if lane == "update" and self.strikes("update"):
            if self.manner == "before":
                kill_this_process()
            self._kill_later()

    def _kill_later(self) -> None:
        threading.Timer(self.delay_s, kill_this_process).start()

    def open_file(self, path: str, direct: bool, inner: OpenFile = open_os_file) -> StorageFile:
        """An `OpenFile`: the real file, with this point in it."""
        return KillingFile(inner(path, direct), self)


class KillingFile:
    """A `StorageFile` whose reads, writes and syncs pass a `KillPoint`."""

    def __init__(self, inner: StorageFile, point: KillPoint) -> None:
        self._inner = inner
        self._point = point

    @property
    def path(self) -> str:
        return self._inner.path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        with self._point.around("read"):
            return self._inner.readv_into(buffers, offset)

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        if not self._point.strikes("write"):
            return self._inner.writev_from(buffers, offset)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        share = {"before": 0, "within": nbytes // 2, "after": nbytes}[self._point.manner]
        wanted = slice_buffers(buffers, 0, round_up(share, ALIGNMENT_BYTES_MIN))
        moved_bytes = self._inner.writev_from(wanted, offset) if wanted else 0
        kill_this_process()
        return moved_bytes

    def sync(self) -> None:
        with self._point.around("fsync"):
            self._inner.sync()

    def truncate(self, nbytes: int) -> None:
        self._inner.truncate(nbytes)

    def allocate(self, offset: int, nbytes: int) -> None:
        self._inner.allocate(offset, nbytes)

    def close(self) -> None:
        self._inner.close()


class KillingDirectoryFiles(OsDirectoryFiles):
    """Real `DirectoryFiles` whose steps of a commit pass a `KillPoint`.

    With `phase` every step is a call of that one; else they have the names of a commit's.
    """

    def __init__(self, point: KillPoint, phase: str | None = None) -> None:
        self._point = point
        self._publish, self._fsync, self._rename = (
            ("publish", "fsync", "rename") if phase is None else (phase,) * 3
        )

    def write_file(self, path: str, data: bytes) -> None:
        if not self._point.strikes(self._publish):
            super().write_file(path, data)
            return
        share = {"before": 0, "within": len(data) // 2, "after": len(data)}[self._point.manner]
        super().write_file(path, data[:share])
        kill_this_process()

    def sync_file(self, path: str) -> None:
        with self._point.around(self._fsync):
            super().sync_file(path)

    def rename(self, old: str, new: str) -> None:
        with self._point.around(self._rename):
            super().rename(old, new)

    def sync_directory(self, directory: str) -> None:
        with self._point.around(self._publish):
            super().sync_directory(directory)
