"""Counters of bytes and waits. Every byte a lane carries is counted here or by the store."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class LaneCounts:
    """Running totals: bytes per lane, seconds compute waited, wrong guesses.

    `stall_seconds` counts waits for leases, for gradient slots, and for updates of the step
    before that are still pending when a step ends.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    stall_seconds: float = 0.0
    wrong_guess_bytes: int = 0
    transfers: int = 0


class Stats:
    """Thread-safe totals; `snapshot` copies them so that a caller can take differences."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = LaneCounts()

    def add(
        self,
        *,
        h2d_bytes: int = 0,
        d2h_bytes: int = 0,
        stall_seconds: float = 0.0,
        wrong_guess_bytes: int = 0,
        transfers: int = 0,
    ) -> None:
        """Add to the totals."""
        with self._lock:
            self._counts.h2d_bytes += h2d_bytes
            self._counts.d2h_bytes += d2h_bytes
            self._counts.stall_seconds += stall_seconds
            self._counts.wrong_guess_bytes += wrong_guess_bytes
            self._counts.transfers += transfers

    def snapshot(self) -> LaneCounts:
        """A copy of the totals now."""
        with self._lock:
            return LaneCounts(**vars(self._counts))
