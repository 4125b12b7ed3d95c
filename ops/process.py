"""Resident memory of this process, as the kernel counts it (Linux)."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Bytes resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> bool:
    """Start a new high-water mark; False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """The most bytes resident since the start or the last `reset_peak`."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes() -> int:
    """Memory this process can still take: what the machine has free, or its control group allows.

    Reads MemAvailable and, where there is one, the version 2 control group's limit.
    """
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit != "max":
            available = min(available, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        pass  # no control group: the machine's own number stands
    return available
