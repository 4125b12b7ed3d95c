"""What opens after damage and failures: the newest whole commit, or one sentence that says why not.

Every refusal leaves the directory as it was, so that it can be tried again with the right settings.
"""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from offload.nvme.aligned import AccessMode
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.inspect import InspectedStore
from offload.nvme.manifest import HEADER_BYTES
from offload.nvme.members import Member, encode_member, read_member
from offload.nvme.store import NvmeStore
from offload.testing_storage import (
    BUFFERED,
    Fault,
    FaultyDirectoryFiles,
    FaultyStorage,
    Gate,
    filled_buffer,
)
from ops.errors import ConfigError, StorageError

MIB = 1 << 20
UNIT = 4096
CAPACITY = 64 * UNIT


@pytest.fixture
def path(tmp_path):
    return str(tmp_path)


@pytest.fixture
def rank_directory(tmp_path):
    return tmp_path / "rank-00000"


def open_store(path, **options):
    options = {"workers": 1, "required_bytes": 0, "access": BUFFERED, **options}
    return NvmeStore(path, options.pop("capacity_bytes", CAPACITY), **options)


def put(store, step, blocks=("a", "b"), nbytes=UNIT + 9):
    for index, block in enumerate(blocks):
        store.write(block, filled_buffer(nbytes, seed=10 * step + index), "update", version=step)
    store.drain()


def commit(store, step, **shape):
    put(store, step, **shape)
    return store.publish(store.cut({"step": step}))


def check(store, step, blocks=("a", "b"), nbytes=UNIT + 9):
    assert store.recovered.meta == {"step": step}
    assert store.blocks() == dict.fromkeys(blocks, (nbytes, step))
    for index, block in enumerate(blocks):
        buffer = filled_buffer(nbytes)
        store.read(block, buffer, "update").wait()
        assert (buffer == filled_buffer(nbytes, seed=10 * step + index)).all()


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("verb", ["write_file", "sync_file", "rename", "sync_directory"])
def test_a_failing_step_of_a_commit_is_latched_and_the_last_commit_opens(
    path, rank_directory, verb, code
):
    # C04
    files = FaultyDirectoryFiles(code=code)
    store = open_store(path, directory_files=files)
    commit(store, 1)
    files.verb = verb
    put(store, 2)
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        store.publish(store.cut({"step": 2}))
    assert caught.value.exit_code == 3 and "commit 2 failed" in str(caught.value)
    assert caught.value.path.startswith(str(rank_directory))
    for call in (lambda: put(store, 3), lambda: store.cut({}), lambda: store.hold("a")):
        with pytest.raises(StorageError) as again:
            call()
        assert again.value is caught.value
    store.close()
    with open_store(path, resume=True) as store:
        # Renamed, but not known to be durable: both are whole.
        check(store, 2 if verb == "sync_directory" else 1)
        assert not list(rank_directory.glob("*.tmp"))
        commit(store, 4)


def test_a_failing_data_sync_fails_the_commit_before_its_manifest_exists(path, rank_directory):
    # C04
    fault = Fault("error", "sync", at_op=1, code=errno.EIO)
    store = open_store(path, open_file=FaultyStorage(fault))
    commit(store, 1)
    names = sorted(os.listdir(rank_directory))
    with pytest.raises(StorageError, match="sync failed: EIO") as caught:
        commit(store, 2)
    assert caught.value.path == str(rank_directory / "data.bin")
    with pytest.raises(StorageError, match="sync failed"):
        store.sync()
    assert fault.num_hits == 1, "a failed fsync is never tried again"
    store.close()
    assert sorted(os.listdir(rank_directory)) == names
    with open_store(path, resume=True) as store:
        check(store, 1)


def test_a_failed_write_fails_the_commit_that_holds_it(path):
    # C04
    storage = FaultyStorage()
    store = open_store(path, open_file=storage)
    commit(store, 1)
    gate = Gate("write", at_op=storage.file.num_calls["write"])
    storage.faults += [gate.fault, Fault("error", "write", code=errno.ENOSPC)]
    store.write("a", filled_buffer(99), "update")
    cut = store.cut({})
    gate.open()
    with pytest.raises(StorageError, match="ENOSPC"):
        store.publish(cut)
    store.close()
    with open_store(path, resume=True) as store:
        check(store, 1)


