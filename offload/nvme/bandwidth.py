"""How fast each drive is: a short look, so that blocks are shared out in proportion.

Each directory in turn gets a file of `PROBE_BYTES` written and read back with requests of the usual
size, several at once, in the way the store itself will (direct or not): a few tenths of a second.
Only stores with several paths need it. It decides how much of each block a drive gets, never
what is computed.

Invariants: the probe file is removed again, whatever happens. This module does not know stores.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from offload.nvme.aligned import AccessMode, aligned_buffer
from offload.nvme.files import Buffers, StorageFile, open_os_file, read_fully, write_fully
from ops import clock
from ops.units import format_bytes

log = logging.getLogger(__name__)

PROBE_BYTES = 48 << 20
_REQUEST_BYTES = 4 << 20
_DEPTH = 4

Measure = Callable[[Sequence[str], AccessMode], list[float]]
"""The bandwidth of each directory, in the same unit; positive."""


def measure_bandwidth(directories: Sequence[str], access: AccessMode) -> list[float]:
    """Bytes per second that each directory writes and reads, logged; blocks, one after another.

    Raises OSError or StorageError when a probe file cannot be written or read back.
    """
    rates = [_rate(directory, access) for directory in directories]
    for directory, rate in zip(directories, rates):
        share = rate / sum(rates)
        log.info(
            "%s: %s/s, %.0f %% of each large block", directory, format_bytes(rate), 100 * share
        )
    return rates


def _rate(directory: str, access: AccessMode) -> float:
    made, path = tempfile.mkstemp(prefix=".probe-", dir=directory)
    os.close(made)
    try:
        file = open_os_file(path, access.direct)
        try:
            return 2 * PROBE_BYTES / max(_seconds_both_ways(file, access), 1e-6)
        finally:
            file.close()
    finally:
        os.unlink(path)


def _seconds_both_ways(file: StorageFile, access: AccessMode) -> float:
    memory = aligned_buffer(_DEPTH * _REQUEST_BYTES, access.alignment_bytes)
    # Not zeros: some drives and file systems do not store those.
    words = np.arange(memory.nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    memory[:] = words.view(np.uint8)
    with contextlib.suppress(OSError):  # a file system without it
        file.allocate(0, PROBE_BYTES)
    with ThreadPoolExecutor(_DEPTH) as pool:

        def move(verb: Callable[[StorageFile, Buffers, int], None]) -> None:
            def lane(number: int) -> None:
                buffer = memory[number * _REQUEST_BYTES : (number + 1) * _REQUEST_BYTES].data
                for offset in range(number * _REQUEST_BYTES, PROBE_BYTES, memory.nbytes):
                    verb(file, [buffer], offset)

            list(pool.map(lane, range(_DEPTH)))

        start = clock.seconds()
        move(write_fully)
        file.sync()
        written = clock.seconds()
        _forget_pages(file.path)
        reading = clock.seconds()
        move(read_fully)
        return clock.seconds() - reading + written - start


def _forget_pages(path: str) -> None:
    """Let the read that follows come from the drive, where I/O is not direct anyway."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
