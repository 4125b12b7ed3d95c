"""Transfers are whole or an error that names everything; room is reserved ahead."""

from __future__ import annotations

import errno
import os
from itertools import pairwise

import pytest

from offload.nvme.files import (
    OsDirectoryFiles,
    Preallocator,
    open_os_file,
    read_fully,
    write_fully,
)
from offload.testing_storage import AlignmentFile, Fault, FaultyFile, filled_buffer
from ops.errors import StorageError

STEP_BYTES = 256 << 20


@pytest.fixture
def faulty(tmp_path):
    files = []

    def make(*faults, direct=False):
        inner = open_os_file(str(tmp_path / "file"), direct)
        files.append(inner)
        inner.truncate(1 << 20)
        return FaultyFile(inner, list(faults))

    yield make
    for file in files:
        file.close()


@pytest.mark.parametrize("at_byte", [1, 100, 4095, 4096, 9_999])
def test_short_transfers_are_completed(faulty, at_byte):
    file = faulty(Fault("short", "write", at_byte=at_byte), Fault("short", "read", at_byte=at_byte))
    data = filled_buffer(10_000)
    write_fully(file, [data.data], 4096)
    assert file.num_calls["write"] == 2
    back = bytearray(10_000)
    read_fully(file, [memoryview(back)], 4096)
    assert file.num_calls["read"] == 2
    assert back == data.tobytes()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("at_byte", [0, 1, 4096, 9_999])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_failing_transfer_names_path_offset_and_both_byte_counts(faulty, code, at_byte, verb):
    # C04
    file = faulty(Fault("error", verb, at_byte=at_byte, code=code))
    transfer = read_fully if verb == "read" else write_fully
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        transfer(file, [filled_buffer(10_000).data], 8192, block="expert.3/residual")
    error = caught.value
    assert (error.path, error.offset, error.block) == (file.path, 8192, "expert.3/residual")
    assert (error.wanted_bytes, error.done_bytes) == (10_000, at_byte)


def test_the_end_of_a_truncated_file_is_an_error(faulty):
    # C05
    file = faulty()
    file.truncate(5_000)
    with pytest.raises(StorageError, match="ends too early") as caught:
        read_fully(file, [memoryview(bytearray(4096))], 4096)
    assert (caught.value.wanted_bytes, caught.value.done_bytes) == (4096, 904)


def test_a_write_without_progress_is_an_error(faulty):
    file = faulty(Fault("short", "write", at_byte=0))
    file.faults[0].at_op, file.faults[0].at_byte = 0, None
    with pytest.raises(StorageError, match="no progress"):
        write_fully(file, [memoryview(b"x")], 0)


def test_a_short_direct_transfer_resumes_at_an_aligned_byte(tmp_path):
    """A direct read that stops inside a sector cannot go on there: EINVAL on a real drive."""
    inner = AlignmentFile(open_os_file(str(tmp_path / "file"), False), 4096)
    inner.truncate(1 << 20)
    data = filled_buffer(16_384)
    write_fully(inner, [data.data], 0, io_alignment_bytes=4096)

    class StopsInsideASector:
        def __init__(self):
            self.path = inner.path
            self.offsets = []

        def readv_into(self, buffers, offset):
            self.offsets.append(offset)
            moved_bytes = inner.readv_into(buffers, offset)
            return 5_000 if len(self.offsets) == 1 else moved_bytes

    file = StopsInsideASector()
    back = filled_buffer(16_384, seed=1)
    read_fully(file, [back.data], 0, io_alignment_bytes=4096)
    assert file.offsets == [0, 4096]
    assert (back == data).all()
    inner.close()


def _pieces_of(data, cuts):
    borders = [0, *cuts, len(data)]
    return [data[start:stop].data for start, stop in pairwise(borders)]


@pytest.mark.parametrize("at_byte", [1, 4096, 5_000, 8192, 16_383])
def test_short_vectored_transfers_go_on_in_the_right_piece(faulty, at_byte):
    file = faulty(Fault("short", "write", at_byte=at_byte), Fault("short", "read", at_byte=at_byte))
    data = filled_buffer(16_384)
    write_fully(file, _pieces_of(data, [4096, 8192]), 4096)
    back = filled_buffer(16_384, seed=1)
    read_fully(file, _pieces_of(back, [8192, 12_288]), 4096)
    assert (file.num_calls["write"], file.num_calls["read"]) == (2, 2)
    assert (back == data).all()


@pytest.mark.parametrize("at_byte", [4096 + 5, 12_288 + 4095])
def test_short_direct_vectored_transfers_resume_aligned(tmp_path, at_byte):
    # C10
    checked = AlignmentFile(open_os_file(str(tmp_path / "file"), False), 4096)
    checked.truncate(1 << 20)
    faults = [Fault("short", verb, at_byte=at_byte) for verb in ("read", "write")]
    file = FaultyFile(checked, faults, unit_bytes=4096)
    data, back = filled_buffer(16_384), filled_buffer(16_384, seed=1)
    write_fully(file, _pieces_of(data, [4096, 8192]), 8192, io_alignment_bytes=4096)
    read_fully(file, _pieces_of(back, [8192]), 8192, io_alignment_bytes=4096)
    assert [fault.num_hits for fault in faults] == [1, 1] and (back == data).all()
    checked.close()