SECTIONS = {"magic": 0, "format": 8, "generation": 16, "lengths": 25, "digest": 45, "json": 60}


@pytest.mark.parametrize("section", [*SECTIONS, "checksums", "torn", "empty"])
def test_a_damaged_manifest_is_named_and_the_older_commit_opens(path, rank_directory, section):
    # C05
    with open_store(path) as store:
        commit(store, 1)
        commit(store, 2)
    newest = rank_directory / "manifest.0"
    if section in ("torn", "empty"):
        os.truncate(newest, HEADER_BYTES + 30 if section == "torn" else 0)
    else:
        flip(newest, SECTIONS.get(section, newest.stat().st_size - 3))
    with open_store(path, resume=True) as store:
        check(store, 1)
        (skipped,) = store.recovered.skipped
        assert skipped.startswith("manifest.0: ")
        assert commit(store, 5).generation == 2
    with open_store(path, resume=True) as store:
        check(store, 5)
        assert store.recovered.skipped == ("manifest.1: generation 1 has been superseded",)


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_an_older_commit_whose_room_was_reused_is_not_accepted(path, rank_directory, what):
    """Its manifest is perfect, but the blocks lie where newer ones have been written since."""
    with open_store(path) as store:
        for step in range(1, 4):
            commit(store, step)
        put(store, 4)
    newest = rank_directory / "manifest.1"
    if what == "damaged":
        flip(newest, 70)
    else:
        newest.unlink()
    before = {name: (rank_directory / name).read_bytes() for name in os.listdir(rank_directory)}
    with pytest.raises(
        StorageError,
        match=r"none can be opened.*manifest\.0: .*checksum mismatch"
        r".*manifest\.1: ",
    ) as caught:
        open_store(path, resume=True)
    assert caught.value.path == str(rank_directory)
    assert before == {x: (rank_directory / x).read_bytes() for x in os.listdir(rank_directory)}
    with open_store(path) as store:
        assert store.recovered is None


def test_a_missing_newest_slot_gives_the_older_commit_only_if_it_is_whole(path, rank_directory):
    with open_store(path) as store:
        for step in range(1, 4):
            commit(store, step)
    (rank_directory / "manifest.1").unlink()
    with open_store(path, resume=True) as store:
        check(store, 2)
        assert store.recovered.skipped == ("manifest.1: is missing",)


def test_a_stale_manifest_put_back_is_never_trained_on(path, rank_directory):
    """A lost rename or a restored backup: what is read is right, or an error that names it."""
    with open_store(path) as store:
        commit(store, 1)
        shutil.copy(rank_directory / "manifest.1", rank_directory / "kept")
        commit(store, 2)
        commit(store, 3)
        commit(store, 4)
    (rank_directory / "manifest.0").unlink()
    os.replace(rank_directory / "kept", rank_directory / "manifest.1")
    with (
        open_store(path, resume=True) as store,
        pytest.raises(StorageError, match="checksum mismatch"),
    ):
        check(store, 1)


def test_stale_blocks_under_a_whole_manifest_are_found_when_read(path, rank_directory):
    # C05: the drive lost writes after it had said they were durable
    with open_store(path) as store:
        commit(store, 1)
        kept = (rank_directory / "data.bin").read_bytes()
        commit(store, 2)
    (rank_directory / "data.bin").write_bytes(kept)
    with open_store(path, resume=True) as store:
        with pytest.raises(StorageError, match="checksum mismatch") as caught:
            store.read("a", filled_buffer(UNIT + 9), "update").wait()
        assert caught.value.block == "a"


def test_two_swapped_blocks_are_found_after_reopening(path, rank_directory):
    # C05
    with open_store(path) as store:
        commit(store, 1, nbytes=UNIT)
        offsets = [stored.extents[0].offset for stored in store.cut({}).blocks.values()]
    data = bytearray((rank_directory / "data.bin").read_bytes())
    first, second = (slice(offset, offset + UNIT) for offset in offsets)
    data[first], data[second] = data[second], data[first]
    (rank_directory / "data.bin").write_bytes(data)
    with open_store(path, resume=True) as store:
        for block in "ab":
            with pytest.raises(StorageError, match="checksum mismatch") as caught:
                store.read(block, filled_buffer(UNIT), "update").wait()
            assert caught.value.block == block


