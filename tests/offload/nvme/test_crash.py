"""After a crash at any operation a store opens to a whole commit, at least the last published one.

The workload writes, reads, drops and commits blocks on a simulated disk; every image is reopened
by the production code.
"""

from __future__ import annotations

import numpy as np
import pytest

from offload.nvme.store import NvmeStore
from offload.nvme.verify import BlockReader
from offload.testing_crash import SimulatedDisk
from offload.testing_storage import BUFFERED, filled_buffer

UNIT = 4096
CAPACITY = 300 * UNIT


def open_on(disk, path, **options):
    options = {"workers": 2, "required_bytes": 0, "access": BUFFERED, **options}
    return NvmeStore(path, CAPACITY, open_file=disk.open_file, directory_files=disk, **options)


def work(store, disk, expected, steps, seed):
    """Random writes with a commit a step; notes in `expected` what each generation holds."""
    random = np.random.default_rng(seed)
    state = dict(store.blocks()) and dict(expected[store.recovered.generation])
    for step in steps:
        for _ in range(random.integers(1, 8)):
            block, nbytes = f"b{random.integers(6)}", int(random.integers(0, 6 * UNIT))
            content = int(random.integers(1 << 30))
            store.write(block, filled_buffer(nbytes, seed=content), "update", version=content)
            state[block] = (nbytes, content)
        if random.random() < 0.2 and state:
            store.delete(block)
            del state[block]
        store.write("grad", filled_buffer(UNIT, seed=step), "spill", transient=True)
        cut = store.cut({"step": step})
        store.write("b0", filled_buffer(99, seed=step), "update", version=step)
        held = dict(state)
        state["b0"] = (99, step)
        expected[store_generation(store) + 1] = held
        disk.mark(store.publish(cut).generation)


def store_generation(store):
    return store._commits._generation


def check(store, expected, at_least):
    """The recovered commit is not older than that, and its blocks are what was written."""
    if store.recovered is None:
        assert at_least is None and store.blocks() == {}
        return
    generation = store.recovered.generation
    assert at_least is None or generation >= at_least
    held = expected[generation]
    assert store.blocks() == held
    for block, (nbytes, content) in held.items():
        buffer = filled_buffer(nbytes, seed=1)
        store.read(block, buffer, "update").wait()
        assert (buffer == filled_buffer(nbytes, seed=content)).all()


@pytest.mark.parametrize("keep_commits", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_crash_leaves_a_whole_commit(tmp_path, keep_commits, seed):
    path, disk, expected = str(tmp_path), SimulatedDisk(), {}
    with open_on(disk, path, keep_commits=keep_commits) as store:
        work(store, disk, expected, range(12), seed)
    with open_on(disk, path, keep_commits=keep_commits, resume=True) as store:
        work(store, disk, expected, range(12, 18), seed + 100)
    points = np.random.default_rng(seed).choice(disk.num_operations, 100, replace=False)
    phases = disk.points("sync", "rename", "sync_directory", "unlink", "name")
    for crash in disk.crashes({*points.tolist(), *phases}, seed):
        with open_on(crash.disk, path, keep_commits=keep_commits, resume=True) as store:
            check(store, expected, crash.mark)
            retained = store._commits._retained
            assert len(retained) <= keep_commits
            for commit in retained:  # the older ones are as whole as the newest
                generation = commit.record.generation
                found = {x: (s.nbytes, s.version) for x, s in commit.blocks.blocks.items()}
                assert found == expected[generation]
                reader = BlockReader(store._opened.files, store.access)
                for name, stored in commit.blocks.blocks.items():
                    assert reader.first_damage(name, stored) is None


def test_every_crash_of_a_store_over_two_paths_leaves_a_whole_commit(tmp_path):
    paths, disk, expected = [str(tmp_path / name) for name in "ab"], SimulatedDisk(), {}
    options = {"keep_commits": 2, "measure": lambda directories, access: [1.0, 2.0]}
    with open_on(disk, paths, **options) as store:
        work(store, disk, expected, range(10), 11)
    points = np.random.default_rng(11).choice(disk.num_operations + 1, 80, replace=False)
    for crash in disk.crashes(points.tolist(), 11):
        with open_on(crash.disk, paths, resume=True, **options) as store:
            check(store, expected, crash.mark)


def test_a_crash_after_a_crash_leaves_a_whole_commit(tmp_path):
    """What recovery itself writes and removes is as safe; generations never repeat content."""
    path, disk, expected = str(tmp_path), SimulatedDisk(), {}
    with open_on(disk, path) as store:
        work(store, disk, expected, range(4), 7)
    points = np.random.default_rng(7).choice(disk.num_operations, 12, replace=False)
    for crash in disk.crashes(points.tolist(), 7):
        again = dict(expected)
        with open_on(crash.disk, path, resume=True) as store:
            check(store, again, crash.mark)
            crash.disk.mark(store.recovered.generation if store.recovered else None)
            work(store, crash.disk, again, range(50, 53), crash.number)
        for number in range(0, crash.disk.num_operations, 5):
            for second in crash.disk.crashes([number], crash.number):
                with open_on(second.disk, path, resume=True) as store:
                    check(store, {**expected, **again}, second.mark or crash.mark)


def test_a_crash_while_a_store_is_opened_afresh_never_mixes_old_and_new(tmp_path):
    # C11: leftovers are never read as live; a half discarded commit is not a commit
    path, disk, old, new = str(tmp_path), SimulatedDisk(), {}, {}
    with open_on(disk, path, keep_commits=3) as store:
        work(store, disk, old, range(5), 3)
    disk.mark(None)
    afresh = disk.num_operations
    with open_on(disk, path, keep_commits=3) as store:
        opened = disk.num_operations
        work(store, disk, new, range(20, 23), 4)
    for crash in disk.crashes(range(afresh, disk.num_operations), 5):
        with open_on(crash.disk, path, keep_commits=3, resume=True) as store:
            if crash.number < opened and store.recovered and store.recovered.meta["step"] < 20:
                check(store, old, None)
            else:
                check(store, new, crash.mark)


def test_what_is_deleted_stays_deleted_after_a_crash(tmp_path):
    path, disk, expected = str(tmp_path), SimulatedDisk(), {}
    store = open_on(disk, path)
    work(store, disk, expected, range(3), 9)
    before = disk.num_operations
    store.close(delete=True)
    for crash in disk.crashes(range(before, disk.num_operations), 6):
        with open_on(crash.disk, path, resume=True) as store:
            check(store, expected, None)
    assert disk.list(store.directory) == {}


def test_the_simulated_disk_forgets_what_was_not_synced(tmp_path):
    """The disk itself: without an fsync anything may be lost, with it nothing."""
    disk, path = SimulatedDisk(), str(tmp_path / "f")
    disk.write_file(path, b"a" * 2000)
    disk.sync_file(path)
    disk.sync_directory(str(tmp_path))
    disk.write_file(path + ".2", b"b" * 2000)
    disk.rename(path + ".2", path)
    disk.mark("end")
    contents = set()
    for seed in range(60):
        (crash,) = disk.crashes([disk.num_operations - 1], seed)
        contents.add(crash.disk.read_file(path, 9999))
    assert b"a" * 2000 in contents and b"b" * 2000 in contents
    assert any(len(x) > 0 and set(x) != {97} and x != b"b" * 2000 for x in contents), "torn"