def test_more_pieces_than_one_system_call_takes_are_moved(tmp_path):
    file = open_os_file(str(tmp_path / "file"), False)
    data = filled_buffer(3 * 1500)
    write_fully(file, _pieces_of(data, range(3, 4500, 3)), 0)
    back = filled_buffer(4500, seed=1)
    read_fully(file, _pieces_of(back, range(3, 4500, 3)), 0)
    assert (back == data).all()
    file.close()


def test_a_flip_in_a_vectored_transfer_strikes_its_byte_only(faulty):
    file = faulty(Fault("flip", "write", at_byte=5_000), Fault("flip", "read", at_byte=9_000))
    data, back = filled_buffer(16_384), filled_buffer(16_384, seed=1)
    write_fully(file, _pieces_of(data, [4096, 8192]), 0)
    assert (data == filled_buffer(16_384)).all()  # the caller's memory is whole again
    read_fully(file, _pieces_of(back, [4096, 8192]), 0)
    assert (back != data).nonzero()[0].tolist() == [5_000, 9_000]


def test_room_is_reserved_ahead_in_proportion_and_each_byte_once(faulty):
    """Regression: a step of 256 MiB for a store of a few MiB filled the disk of a test run."""
    file = faulty()
    asked = []
    file.inner.allocate = lambda offset, nbytes: asked.append((offset, nbytes))
    end = 4 << 30
    room = Preallocator(file, 0, end)
    for stop in range(4096, 64 << 20, 4096):
        room.ensure(stop, "block", 0, stop)
    assert asked[0] == (0, 2 << 20) and len(asked) < 40
    assert sum(nbytes for _, nbytes in asked) <= 1.3 * (64 << 20)
    for stop in range(64 << 20, end + 1, 1 << 20):
        room.ensure(stop, "block", 0, stop)
    starts = [offset for offset, _ in asked]
    assert starts == [0, *(offset + nbytes for offset, nbytes in asked[:-1])]
    assert sum(asked[-1]) == end and max(nbytes for _, nbytes in asked) <= 257 << 20


def test_a_step_that_does_not_fit_shrinks_to_what_is_needed(faulty):
    file = faulty()
    asked = []

    def allocate(offset, nbytes):
        asked.append((offset, nbytes))
        if nbytes > 10_000:
            raise OSError(errno.ENOSPC, "full")

    file.inner.allocate = allocate
    room = Preallocator(file, 0, STEP_BYTES)
    room.ensure(8192, "block", 4096, 4096)
    assert asked == [(0, 2 << 20), (0, 8192)]
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        room.ensure(40_960, "other", 8192, 32_768)
    error = caught.value
    assert (error.path, error.offset, error.block) == (file.path, 8192, "other")
    assert (error.wanted_bytes, error.done_bytes) == (32_768, 0)


def test_a_file_system_without_fallocate_is_left_alone(faulty):
    file = faulty(Fault("error", "allocate", code=errno.EOPNOTSUPP))
    room = Preallocator(file, 0, STEP_BYTES)
    room.ensure(4096, "block", 0, 4096)
    room.ensure(STEP_BYTES, "block", 0, 4096)
    assert file.num_calls["allocate"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda path: OsDirectoryFiles().read_file(path, 10),
        lambda path: OsDirectoryFiles().write_file(path, b"new"),
        lambda path: OsDirectoryFiles().sync_file(path),
        lambda path: open_os_file(path, False),
        lambda path: open_os_file(path, True),
    ],
    ids=["read", "write", "sync", "data", "data past the page cache"],
)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, call):
    """A pipe keeps whoever opens it waiting for its other end, and a link leads anywhere (C68)."""
    path, victim = tmp_path / "member.json", tmp_path / "elsewhere"
    victim.write_text("precious")
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is no plain file"):
        call(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="it is no plain file"):
        call(str(path))
    path.rmdir()
    path.symlink_to(victim)
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        call(str(path))
    assert victim.read_text() == "precious"


def test_a_file_that_vanishes_while_its_directory_is_listed_is_not_listed(tmp_path, monkeypatch):
    # A reader's hold file ended a run's look into its directory, when it went between two steps.
    for name in "ab":
        (tmp_path / name).write_text(name)
    scandir = os.scandir

    class Entries:
        def __init__(self, path):
            self.entries = scandir(path)

        def __enter__(self):
            found = list(self.entries)
            (tmp_path / "a").unlink()
            return found

        def __exit__(self, *error):
            self.entries.close()

    monkeypatch.setattr(os, "scandir", Entries)
    assert OsDirectoryFiles().list(str(tmp_path)) == {"b": 1}
