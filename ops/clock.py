"""The one source of time, so that whoever measures can be given another."""

from __future__ import annotations

import time


def seconds() -> float:
    """Monotonic seconds; only differences mean something."""
    return time.perf_counter()
