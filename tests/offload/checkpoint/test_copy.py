"""Native copies: the same commit elsewhere, verified, resumable, and never half of one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offload.checkpoint.catalog import find_checkpoints, open_parts
from offload.checkpoint.copy import choose_source, commit_of, copy_checkpoint
from offload.checkpoint.source import CommitPart
from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.files import OsDirectoryFiles, OsFile
from offload.nvme.store import NvmeStore
from offload.rank_commits import RecordFile
from offload.runs import Run
from offload.testing_storage import Fault, FaultyStorage, filled_buffer, moments
from ops.checksum import CHUNK_BYTES
from ops.errors import ConfigError, StorageError
from tests.offload.checkpoint.test_catalog import Ranks

MIB = CHUNK_BYTES
SIZES = {"a": 9 * MIB + 77, "empty": 0, "b": 5, "c": 4 * MIB, "d": 4097}


def fill(store, step, sizes=SIZES):
    for name, nbytes in sizes.items():
        store.write(name, filled_buffer(nbytes, seed=step), "update", version=step)
    store.publish(store.cut({"step": step, "note": ["x", 1.5]}))


@pytest.fixture
def source(tmp_path):
    path = str(tmp_path / "source")
    with NvmeStore(path, 64 * MIB, workers=2, keep_commits=2) as store:
        for step in (1, 2):
            fill(store, step)
    return path


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


def copy(source, out, **options):
    paths = [source] if isinstance(source, str) else source
    step = options.pop("step", None)
    return copy_checkpoint(choose_source(paths, out, step), out, **options)


def content(path, rank=0):
    (checkpoint,) = find_checkpoints([path])
    with CommitPart(checkpoint.directories(rank)) as part:
        return {
            name: b"".join(
                bytes(x) for _, x in part.read_chunks(name, range(len(stored.checksums)))
            )
            for name, stored in part.blocks.items()
        }


def expected(step, sizes=SIZES):
    return {name: filled_buffer(nbytes, seed=step).tobytes() for name, nbytes in sizes.items()}


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def data_of(path, rank=0):
    return os.path.join(path, f"rank-{rank:05d}", "data.bin")


def test_a_copy_is_the_newest_commit_in_compact_form(source, out):
    told = []
    done = copy(source, out, begin=lambda total: told.append(total) or told.append)
    nbytes = sum(SIZES.values())
    assert (done.written_bytes, done.kept_bytes, done.missing) == (nbytes, 0, ())
    assert told[0] == nbytes == sum(told[1:])
    found, before = find_checkpoints([out])[0], find_checkpoints([source])[0]
    assert found.is_complete and found.step == 2 and found.meta == before.meta
    assert (found.stores, found.generations) == (before.stores, before.generations)
    assert content(out) == expected(2)
    assert sorted(os.listdir(out)) == ["rank-00000"]
    assert os.path.getsize(data_of(out)) == 9 * MIB + 4096 + 4096 + 4 * MIB + 8192
    assert os.path.getsize(data_of(out)) < os.path.getsize(data_of(source))


def test_an_older_commit_can_be_copied_by_its_step(source, out):
    copy(source, out, step=1)
    assert content(out) == expected(1)
    with pytest.raises(ConfigError, match=r"--step 7: .* no checkpoint of this step"):
        copy(source, out + "2", step=7)


def test_a_copy_opens_as_a_store_and_trains_on(source, out):
    copy(source, out)
    with NvmeStore(out, 64 * MIB, workers=1, resume=True) as store:
        assert store.recovered.meta == {"step": 2, "note": ["x", 1.5]}
        buffer = filled_buffer(SIZES["a"])
        store.read("a", buffer, "update").wait()
        assert buffer.tobytes() == expected(2)["a"]
        fill(store, 3)
    assert content(out) == expected(3)


def test_a_copy_of_a_copy_is_the_same_copy(source, out):
    copy(source, out)
    copy(out, out + "2")
    first, second = Path(out, "rank-00000"), Path(out + "2", "rank-00000")
    for name in ("data.bin", "manifest.0", "member.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_striped_stores_are_copied_to_one_path(tmp_path, out):
    paths = [str(tmp_path / name) for name in "ab"]
    with NvmeStore(paths, 96 * MIB, workers=2) as store:
        fill(store, 4)
    copy(paths, out)
    assert content(out) == expected(4)


def test_encoded_frames_are_copied_as_they_are(tmp_path, source, out):
    nbytes = 6 * MIB + 999
    path = str(tmp_path / "packed")
    with NvmeStore(path, 64 * MIB, codec="lz4", drive_speed=lambda: DriveSpeed(1e6, 1e6)) as store:
        data = moments(nbytes, seed=3)
        store.write("v", data, "update", runs=[Run("exp_avg_sq", 4, 0, nbytes)]).wait()
        store.publish(store.cut({}))
    done = copy(path, out)
    with CommitPart([os.path.join(path, "rank-00000")]) as part:
        stored = part.blocks["v"]
        assert any(stored.encoded_bytes)
        assert done.written_bytes == sum(map(stored.stored_bytes, range(7))) < nbytes
    assert content(out) == {"v": data.tobytes()}
    assert copy(path, out).written_bytes == 0, "every frame verified"
    flip(data_of(out), 2 * MIB + 5)
    assert copy(path, out).written_bytes == stored.stored_bytes(2)
    assert content(out) == {"v": data.tobytes()}


def test_a_whole_copy_is_verified_and_what_rotted_in_it_copied_anew(source, out):
    copy(source, out)
    done = copy(source, out)
    assert (done.written_bytes, done.kept_bytes) == (0, sum(SIZES.values()))
    flip(data_of(out), 6 * MIB + 1)
    done = copy(source, out)
    assert done.written_bytes == MIB and content(out) == expected(2)


@pytest.mark.parametrize("at_byte", [0, 3 * MIB, 13 * MIB])
def test_a_full_disk_is_one_sentence_and_the_same_copy_goes_on_later(source, out, at_byte):
    # C04, C62
    storage = FaultyStorage(Fault("error", "write", at_byte=at_byte, code=errno.ENOSPC))
    with pytest.raises(StorageError, match="ENOSPC: No space left") as caught:
        copy(source, out, open_file=storage)
    assert caught.value.path == data_of(out) and caught.value.exit_code == 3
    (found,) = find_checkpoints([out])
    assert not found.is_complete and "the copy is not finished" in found.missing[0]
    assert find_checkpoints([source])[0].is_complete
    done = copy(source, out)
    assert done.written_bytes + done.kept_bytes == sum(SIZES.values())
    assert done.kept_bytes >= at_byte - 16 * MIB and content(out) == expected(2)


def test_a_sync_that_fails_leaves_no_manifest(source, out):
    storage = FaultyStorage(Fault("error", "sync", at_op=0))
    with pytest.raises(StorageError, match="sync failed: EIO"):
        copy(source, out, open_file=storage)
    assert "manifest.0" not in os.listdir(os.path.join(out, "rank-00000"))
    copy(source, out)
    assert content(out) == expected(2)


def test_too_little_room_is_told_before_anything_is_written(source, out, monkeypatch):
    monkeypatch.setattr("offload.checkpoint.part_copy.free_bytes_at", lambda directory: 5 * MIB)
    with pytest.raises(StorageError, match=r"needs 13\.0 MiB and the disk has 5\.0 MiB free"):
        copy(source, out)
    assert not os.path.exists(data_of(out))


def test_damage_in_the_source_is_never_copied(source, out):
    # C05
    with CommitPart([os.path.join(source, "rank-00000")]) as part:
        offset = part.blocks["a"].extents[0].offset
    flip(data_of(source), offset + 7 * MIB)
    with pytest.raises(StorageError, match="checksum mismatch") as caught:
        copy(source, out)
    assert (caught.value.block, caught.value.offset) == ("a", offset + 7 * MIB)
    assert not find_checkpoints([out])[0].is_complete


@pytest.mark.parametrize("kill_at", [1, 6, 12])
def test_killed_in_the_middle_and_run_again_it_is_whole(source, out, kill_at):
    # C62
    code = (
        "import os, signal, sys\n"
        "from offload.checkpoint.copy import choose_source, copy_checkpoint\n"
        "from offload.nvme.files import OsFile\n"
        "calls = []\n"
        "write = OsFile.writev_from\n"
        "def writev(self, buffers, offset):\n"
        "    calls.append(0)\n"
        "    if len(calls) == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return write(self, [b[:4096] for b in buffers], offset)\n"
        "OsFile.writev_from = writev\n"
        "copy_checkpoint(choose_source([sys.argv[1]], sys.argv[2]), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, source, out, str(kill_at)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -9
    (found,) = find_checkpoints([out])
    assert not found.is_complete
    copy(source, out)
    assert content(out) == expected(2)
    assert [x for x in os.listdir(os.path.join(source, "rank-00000")) if "reading" in x], "dead's"
    with NvmeStore(source, 64 * MIB, workers=1, resume=True) as store:
        fill(store, 3)
    assert not [x for x in os.listdir(os.path.join(source, "rank-00000")) if "reading" in x]


class Crash(BaseException):
    """The end of the process, as far as the files are concerned."""


def test_a_crash_at_any_step_leaves_what_says_so_and_the_copy_goes_on(tmp_path, monkeypatch):
    # C62
    ranks = Ranks(tmp_path / "ranks", 2)
    ranks.publish(10)
    ranks.close()
    steps = [(OsDirectoryFiles, x) for x in ("write_file", "sync_file", "rename", "sync_directory")]
    steps += [(OsFile, "writev_from"), (OsFile, "sync"), (os, "rename"), (os, "unlink")]
    num_steps = 0
    for at in range(200):
        path, left = str(tmp_path / f"copy-{at}"), [at]

        def stopping(call, left=left):
            def step(*arguments):
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                return call(*arguments)

            return step

        with monkeypatch.context() as patch:
            for owner, name in steps:
                patch.setattr(owner, name, stopping(getattr(owner, name)))
            try:
                copy(ranks.path, path)
                break
            except Crash:
                num_steps += 1
        if os.path.exists(path) and os.listdir(path):
            with contextlib.suppress(ConfigError):
                found = find_checkpoints([path])
                is_named = "commits.json" in os.listdir(path)
                assert [x.is_complete for x in found] == [is_named], at
        copy(ranks.path, path)
        assert find_checkpoints([path])[0].is_complete
        for rank in (0, 1):
            assert content(path, rank)["block"] == filled_buffer(MIB + 3, seed=10).tobytes()
    assert num_steps >= 25


def test_a_live_store_is_copied_while_it_trains_on(tmp_path, out):
    path = str(tmp_path / "live")
    with NvmeStore(path, 64 * MIB, workers=2) as store:
        fill(store, 1)
        steps = iter(range(2, 99))
        copy(path, out, begin=lambda total: lambda nbytes: fill(store, next(steps)))
        assert content(out) == expected(1)


@pytest.mark.parametrize("what", ["source", "link", "file", "foreign", "store", "other"])
def test_a_directory_that_is_not_free_is_refused_and_stays_as_it_is(source, out, what, tmp_path):
    if what == "source":
        out = os.path.join(source, "..", "source")
    elif what == "link":
        os.symlink(source, out)
    elif what == "file":
        (tmp_path / "out").write_text("x")
    elif what == "foreign":
        os.makedirs(os.path.join(out, "photos"))
    elif what == "store":
        NvmeStore(out, MIB, workers=1).close()
    else:
        copy(source, out, step=1)
    before = sorted(os.walk(out))
    with pytest.raises(ConfigError, match="--out"):
        copy(source, out)
    assert sorted(os.walk(out)) == before


def test_a_copy_in_use_is_refused(source, out):
    copy(source, out)
    with (
        NvmeStore(out, 64 * MIB, workers=1, resume=True),
        pytest.raises(ConfigError, match=r"--out: .* is in use by process"),
    ):
        copy(source, out)


def test_a_file_that_no_copy_made_is_never_overwritten(source, out):
    storage = FaultyStorage(Fault("error", "write", at_op=0, code=errno.ENOSPC))
    with pytest.raises(StorageError):
        copy(source, out, open_file=storage)
    directory = os.path.join(out, "rank-00000")
    os.unlink(data_of(out))
    os.symlink(data_of(source), data_of(out))
    with pytest.raises(ConfigError, match=r"--out: .*data\.bin exists and was not made by"):
        copy(source, out)
    os.unlink(data_of(out))
    shutil.rmtree(directory)
    NvmeStore(out, MIB, workers=1).close()
    with pytest.raises(ConfigError, match="holds another store"):
        copy(source, out)


@pytest.fixture
def ranks(tmp_path):
    three = Ranks(tmp_path / "ranks", 3, keep=2)
    for step in (10, 20):
        three.publish(step)
    three.close()
    return str(tmp_path / "ranks")


def test_all_ranks_and_their_record_are_copied(ranks, out):
    before = find_checkpoints([ranks])
    done = copy(ranks, out)
    assert done.missing == () and done.written_bytes == 3 * (MIB + 3)
    (found,) = find_checkpoints([out])
    assert found.is_complete and found.step == 20 and found.num_ranks == 3
    assert commit_of(found) == commit_of(before[0]) and found.facts == before[0].facts
    assert RecordFile(out).read() == RecordFile(ranks).read()[:1]
    assert sorted(os.listdir(out))[0] == "commits.json" and len(os.listdir(out)) == 4
    for rank in range(3):
        assert content(out, rank)["block"] == filled_buffer(MIB + 3, seed=20).tobytes()


def test_ranks_of_other_machines_are_copied_by_the_same_command_there(ranks, out, tmp_path):
    other = tmp_path / "other machine"
    other.mkdir()
    os.rename(os.path.join(ranks, "rank-00001"), other / "rank-00001")
    with pytest.raises(ConfigError, match="nothing can be copied: no record"):
        copy(str(other), out)
    assert copy(ranks, out).missing == (1,)
    (found,) = find_checkpoints([out])
    assert not found.is_complete
    assert found.missing[0].startswith("the copy is not finished") and "rank 1" in found.missing[1]
    assert copy(str(other), out).missing == ()
    (found,) = find_checkpoints([out])
    assert found.is_complete
    parts = open_parts(found)
    assert [part.meta["step"] for part in parts] == [20] * 3
    for part in parts:
        part.close()


def test_a_copy_goes_on_with_the_checkpoint_it_was_begun_with(tmp_path, out):
    ranks = Ranks(tmp_path / "ranks", 2, keep=2)
    ranks.publish(10)
    storage = FaultyStorage(Fault("error", "write", at_op=0, code=errno.ENOSPC))
    with pytest.raises(StorageError):
        copy(ranks.path, out, open_file=storage)
    ranks.publish(20)
    copy(ranks.path, out)
    assert find_checkpoints([out])[0].step == 10
    with pytest.raises(StorageError):
        copy(ranks.path, out + "2", open_file=storage)  # of step 20
    for step in (30, 40):
        ranks.publish(step)
    with pytest.raises(ConfigError, match=r"a copy of commit 2, which is not in .* any more"):
        copy(ranks.path, out + "2")
    ranks.close()


def test_the_unfinished_record_is_as_strict_as_a_record(source, out):
    # C68
    os.makedirs(out)
    with open(os.path.join(out, "commits.json.unfinished"), "w") as file:
        json.dump({"format": "headrace commits 1", "commits": [], "checksum": "0" * 16}, file)
    with pytest.raises(StorageError, match="checksum mismatch"):
        copy(source, out)
