"""Several drives as one: shares by weight, full use of every drive, exact accounting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.nvme.extents import Extent
from offload.nvme.striping import StripedAllocator, split_capacity
from ops.units import round_up

MIB = 1 << 20
UNIT = 4096
LARGE = 1 << 40


def _bytes_by_drive(allocator, pieces):
    totals = [0] * len(allocator.drives)
    for piece in pieces:
        totals[piece.drive] += piece.nbytes
    return totals


def test_a_large_block_is_split_in_proportion_and_uses_all_drives_from_its_start():
    allocator = StripedAllocator([LARGE, LARGE], [3, 1], UNIT)
    pieces = allocator.allocate_pieces(32 * MIB)
    assert _bytes_by_drive(allocator, pieces) == [24 * MIB, 8 * MIB]
    assert {piece.drive for piece in pieces[:2]} == {0, 1}
    assert max(piece.nbytes for piece in pieces) <= 12 * MIB
    assert all(piece.nbytes % MIB == 0 for piece in pieces)


def test_small_blocks_stay_whole_on_the_drive_that_lags_most():
    allocator = StripedAllocator([LARGE, LARGE], [2, 1], UNIT)
    pieces = [allocator.allocate_pieces(MIB) for _ in range(6)]
    assert all(len(block) == 1 for block in pieces)
    assert [block[0].drive for block in pieces] == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("weights", [[1, 1], [1.5, 3.1], [5, 2, 1]])
@pytest.mark.parametrize(
    "sizes", [[4096 + 77], [int(4.3 * MIB), 21 * MIB], [1, 100, 3 * MIB, 64 * MIB, MIB]]
)
def test_the_share_of_each_drive_follows_its_weight(weights, sizes):
    # C55: within 2 %, also while blocks come and go
    allocator = StripedAllocator([LARGE] * len(weights), weights, UNIT)
    choose = random.Random(0)
    live = [allocator.allocate_pieces(sizes[number % len(sizes)]) for number in range(300)]
    for _ in range(600):
        for piece in live.pop(choose.randrange(len(live))):
            allocator.free(piece)
        live.append(allocator.allocate_pieces(choose.choice(sizes)))
    for drive, weight in zip(allocator.drives, weights):
        share = drive.used_bytes / allocator.used_bytes
        assert abs(share - weight / sum(weights)) < 0.02


def test_a_full_drive_leaves_the_rest_to_the_others():
    allocator = StripedAllocator([3 * MIB + UNIT, 20 * MIB], [1, 1], UNIT)
    pieces = allocator.allocate_pieces(16 * MIB + 5)
    assert _bytes_by_drive(allocator, pieces) == [3 * MIB + UNIT, 13 * MIB]
    assert all(piece.nbytes % UNIT == 0 for piece in pieces)
    assert allocator.allocate_pieces(7 * MIB + 1) is None
    assert allocator.allocate_pieces(7 * MIB) is not None
    assert allocator.free_bytes == 0 == allocator.largest_free_bytes


def test_the_same_calls_give_the_same_places():
    def places():
        allocator = StripedAllocator([64 * MIB] * 3, [1, 2, 3], UNIT)
        blocks = [allocator.allocate_pieces(size * 1000) for size in range(1, 9000, 700)]
        for piece in blocks[5] + blocks[12]:
            allocator.free(piece)
        return [*blocks, allocator.allocate_pieces(9 * MIB)]

    assert places() == places()


def test_claims_and_frees_go_to_the_drive_of_the_extent():
    allocator = StripedAllocator([MIB, MIB], [1, 1], UNIT, base_offset=UNIT)
    allocator.claim([Extent(UNIT, UNIT, drive=1), Extent(0, 0)])
    assert allocator.drives[0].used_bytes == 0
    with pytest.raises(ValueError, match="not free"):  # all or none
        allocator.claim([Extent(UNIT, UNIT, drive=0), Extent(UNIT, UNIT, drive=1)])
    assert allocator.drives[0].used_bytes == 0
    with pytest.raises(ValueError, match="none of 2 drives"):
        allocator.claim([Extent(UNIT, UNIT, drive=2)])
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(Extent(UNIT, UNIT, drive=0))
    assert allocator.used_bytes == UNIT and allocator.num_extents == 1
    allocator.free(Extent(UNIT, UNIT, drive=1))
    assert allocator.used_bytes == 0 and allocator.used_bytes_max == UNIT
    assert allocator.free_regions() == [Extent(UNIT, MIB, 0), Extent(UNIT, MIB, 1)]


def test_empty_blocks_take_no_room_and_senseless_arguments_are_refused():
    allocator = StripedAllocator([UNIT, UNIT], [1, 1], UNIT)
    assert allocator.allocate_pieces(0) == [Extent(0, 0)]
    allocator.free(Extent(0, 0))
    with pytest.raises(ValueError):
        allocator.allocate_pieces(-1)
    for arguments in (([], [], UNIT), ([UNIT], [1, 1], UNIT), ([UNIT], [0], UNIT), ([5], [1], 4)):
        with pytest.raises(ValueError):
            StripedAllocator(*arguments)


@settings(max_examples=100, deadline=None)
@given(
    capacities=st.lists(st.integers(0, 1500), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 900)), max_size=30),
)
def test_room_is_refused_only_when_all_free_bytes_do_not_suffice(capacities, weights, steps):
    allocator = StripedAllocator(
        [capacity * UNIT for capacity in capacities], weights[: len(capacities)], UNIT
    )
    live = []
    for wants, amount in steps:
        if wants:
            nbytes = amount * UNIT - (amount % 3 if amount else 0)
            before = (allocator.free_bytes, allocator.free_regions())
            pieces = allocator.allocate_pieces(nbytes)
            assert (pieces is not None) == (nbytes <= before[0])
            if pieces is None:
                assert (allocator.free_bytes, allocator.free_regions()) == before
                continue
            assert sum(piece.nbytes for piece in pieces) == round_up(nbytes, UNIT)
            assert all(piece.nbytes % UNIT == 0 for piece in pieces)
            live.append(pieces)
        elif live:
            for piece in live.pop(amount % len(live)):
                allocator.free(piece)
        assert allocator.used_bytes == sum(piece.nbytes for block in live for piece in block)
        assert allocator.used_bytes == sum(drive.used_bytes for drive in allocator.drives)
        assert allocator.free_bytes == sum(region.nbytes for region in allocator.free_regions())


@settings(max_examples=200, deadline=None)
@given(
    units=st.integers(0, 1000),
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    limits=st.lists(st.integers(0, 1000), min_size=3, max_size=3),
    floors=st.lists(st.integers(0, 300), min_size=3, max_size=3),
)
def test_capacity_is_split_exactly_within_floors_and_limits(units, weights, limits, floors):
    parts = split_capacity(
        units * UNIT + 7,
        weights,
        UNIT,
        limits_bytes=[limit * UNIT for limit in limits],
        floors_bytes=[floor * UNIT for floor in floors],
    )
    highs = [max(limit, floor) for limit, floor in zip(limits, floors)]
    assert (parts is None) == (sum(highs) < units or sum(floors) > units)
    if parts is None:
        return
    assert sum(parts) == units * UNIT
    for part, low, high in zip(parts, floors, highs):
        assert part % UNIT == 0 and low * UNIT <= part <= high * UNIT


def test_capacity_follows_the_weights_where_nothing_hinders():
    parts = split_capacity(1000 * UNIT, [3, 1], UNIT, limits_bytes=[LARGE, LARGE])
    assert parts == [750 * UNIT, 250 * UNIT]
    assert split_capacity(1000 * UNIT, [3, 1], UNIT, limits_bytes=[100 * UNIT, LARGE]) == [
        100 * UNIT,
        900 * UNIT,
    ]
