"""Small neighbours share a system call, and nobody can tell from the blocks (C04, C07, C10)."""

from __future__ import annotations

import errno
import os

import pytest

from offload.nvme.aligned import AccessMode
from offload.nvme.handle import wait_all
from offload.nvme.store import NvmeStore
from offload.testing_storage import (
    BUFFERED,
    AlignmentFile,
    Fault,
    FaultyFile,
    FaultyStorage,
    Gate,
    filled_buffer,
)
from ops.errors import StorageError

MIB = 1 << 20
UNIT = 4096
PLUG = 1  # system calls of the block that keeps the worker busy while the queue fills


class Queued:
    """A store whose only worker stands before a gate until `go`: what is queued is known."""

    def __init__(self, path, verb, faults=(), access=None, **options):
        self.gate = Gate(verb)
        self.storage = FaultyStorage(self.gate.fault, *faults, **options.pop("storage", {}))
        self.store = NvmeStore(
            str(path), 64 * MIB, workers=1, open_file=self.storage, access=access, **options
        )
        self.verb = verb

    @property
    def file(self) -> FaultyFile:
        return self.storage.file

    def plug(self):
        if self.verb == "read":
            self.store.write("plug", filled_buffer(UNIT), "update").wait()
            self.handle = self.store.read("plug", filled_buffer(UNIT), "update", deadline=-1)
        else:
            self.handle = self.store.write("plug", filled_buffer(UNIT), "update", deadline=-1)
        self.gate.wait_entered()

    def go(self, handles):
        self.gate.open()
        wait_all([self.handle, *handles])


@pytest.fixture
def queued(tmp_path):
    opened = []

    def make(verb, *faults, **options):
        opened.append(Queued(tmp_path, verb, faults, **options))
        return opened[-1]

    yield make
    for item in opened:
        item.gate.open()
        item.store.close(delete=True)


def _shapes(number):
    """Lengths and addresses of all kinds: exact, with scratch behind, unaligned, several units."""
    nbytes = [50, UNIT, UNIT + 1, 3 * UNIT - 5, 1][number % 5]
    shape = [{}, {"padded_bytes": 3 * UNIT}, {"skew_bytes": 8}][number % 3]
    return nbytes, shape


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
@pytest.mark.parametrize("order", ["forward", "backward", "mixed"])
def test_neighbours_of_all_shapes_come_back_byte_for_byte(queued, access, order):
    ahead = list(range(60))
    orders = {"forward": ahead, "backward": ahead[::-1], "mixed": ahead[::2] + ahead[1::2]}
    case = queued("write", access=access)
    case.plug()
    handles = []
    for number in range(60):
        nbytes, shape = _shapes(number)
        data = filled_buffer(nbytes, seed=number, **shape)
        handles.append(case.store.write(f"b{number}", data, "update", nbytes=nbytes))
    case.go(handles)
    assert case.file.num_calls["write"] == PLUG + 1

    reads = []
    plug = Gate("read")
    case.file.faults.append(plug.fault)
    handles = [case.store.read("plug", filled_buffer(UNIT), "update")]
    plug.wait_entered()
    for number in orders[order]:
        nbytes, shape = _shapes(number)[0], _shapes(number + 1)[1]
        if shape.get("padded_bytes", UNIT * 3) < nbytes:
            shape = {}
        reads.append((number, nbytes, filled_buffer(nbytes, seed=99, **shape)))
        handles.append(case.store.read(f"b{number}", reads[-1][2], "update", nbytes=nbytes))
    plug.open()
    wait_all(handles)
    assert case.file.num_calls["read"] == PLUG + 1
    for number, nbytes, data in reads:
        assert (data[:nbytes] == filled_buffer(nbytes, seed=number)).all()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_five_thousand_tiny_blocks_need_few_system_calls(queued, verb):
    # C07
    case = queued(verb, transfers_max=5_001)
    data = filled_buffer(40_000)
    if verb == "read":
        for number in range(5_000):
            case.store.write(f"norm.{number}", data[number : number + 40], "update")
        case.store.drain()
    case.plug()
    back = filled_buffer(5_000 * UNIT, seed=1)
    handles = []
    for number in range(5_000):
        if verb == "write":
            piece = data[number : number + 40]
            handles.append(case.store.write(f"norm.{number}", piece, "update", deadline=number))
        else:
            piece = back[number * UNIT : number * UNIT + UNIT]
            handles.append(case.store.read(f"norm.{number}", piece, "update", nbytes=40))
    case.go(handles)
    assert case.file.num_calls[verb] <= PLUG + 20 < 5_000 / 200
    lane = case.store.stats().written if verb == "write" else case.store.stats().read
    assert lane.payload_bytes["update"] == 5_000 * 40 + UNIT
    assert lane.total_bytes == 5_001 * UNIT == case.file.num_bytes[verb]
    assert lane.num_requests == case.file.num_calls[verb]
    if verb == "read":
        for number in range(0, 5_000, 191):
            piece = back[number * UNIT : number * UNIT + 40]
            assert (piece == data[number : number + 40]).all()


