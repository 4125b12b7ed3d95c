"""Where blocks lie when a store has several drives: each drive's share follows its bandwidth.

Blocks above `WHOLE_BYTES_MAX` are cut into chunks of 1 MiB that are dealt out in proportion to the
drives' weights, so that one block uses all drives at once; smaller ones go whole to the drive
that lags its share most. A drive that is full gives its part to the others: room is refused only
when the free bytes of all drives together do not suffice.

Pure planning, deterministic: no I/O, no threads, no clock. The owner serialises calls.

Invariants: a drive's extents lie in its own data file only (`Extent.drive`). Every capacity is a
multiple of the alignment, and all extents of a block but its last are, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from offload.nvme.extents import Extent, ExtentAllocator
from ops.checksum import CHUNK_BYTES
from ops.units import round_up

WHOLE_BYTES_MAX = 2 << 20
RUN_CHUNKS_MAX = 4  # dealt to one drive in a row: a request's worth, then another drive's turn


class BlockAllocator(Protocol):
    """What a block table needs: one drive's `ExtentAllocator`, or several drives' together."""

    @property
    def capacity_bytes(self) -> int:
        """The limit of `used_bytes`."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes in extents, padding included."""
        ...

    @property
    def used_bytes_max(self) -> int:
        """The most `used_bytes` has been."""
        ...

    @property
    def used_bytes_by_drive(self) -> tuple[int, ...]:
        """The parts of `used_bytes`."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent, however fragmented."""
        ...

    @property
    def largest_free_bytes(self) -> int:
        """The largest room in one piece."""
        ...

    @property
    def alignment_bytes(self) -> int:
        """What extents start at multiples of."""
        ...

    def allocate_pieces(self, nbytes: int) -> list[Extent] | None:
        """Reserve `nbytes` bytes, or return None and change nothing."""
        ...

    def claim(self, extents: Iterable[Extent]) -> None:
        """Take exactly these extents, all of them or none; ValueError when one is not free."""
        ...

    def free(self, extent: Extent) -> None:
        """Give `extent` back."""
        ...


