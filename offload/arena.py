"""One aligned piece of memory per tier, taken at start-up; buffers are ranges of it.

The host's arena is locked into memory where the system allows it: what compute waits for must not
be on a swap device. Where it does not, one line says so and nothing else changes.

Invariants: the sum of live buffers never exceeds the capacity; a buffer is owned by exactly one
party until freed; nothing outside the arena grows in a step. Thread-safe; nothing here blocks.
"""

from __future__ import annotations

import logging
import mmap
import threading

import numpy as np

from offload.nvme.extents import Extent, ExtentAllocator
from ops.errors import PlanError
from ops.memory_lock import lock_on_fault
from ops.units import format_bytes, round_up

ALIGN_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
# A capacity may exceed what is used: pages are promised on first use, not by the mapping.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_log = logging.getLogger(__name__)


class Buffer:
    """A range of an arena: `array` is a uint8 view of `nbytes` bytes, page-aligned."""

    __slots__ = ("array", "extent", "nbytes")

    def __init__(self, extent: Extent, array: np.ndarray) -> None:
        self.extent = extent
        self.array = array
        self.nbytes = extent.nbytes

    def view(self, dtype: str, offset: int, count: int) -> np.ndarray:
        """`count` elements of NumPy `dtype` that start `offset` bytes into the buffer."""
        item = np.dtype(dtype).itemsize
        return self.array[offset : offset + count * item].view(dtype)

    def slice(self, offset: int, nbytes: int) -> Buffer:
        """A borrowed part of this buffer; only the whole may be freed."""
        part = Extent(self.extent.offset + offset, nbytes)
        return Buffer(part, self.array[offset : offset + nbytes])


class Arena:
    """`capacity_bytes` of anonymous memory handed out in page-aligned buffers."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        """Map the memory (pages are touched on first use); raises PlanError when that fails."""
        self.name = name
        self.capacity_bytes = capacity_bytes
        usable = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._allocator = ExtentAllocator(usable, ALIGN_BYTES)
        self._lock = threading.Lock()
        self._bytes = _huge_page_memory(name, usable)
        self.is_locked = name == "host" and _lock(name, self._bytes)

    def allocate(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes` bytes (rounded up to pages), or None, changing nothing."""
        if nbytes < 1:
            raise ValueError(f"a buffer of {nbytes} bytes")
        with self._lock:
            extent = self._allocator.allocate(round_up(nbytes, ALIGN_BYTES))
        if extent is None:
            return None
        end = extent.offset + extent.nbytes
        return Buffer(extent, self._bytes[extent.offset : end])

    def require(self, nbytes: int, what: str) -> Buffer:
        """A buffer the plan has promised; MemoryError names `what` if the plan was wrong."""
        buffer = self.allocate(nbytes)
        if buffer is None:
            raise MemoryError(
                f"{self.name} arena: no {nbytes} bytes for {what} "
                f"({self.used_bytes} of {self.capacity_bytes} used)"
            )
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give a whole buffer back; ValueError when it is not live (a double free)."""
        with self._lock:
            self._allocator.free(buffer.extent)

    @property
    def used_bytes(self) -> int:
        """Bytes in live buffers."""
        return self._allocator.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no buffer, however fragmented."""
        return self._allocator.free_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever live at once."""
        return self._allocator.used_bytes_max

    @property
    def num_buffers(self) -> int:
        """Live buffers."""
        return self._allocator.num_extents


def _huge_page_memory(name: str, nbytes: int) -> np.ndarray:
    """`nbytes` of private anonymous memory that starts on a huge page, as uint8.

    Private, because huge pages are not given to shared anonymous memory, Python's default; what
    is mapped beyond `nbytes` is never touched.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
    except (OSError, OverflowError) as error:
        raise PlanError(
            f"offload.{name}.capacity: this machine cannot map {format_bytes(nbytes)} of memory "
            f"({error}); lower it, see `headrace plan`."
        ) from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError, ValueError) as error:
        _log.info("%s arena of %s without huge pages: %s", name, format_bytes(nbytes), error)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + nbytes]


def _lock(name: str, array: np.ndarray) -> bool:
    """Lock the memory of `array` as it is touched; False, and a line that says why, if it stays
    swappable."""
    if not array.nbytes:
        return False
    reason = lock_on_fault(array.ctypes.data, array.nbytes)
    size = format_bytes(array.nbytes)
    if reason is None:
        _log.info("%s memory: %s locked, as it is touched", name, size)
        return True
    _log.warning(
        "%s memory: %s not locked, so under pressure the system may swap it out, which is slow but "
        "changes no result: %s",
        name,
        size,
        reason,
    )
    return False