def test_a_damaged_stale_slot_makes_the_newest_commit_prove_itself(path, rank_directory, caplog):
    with open_store(path) as store:
        commit(store, 1)
        commit(store, 2)
    flip(rank_directory / "manifest.1", 70)
    with open_store(path, resume=True) as store:
        check(store, 2)
    assert "verifying every block" in caplog.text
    flip(rank_directory / "data.bin", 2 * (UNIT * 2) + 5)
    with pytest.raises(StorageError, match="none can be opened"):
        open_store(path, resume=True)


def test_older_commits_stay_retained_and_the_number_kept_may_change(path, rank_directory):
    with open_store(path, keep_commits=3) as store:
        for step in range(1, 6):
            commit(store, step)
        assert store.used_bytes == 3 * 2 * 2 * UNIT
    with open_store(path, keep_commits=3, resume=True) as store:
        check(store, 5)
        assert store.used_bytes == 3 * 2 * 2 * UNIT
        assert store.recovered.skipped == ("manifest.2: generation 2 has been superseded",)
    flip(rank_directory / "manifest.1", 70)  # generation 5
    with open_store(path, keep_commits=3, resume=True) as store:
        check(store, 4)
        assert store.used_bytes == 3 * 2 * 2 * UNIT, "2 was released, but nothing has replaced it"
    with open_store(path, keep_commits=1, resume=True) as store:
        check(store, 4)
        assert store.used_bytes == 2 * 2 * UNIT
        commit(store, 6)
        commit(store, 7)
    assert sorted(rank_directory.glob("manifest.*")) == [
        rank_directory / "manifest.0",
        rank_directory / "manifest.1",
    ]
    with open_store(path, keep_commits=2, resume=True) as store:
        check(store, 7)


def test_fewer_kept_commits_are_let_go_of_only_when_no_manifest_retains_them(path, rank_directory):
    """Regression: opened with fewer to keep, a store wrote over the older commits at once.

    The manifest on the disk still called them whole, so a process killed before its first commit
    left a store that did not verify, and older commits that later openings took up.
    """
    with open_store(path, keep_commits=3) as store:
        for step in range(1, 5):
            commit(store, step)
    with open_store(path, keep_commits=1, resume=True) as store:
        check(store, 4)
        for content in range(90, 94):  # never committed, as if killed
            store.write(f"x{content}", filled_buffer(2 * UNIT, seed=content), "update").wait()
    inspected = InspectedStore([str(rank_directory)])
    assert [commit.meta["step"] for commit in inspected.commits] == [4]
    assert not inspected.damaged and all(not found for _, _, found in inspected.verify())
    inspected.close()
    with open_store(path, keep_commits=3, resume=True) as store:
        check(store, 4)
        assert len(store._commits._retained) == 1


