"""Which checkpoints a path has, which of them is the newest, and why one is incomplete."""

from __future__ import annotations

import os
import shutil

import pytest

from offload.checkpoint.catalog import find_checkpoints, open_parts
from offload.checkpoint.rank_parts import look_at_parts
from offload.checkpoint.removal import delete_checkpoint
from offload.nvme.store import NvmeStore
from offload.rank_commits import RankCommit, RecordFile, published_copy
from offload.testing_storage import filled_buffer
from ops.checksum import CHUNK_BYTES
from ops.errors import ConfigError, StorageError

MIB = CHUNK_BYTES


def meta(step, ranks):
    return {"step": step, "run": {"step": step, "ranks": ranks}}


def write(store, step, ranks, nbytes=MIB + 3):
    store.write("block", filled_buffer(nbytes, seed=step), "update", version=step)
    return store.publish(store.cut(meta(step, ranks))).generation


class Ranks:
    """Stores of several ranks under one path, and their record, without engines."""

    def __init__(self, path, num, keep=1, copies=False):
        self.path, self.keep, self.commits = str(path), keep, ()
        self.copies = copies
        self.stores = [
            NvmeStore(self.path, 32 * MIB, rank=rank, workers=1, keep_commits=keep)
            for rank in range(num)
        ]

    def publish(self, step, record=True):
        """Every rank publishes; without `record` the commit stays a prepared one."""
        cuts = []
        for store in self.stores:
            store.write("block", filled_buffer(MIB + 3, seed=step), "update", version=step)
            cuts.append(store.cut(meta(step, len(self.stores))))
        generations = [x.publish(cut).generation for x, cut in zip(self.stores, cuts)]
        if record:
            self.commits = (
                RankCommit(
                    step,
                    tuple(generations),
                    tuple(store.store_id for store in self.stores),
                    {"parallel": {"data_parallel": len(self.stores)}},
                ),
                *self.commits,
            )[: self.keep]
            RecordFile(self.path).write(self.commits)
            for store in self.stores if self.copies else ():
                published_copy(store.directory).write(self.commits)

    def close(self):
        for store in self.stores:
            store.close()


@pytest.fixture
def two(tmp_path):
    """Two ranks, two commits kept of three."""
    ranks = Ranks(tmp_path, 2, keep=2)
    for step in (10, 20, 30):
        ranks.publish(step)
    ranks.close()
    return tmp_path


def only(path):
    (found,) = find_checkpoints([str(path)])
    return found


