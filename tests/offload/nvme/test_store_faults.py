"""Whatever the drive does, a block is whole or an error that names it (C04, C05, C11, C12)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from offload.nvme.handle import wait_all
from offload.nvme.store import NvmeStore
from offload.testing_storage import BUFFERED, Fault, FaultyStorage, Gate, filled_buffer
from ops.errors import ConfigError, StorageError

MIB = 1 << 20
NBYTES = 6 * MIB + 123
CAPACITY = 32 * MIB


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(*faults, **options):
        options.setdefault("workers", 1)
        storage = FaultyStorage(*faults)
        stores.append(NvmeStore(str(tmp_path), CAPACITY, open_file=storage, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close(delete=True)


def _corrupt(store, offset, data):
    with open(os.path.join(store.directory, "data.bin"), "r+b") as file:
        file.seek(offset)
        old = file.read(len(data))
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return old


def _offset_of(store, block):
    retained = store.cut({})
    store.abandon(retained)
    return retained.blocks[block].extents[0].offset


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("at_byte", [0, 1, MIB, 4 * MIB - 1, 4 * MIB, NBYTES - 1])
def test_a_write_failing_at_any_byte_names_everything_and_serves_nothing(open_store, code, at_byte):
    # C04
    first = 2 * MIB
    store = open_store(Fault("error", "write", at_byte=first + at_byte, code=code), access=BUFFERED)
    store.write("good", filled_buffer(first), "update").wait()
    used = store.used_bytes
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        store.write("bad", filled_buffer(NBYTES), "update").wait()
    error = caught.value
    request_start = at_byte - at_byte % (4 * MIB)
    assert error.block == "bad" and error.path == os.path.join(store.directory, "data.bin")
    assert error.offset == first + request_start
    assert error.wanted_bytes == min(4 * MIB, NBYTES - request_start)
    assert error.done_bytes == at_byte - request_start
    with pytest.raises(StorageError):
        store.drain()
    assert "bad" not in store.blocks() and store.used_bytes == used


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("at_byte", [1, MIB, NBYTES - 1])
def test_short_transfers_at_any_byte_are_completed(open_store, verb, at_byte):
    # C04, C05
    fault = Fault("short", verb, at_byte=at_byte)
    store = open_store(fault, access=BUFFERED)
    store.write("a", filled_buffer(NBYTES), "update").wait()
    read = filled_buffer(NBYTES, seed=1)
    store.read("a", read, "update").wait()
    assert fault.num_hits == 1 and (read == filled_buffer(NBYTES)).all()


def test_short_direct_transfers_are_completed(open_store):
    faults = [Fault("short", "write", at_byte=MIB + 5), Fault("short", "read", at_byte=MIB + 5)]
    store = open_store(*faults)
    store.write("a", filled_buffer(NBYTES), "update").wait()
    read = filled_buffer(NBYTES, seed=1)
    store.read("a", read, "update").wait()
    assert [fault.num_hits for fault in faults] == [1, 1]
    assert (read == filled_buffer(NBYTES)).all()


def test_the_first_failure_is_latched_and_ends_everything_queued(open_store):
    store = open_store(Fault("error", "write", at_op=1), access=BUFFERED)
    store.write("good", filled_buffer(100), "update").wait()
    with pytest.raises(StorageError) as first:
        store.write("bad", filled_buffer(100), "update").wait()
    for call in (
        lambda: store.write("next", filled_buffer(100), "update"),
        lambda: store.read("good", filled_buffer(100), "update"),
        lambda: store.delete("good"),
        store.drain,
        store.sync,
    ):
        with pytest.raises(StorageError) as later:
            call()
        assert later.value is first.value
    assert store._file.num_calls["write"] == 2  # nothing was tried after the failure


def test_everything_behind_a_failed_write_fails_with_it_and_gives_its_room_back(open_store):
    gate = Gate("write")
    store = open_store(gate.fault, Fault("error", "write", at_op=1), access=BUFFERED)
    plug = store.write("plug", filled_buffer(100), "update")
    gate.wait_entered()
    handles = [store.write("a", filled_buffer(200), "update") for _ in range(3)]
    handles.append(store.read("a", filled_buffer(200), "update"))
    handles.append(store.write("b", filled_buffer(300), "update"))
    gate.open()
    plug.wait()
    with pytest.raises(StorageError):
        wait_all(handles)
    assert len({id(handle.error()) for handle in handles}) == 1
    with pytest.raises(StorageError):
        store.drain()
    assert "a" not in store.blocks() and "b" not in store.blocks()
    assert "plug" in store.blocks() and store.used_bytes == 4096


def test_a_full_disk_while_reserving_room_names_the_block(open_store):
    store = open_store(Fault("error", "allocate", code=errno.ENOSPC))
    with pytest.raises(StorageError, match="cannot reserve disk space: ENOSPC") as caught:
        store.write("big", filled_buffer(NBYTES), "update").wait()
    error = caught.value
    assert (error.block, error.offset, error.done_bytes) == ("big", 0, 0)
    assert error.wanted_bytes == 4 * MIB


def test_a_failed_sync_is_latched(open_store):
    store = open_store(Fault("error", "sync"))
    store.write("a", filled_buffer(10), "update")
    with pytest.raises(StorageError, match="sync failed: EIO"):
        store.sync()
    with pytest.raises(StorageError, match="sync failed: EIO"):
        store.write("b", filled_buffer(10), "update")


@pytest.mark.parametrize("at_byte", [0, MIB - 1, MIB, 5 * MIB + 7, NBYTES - 1])
@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
def test_a_flipped_bit_on_the_disk_is_found_and_named(open_store, at_byte, access):
    # C05
    store = open_store(access=access)
    store.write("a", filled_buffer(NBYTES), "update")
    store.write("b", filled_buffer(100), "update")
    store.sync()
    offset = _offset_of(store, "a")
    old = _corrupt(store, offset + at_byte, b"?")
    _corrupt(store, offset + at_byte, bytes([old[0] ^ 0x40]))
    for _ in range(2):  # as often as it is asked for
        with pytest.raises(StorageError, match="checksum mismatch") as caught:
            store.read("a", filled_buffer(NBYTES), "update").wait()
        error = caught.value
        assert error.block == "a" and error.path == os.path.join(store.directory, "data.bin")
        assert error.offset == offset + at_byte - at_byte % MIB
    store.read("b", filled_buffer(100), "update").wait()  # the others are served


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_bit_flipped_on_the_way_is_found(open_store, verb):
    store = open_store(Fault("flip", verb, at_byte=3 * MIB))
    store.write("a", filled_buffer(NBYTES), "update").wait()
    with pytest.raises(StorageError, match="checksum mismatch"):
        store.read("a", filled_buffer(NBYTES), "update").wait()


def test_two_swapped_blocks_are_found(open_store):
    # C05: both are whole in themselves, each in the other's place
    store = open_store()
    store.write("a", filled_buffer(2 * MIB, seed=1), "update")
    store.write("b", filled_buffer(2 * MIB, seed=2), "update")
    store.sync()
    _corrupt(store, _offset_of(store, "a"), filled_buffer(2 * MIB, seed=2).tobytes())
    _corrupt(store, _offset_of(store, "b"), filled_buffer(2 * MIB, seed=1).tobytes())
    for block in ("a", "b"):
        with pytest.raises(StorageError, match="checksum mismatch") as caught:
            store.read(block, filled_buffer(2 * MIB), "update").wait()
        assert caught.value.block == block


def test_a_truncated_file_is_found(open_store):
    # C05
    store = open_store()
    store.write("a", filled_buffer(NBYTES), "update")
    store.sync()
    os.truncate(os.path.join(store.directory, "data.bin"), 5 * MIB)
    with pytest.raises(StorageError, match="ends too early") as caught:
        store.read("a", filled_buffer(NBYTES), "update").wait()
    error = caught.value
    assert (error.block, error.offset, error.done_bytes) == ("a", 4 * MIB, MIB)


def _start(script, directory):
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


OWN = """
import signal, sys
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
def stop(number, frame):
    raise SystemExit(130)
