"""The allocator: exact accounting, no overlap, best fit, full use of odd capacities."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.nvme.extents import Extent, ExtentAllocator
from ops.units import round_up


def test_capacity_that_is_no_multiple_of_the_alignment_is_used_to_its_last_byte():
    # C02
    allocator = ExtentAllocator(10_001, 4096)
    assert allocator.allocate(10_001) == Extent(0, 10_001)
    assert allocator.used_bytes == 10_001 and allocator.free_bytes == 0
    assert allocator.allocate(1) is None


def test_short_tail_serves_what_fits_in_it():
    allocator = ExtentAllocator(4096 + 100, 4096)
    first = allocator.allocate(1)
    assert first == Extent(0, 4096)
    assert allocator.allocate(101) is None
    assert allocator.allocate(100) == Extent(4096, 100)
    allocator.free(first)
    assert allocator.free_regions() == [Extent(0, 4096)]


def test_refused_allocation_changes_nothing():
    allocator = ExtentAllocator(8192, 4096)
    allocator.allocate(4096)
    before = (allocator.used_bytes, allocator.free_regions(), allocator.used_bytes_max)
    assert allocator.allocate(4097) is None
    assert (allocator.used_bytes, allocator.free_regions(), allocator.used_bytes_max) == before


def test_takes_the_smallest_region_that_fits():
    allocator = ExtentAllocator(100, 1)
    parts = [allocator.allocate(size) for size in (30, 1, 10, 1, 20, 1)]
    for index in (0, 2, 4):
        allocator.free(parts[index])
    assert allocator.allocate(9) == Extent(31, 9)
    assert allocator.allocate(11) == Extent(42, 11)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_coalesce_whatever_the_order(order):
    allocator = ExtentAllocator(3 * 512, 512)
    parts = [allocator.allocate(512) for _ in range(3)]
    for index in order:
        allocator.free(parts[index])
    assert allocator.free_regions() == [Extent(0, 3 * 512)]
    assert allocator.largest_free_bytes == 3 * 512
    assert allocator.used_bytes_max == 3 * 512


def test_double_free_and_foreign_extents_are_refused():
    allocator = ExtentAllocator(8192, 4096)
    extent = allocator.allocate(1)
    allocator.free(extent)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(extent)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(Extent(4096, 1))


def test_empty_extents_take_no_room():
    allocator = ExtentAllocator(4096, 4096)
    allocator.allocate(4096)
    empty = allocator.allocate(0)
    assert empty == Extent(0, 0)
    allocator.free(empty)
    assert allocator.used_bytes == 4096


def test_base_offset_shifts_every_extent():
    allocator = ExtentAllocator(8192, 4096, base_offset=5 << 30)
    assert allocator.allocate(5000) == Extent(5 << 30, 8192)


@pytest.mark.parametrize(
    "arguments", [(-1, 4096, 0), (4096, 0, 0), (4096, 4096, 100)], ids=["size", "unit", "base"]
)
def test_senseless_sizes_are_refused(arguments):
    with pytest.raises(ValueError):
        ExtentAllocator(*arguments)
    with pytest.raises(ValueError):
        ExtentAllocator(4096, 4096).allocate(-1)


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(0, 200),
    alignment=st.sampled_from([1, 4, 16]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=60),
)
def test_agrees_with_a_map_of_bytes(capacity, alignment, steps):
    """Against the plainest model: one owner per byte."""
    allocator = ExtentAllocator(capacity, alignment)
    owner = [0] * capacity
    live: list[Extent] = []
    peak = 0
    for number, (wants, amount) in enumerate(steps, start=1):
        if wants:
            extent = allocator.allocate(amount)
            fits = _fits(owner, amount, alignment)
            assert (extent is not None) == fits
            if extent is None:
                continue
            end = extent.offset + extent.nbytes
            assert extent.offset % alignment == 0
            assert amount <= extent.nbytes <= round_up(amount, alignment)
            assert end % alignment == 0 or end == capacity
            assert not any(owner[extent.offset : end]), "overlap"
            owner[extent.offset : end] = [number] * extent.nbytes
            live.append(extent)
        elif live:
            extent = live.pop(amount % len(live))
            allocator.free(extent)
            owner[extent.offset : extent.offset + extent.nbytes] = [0] * extent.nbytes
        used = capacity - owner.count(0)
        peak = max(peak, used)
        assert (allocator.used_bytes, allocator.free_bytes) == (used, owner.count(0))
        assert allocator.used_bytes_max == peak
        assert allocator.free_regions() == _regions(owner)
        assert allocator.num_extents == sum(extent.nbytes > 0 for extent in live)


def test_claimed_extents_are_used_and_freed_like_others():
    """What a recovered commit lies in is taken out of the free room, shared or not."""
    allocator = ExtentAllocator(10 * 512 + 100, 512, base_offset=1024, drive=2)
    held = [Extent(1024 + 512 * at, 512 * size, 2) for at, size in ((8, 1), (0, 2), (5, 3))]
    allocator.claim([*held, Extent(1024 + 5120, 100, 2), Extent(0, 0, 2)])
    assert allocator.used_bytes == allocator.used_bytes_max == 6 * 512 + 100
    assert allocator.free_regions() == [Extent(2048, 1536, 2), Extent(1024 + 512 * 9, 512, 2)]
    allocator.claim([Extent(2048 + 512, 512, 2)])
    for extent in held:
        allocator.free(extent)
    assert allocator.used_bytes == 512 + 100
    assert [region.nbytes for region in allocator.free_regions()] == [3 * 512, 6 * 512]


@pytest.mark.parametrize(
    "extent",
    [
        Extent(512, 512, 1),
        Extent(512, 512),
        Extent(2560, 512),
        Extent(4 * 512, 1024),
        Extent(100, 412),
        Extent(0, 100),
        Extent(-512, 512),
    ],
    ids=["drive", "taken", "behind", "beyond", "offset", "length", "before"],
)
def test_a_claim_of_what_is_not_free_changes_nothing(extent):
    allocator = ExtentAllocator(5 * 512, 512)
    allocator.claim([Extent(512, 1024)])
    before = (allocator.free_regions(), allocator.used_bytes, allocator.num_extents)
    with pytest.raises(ValueError, match=r"not (free|aligned)"):
        allocator.claim([Extent(3 * 512, 512), extent])
    with pytest.raises(ValueError, match="not free"):
        allocator.claim([Extent(3 * 512, 512), Extent(3 * 512, 512)])
    assert before == (allocator.free_regions(), allocator.used_bytes, allocator.num_extents)


@settings(max_examples=100, deadline=None)
@given(
    capacity=st.integers(1, 200),
    sizes=st.lists(st.integers(0, 30), max_size=20),
    holes=st.lists(st.integers(0, 100), max_size=10),
    split=st.integers(0, 20),
)
def test_a_claim_rebuilds_what_allocations_made(capacity, sizes, holes, split):
    allocator, again = ExtentAllocator(capacity, 4), ExtentAllocator(capacity, 4)
    live = [extent for extent in map(allocator.allocate, sizes) if extent is not None]
    for hole in holes:
        if live:
            allocator.free(live.pop(hole % len(live)))
    again.claim(live[split:])
    again.claim(live[:split])
    assert again.free_regions() == allocator.free_regions()
    assert again.used_bytes == allocator.used_bytes
    for extent in live:
        again.free(extent)
    assert again.largest_free_bytes == capacity


def _regions(owner: list[int]) -> list[Extent]:
    regions: list[Extent] = []
    start = None
    for index, holder in enumerate([*owner, 1]):
        if holder == 0 and start is None:
            start = index
        if holder != 0 and start is not None:
            regions.append(Extent(start, index - start))
            start = None
    return regions


def _fits(owner: list[int], nbytes: int, alignment: int) -> bool:
    return nbytes == 0 or any(region.nbytes >= nbytes for region in _regions(owner))


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(1, 200),
    alignment=st.sampled_from([1, 4, 16]),
    fill=st.lists(st.integers(1, 30), max_size=20),
    holes=st.lists(st.integers(0, 100), max_size=10),
    wanted=st.integers(0, 200),
)
def test_fragmentation_never_refuses_what_the_free_bytes_hold(
    capacity, alignment, fill, holes, wanted
):
    """Out-of-place writes of blocks of many sizes scatter the free room of a full store."""
    allocator = ExtentAllocator(capacity, alignment)
    live = [extent for extent in map(allocator.allocate, fill) if extent is not None]
    for hole in holes:
        if live:
            allocator.free(live.pop(hole % len(live)))
    before = (allocator.free_bytes, allocator.used_bytes_max, allocator.free_regions())
    pieces = allocator.allocate_pieces(wanted)
    assert (pieces is not None) == (wanted <= before[0])
    if pieces is None:
        assert (allocator.free_bytes, allocator.used_bytes_max) == before[:2]
        assert allocator.free_regions() == before[2]
        return
    assert all(piece.nbytes % alignment == 0 for piece in pieces[:-1])
    assert wanted <= sum(piece.nbytes for piece in pieces) < wanted + alignment
    if any(region.nbytes >= wanted for region in before[2]):
        assert len(pieces) == 1
    for piece in pieces:
        allocator.free(piece)
    assert allocator.free_regions() == before[2]