def test_one_rank_has_its_retained_commits(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    with NvmeStore(paths, 64 * MIB, workers=1, keep_commits=2) as store:
        for step in (1, 2, 3):
            write(store, step, 1, 9 * MIB)
        found = find_checkpoints(paths)
        assert [x.step for x in found] == [3, 2]
        newest = found[0]
        assert newest.paths == tuple(paths) and newest.num_ranks == 1 and newest.is_complete
        assert (newest.generations, newest.stores) == ((3,), (store.store_id,))
        assert newest.facts == {} and newest.meta == meta(3, 1) and newest.written_s > 0
    (part,) = open_parts(newest)
    with part:
        assert bytes(part.read_chunk("block", 8)) == filled_buffer(9 * MIB, seed=3)[-MIB:].tobytes()


def test_a_store_that_says_nothing_of_its_run_is_one_rank_s(tmp_path):
    with NvmeStore(str(tmp_path), MIB, workers=1) as store:
        store.publish(store.cut({}))
    found = only(tmp_path)
    assert found.step is None and found.num_ranks == 1 and found.is_complete


def test_the_record_names_the_commits_of_several_ranks(two):
    found = find_checkpoints([str(two)])
    assert [x.step for x in found] == [30, 20]
    assert all(x.is_complete and x.num_ranks == 2 for x in found)
    assert found[0].generations == (3, 3) and found[0].meta == meta(30, 2)
    assert found[0].facts == {"parallel": {"data_parallel": 2}}
    for checkpoint in found:
        parts = open_parts(checkpoint)
        for part in parts:
            expected = filled_buffer(MIB + 3, seed=checkpoint.step).tobytes()
            assert b"".join(bytes(x) for _, x in part.read_chunks("block", [0, 1])) == expected
            part.close()


def test_what_was_only_prepared_is_no_checkpoint(tmp_path):
    ranks = Ranks(tmp_path, 2, keep=1)
    ranks.publish(1, record=False)
    found = only(tmp_path)
    assert not found.is_complete and "no record" in found.missing[0] and found.num_ranks == 2
    assert found.generations == ()
    with pytest.raises(ConfigError, match="incomplete: no record"):
        open_parts(found)
    ranks.publish(2)
    ranks.stores[0].publish(ranks.stores[0].cut(meta(3, 2)))
    assert only(tmp_path).step == 2
    ranks.close()


def test_missing_parts_are_named(two):
    shutil.rmtree(two / "rank-00001")
    found = find_checkpoints([str(two)])
    assert [x.missing for x in found] == [
        (f"rank 1: no directory {two / 'rank-00001'}",),
    ] * 2
    assert found[0].step == 30, "the other rank's part tells"
    (part,) = open_parts(found[0], [0])
    part.close()


def test_what_is_wrong_with_a_part_is_told(two, tmp_path):
    directory = two / "rank-00001"

    def clause():
        (found,) = find_checkpoints([str(two)])[0].missing
        return found

    data = directory / "data.bin"
    nbytes = data.stat().st_size
    os.truncate(data, 5)
    assert f"{data} has 5 bytes, commit 3 needs" in clause()
    os.truncate(data, nbytes)
    data.rename(tmp_path / "elsewhere")
    assert f"{data}: ENOENT" in clause()
    data.symlink_to(tmp_path / "elsewhere")
    assert f"{data} is no plain file" in clause()
    data.unlink()
    (tmp_path / "elsewhere").rename(data)
    (slot,) = (x for x in directory.iterdir() if x.name == "manifest.0")
    content = slot.read_bytes()
    slot.write_bytes(content[:70] + b"x" + content[71:])
    assert "holds no commit 3 (manifest.0: checksum mismatch)" in clause()
    slot.unlink()
    assert clause().endswith("holds no commit 3")
    NvmeStore(str(two), MIB, rank=1, workers=1).close()
    assert clause().endswith("holds no commit 3")
    with NvmeStore(str(two), 9 * MIB, rank=1, workers=1) as store:
        for step in (1, 2, 3):
            write(store, step, 2)
    assert "holds another store" in clause()


def test_the_number_of_paths_must_be_that_of_the_store(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    with NvmeStore(paths, 32 * MIB, workers=1) as store:
        write(store, 1, 1)
    assert "lies on 2 paths, 1 were named" in only(tmp_path / "a").missing[0]


def test_a_run_of_one_rank_that_went_on_is_newer_than_the_record(two):
    # one rank resumes rank 0's store at its own newest commit, whatever made it
    with NvmeStore(str(two), 32 * MIB, workers=1, keep_commits=2, resume=True) as store:
        write(store, 40, 1)
        found = find_checkpoints([str(two)])
        assert [(x.step, x.num_ranks, x.is_complete) for x in found] == [
            (40, 1, True),
            (30, 2, True),
            (20, 2, False),
        ]
        assert "given up by a run of one rank" in found[2].missing[0]
        write(store, 50, 1)
    assert [(x.step, x.is_complete) for x in find_checkpoints([str(two)])] == [
        (50, True),
        (40, True),
        (30, False),
        (20, False),
    ]


def test_a_run_of_all_ranks_after_one_of_one_rank_is_the_newest(tmp_path):
    with NvmeStore(str(tmp_path), 32 * MIB, workers=1, keep_commits=2) as store:
        write(store, 10, 1)
    ranks = Ranks.__new__(Ranks)
    ranks.path, ranks.keep, ranks.commits, ranks.copies = str(tmp_path), 2, (), False
    ranks.stores = [
        NvmeStore(str(tmp_path), 32 * MIB, rank=rank, workers=1, keep_commits=2, resume=rank == 0)
        for rank in (0, 1)
    ]
    ranks.publish(20, record=False)
    assert [x.step for x in find_checkpoints([str(tmp_path)])] == [10], "20 was only prepared"
    ranks.publish(30)
    assert [(x.step, x.num_ranks) for x in find_checkpoints([str(tmp_path)])] == [(30, 2)]
    ranks.close()


def test_parts_without_a_record_lie_on_another_machine(two):
    # A store that many machines share: the record is where rank 0 is.
    (two / "commits.json").unlink()
    shutil.rmtree(two / "rank-00000")
    found = only(two)
    assert "it lies where the directory of rank 0 is (found: ranks 1)" in found.missing[0]


def test_damaged_manifests_are_noted_and_without_any_whole_one_an_error(tmp_path):
    with NvmeStore(str(tmp_path), 32 * MIB, workers=1, keep_commits=2) as store:
        for step in (1, 2):
            write(store, step, 1)
    for slot in (tmp_path / "rank-00000").glob("manifest.*"):
        content = slot.read_bytes()
        if slot.name == "manifest.1":
            slot.write_bytes(content[:-1])
            found = only(tmp_path)
            assert found.step == 2 and found.notes and "manifest.1" in found.notes[0]
    for slot in (tmp_path / "rank-00000").glob("manifest.*"):
        slot.write_bytes(b"x")
    with pytest.raises(StorageError, match=r"manifest\.\d: 1 bytes are too few"):
        find_checkpoints([str(tmp_path)])


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_where_there_is_nothing_that_is_said(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is no store"):
        find_checkpoints([str(tmp_path / name)])


def test_an_empty_store_and_the_directory_of_one_rank_are_refused(tmp_path):
    NvmeStore(str(tmp_path), MIB, workers=1).close()
    with pytest.raises(ConfigError, match="nothing has been committed"):
        find_checkpoints([str(tmp_path)])
    with pytest.raises(ConfigError, match=f"name the one above it, {tmp_path}"):
        find_checkpoints([str(tmp_path / "rank-00000")])


def test_a_damaged_record_is_an_error(two):
    (two / "commits.json").write_text("{}")
    with pytest.raises(StorageError, match="damaged"):
        find_checkpoints([str(two)])


@pytest.mark.parametrize("at", [0, 1])
def test_the_directory_of_a_rank_that_is_a_link_is_refused(two, tmp_path_factory, at):
    """It was followed: holds were made at its target, and only `delete` refused it. The paths that
    a user names may be links."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    linked = elsewhere / "linked"
    linked.symlink_to(two)
    assert len(find_checkpoints([str(linked)])) == 2
    rank = two / f"rank-0000{at}"
    rank.rename(elsewhere / "rank")
    rank.symlink_to(elsewhere / "rank")
    before = sorted(os.listdir(elsewhere / "rank"))
    for look in (
        lambda: find_checkpoints([str(two)]),
        lambda: delete_checkpoint([str(two)]),
        lambda: NvmeStore(str(two), 32 * MIB, rank=at, workers=1, resume=True),
    ):
        with pytest.raises(ConfigError, match=rf"{rank} is a link, which is not followed"):
            look()
    seen = look_at_parts([str(two)], (3, 3), ("", ""))[at]
    assert seen.problem == f"{rank} is a link, which is not followed"
    assert sorted(os.listdir(elsewhere / "rank")) == before


def test_the_directory_of_a_rank_under_another_path_may_not_be_a_link_either(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    with NvmeStore(paths, 32 * MIB, workers=1) as store:
        write(store, 1, 1)
    (tmp_path / "b/rank-00000").rename(tmp_path / "rank")
    (tmp_path / "b/rank-00000").symlink_to(tmp_path / "rank")
    with pytest.raises(ConfigError, match="b/rank-00000 is a link, which is not followed"):
        find_checkpoints(paths)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "nothing"])
def test_a_newest_manifest_that_is_something_else_is_told(tmp_path, kind):
    """The older commit, whose extents the newest had already written again, was called complete
    without a word."""
    with NvmeStore(str(tmp_path), 32 * MIB, workers=1) as store:
        for step in (1, 2, 3):
            write(store, step, 1)
    manifest = tmp_path / "rank-00000/manifest.1"
    manifest.rename(tmp_path / "elsewhere")
    if kind == "link":
        manifest.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "directory":
        manifest.mkdir()
    found = only(tmp_path)
    assert found.step == 2
    (note,) = found.notes
    assert note.startswith("manifest.1: ")
    assert ("is missing" if kind == "nothing" else "it is ") in note


def test_a_manifest_that_may_have_been_newer_than_the_record_is_told(two):
    """A run of one rank went on after the record; with its manifest hidden, what it had written
    over was called complete."""
    with NvmeStore(str(two), 32 * MIB, workers=1, keep_commits=2, resume=True) as store:
        write(store, 40, 1)
    slot = two / f"rank-00000/manifest.{4 % 3}"
    slot.unlink()
    os.mkfifo(slot)
    newest, older = find_checkpoints([str(two)])
    (note,) = newest.notes
    assert newest.step == 30 and note.startswith("rank 0: manifest.1: cannot be read")
    assert older.notes == ()


def test_ranks_that_are_not_here_are_counted_and_not_all_listed(two):
    """A record of 10^6 ranks gave a line for each."""
    record = RecordFile(str(two))
    (newest, _) = record.read()
    stores, num = newest.stores, 5000
    generations = (*newest.generations, *[1] * num)
    record.write([RankCommit(1, generations, (*stores, *["0" * 32] * num), {})])
    (found,) = find_checkpoints([str(two)])
    assert found.num_ranks == num + 2 and found.present == (0, 1)
    assert len(found.missing) == 17 and "rank 2: no directory" in found.missing[0]
    assert found.missing[-1] == f"4984 more of 5002 ranks have no directory in {two}"
