"""A reader keeps the commit it reads, as long as there is room, and is told when it cannot."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from offload.checkpoint.source import CommitPart
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.hold import Hold, held_generation, held_generations
from offload.nvme.inspect import InspectedStore
from offload.nvme.store import NvmeStore
from offload.testing_crash import SimulatedDisk
from offload.testing_storage import BUFFERED, filled_buffer
from ops.checksum import CHUNK_BYTES
from ops.errors import StorageError

MIB = CHUNK_BYTES
FILES = OsDirectoryFiles()


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(capacity_bytes=64 * MIB, **options):
        options.setdefault("workers", 2)
        for store in stores:
            store.close()
        stores.append(NvmeStore(str(tmp_path), capacity_bytes, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def publish(store, step, nbytes=4 * MIB):
    store.write("block", filled_buffer(nbytes, seed=step), "update", version=step)
    return store.publish(store.cut({"step": step}))


def reader(store, generation=None):
    return CommitPart([store.directory], generation, hold=True)


def is_whole(part, step, nbytes=4 * MIB):
    chunks = part.read_chunks("block", range(nbytes // MIB))
    return b"".join(bytes(x) for _, x in chunks) == filled_buffer(nbytes, seed=step).tobytes()


def hold_files(store):
    return [x for x in os.listdir(store.directory) if held_generation(x) is not None]


def test_a_held_commit_survives_three_publishes_and_its_room_comes_back(open_store):
    store = open_store()
    publish(store, 1)
    with reader(store) as part:
        assert part.is_held
        for step in (2, 3, 4):
            publish(store, step)
            assert store.used_bytes == 8 * MIB, "the newest and the one that is read, no more"
        assert is_whole(part, 1)
        with closing(InspectedStore([store.directory])) as seen:
            assert [x.generation for x in seen.commits] == [4], "no manifest promises it"
    assert hold_files(store) == []
    publish(store, 5)
    assert store.used_bytes == 4 * MIB


def test_without_room_the_oldest_hold_is_broken_and_its_reader_told(open_store, caplog):
    store = open_store(15 * MIB)
    publish(store, 1)
    first = reader(store)
    publish(store, 2)
    second = reader(store)
    with caplog.at_level(logging.WARNING):
        publish(store, 3)  # there is room for three versions
        assert "given up" not in caplog.text
        publish(store, 4)
    assert "commit 1 is given up while it is being read" in caplog.text
    assert not first.is_held and second.is_held
    assert is_whole(second, 2)
    sentence = "commit 1 was given up while it was read: the run that owns.*keep_in_store"
    with pytest.raises(StorageError, match=sentence):
        is_whole(first, 1)
    publish(store, 5)
    first.close()
    second.close()


def test_a_write_fails_only_when_no_hold_is_left_to_break(open_store):
    store = open_store(12 * MIB)
    publish(store, 1)
    with reader(store):
        publish(store, 2)
        publish(store, 3)
        store.write("more", filled_buffer(4 * MIB), "update").wait()
        with pytest.raises(StorageError, match=r"capacity: 12582912 bytes.*8388608 current"):
            store.write("too much", filled_buffer(5 * MIB), "update")


def test_a_reader_that_died_holds_nothing(open_store, caplog):
    store = open_store(12 * MIB)
    publish(store, 1)
    code = (
        "import sys, time\n"
        "from offload.checkpoint.source import CommitPart\n"
        "part = CommitPart([sys.argv[1]], hold=True)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, store.directory]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"held\n"
        publish(store, 2)
        assert store.used_bytes == 8 * MIB
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert len(hold_files(store)) == 1
    with caplog.at_level(logging.WARNING):
        publish(store, 3)
    assert store.used_bytes == 4 * MIB and hold_files(store) == []
    assert "given up" not in caplog.text


def test_room_that_a_reader_has_left_is_taken_without_a_word(open_store, caplog):
    store = open_store(8 * MIB)
    publish(store, 1)
    part = reader(store)
    publish(store, 2)
    part.close()
    with caplog.at_level(logging.WARNING):
        publish(store, 3)
    assert "given up" not in caplog.text


def test_a_hold_that_comes_after_the_manifest_is_refused_and_the_newest_taken(open_store):
    # order 1: the manifest is durable, then the hold is placed; the store may or may not see it
    store = open_store()
    publish(store, 1)
    seen = []

    def between(generation):
        with pytest.raises(StorageError, match="commit 1 is not in this store any more"):
            reader(store, 1)
        with reader(store) as part:
            seen.append(part.generation)

    store.write("block", filled_buffer(4 * MIB, seed=2), "update", version=2)
    store.publish(store.cut({"step": 2}), between)
    assert seen == [2] and store.used_bytes == 4 * MIB


def test_a_hold_that_comes_before_the_manifest_is_seen(open_store):
    # order 2: the reader has read the manifests before the new one is renamed into place
    class Files(OsDirectoryFiles):
        before_rename = staticmethod(lambda: None)

        def rename(self, old, new):
            self.before_rename()
            super().rename(old, new)

    files, parts = Files(), []
    store = open_store(directory_files=files)
    publish(store, 1)
    files.before_rename = lambda: parts.append(reader(store, 1))
    publish(store, 2)
    files.before_rename = lambda: None
    for step in (3, 4):
        publish(store, step)
    assert is_whole(parts[0], 1)
    parts[0].close()


def test_readers_and_a_publisher_never_miss_each_other(open_store):
    store = open_store(256 * MIB)
    publish(store, 1, MIB)
    stop, failures, num_read = threading.Event(), [], []

    def read():
        try:
            while not stop.is_set():
                with reader(store) as part:
                    step = part.meta["step"]
                    for _ in range(3):
                        assert is_whole(part, step, MIB), step
                num_read.append(step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(2, 60):
        publish(store, step, MIB)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures and len(num_read) >= 3


def test_a_held_commit_of_several_kept_ones_stays_until_it_is_the_last(open_store):
    store = open_store(keep_commits=2)
    for step in (1, 2):
        publish(store, step)
    with reader(store, 1) as part:
        for step in (3, 4, 5):
            publish(store, step)
        assert is_whole(part, 1)
        assert store.used_bytes == 12 * MIB


def test_a_commit_can_be_held_across_a_restart_if_it_is_retained(open_store):
    store = open_store(keep_commits=2)
    for step in (1, 2):
        publish(store, step)
    with reader(store, 1) as part:
        # A held commit keeps nobody from becoming the owner; fewer commits are to be kept now.
        store = open_store(keep_commits=1, resume=True)
        publish(store, 3)
        assert is_whole(part, 1)
    assert hold_files(store) == []


def test_what_an_owner_kept_in_memory_alone_is_given_up_by_the_next_one(open_store):
    store = open_store()
    publish(store, 1)
    with reader(store) as part:
        publish(store, 2)
        assert is_whole(part, 1)
        store = open_store(resume=True)
        assert hold_files(store) == [] and not part.is_held
        for step in (3, 4):
            publish(store, step)
        with pytest.raises(StorageError, match="commit 1 was given up"):
            is_whole(part, 1)


def test_opening_afresh_and_deleting_take_hold_files_away(open_store, tmp_path):
    store = open_store()
    publish(store, 1)
    with reader(store):
        store = open_store()
        assert hold_files(store) == []
        publish(store, 1)
    with reader(store):
        store.close(delete=True)
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_read_without_a_hold(open_store, monkeypatch, caplog):
    store = open_store()
    publish(store, 1)

    def refuse(*arguments):
        raise OSError(30, "Read-only file system", store.directory)

    monkeypatch.setattr(Hold, "place", refuse)
    with reader(store) as part:
        assert "read without a hold (EROFS" in caplog.text
        assert not part.is_held and is_whole(part, 1)


def test_names_that_are_no_holds_are_left_alone(tmp_path):
    for name in ("reading.0.0123456789abcdef", "reading.1.xyz", "reading.1", "data.bin"):
        assert held_generation(name) is None
        (tmp_path / name).write_text("x")
    (tmp_path / "reading.1.0123456789abcdef").symlink_to(tmp_path / "data.bin")
    assert held_generations(str(tmp_path), FILES) == set()
    assert len(list(tmp_path.iterdir())) == 5
    hold = Hold.place(str(tmp_path), 12)
    assert held_generations(str(tmp_path), FILES) == {12}
    hold.release()
    hold.release()
    assert hold.is_broken and len(list(tmp_path.iterdir())) == 5
    assert held_generations(str(tmp_path / "gone"), FILES) == set()


def test_crashes_around_a_publish_open_right_although_somebody_reads(tmp_path, monkeypatch):
    """The images of a crash while a superseded commit is kept: the newest opens, whole."""
    disk = SimulatedDisk()
    monkeypatch.setattr("offload.nvme.commit.held_generations", lambda *x: {1})
    store = NvmeStore(
        str(tmp_path),
        16 * MIB,
        access=BUFFERED,
        workers=1,
        open_file=disk.open_file,
        directory_files=disk,
        required_bytes=0,
    )
    for step in (1, 2, 3, 4, 5):
        publish(store, step, 3 * MIB)
        disk.mark(step)
    assert store.used_bytes == 6 * MIB, "commit 1 is kept"
    store.close()
    first = next(x for x in disk.points("mark"))
    for crash in disk.crashes(range(first + 1, disk.num_operations, 2), seed=1):
        opened = NvmeStore(
            str(tmp_path),
            16 * MIB,
            access=BUFFERED,
            workers=1,
            open_file=crash.disk.open_file,
            directory_files=crash.disk,
            required_bytes=0,
            resume=True,
        )
        with opened:
            step = opened.recovered.meta["step"]
            assert step in (crash.mark, crash.mark + 1)
            buffer = filled_buffer(3 * MIB)
            opened.read("block", buffer, "update").wait()
            assert (buffer == filled_buffer(3 * MIB, seed=step)).all()
            assert opened.used_bytes == 3 * MIB
