"""A store over several paths: shares by measured bandwidth, and one store in every other way."""

from __future__ import annotations

import errno
import os

import pytest

from offload.nvme.files import open_os_file
from offload.nvme.handle import wait_all
from offload.nvme.store import NvmeStore
from offload.testing_storage import BUFFERED, Fault, FaultyFile, filled_buffer
from ops.errors import ConfigError, StorageError

MIB = 1 << 20
UNIT = 4096


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(weights, capacity_bytes=64 * MIB, faults=None, **options):
        files = []

        def open_file(path, direct):
            number = len(files)
            inner = open_os_file(path, direct)
            files.append(FaultyFile(inner, (faults or {}).get(number, [])))
            return files[-1]

        options.setdefault("measure", lambda directories, access: list(weights))
        paths = [str(tmp_path / f"drive{number}") for number in range(len(weights))]
        store = NvmeStore(
            paths, capacity_bytes, open_file=open_file, required_bytes=0, workers=2, **options
        )
        stores.append(store)
        return store, files

    yield make
    for store in stores:
        store.close(delete=True)


def _write_all(store, sizes):
    wait_all(
        [
            store.write(f"b{number}", filled_buffer(nbytes, seed=number), "update")
            for number, nbytes in enumerate(sizes)
        ]
    )


def _check_all(store, sizes):
    reads = [filled_buffer(nbytes, seed=999) for nbytes in sizes]
    wait_all([store.read(f"b{n}", data, "update") for n, data in enumerate(reads)])
    for number, data in enumerate(reads):
        assert (data == filled_buffer(len(data), seed=number)).all()


MIXED = [5 * MIB + 13, 100, MIB, 3 * MIB, 7, 2 * MIB + 1, 9 * MIB, UNIT, 0, MIB + 5] * 2


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (2.2, 1.3, 0.5)])
def test_blocks_are_shared_by_weight_and_come_back_byte_for_byte(open_store, weights, access):
    # C55: bytes of each drive within 2 % of its share
    store, files = open_store(weights, access=access)
    _write_all(store, MIXED)
    _check_all(store, MIXED)
    stats = store.stats()
    assert sum(stats.used_bytes_by_drive) == stats.used_bytes
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(stats.used_bytes_by_drive[number] / stats.used_bytes - share) < 0.02
        for verb in ("write", "read"):
            moved = sum(file.num_bytes[verb] for file in files)
            assert abs(files[number].num_bytes[verb] / moved - share) < 0.02
    assert store.stats().written.payload_bytes["update"] == sum(MIXED)


def test_a_request_stays_on_one_drive(open_store):
    store, files = open_store((1, 1), request_bytes=8 * MIB)
    _write_all(store, [16 * MIB])
    for file in files:
        assert [nbytes for verb, _, nbytes in file.ranges if verb == "write"] == [4 * MIB] * 2
    assert store.stats().written.num_requests == 4


def test_one_path_is_not_measured_and_several_are(tmp_path):
    measured = []

    def measure(directories, access):
        measured.append(list(directories))
        return [1.0] * len(directories)

    for names in ("a", "bc"):
        paths = [str(tmp_path / name) for name in names]
        with NvmeStore(paths, MIB, measure=measure, required_bytes=0) as store:
            store.close(delete=True)
    assert measured == [[str(tmp_path / name / "rank-00000") for name in "bc"]]


def test_real_drives_are_measured_and_nothing_of_it_stays(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    with NvmeStore(paths, 32 * MIB, required_bytes=0) as store:
        _write_all(store, MIXED[:5])
        _check_all(store, MIXED[:5])
        left = {name for path in paths for name in os.listdir(os.path.join(path, "rank-00000"))}
        assert left == {"data.bin", "owner.lock", "member.json"}
        store.close(delete=True)


def test_the_capacity_is_used_to_its_last_unit_over_all_drives(open_store):
    store, _ = open_store((5, 1), capacity_bytes=12 * MIB + 77)
    assert store.capacity_bytes == 12 * MIB
    _write_all(store, [7 * MIB, 5 * MIB])
    assert store.used_bytes == store.capacity_bytes
    with pytest.raises(StorageError, match=r"offload\.nvme\.capacity"):
        store.write("more", filled_buffer(1), "update")
    _check_all(store, [7 * MIB, 5 * MIB])


def test_a_store_resumes_when_the_drives_are_measured_differently(open_store, tmp_path):
    """The probe is never the same twice; what a commit placed stays where it is."""
    store, _ = open_store((3, 1))
    _write_all(store, MIXED)
    store.publish(store.cut({"step": 1}))
    placed = store.stats().used_bytes_by_drive
    store.close()
    for weights in ((1, 9), (9, 1), (1, 1)):
        store, _ = open_store(weights, resume=True)
        assert store.recovered is not None and store.stats().used_bytes_by_drive == placed
        assert store.capacity_bytes == 64 * MIB
        _check_all(store, MIXED)
        store.close()


def test_a_capacity_below_what_the_commits_use_is_refused_with_both_files(open_store, tmp_path):
    store, _ = open_store((1, 1))
    _write_all(store, [16 * MIB])
    store.publish(store.cut({"step": 1}))
    store.close()
    with pytest.raises(ConfigError, match=r"nvme\.capacity.*drive0.*drive1.*at least") as caught:
        open_store((1, 1), capacity_bytes=8 * MIB, resume=True)
    needed = int(str(caught.value).split("at least ")[1].split(" ")[0])
    store, _ = open_store((1, 1), capacity_bytes=needed, resume=True)
    _check_all(store, [16 * MIB])


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_failure_on_the_second_drive_names_its_file_and_offset(open_store, verb):
    # C04
    fault = Fault("error", verb, at_byte=100, code=errno.EIO)
    store, files = open_store((1, 1), faults={1: [fault]}, access=BUFFERED)
    handle = store.write("a", filled_buffer(8 * MIB), "update")
    if verb == "read":
        handle.wait()
        handle = store.read("a", filled_buffer(8 * MIB), "update")
    with pytest.raises(StorageError, match="EIO") as caught:
        handle.wait()
    error = caught.value
    assert (error.path, error.block, error.offset) == (files[1].path, "a", 0)
    assert (error.wanted_bytes, error.done_bytes) == (4 * MIB, 100)
    with pytest.raises(StorageError):
        store.drain()


def test_a_flipped_bit_on_the_second_drive_is_found_and_named(open_store):
    # C05
    store, files = open_store((1, 1), faults={1: [Fault("flip", "read", at_byte=MIB + 9)]})
    _write_all(store, [8 * MIB])
    with pytest.raises(StorageError, match="checksum mismatch") as caught:
        store.read("b0", filled_buffer(8 * MIB), "update").wait()
    assert caught.value.path == files[1].path
    assert caught.value.offset is not None and caught.value.offset % MIB == 0
    _check_all(store, [8 * MIB])


def test_descriptors_are_one_a_drive(open_store):
    # C08
    before = len(os.listdir("/proc/self/fd"))
    store, _ = open_store((1, 2, 3))
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        _write_all(store, MIXED[:4])
    assert len(os.listdir("/proc/self/fd")) == opened == before + 2 * 3  # data and lock
