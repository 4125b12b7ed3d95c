"""Where blocks lie in a data file: best-fit extents with coalescing.

Pure planning: no I/O, no threads, no clock. The owner serialises calls.

Invariants: extents never overlap and start at multiples of the alignment; two free regions never
touch; used + free = capacity, exactly. Every free region has a size that is a multiple of the
alignment, except the one that ends at the capacity, whose tail may be shorter than the alignment:
so a capacity that is no multiple of the alignment is still usable to its last byte.

Cost per call: O(log n) comparisons for n free regions and one move of at most n pointers in a
sorted list (about 10 µs at 100 000 regions).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from ops.units import round_up


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved range: `nbytes` bytes (padding included) at byte `offset` of drive `drive`."""

    offset: int
    nbytes: int
    drive: int = 0


class ExtentAllocator:
    """Hands out extents of `[base_offset, base_offset + capacity_bytes)` of one data file."""

    def __init__(
        self, capacity_bytes: int, alignment_bytes: int, base_offset: int = 0, drive: int = 0
    ) -> None:
        """All bytes are free at first; raises ValueError for sizes that make no sense.

        `drive` is what its extents are marked with.
        """
        if capacity_bytes < 0 or alignment_bytes < 1 or base_offset % alignment_bytes:
            raise ValueError(
                f"capacity {capacity_bytes} must be >= 0, alignment {alignment_bytes} >= 1, "
                f"base offset {base_offset} a multiple of the alignment"
            )
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = alignment_bytes
        self.drive = drive
        self.used_bytes = 0
        self.used_bytes_max = 0
        self._free: list[tuple[int, int]] = []  # (size, offset), sorted
        self._free_size_at: dict[int, int] = {}  # offset of a free region -> size
        self._free_ending_at: dict[int, int] = {}  # end of a free region -> offset
        self._used_size_at: dict[int, int] = {}
        self._end = base_offset + capacity_bytes
        if capacity_bytes:
            self._add_free(base_offset, capacity_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent, however fragmented."""
        return self.capacity_bytes - self.used_bytes

    @property
    def used_bytes_by_drive(self) -> tuple[int, ...]:
        """`used_bytes`, for callers who may have several drives."""
        return (self.used_bytes,)

    @property
    def largest_free_bytes(self) -> int:
        """The largest `nbytes` that `allocate` would grant now."""
        return self._free[-1][0] if self._free else 0

    @property
    def num_extents(self) -> int:
        """How many extents are allocated (empty ones are not counted)."""
        return len(self._used_size_at)

    def allocate(self, nbytes: int) -> Extent | None:
        """Reserve room for `nbytes` bytes, or return None and change nothing.

        Takes the smallest free region that fits and, among equals, the one nearest to the start.
        An empty extent takes no room. Raises ValueError for a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"an extent of {nbytes} bytes")
        if nbytes == 0:
            return Extent(0, 0, self.drive)
        index = bisect_left(self._free, (nbytes, -1))
        if index == len(self._free):
            return None
        region_bytes, offset = self._free[index]
        del self._free[index]
        del self._free_size_at[offset]
        del self._free_ending_at[offset + region_bytes]
        taken_bytes = min(round_up(nbytes, self.alignment_bytes), region_bytes)
        if taken_bytes < region_bytes:
            self._add_free(offset + taken_bytes, region_bytes - taken_bytes)
        self._used_size_at[offset] = taken_bytes
        self.used_bytes += taken_bytes
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        return Extent(offset, taken_bytes, self.drive)

    def allocate_pieces(self, nbytes: int) -> list[Extent] | None:
        """Reserve `nbytes` bytes in as few extents as a greedy choice finds, or change nothing.

        One extent where a free region fits, else the largest regions in turn, so that fragmentation
        never refuses what the free bytes can hold. All but the last are multiples of the alignment.
        None when the free bytes do not suffice. Raises ValueError as `allocate`.
        """
        if nbytes > self.free_bytes:
            return None
        pieces: list[Extent] = []
        wanted_bytes, used_bytes_max = nbytes, self.used_bytes_max
        while True:
            piece_bytes = min(wanted_bytes, self.largest_free_bytes)
            if piece_bytes < wanted_bytes:
                piece_bytes -= piece_bytes % self.alignment_bytes
            extent = self.allocate(piece_bytes) if piece_bytes or not wanted_bytes else None
            if extent is None:
                for piece in pieces:
                    self.free(piece)
                self.used_bytes_max = used_bytes_max
                return None
            pieces.append(extent)
            wanted_bytes -= piece_bytes
            if not wanted_bytes:
                return pieces

    def free(self, extent: Extent) -> None:
        """Give `extent` back; raises ValueError if it is not allocated (a double free)."""
        if extent.nbytes == 0:
            return
        if extent.drive != self.drive or self._used_size_at.get(extent.offset) != extent.nbytes:
            raise ValueError(f"{extent} is not allocated")
        del self._used_size_at[extent.offset]
        self.used_bytes -= extent.nbytes
        start, end = extent.offset, extent.offset + extent.nbytes
        if start in self._free_ending_at:
            start = self._free_ending_at[start]
            self._remove_free(start)
        if end in self._free_size_at:
            size = self._free_size_at[end]
            self._remove_free(end)
            end += size
        self._add_free(start, end - start)

    def claim(self, extents: Iterable[Extent]) -> None:
        """Take exactly these extents, as an earlier process left them; all of them or none.

        Raises ValueError naming the first one that is not free, not aligned (the one that ends at
        the capacity may be short), on another drive or outside of the capacity. Empty ones take no
        room. O(n log n) for n extents and regions.
        """
        wanted = sorted((x for x in extents if x.nbytes), key=lambda extent: extent.offset)
        regions = self.free_regions()
        left: list[tuple[int, int]] = []  # (size, offset)
        index, start = 0, regions[0].offset if regions else 0
        for extent in wanted:
            end = extent.offset + extent.nbytes
            while index < len(regions) and _end(regions[index]) < end:
                if start < _end(regions[index]):
                    left.append((_end(regions[index]) - start, start))
                index += 1
                start = regions[index].offset if index < len(regions) else start
            if index == len(regions) or extent.offset < start or extent.drive != self.drive:
                raise ValueError(f"{extent} is not free")
            is_tail = end == self._end
            if extent.offset % self.alignment_bytes or (
                extent.nbytes % self.alignment_bytes and not is_tail
            ):
                raise ValueError(f"{extent} is not aligned to {self.alignment_bytes}")
            if start < extent.offset:
                left.append((extent.offset - start, start))
            start = end
        if index < len(regions):
            if start < _end(regions[index]):
                left.append((_end(regions[index]) - start, start))
            left += [(region.nbytes, region.offset) for region in regions[index + 1 :]]
        self._free = sorted(left)
        self._free_size_at = {offset: size for size, offset in left}
        self._free_ending_at = {offset + size: offset for size, offset in left}
        self._used_size_at.update((extent.offset, extent.nbytes) for extent in wanted)
        self.used_bytes += sum(extent.nbytes for extent in wanted)
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)

    def free_regions(self) -> list[Extent]:
        """The free regions by offset, for reports and tests."""
        items = sorted(self._free_size_at.items())
        return [Extent(offset, size, self.drive) for offset, size in items]

    def _add_free(self, offset: int, size: int) -> None:
        insort(self._free, (size, offset))
        self._free_size_at[offset] = size
        self._free_ending_at[offset + size] = offset

    def _remove_free(self, offset: int) -> None:
        size = self._free_size_at.pop(offset)
        del self._free_ending_at[offset + size]
        del self._free[bisect_left(self._free, (size, offset))]


def _end(region: Extent) -> int:
    return region.offset + region.nbytes