signal.signal(signal.SIGTERM, stop)
with NvmeStore(sys.argv[1], 64 << 20, workers=2) as store:
    store.write("old", filled_buffer(1 << 20), "update").wait()
    print("ready", flush=True)
    while True:
        handle = store.write("old", filled_buffer(1 << 20), "update")
        handle.wait()
"""


def test_a_second_live_owner_is_refused_and_told_who_holds_the_path(tmp_path):
    # C11
    owner = _start(OWN, tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"in use by process {owner.pid} on host"):
            NvmeStore(str(tmp_path), CAPACITY)
        assert (tmp_path / "rank-00000/data.bin").stat().st_size == 64 * MIB  # untouched
    finally:
        owner.kill()
        owner.communicate()


def test_what_a_killed_owner_left_is_reclaimed_and_never_read(tmp_path):
    # C11
    owner = _start(OWN, tmp_path)
    owner.kill()
    owner.communicate()
    with NvmeStore(str(tmp_path), CAPACITY, workers=1) as store:
        assert "old" not in store.blocks() and store.used_bytes == 0
        assert (tmp_path / "rank-00000/data.bin").stat().st_size == CAPACITY
        assert (tmp_path / "rank-00000/data.bin").stat().st_blocks == 0


def test_sigterm_in_the_middle_of_transfers_ends_cleanly(tmp_path):
    # C12
    owner = _start(OWN, tmp_path)
    owner.send_signal(signal.SIGTERM)
    owner.communicate(timeout=30)
    assert owner.returncode == 130
    assert (tmp_path / "rank-00000/owner.lock").stat().st_size == 0  # given up cleanly
    NvmeStore(str(tmp_path), CAPACITY, workers=1).close(delete=True)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_forgets_to_close_still_ends(tmp_path):
    # C12
    script = """
import sys
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
store = NvmeStore(sys.argv[1], 64 << 20)
store.write("a", filled_buffer(1 << 20), "update")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=30)


def test_a_refused_open_gives_the_directory_up(tmp_path):
    def refuse(path, direct):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(ConfigError, match=r"offload\.nvme\.path.*EROFS"):
        NvmeStore(str(tmp_path), CAPACITY, open_file=refuse)
    NvmeStore(str(tmp_path), CAPACITY).close()