def test_neighbours_are_joined_up_to_the_request_size(queued):
    case = queued("write", request_bytes=MIB)
    case.plug()
    sizes = [MIB // 4] * 6 + [MIB, 3 * MIB // 4, MIB // 2]
    handles = [
        case.store.write(f"b{number}", filled_buffer(nbytes), "update")
        for number, nbytes in enumerate(sizes)
    ]
    case.go(handles)
    moved = [nbytes for verb, _, nbytes in case.file.ranges if verb == "write"]
    assert moved == [UNIT, MIB, MIB // 2, MIB, 3 * MIB // 4, MIB // 2]


def test_each_block_keeps_its_cause_and_padding(queued):
    case = queued("write", access=AccessMode(True, UNIT, "test"))
    case.plug()
    handles = [
        case.store.write("a", filled_buffer(UNIT + 1), "spill"),
        case.store.write("b", filled_buffer(10), "commit"),
        case.store.write("c", filled_buffer(2 * UNIT), "weight"),
    ]
    case.go(handles)
    lane = case.store.stats().written
    assert case.file.num_calls["write"] == PLUG + 1 == lane.num_requests
    assert [lane.payload_bytes[cause] for cause in ("spill", "commit", "weight")] == [
        UNIT + 1,
        10,
        2 * UNIT,
    ]
    assert [lane.padding_bytes[cause] for cause in ("spill", "commit", "weight")] == [
        UNIT - 1,
        UNIT - 10,
        0,
    ]


def test_gaps_are_not_bridged(queued):
    case = queued("write")
    case.plug()
    handles = [case.store.write(name, filled_buffer(10), "update") for name in "ab"]
    case.store._table.allocator.allocate(UNIT)
    handles.append(case.store.write("c", filled_buffer(10), "update"))
    case.go(handles)
    assert case.file.num_calls["write"] == PLUG + 2


@pytest.mark.parametrize("alignment", [4096, 65_536])
def test_large_sectors_see_only_aligned_pieces(queued, alignment):
    # C10
    checked = []

    def open_checked(path, direct):
        checked.append(AlignmentFile(FaultyStorage()(path, False), alignment))
        return checked[-1]

    access = AccessMode(True, alignment, "test")
    case = queued("write", access=access, storage={"open_file": open_checked})
    case.plug()
    handles, blocks = [], {}
    for number in range(40):
        nbytes, shape = _shapes(number)
        blocks[f"b{number}"] = filled_buffer(nbytes, seed=number, **shape)[:nbytes]
        handles.append(case.store.write(f"b{number}", blocks[f"b{number}"], "update"))
    case.go(handles)
    assert checked[0].num_checked < 8
    reads = {block: filled_buffer(len(data), seed=77) for block, data in blocks.items()}
    wait_all([case.store.read(block, data, "update") for block, data in reads.items()])
    assert all((reads[block] == data).all() for block, data in blocks.items())


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("at_byte", [1, UNIT, 3 * UNIT + 7, 6 * UNIT - 1])
@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
def test_short_transfers_of_neighbours_are_completed(queued, verb, at_byte, access):
    # C04
    fault = Fault("short", verb, at_byte=UNIT + at_byte)  # behind the plug
    case = queued(verb, fault, access=access)
    for number in range(6) if verb == "read" else ():
        case.store.write(f"b{number}", filled_buffer(UNIT, seed=number), "update").wait()
    case.plug()
    reads = [filled_buffer(UNIT, seed=99) for _ in range(6)]
    if verb == "write":
        data = [filled_buffer(UNIT, seed=number) for number in range(6)]
        case.go([case.store.write(f"b{n}", buffer, "update") for n, buffer in enumerate(data)])
        wait_all([case.store.read(f"b{n}", buffer, "update") for n, buffer in enumerate(reads)])
    else:
        case.go([case.store.read(f"b{n}", buffer, "update") for n, buffer in enumerate(reads)])
    assert fault.num_hits == 1
    assert all((buffer == filled_buffer(UNIT, seed=n)).all() for n, buffer in enumerate(reads))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("at_byte", [0, 1, UNIT, 2 * UNIT + 9, 5 * UNIT + 10])
def test_a_failing_write_of_neighbours_names_the_right_block(queued, code, at_byte):
    # C04
    fault = Fault("error", "write", at_byte=UNIT + at_byte, code=code)
    case = queued("write", fault, access=BUFFERED)
    case.plug()
    handles = [case.store.write(f"b{n}", filled_buffer(UNIT), "update") for n in range(6)]
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        case.go(handles)
    bad, error = at_byte // UNIT, caught.value
    assert error.block == f"b{bad}" and error.offset == UNIT + bad * UNIT
    assert error.path == os.path.join(case.store.directory, "data.bin")
    assert error.wanted_bytes == UNIT and error.done_bytes < UNIT
    # The blocks before it are whole; it and those behind it are not served.
    assert [f"b{n}" in case.store.blocks() for n in range(6)] == [n < bad for n in range(6)]
    with pytest.raises(StorageError) as later:
        case.store.drain()
    assert later.value is error
    assert case.store.used_bytes == UNIT + bad * UNIT


def test_a_failing_read_of_neighbours_leaves_those_before_it_usable(queued):
    # C04
    case = queued("read", Fault("error", "read", at_byte=UNIT + 2 * UNIT + 5), access=BUFFERED)
    for number in range(5):
        case.store.write(f"b{number}", filled_buffer(UNIT, seed=number), "update").wait()
    case.plug()
    reads = [filled_buffer(UNIT, seed=99) for _ in range(5)]
    handles = [case.store.read(f"b{n}", buffer, "update") for n, buffer in enumerate(reads)]
    with pytest.raises(StorageError, match="EIO") as caught:
        case.go(handles)
    assert caught.value.block == "b2"
    assert [handle.error() is None for handle in handles] == [True, True, False, False, False]
    assert all((reads[n] == filled_buffer(UNIT, seed=n)).all() for n in range(2))


def test_a_joined_call_that_is_refused_is_done_block_by_block(queued, caplog):
    """A drive or a driver may refuse what it grants in pieces; nothing is wrong with the blocks."""
    refused = []

    class RefusesPieces:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def writev_from(self, buffers, offset):
            if len(buffers) > 1:
                refused.append(len(buffers))
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return self.inner.writev_from(buffers, offset)

    opened = FaultyStorage()
    case = queued(
        "write",
        access=BUFFERED,
        storage={"open_file": lambda path, direct: RefusesPieces(opened(path, direct))},
    )
    case.plug()
    case.go([case.store.write(f"b{n}", filled_buffer(UNIT, seed=n), "update") for n in range(4)])
    assert refused == [4] and "one by one" in caplog.text
    for number in range(4):
        read = filled_buffer(UNIT)
        case.store.read(f"b{number}", read, "update").wait()
        assert (read == filled_buffer(UNIT, seed=number)).all()
    assert case.store.stats().written.payload_bytes["update"] == 5 * UNIT


def test_a_flipped_bit_among_neighbours_spoils_its_block_only(queued):
    # C05
    case = queued("read", Fault("flip", "read", at_byte=UNIT + 2 * UNIT + 5))
    for number in range(5):
        case.store.write(f"b{number}", filled_buffer(100, seed=number), "update").wait()
    case.plug()
    reads = [filled_buffer(100, seed=99) for _ in range(5)]
    handles = [case.store.read(f"b{n}", buffer, "update") for n, buffer in enumerate(reads)]
    with pytest.raises(StorageError, match="checksum mismatch") as caught:
        case.go(handles)
    assert caught.value.block == "b2" and case.file.num_calls["read"] == PLUG + 1
    assert [handle.error() is None for handle in handles] == [True, True, False, True, True]
    case.store.read("b2", reads[2], "update").wait()  # not latched


def test_a_joined_transfer_is_ended_once_when_an_earlier_failure_is_latched(queued):
    case = queued("write", Fault("error", "write", at_op=1), access=BUFFERED)
    case.plug()
    handles = [case.store.write("bad", filled_buffer(10), "update", deadline=-1)]
    case.store._table.allocator.allocate(UNIT)
    handles += [case.store.write(f"b{n}", filled_buffer(10), "update") for n in range(50)]
    with pytest.raises(StorageError):
        case.go(handles)
    assert case.file.num_calls["write"] == PLUG + 1
    with pytest.raises(StorageError):
        case.store.drain()
    assert case.store.used_bytes == 2 * UNIT and case.store.stats().num_transfers == 0


@pytest.mark.parametrize(
    ("nbytes", "requests"),
    [
        (MIB, [MIB]),
        (MIB + MIB // 4 - UNIT, [MIB + MIB // 4 - UNIT]),
        (MIB + MIB // 4, [MIB, MIB // 4]),
        (3 * MIB + UNIT, [MIB, MIB, MIB + UNIT]),
    ],
)
def test_a_short_rest_of_a_block_is_moved_with_its_last_request(queued, nbytes, requests):
    """An expert's weight of 4.1 MiB went as 4 MiB and a request of 128 KiB, 7 to 20 % slower."""
    case = queued("write", request_bytes=MIB)
    case.plug()
    case.go([case.store.write("a", filled_buffer(nbytes), "update")])
    assert [moved for verb, _, moved in case.file.ranges if verb == "write"][1:] == requests
