"""Blocks come back byte for byte, sizes and capacity are exact, every byte is counted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
import weakref
from itertools import pairwise

import numpy as np
import pytest

from offload.nvme.aligned import AccessMode
from offload.nvme.store import NvmeStore
from offload.testing_storage import (
    BUFFERED,
    AlignmentFile,
    FaultyStorage,
    SparseFile,
    filled_buffer,
)
from ops.errors import ConfigError, StorageError
from ops.units import round_up

MIB = 1 << 20
UNIT = 4096
LENGTHS = [0, 1, 7, 511, 513, UNIT - 1, UNIT, UNIT + 1, MIB - 1, MIB + 1, 5 * MIB, 5 * MIB + 13]


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(capacity_bytes=64 * MIB, **options):
        options.setdefault("workers", 2)
        options.setdefault("required_bytes", 0)
        stores.append(NvmeStore(str(tmp_path), capacity_bytes, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close(delete=True)


def _round_trip(store, block, nbytes, **shape):
    written = filled_buffer(nbytes, seed=1, **shape)
    store.write(block, written, "update", nbytes=nbytes).wait()
    read = filled_buffer(nbytes, seed=2, **shape)
    store.read(block, read, "update", nbytes=nbytes).wait()
    assert (read[:nbytes] == written[:nbytes]).all()


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_round_trip_is_exact_for_any_length_and_address(open_store, nbytes, access):
    # C01
    store = open_store(access=access)
    _round_trip(store, "exact", nbytes)
    _round_trip(store, "padded", nbytes, padded_bytes=round_up(nbytes, UNIT))
    _round_trip(store, "unaligned", nbytes, skew_bytes=1)
    assert store.nbytes("exact") == nbytes
    assert store.used_bytes == 3 * round_up(nbytes, store.alignment_bytes)


@pytest.mark.long
def test_round_trip_of_a_whole_expert(open_store):
    # C01: 14 412 000 fp32 elements
    _round_trip(open_store(128 * MIB), "expert", 4 * 14_412_000)


def test_round_trip_of_odd_elements(open_store):
    # C01, scaled down: 14 412 000 bytes is no multiple of anything useful
    _round_trip(open_store(), "expert", 14_412_000)


@pytest.mark.parametrize("capacity", [10 * MIB + 1, UNIT - 1, 1, MIB])
def test_capacity_equal_to_the_data_is_accepted_and_hard(open_store, capacity):
    # C02
    store = open_store(capacity)
    _round_trip(store, "all", capacity)
    assert store.used_bytes == store.capacity_bytes == capacity
    store.drain()  # the read's place is given up a moment after its handle is done
    before = store.stats()
    with pytest.raises(StorageError, match=r"offload\.nvme\.capacity") as caught:
        store.write("more", filled_buffer(1), "update")
    assert (caught.value.block, caught.value.wanted_bytes) == ("more", 1)
    assert store.stats() == before and "more" not in store.blocks()
    _read_back(store, "all", capacity)


def _read_back(store, block, nbytes):
    read = filled_buffer(nbytes, seed=9)
    store.read(block, read, "update").wait()
    assert (read == filled_buffer(nbytes, seed=1)).all()


def test_room_that_is_about_to_be_freed_is_waited_for(open_store):
    """Rewriting a block needs two extents only until the new one is whole."""
    store = open_store(2 * UNIT, workers=1)
    for seed in range(20):
        store.write("a", filled_buffer(UNIT, seed=seed), "update")
    store.write("b", filled_buffer(UNIT), "update").wait()
    assert store.stats().used_bytes_max == 2 * UNIT


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
@pytest.mark.parametrize("skew_bytes", [0, 1])
def test_a_block_fits_into_scattered_room(open_store, access, skew_bytes):
    """The plan counts bytes; blocks of many sizes written out of place scatter the free ones."""
    store = open_store(600 * UNIT + 9, access=access)
    for index in range(200):
        store.write(f"small.{index}", filled_buffer(3 * UNIT, seed=index), "update")
    store.drain()
    for index in range(0, 200, 2):
        store.delete(f"small.{index}")
    nbytes = 300 * UNIT + 9
    _round_trip(store, "large", nbytes, skew_bytes=skew_bytes)
    assert store.used_bytes == store.capacity_bytes
    for index in range(1, 200, 2):
        read = filled_buffer(3 * UNIT)
        store.read(f"small.{index}", read, "update").wait()
        assert (read == filled_buffer(3 * UNIT, seed=index)).all()
    store.delete("large")
    assert store.used_bytes == 300 * UNIT


def test_element_sizes_are_never_mixed_up(open_store):
    # C03: bf16 weights, int16 residuals and fp32 moments of one unit
    store = open_store()
    sizes = {"u/weight": 2 * 999, "u/residual": 2 * 999, "u/exp_avg": 4 * 999}
    for block, nbytes in sizes.items():
        store.write(block, filled_buffer(nbytes, seed=len(block)), "update")
    for block, nbytes in sizes.items():
        read = filled_buffer(nbytes)
        store.read(block, read, "update").wait()
        assert (read == filled_buffer(nbytes, seed=len(block))).all()
    with pytest.raises(StorageError, match="has 3996 bytes, not 1998") as caught:
        store.read("u/exp_avg", filled_buffer(2 * 999), "update")
    assert caught.value.block == "u/exp_avg"


def test_offsets_above_4_gib_are_right(open_store, tmp_path):
    # C06, on a sparse file
    base = 5 << 30
    store = open_store(8 * MIB, base_offset=base)
    _round_trip(store, "far", 3 * MIB + 5)
    path = tmp_path / "rank-00000" / "data.bin"
    assert path.stat().st_size == base + 8 * MIB
    assert path.stat().st_blocks * 512 < 64 * MIB
    with open(path, "rb") as file:
        file.seek(base)
        assert file.read(3 * MIB + 5) == filled_buffer(3 * MIB + 5, seed=1).tobytes()


def test_one_block_above_4_gib_has_right_offsets(open_store):
    # C06: the data is not kept, the requests are looked at
    files = []

    def open_sparse(path, direct):
        files.append(SparseFile(path, touch=False))
        return files[-1]

    nbytes = (4 << 30) + 3 * MIB + 1
    store = open_store(5 << 30, open_file=open_sparse, access=BUFFERED, request_bytes=8 * MIB)
    zeros = np.zeros(nbytes, np.uint8)  # never mapped page by page: only the zero page is read
    store.write("huge", zeros, "update").wait()
    store.read("huge", zeros, "update").wait()
    for verb in ("write", "read"):
        ranges = sorted((offset, size) for kind, offset, size in files[0].ranges if kind == verb)
        assert ranges[0][0] == 0 and sum(size for _, size in ranges) == nbytes
        assert all(a + size == b for (a, size), (b, _) in pairwise(ranges))


def test_thousands_of_tiny_blocks_share_one_file_with_small_room(open_store, tmp_path):
    # C07
    store = open_store(32 * MIB)
    names = [f"layer.{i}/" + "norm" * 60 for i in range(2_000)]
    for index, name in enumerate(names):
        store.write(name, filled_buffer(index % 50 + 1, seed=index), "update")
    store.drain()
    assert store.used_bytes == len(names) * UNIT
    assert sorted(os.listdir(tmp_path / "rank-00000")) == [
        "data.bin",
        "member.json",
        "owner.lock",
    ]
    for index in range(0, len(names), 97):
        read = filled_buffer(index % 50 + 1)
        store.read(names[index], read, "update").wait()
        assert (read == filled_buffer(index % 50 + 1, seed=index)).all()


def test_descriptors_stay_constant_under_a_limit_of_64(tmp_path):
    # C08
    script = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
count = lambda: len(os.listdir("/proc/self/fd"))
with NvmeStore(sys.argv[1], 64 << 20, workers=4) as store:
    opened = count()
    for index in range(1000):
        store.write(f"b{index % 50}", filled_buffer(9000), "update")
        if index % 100 == 0:
            assert count() == opened
    store.drain()
    assert count() == opened
assert count() == opened - 2
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("alignment", [4096, 65536])
@pytest.mark.parametrize("nbytes", [1, 4095, 4097, 2 * MIB + 100])
def test_large_sectors_see_only_aligned_transfers(tmp_path, open_store, alignment, nbytes):
    # C10
    files = []

    def open_checked(path, direct):
        assert direct
        storage = FaultyStorage()
        files.append(AlignmentFile(storage(path, False), alignment))
        return files[-1]

    access = AccessMode(direct=True, alignment_bytes=alignment, reason="test")
    store = open_store(32 * MIB, access=access, open_file=open_checked)
    _round_trip(store, "exact", nbytes)
    _round_trip(store, "padded", nbytes, padded_bytes=round_up(nbytes, alignment))
    _round_trip(store, "unaligned", nbytes, skew_bytes=3)
    assert files[0].num_checked >= 6
    assert store.used_bytes == 3 * round_up(nbytes, alignment)


def test_five_hundred_steps_leave_nothing_behind(open_store):
    # C14: memory, descriptors, buffers, room
    store = open_store(16 * MIB)
    references, descriptors, used, traced = [], [], [], []
    tracemalloc.start()
    for step in range(500):
        written, read = filled_buffer(UNIT + 1, seed=step), filled_buffer(UNIT + 1)
        references += [weakref.ref(written), weakref.ref(read)]
        store.write("moments", written, "update")
        store.read("moments", read, "update").wait()
        assert (read == written).all()
        descriptors.append(len(os.listdir("/proc/self/fd")))
        store.drain()
        used.append(store.used_bytes)
        traced.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    del written, read
    gc.collect()
    assert [reference for reference in references if reference() is not None] == []
    assert traced[-1] - traced[99] < 400 * 400  # the lists of this test; a buffer has 4 KiB
    assert len(set(descriptors)) == 1 and set(used) == {2 * UNIT}
    assert store.stats().num_transfers == 0


def test_every_byte_is_counted_by_cause(open_store):
    access = AccessMode(direct=True, alignment_bytes=UNIT, reason="test")
    store = open_store(access=access, open_file=lambda path, direct: FaultyStorage()(path, False))
    store.write("a", filled_buffer(UNIT + 1), "spill").wait()
    store.write("b", filled_buffer(5 * MIB), "commit").wait()
    store.read("a", filled_buffer(UNIT + 1), "wrong_guess").wait()
    store.drain()
    stats = store.stats()
    assert stats.written.payload_bytes["spill"] == UNIT + 1
    assert stats.written.padding_bytes["spill"] == UNIT - 1
    assert stats.written.payload_bytes["commit"] == 5 * MIB
    assert stats.written.total_bytes == 5 * MIB + 2 * UNIT == store._file.num_bytes["write"]
    assert stats.read.payload_bytes["wrong_guess"] == UNIT + 1
    assert stats.read.total_bytes == 2 * UNIT == store._file.num_bytes["read"]
    assert (stats.written.num_requests, stats.read.num_requests) == (3, 1)
    assert (stats.num_blocks, stats.capacity_bytes) == (2, 64 * MIB)


def test_deleted_and_unknown_blocks_are_errors_that_name_them(open_store):
    store = open_store()
    store.write("gone", filled_buffer(10), "update")
    assert "gone" in store.blocks() and store.nbytes("gone") == 10
    store.delete("gone")
    store.delete("gone")
    assert "gone" not in store.blocks() and store.used_bytes == 0
    for call in (
        lambda: store.read("gone", filled_buffer(10), "update"),
        lambda: store.nbytes("gone"),
    ):
        with pytest.raises(StorageError, match="no such block") as caught:
            call()
        assert caught.value.block == "gone"


def test_bad_arguments_are_refused_and_change_nothing(open_store):
    store = open_store()
    store.write("a", filled_buffer(10), "update").wait()
    store.drain()
    before = store.stats()
    buffer = filled_buffer(10)
    with pytest.raises(ValueError, match="cause 'upd'"):
        store.write("a", buffer, "upd")
    with pytest.raises(ValueError, match="11 bytes of a buffer of 10"):
        store.write("a", buffer, "update", nbytes=11)
    with pytest.raises(ValueError, match="contiguous"):
        store.write("a", buffer[::2], "update")
    with pytest.raises(ValueError, match="read-only"):
        store.read("a", bytes(10), "update")
    assert store.stats() == before


def test_retained_extents_are_not_reused(open_store, tmp_path):
    store = open_store(3 * UNIT)
    store.write("a", filled_buffer(UNIT, seed=1), "update")
    store.drain()
    retained = store.cut({})
    for seed in range(2, 6):
        store.write("a", filled_buffer(UNIT, seed=seed), "update").wait()
    store.drain()
    assert store.used_bytes == 2 * UNIT
    extent = retained.blocks["a"].extents[0]
    store.sync()
    data = (tmp_path / "rank-00000" / "data.bin").read_bytes()
    kept = data[extent.offset : extent.offset + UNIT]
    assert kept == filled_buffer(UNIT, seed=1).tobytes()
    store.delete("a")
    assert store.used_bytes == UNIT
    store.abandon(retained)
    store.abandon(retained)
    assert store.used_bytes == 0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"capacity_bytes": 0}, "offload.nvme.capacity"),
        ({"workers": 0}, "offload.io_workers"),
        ({"request_bytes": MIB + 1}, "offload.io_request_size"),
        ({"request_bytes": 16 * MIB}, "offload.io_request_size"),
        ({"transfers_max": 0}, "transfers_max"),
    ],
)
def test_settings_no_store_can_have_are_refused_with_their_key(open_store, options, key):
    with pytest.raises(ConfigError, match=key):
        open_store(**options)


def test_too_little_free_disk_is_refused_with_both_numbers(open_store, tmp_path):
    status = os.statvfs(tmp_path)
    needed = (status.f_blocks + 1) * status.f_frsize
    with pytest.raises(ConfigError, match=rf"nvme\.capacity.*{needed} bytes.*has \d+ free"):
        open_store(needed, required_bytes=None)
    open_store(MIB)  # the refused one gave the directory up


def test_a_path_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"offload\.nvme\.path: .*file.*E(NOTDIR|EXIST)"):
            NvmeStore(str(path), MIB)


def test_memory_file_systems_work(tmp_path):
    # C09, on a real tmpfs where there is one
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs")
    directory = f"/dev/shm/headrace-test-{os.getpid()}"
    try:
        with NvmeStore(directory, 4 * MIB, workers=1) as store:
            _round_trip(store, "a", MIB + 5)
            store.close(delete=True)
        assert os.listdir(directory) == []
    finally:
        os.rmdir(directory)
