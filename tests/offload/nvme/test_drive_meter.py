"""The drive's speed is told from transfers that overlap."""

from __future__ import annotations

import pytest

from offload.nvme.drive_meter import KNOWN_BYTES_MIN, DriveMeter, metered
from offload.nvme.transfers import Direction
from offload.testing_storage import Fault, FaultyStorage, filled_buffer

READ, WRITE = Direction.READ, Direction.WRITE
MB = 1_000_000


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    return DriveMeter(clock)


def test_nothing_is_known_before_enough_has_moved(meter, clock):
    meter.start(WRITE)
    clock.now += 1
    meter.finish(WRITE, KNOWN_BYTES_MIN - 1)
    assert meter.speed().write_bytes_per_s == 0.0
    assert meter.speed().seconds_per_byte is None


def test_one_transfer_after_another(meter, clock):
    for _ in range(4):
        meter.start(WRITE)
        clock.now += 0.1
        meter.finish(WRITE, 5 * MB)
        clock.now += 10  # idle time is nobody's
    assert meter.speed().write_bytes_per_s == pytest.approx(50 * MB)
    assert meter.speed().read_bytes_per_s == 0.0


def test_transfers_side_by_side_are_one_busy_drive(meter, clock):
    for _ in range(8):
        meter.start(READ)
    for _ in range(8):
        clock.now += 0.1
        meter.finish(READ, 10 * MB)
    assert meter.speed().read_bytes_per_s == pytest.approx(100 * MB)


def test_a_mixed_second_is_shared_between_the_directions(meter, clock):
    for direction in (READ, READ, READ, WRITE):
        meter.start(direction)
    clock.now += 1
    for direction in (READ, READ, READ, WRITE):
        meter.finish(direction, 25 * MB)
    speed = meter.speed()
    assert speed.read_bytes_per_s == pytest.approx(100 * MB)
    assert speed.write_bytes_per_s == pytest.approx(100 * MB)


def test_a_drive_that_changes_is_noticed(meter, clock):
    for seconds in [0.01] * 500 + [0.4] * 40:
        meter.start(READ)
        clock.now += seconds
        meter.finish(READ, 20 * MB)
    assert meter.speed().read_bytes_per_s == pytest.approx(50 * MB, rel=0.05)


def test_a_very_slow_drive_becomes_known_all_the_same(meter, clock):
    for _ in range(30):
        meter.start(WRITE)
        clock.now += 1
        meter.finish(WRITE, MB)
    assert meter.speed().write_bytes_per_s == pytest.approx(MB)


def test_a_metered_file_moves_the_same_bytes_and_counts_them(clock, meter, tmp_path):
    file = metered(FaultyStorage(), meter)(str(tmp_path / "data.bin"), False)
    written, read = filled_buffer(2 * KNOWN_BYTES_MIN), filled_buffer(2 * KNOWN_BYTES_MIN, seed=1)
    half = KNOWN_BYTES_MIN
    clock_at_start = clock.now
    file.writev_from([written.data[:half], written.data[half:]], 0)
    file.readv_into([read.data[:half], read.data[half:]], 0)
    file.close()
    assert (read == written).all()
    assert clock.now == clock_at_start  # the time it took is none on this clock
    assert meter.speed().read_bytes_per_s == 0.0


def test_a_failed_transfer_ends_for_the_meter_too(clock, meter, tmp_path):
    storage = FaultyStorage(Fault("error", "write"))
    file = metered(storage, meter)(str(tmp_path / "data.bin"), False)
    with pytest.raises(OSError):
        file.writev_from([filled_buffer(4096).data], 0)
    file.close()
    for _ in range(2):  # had the failed one gone on, half of this time would be its own
        meter.start(READ)
        clock.now += 1
        meter.finish(READ, 50 * MB)
    assert meter.speed().read_bytes_per_s == pytest.approx(50 * MB)
