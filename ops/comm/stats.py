"""How often ranks talked, how much and how long: counted by kind of call, for the report."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class CommCount:
    """Calls of one kind: how many, bytes sent to other ranks, seconds spent inside.

    `waited_seconds` are those of the thread that made the world, which computes; the rest of
    `seconds` passed in other threads, beside compute.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclasses.dataclass
class CommStats:
    """Counts by kind (`all_reduce`, `send`, ...). May be used from several threads.

    Seconds are those of the calling thread, waiting included, so two threads that communicate at
    once both count. Make it in the thread that computes.
    """

    _counts: dict[str, CommCount] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)
    _compute: int = dataclasses.field(default_factory=threading.get_ident, repr=False)

    def add(self, kind: str, num_bytes: int, seconds: float) -> None:
        """Count one call."""
        waited = seconds if threading.get_ident() == self._compute else 0.0
        with self._lock:
            old = self._counts.get(kind, CommCount())
            self._counts[kind] = CommCount(
                old.calls + 1,
                old.bytes + num_bytes,
                old.seconds + seconds,
                old.waited_seconds + waited,
            )

    def snapshot(self) -> Mapping[str, CommCount]:
        """The counts so far, by kind in alphabetical order; later calls do not change it."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def seconds(self) -> float:
        """Seconds of all kinds together."""
        return sum(count.seconds for count in self.snapshot().values())

    def waited_seconds(self) -> float:
        """Seconds of all kinds together in which compute waited."""
        return sum(count.waited_seconds for count in self.snapshot().values())