class StripedAllocator:
    """One `ExtentAllocator` a drive, behind the same calls."""

    def __init__(
        self,
        capacities_bytes: Sequence[int],
        weights: Sequence[float],
        alignment_bytes: int,
        base_offset: int = 0,
    ) -> None:
        """`weights`: of any scale, positive; one a drive. ValueError for what makes no sense."""
        if not capacities_bytes or len(weights) != len(capacities_bytes) or min(weights) <= 0:
            raise ValueError(f"capacities {capacities_bytes} want as many weights, not {weights}")
        if any(capacity % alignment_bytes for capacity in capacities_bytes):
            raise ValueError(f"capacities {capacities_bytes} are no multiples of {alignment_bytes}")
        self.alignment_bytes = alignment_bytes
        self.shares = [weight / sum(weights) for weight in weights]
        self.drives = [
            ExtentAllocator(capacity, alignment_bytes, base_offset, drive)
            for drive, capacity in enumerate(capacities_bytes)
        ]
        self.capacity_bytes = sum(capacities_bytes)
        self.used_bytes = 0
        self.used_bytes_max = 0

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent of any drive, however fragmented."""
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest room in one piece."""
        return max(drive.largest_free_bytes for drive in self.drives)

    @property
    def used_bytes_by_drive(self) -> tuple[int, ...]:
        """The parts of `used_bytes`."""
        return tuple(drive.used_bytes for drive in self.drives)

    @property
    def num_extents(self) -> int:
        """How many extents are allocated (empty ones are not counted)."""
        return sum(drive.num_extents for drive in self.drives)

    def allocate_pieces(self, nbytes: int) -> list[Extent] | None:
        """Reserve `nbytes` bytes, in the order of the block's bytes, or change nothing.

        None when the free bytes of all drives do not suffice. An empty block gets an empty extent.
        Raises ValueError for a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        if nbytes == 0:
            return [Extent(0, 0)]
        if nbytes > self.free_bytes:
            return None
        pieces: list[Extent] = []
        for drive, run_bytes in self._deal(round_up(nbytes, self.alignment_bytes)):
            extents = self.drives[drive].allocate_pieces(run_bytes)
            assert extents is not None  # whole units, and as many as are free
            pieces += extents
        self._count(sum(piece.nbytes for piece in pieces))
        return pieces

    def claim(self, extents: Iterable[Extent]) -> None:
        """Take exactly these extents, all of them or none; raises ValueError as one drive does."""
        by_drive: list[list[Extent]] = [[] for _ in self.drives]
        for extent in extents:
            if not 0 <= extent.drive < len(self.drives):
                raise ValueError(f"{extent} is on none of {len(self.drives)} drives")
            by_drive[extent.drive].append(extent)
        for number, (drive, wanted) in enumerate(zip(self.drives, by_drive)):
            try:
                drive.claim(wanted)
            except ValueError:
                for taken in itertools.chain(*by_drive[:number]):
                    self.drives[taken.drive].free(taken)
                raise
        self._count(sum(extent.nbytes for wanted in by_drive for extent in wanted))

    def free(self, extent: Extent) -> None:
        """Give `extent` back; raises ValueError if it is not allocated (a double free)."""
        self.drives[extent.drive].free(extent)
        self.used_bytes -= extent.nbytes

    def free_regions(self) -> list[Extent]:
        """The free regions by drive and offset, for reports and tests."""
        return [region for drive in self.drives for region in drive.free_regions()]

    def _count(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)

    def _deal(self, nbytes: int) -> list[tuple[int, int]]:
        """(drive, bytes) of each run of a block of `nbytes` (whole units, and as many are free)."""
        room = [drive.free_bytes for drive in self.drives]
        wishes = self._wishes(nbytes, room)
        step_bytes = CHUNK_BYTES if len(wishes) > 1 else nbytes
        dealt: list[tuple[int, int]] = []
        for number, wish in enumerate(wishes):
            left = min(step_bytes, nbytes - number * step_bytes)
            others = self._by_lag(nbytes, room) if room[wish] < left else []
            for drive in (wish, *others):
                taken = min(left, room[drive])
                if taken:
                    dealt.append((drive, taken))
                    room[drive] -= taken
                    left -= taken
        runs = itertools.groupby(dealt, key=lambda part: part[0])
        return [(drive, sum(taken for _, taken in run)) for drive, run in runs]

    def _wishes(self, nbytes: int, room: list[int]) -> list[int]:
        """The drive that each chunk should go to; one for a block that stays whole."""
        if nbytes <= WHOLE_BYTES_MAX:
            order = self._by_lag(nbytes, room)
            return [next((drive for drive in order if room[drive] >= nbytes), order[0])]
        num_chunks = -(-nbytes // CHUNK_BYTES)
        num_each = [int(share * num_chunks) for share in self.shares]
        while sum(num_each) < num_chunks:
            left = [free - CHUNK_BYTES * num for free, num in zip(room, num_each)]
            num_each[self._by_lag(nbytes, left)[0]] += 1
        wishes: list[int] = []
        left = list(num_each)
        while len(wishes) < num_chunks:
            drive = max(range(len(left)), key=lambda d: (left[d] / (num_each[d] or 1), -d))
            run = min(RUN_CHUNKS_MAX, left[drive])
            wishes += [drive] * run
            left[drive] -= run
        return wishes

    def _by_lag(self, nbytes: int, room: list[int]) -> list[int]:
        """The drives, the one furthest below its share first, once `nbytes` more are placed."""
        total = self.used_bytes + nbytes

        def lag(drive: int) -> float:
            used = self.drives[drive].capacity_bytes - room[drive]
            return self.shares[drive] * total - used

        return sorted(range(len(room)), key=lambda drive: (-lag(drive), drive))


def split_capacity(
    capacity_bytes: int,
    weights: Sequence[float],
    alignment_bytes: int,
    *,
    limits_bytes: Sequence[int],
    floors_bytes: Sequence[int] | None = None,
) -> list[int] | None:
    """How much of `capacity_bytes` each drive holds: by weight, within its floor and its limit.

    `limits_bytes` is what each drive has room for, `floors_bytes` (default: nothing) what it holds
    already; weights measured anew must not push out what an earlier opening placed. All results
    are multiples of the alignment, and their sum is the capacity rounded down to one. None when
    the limits together are smaller or the floors together larger.
    """
    units = capacity_bytes // alignment_bytes
    limits = [limit // alignment_bytes for limit in limits_bytes]
    floors = [-(-floor // alignment_bytes) for floor in floors_bytes or [0] * len(limits)]
    limits = [max(limit, floor) for limit, floor in zip(limits, floors)]
    if sum(limits) < units or sum(floors) > units:
        return None
    # The scale at which the clamped shares add up: they grow with it, so halving finds it.
    low, high = 0.0, float(max(limits)) / min(weights) + 1
    for _ in range(100):
        middle = (low + high) / 2
        clamped = _clamp(middle, weights, floors, limits)
        low, high = (middle, high) if sum(clamped) <= units else (low, middle)
    parts = _clamp(low, weights, floors, limits)
    for drive, limit in enumerate(limits):  # what rounding left over
        more = min(limit - parts[drive], units - sum(parts))
        parts[drive] += more
    return [part * alignment_bytes for part in parts]


def _clamp(
    scale: float, weights: Sequence[float], floors: list[int], limits: list[int]
) -> list[int]:
    parts = zip(weights, floors, limits)
    return [min(max(int(scale * weight), floor), limit) for weight, floor, limit in parts]
