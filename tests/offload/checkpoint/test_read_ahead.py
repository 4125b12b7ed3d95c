"""Reading ahead across blocks, parts and units: order, memory, and what is dropped on the way."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from offload.checkpoint import read_ahead
from offload.checkpoint.read_ahead import BUFFERS, ReadAhead
from offload.checkpoint.source import CommitPart
from offload.checkpoint.units import UnitReader
from offload.ledger import Ledger
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
from ops.checksum import CHUNK_BYTES
from ops.errors import StorageError
from ops.kernels.adamw import AdamW
from ops.kernels.pool import KernelPool
from tests.offload.checkpoint.saved_units import Whole, blocks_of, mesh_layouts, part_of_units
from tests.offload.checkpoint.test_source import directories, flip, whole

MIB = CHUNK_BYTES


@pytest.fixture
def ahead():
    made = ReadAhead()
    made.join()
    yield made
    made.leave()


class Drive:
    """Reads that end when they are let; knows in which order they began."""

    def __init__(self, free: bool = True) -> None:
        self.gate = threading.Event()
        self.began: list[int] = []
        self.buffers: set[int] = set()
        if free:
            self.gate.set()

    def read(self, number: int):
        def call(buffer):
            self.began.append(number)
            self.buffers.add(np.frombuffer(buffer, np.uint8).ctypes.data)
            assert self.gate.wait(60)
            buffer[:1] = bytes([number])
            return [buffer[:1]]

        return call


def test_requests_start_in_their_order_and_no_more_than_there_are_buffers(ahead, monkeypatch):
    monkeypatch.setattr(read_ahead, "READERS", 1)  # so that what began is in order
    drive = Drive()
    requests = [ahead.announce(drive.read(number)) for number in range(30)]
    for number, request in enumerate(requests):
        (found,) = ahead.result(request)
        assert max(drive.began) < number + BUFFERS
        assert bytes(found) == bytes([number])
        ahead.give_back(request)
    assert drive.began == list(range(30))
    assert len(drive.buffers) <= BUFFERS


def test_whose_turn_comes_before_there_is_a_buffer_gets_one_of_its_own(ahead):
    drive = Drive()
    requests = [ahead.announce(drive.read(number)) for number in range(20)]
    (late,) = ahead.result(requests[19])
    assert bytes(late) == bytes([19])
    for request in requests:  # in their order: the rest starts as buffers come free
        ahead.result(request)
        ahead.give_back(request)
    assert sorted(drive.began) == list(range(20))
    assert len(drive.buffers) == BUFFERS + 1
    drive.buffers.clear()
    again = [ahead.announce(drive.read(number)) for number in range(20)]
    for request in again:
        ahead.result(request)
        ahead.give_back(request)
    assert len(drive.buffers) <= BUFFERS, "the additional one is not kept"


def test_what_is_given_back_never_starts_or_is_waited_for(ahead):
    drive = Drive(free=False)
    requests = [ahead.announce(drive.read(number)) for number in range(BUFFERS + 5)]
    for request in requests[BUFFERS:]:
        ahead.give_back(request)
        ahead.give_back(request)
    threading.Timer(0.05, drive.gate.set).start()
    for request in requests[:BUFFERS]:
        ahead.give_back(request)  # waits: the buffer is being filled
    assert sorted(drive.began) == list(range(BUFFERS))


def test_a_failed_read_is_raised_at_its_turn_and_its_buffer_comes_back(ahead):
    def fail(buffer):
        raise ValueError("no")

    for _ in range(3 * BUFFERS):
        request = ahead.announce(fail)
        with pytest.raises(ValueError, match="no"):
            ahead.result(request)
        ahead.give_back(request)
    drive = Drive()
    request = ahead.announce(drive.read(1))
    assert bytes(ahead.result(request)[0]) == b"\1"


@pytest.fixture
def part(tmp_path):
    with NvmeStore(str(tmp_path), 128 * MIB, workers=2) as store:
        for seed, name in enumerate("abcdef", 1):
            store.write(name, filled_buffer(5 * MIB + seed, seed=seed), "update", version=1)
        store.publish(store.cut({}))
    with CommitPart(directories(tmp_path)) as opened:
        yield opened


def test_blocks_that_are_expected_are_on_their_way_while_the_first_is_used(part, monkeypatch):
    read = {}
    original = CommitPart._announce

    def announce(self, block, stored, chunks):
        read[block] = list(chunks)
        return original(self, block, stored, chunks)

    monkeypatch.setattr(CommitPart, "_announce", announce)
    for name in "abcdef":
        part.expect(name, range(6))
    assert list(read) == list("abcdef")
    for seed, name in enumerate("abcdef", 1):
        assert whole(part, name) == filled_buffer(5 * MIB + seed, seed=seed).tobytes()
    assert part.chunks_read == 36, "each of them once"


@pytest.mark.parametrize("asked", ["b", "a"], ids=["another block", "other chunks"])
def test_a_call_that_was_not_expected_is_answered_and_drops_what_was(part, asked):
    part.expect("a", [0, 1])
    part.expect("c", range(6))
    assert [x for x, _ in part.read_chunks(asked, [2, 4])] == [2, 4]
    assert part.chunks_read == 2
    for seed, name in enumerate("abcdef", 1):
        assert whole(part, name) == filled_buffer(5 * MIB + seed, seed=seed).tobytes()


def test_a_part_is_closed_while_something_is_expected(part):
    for name in "abcdef":
        part.expect(name, range(6))
    next(part.read_chunks("a", range(6)))
    part.close()


def test_damage_in_what_was_expected_is_told_at_its_turn(part):
    # C05
    stored = part.blocks["b"]
    flip(part.directories[0] + "/data.bin", stored.extents[0].offset + 3 * MIB)
    for name in "abc":
        part.expect(name, range(6))
    assert whole(part, "a")
    with pytest.raises(StorageError, match="checksum mismatch") as caught:
        whole(part, "b")
    assert (caught.value.block, caught.value.offset) == ("b", stored.extents[0].offset + 3 * MIB)
    assert whole(part, "c") == filled_buffer(5 * MIB + 3, seed=3).tobytes()


class Recording:
    """A part that notes what it was told to expect, and what was read."""

    def __init__(self, part) -> None:
        self.blocks = part.blocks
        self._part = part
        self.expected: list[tuple[str, tuple[int, ...]]] = []
        self.read: list[tuple[str, tuple[int, ...]]] = []

    def expect(self, block, chunks):
        self.expected.append((block, tuple(chunks)))

    def read_chunks(self, block, chunks):
        self.read.append((block, tuple(chunks)))
        return self._part.read_chunks(block, chunks)


UNITS = 40
KINDS = ("bfloat16", "bfloat16", "float32")


@pytest.fixture(scope="module")
def pool():
    with KernelPool(1) as made:
        yield made


def layouts_of(index, ranks):
    """A unit of 2.25 MiB of state and an odd size, cut by rows of its one tensor."""
    tensors = [Whole(520, 456, False, True, "rows")]
    return mesh_layouts(tensors, 1, ranks, KINDS, name=f"u{index}")


@pytest.fixture
def units(pool):
    """(reader, targets, parts): 40 units of 4 ranks, wanted by 2."""
    saved: dict[int, dict] = {rank: {} for rank in range(4)}
    targets = []
    for index in range(UNITS):
        for rank, layout in enumerate(layouts_of(index, 4)):
            saved[rank][layout.name] = layout
        targets.append(layouts_of(index, 2)[0])
    parts = {
        rank: Recording(part_of_units(list(layouts.values()))) for rank, layouts in saved.items()
    }
    ledger = Ledger(AdamW(0.9, 0.95, 1e-8))
    for _ in range(3):
        ledger.add(1e-3)
    return UnitReader(parts, saved, ledger, 0.1, pool), targets, parts


def filled(reader, target):
    weight = np.full(target.nbytes("weight"), 0xAA, np.uint8)
    state = np.full(target.nbytes("state"), 0xAA, np.uint8)
    reader.fill(target, weight, state)
    expected = blocks_of(target)
    np.testing.assert_array_equal(weight, expected["weight"])
    np.testing.assert_array_equal(state, expected["state"])


def test_parts_are_told_of_units_to_come_in_the_order_they_are_read(units):
    reader, targets, parts = units
    reader.expect(targets)
    most = 0
    for target in targets:
        filled(reader, target)
        most = max(most, max(len(x.expected) - len(x.read) for x in parts.values()))
    assert 2 < most < UNITS, "some are known ahead, and not all of them"
    for part in parts.values():
        assert part.expected == part.read


def test_a_unit_out_of_order_is_filled_and_nothing_is_expected_any_more(units):
    reader, targets, parts = units
    reader.expect(targets)
    filled(reader, targets[0])
    filled(reader, targets[7])
    told = {rank: len(part.expected) for rank, part in parts.items()}
    for target in targets[1:5]:
        filled(reader, target)
    assert told == {rank: len(part.expected) for rank, part in parts.items()}
    reader.expect(targets)
    filled(reader, targets[0])
    assert all(len(part.expected) > told[rank] for rank, part in parts.items() if part.read)


def test_moments_that_are_left_out_keep_their_place_and_padding_is_zero(units, pool):
    reader, targets, _ = units
    target = targets[0]
    reader.expect([target], moments=False)
    weight = np.full(target.nbytes("weight"), 0xAA, np.uint8)
    state = np.full(target.nbytes("state"), 0xAA, np.uint8)
    reader.fill(target, weight, state, moments=False)
    expected = blocks_of(target)["state"]
    np.testing.assert_array_equal(weight, blocks_of(target)["weight"])
    for field in target.fields["state"]:
        span = slice(field.offset, field.offset + field.nbytes)
        wanted = 0xAA if field.component.startswith("exp_avg") else expected[span]
        assert (state[span] == wanted).all(), field.component
