"""The one source of time, so that whoever measures can be given another."""

from __future__ import annotations

import time


def seconds() -> float:
    """Monotonic seconds; only differences mean something."""
    return time.perf_counter()


def thread_seconds() -> float:
    """Seconds the calling thread has run on a core; only differences mean something."""
    return time.thread_time()