def test_a_manifest_of_another_store_is_not_taken(tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for path, steps in ((one, 1), (two, 3)):
        with open_store(path) as store:
            for step in range(1, steps + 1):
                commit(store, step)
    shutil.copy(tmp_path / "two/rank-00000/manifest.0", tmp_path / "one/rank-00000/manifest.0")
    with open_store(one, resume=True) as store:
        check(store, 1)
        assert "belongs to another store" in store.recovered.skipped[0]


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_the_only_directory_can_lose_its_member_file(path, rank_directory, damage):
    with open_store(path) as store:
        commit(store, 1)
    member = read_member(str(rank_directory), OsDirectoryFiles())
    if damage == "missing":
        (rank_directory / "member.json").unlink()
    else:
        flip(rank_directory / "member.json", 30)
    with open_store(path, resume=True) as store:
        check(store, 1)
    assert read_member(str(rank_directory), OsDirectoryFiles()) == member


def test_settings_the_commit_does_not_fit_are_refused_with_the_way_out(path, rank_directory):
    with open_store(path) as store:
        commit(store, 1)
    with pytest.raises(
        ConfigError,
        match=r"offload\.nvme\.capacity: 12288 bytes, but commit 1 "
        r"\(step 1\) uses .*data\.bin up to byte 16384; set it to at least 16384",
    ):
        open_store(path, capacity_bytes=3 * UNIT, resume=True)
    other = AccessMode(direct=False, alignment_bytes=2 * UNIT, reason="test")
    with pytest.raises(ConfigError, match=r"aligned to 4096 bytes, but .* asks for 8192"):
        open_store(path, access=other, resume=True)
    with open_store(path, capacity_bytes=4 * UNIT, resume=True) as store:
        check(store, 1)
    with open_store(path, capacity_bytes=100 * UNIT + 7, resume=True) as store:
        check(store, 1)
        assert (rank_directory / "data.bin").stat().st_size == 101 * UNIT


def test_a_block_in_the_odd_tail_of_the_capacity_survives_a_larger_one(path):
    # C02
    nbytes = 3 * UNIT + 100
    with open_store(path, capacity_bytes=nbytes) as store:
        commit(store, 1, blocks=("a",), nbytes=nbytes)
        assert store.used_bytes == nbytes
    with open_store(path, capacity_bytes=nbytes, resume=True) as store:
        check(store, 1, ("a",), nbytes)
        assert store.used_bytes == nbytes
    with open_store(path, capacity_bytes=10 * UNIT, resume=True) as store:
        check(store, 1, ("a",), nbytes)
        assert store.used_bytes == 4 * UNIT
        put(store, 2, ("a",), nbytes)
        store.write("b", filled_buffer(2 * UNIT), "update").wait()
        assert store.used_bytes == 10 * UNIT
        store.publish(store.cut({}))
        assert store.used_bytes == 6 * UNIT


def test_a_data_file_that_is_gone_or_short_is_named(path, rank_directory):
    # C05
    with open_store(path) as store:
        commit(store, 1)
    os.truncate(rank_directory / "data.bin", 3 * UNIT)
    with pytest.raises(StorageError, match=r"has 12288 bytes, but commit 1 \(step 1\) needs 16384"):
        open_store(path, resume=True)
    (rank_directory / "data.bin").unlink()
    with pytest.raises(StorageError, match=r"missing.*data\.bin"):
        open_store(path, resume=True)
    assert not (rank_directory / "data.bin").exists()


def test_directories_that_do_not_belong_together_are_refused_by_name(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    with open_store(paths) as store:
        commit(store, 1)
    with pytest.raises(ConfigError, match="was made of 2; give all of them"):
        open_store(paths[0], resume=True)
    with pytest.raises(ConfigError, match=r"is directory 1 of its store and was given as.* 0"):
        open_store(paths[::-1], resume=True)
    with pytest.raises(ConfigError, match="each only once"):
        open_store([paths[0], paths[0] + "/."])
    member = tmp_path / "b/rank-00000/member.json"
    kept = member.read_bytes()
    foreign = encode_member(Member("0" * 32, 1, 2))
    for content, reason in ((foreign, "store_id='000"), (kept[:-1], "no readable")):
        member.write_bytes(content)
        with pytest.raises(StorageError, match=rf"not directory 1 of store.*{reason}") as caught:
            open_store(paths, resume=True)
        assert caught.value.path == str(member)
    member.write_bytes(kept)
    with pytest.raises(StorageError, match="missing"):
        open_store([paths[0], str(tmp_path / "c")], resume=True)
    with open_store(paths, resume=True) as store:
        check(store, 1)
        store.close(delete=True)


def test_every_lock_is_given_up_when_one_of_the_paths_is_refused(tmp_path):
    # C11
    paths = [str(tmp_path / name) for name in "abc"]
    with open_store(paths[2]):
        with pytest.raises(ConfigError, match=r"c.*in use by process"):
            open_store(paths)
        open_store(paths[0]).close()
        open_store(paths[1]).close()


def test_ranks_that_share_a_path_never_meet(path):
    # C11
    with open_store(path) as zero, open_store(path, rank=7) as seven:
        commit(zero, 1)
        commit(seven, 2)
    with open_store(path, rank=7, resume=True) as store:
        check(store, 2)
    assert sorted(os.listdir(path)) == ["rank-00000", "rank-00007"]


def test_closing_with_delete_leaves_nothing_and_without_it_the_commits(path):
    store = open_store(path)
    commit(store, 1)
    store.close()
    store = open_store(path, resume=True)
    check(store, 1)
    store.close(delete=True)
    assert os.listdir(path) == []


def test_the_member_file_is_json_that_people_can_read(path, rank_directory):
    with open_store(path) as store:
        fields = json.loads((rank_directory / "member.json").read_text())
        assert fields["store_id"] == store._opened.store_id
        assert (fields["index"], fields["count"], fields["format"]) == (0, 1, 1)
