"""`headrace checkpoint`: what it prints, what it leaves, and its exit status."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from launch.checkpoint_command import app
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
from ops.errors import ConfigError, HeadraceError, StorageError
from tests.offload.checkpoint.test_catalog import Ranks

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "store"
    with NvmeStore(str(path), 32 * MIB, workers=1, keep_commits=2) as store:
        store.write("same", filled_buffer(2 * MIB), "update")
        for step in (10, 20):
            store.write("layer[0]/state", filled_buffer(MIB, seed=step), "update", version=step)
            store.publish(store.cut({"step": step}))
    return path


def invoke(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def error_of(result):
    assert isinstance(result.exception, HeadraceError), result.output
    return result.exception


def test_list_shows_step_time_size_and_what_is_shared(path):
    result = invoke("list", path)
    assert result.exit_code == 0, result.output
    newest, older = (line for line in result.output.splitlines() if "3.0 MiB" in line)
    assert "20" in newest and "complete" in newest and "2.0 MiB" not in newest
    assert "10" in older and "2.0 MiB" in older
    assert newest.count(":") == 2, "hours, minutes, seconds"


def test_list_says_what_is_missing_and_of_which_rank(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.publish(5)
    ranks.close()
    os.rename(tmp_path / "rank-00001", tmp_path / "elsewhere")
    result = invoke("list", tmp_path)
    assert result.exit_code == 0 and "incomplete" in result.output
    reason = f"step 5 is incomplete: rank 1: no directory {tmp_path / 'rank-00001'}"
    assert reason in result.output
    assert invoke("verify", tmp_path).exit_code == 2


def test_what_is_not_here_is_not_called_whole(path):
    """Without its data file a checkpoint was verified: 0 blocks, all whole."""
    (path / "rank-00000/data.bin").unlink()
    result = invoke("verify", path)
    assert result.exit_code == 2, result.output
    assert "whole" not in result.output and "nothing is here" in result.output
    assert "is incomplete" in result.output and "data.bin" in result.output


def test_verify_reads_every_block_of_all_ranks(tmp_path):
    ranks = Ranks(tmp_path, 3, keep=2)
    for step in (5, 6):
        ranks.publish(step)
    result = invoke("verify", tmp_path)
    assert result.exit_code == 0, result.output
    assert "verified 2 blocks" in result.output or "verified 6 blocks" in result.output
    assert "all whole" in result.output
    ranks.close()
    flip(tmp_path / "rank-00002/data.bin", 77)
    result = invoke("verify", tmp_path)
    assert result.exit_code == 3
    place = f"damaged: {tmp_path / 'rank-00002/data.bin'}, byte 0: block 'block', chunk 0"
    assert place in result.output and "1 chunks are damaged" in result.output


def test_a_damaged_manifest_is_told_by_list_and_fails_verify(path):
    flip(path / "rank-00000/manifest.1", 70)
    result = invoke("list", path)
    assert result.exit_code == 0 and "manifest.1: checksum mismatch" in result.output
    result = invoke("verify", path)
    assert result.exit_code == 3 and "damaged: manifest.1" in result.output


def test_copy_then_list_and_verify_the_copy(path, tmp_path):
    out = tmp_path / "copy"
    result = invoke("copy", path, "--out", out)
    assert result.exit_code == 0, result.output
    assert f"step 20: copied 3.0 MiB to {out}, every chunk verified" in result.output
    assert invoke("verify", out).exit_code == 0
    assert "20" in invoke("list", out).output
    result = invoke("copy", path, "--out", out)
    assert "copied 0 B" in result.output and "3.0 MiB were there and whole" in result.output
    assert error_of(invoke("copy", path, "--out", out, "--step", 10)).exit_code == 2
    assert invoke("copy", path, "--out", tmp_path / "older", "--step", 10).exit_code == 0


def test_copy_names_ranks_that_are_elsewhere_and_says_what_to_do(tmp_path):
    ranks = Ranks(tmp_path / "a", 3)
    ranks.publish(5)
    ranks.close()
    (tmp_path / "b").mkdir()
    for rank in ("rank-00001", "rank-00002"):
        os.rename(tmp_path / "a" / rank, tmp_path / "b" / rank)
    error = error_of(invoke("copy", tmp_path / "a", "--out", tmp_path / "out"))
    assert isinstance(error, ConfigError)
    assert "the parts of ranks 1, 2 are missing (rank 1: no directory" in str(error)
    assert "run the same command where they are, with the same --out" in str(error)
    assert "not finished" in invoke("list", tmp_path / "out").output
    result = invoke("copy", tmp_path / "b", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert invoke("verify", tmp_path / "out").exit_code == 0


def test_copy_of_a_damaged_chunk_names_it(path, tmp_path):
    for offset in range(0, 4 * MIB, MIB):
        flip(path / "rank-00000/data.bin", offset)
    error = error_of(invoke("copy", path, "--out", tmp_path / "out"))
    assert isinstance(error, StorageError) and error.path == str(path / "rank-00000/data.bin")


def test_delete_asks_first(path):
    result = invoke("delete", path, input="n\n")
    assert result.exit_code == 2 and "the checkpoints of step 20, 10" in result.output
    assert path.exists()
    result = invoke("delete", path, input="y\n")
    assert result.exit_code == 0 and not path.exists()
    assert "is no store" in str(error_of(invoke("delete", path, "--yes")))
    assert "is no store" in str(error_of(invoke("delete", path)))


def test_delete_is_refused_when_nobody_answers(path):
    """With no terminal it ended with 1, which means nothing, and did not say what would help."""
    error = error_of(invoke("delete", path, input=""))
    assert isinstance(error, ConfigError) and "--yes" in str(error)
    assert invoke("verify", path).exit_code == 0


def test_delete_refuses_what_is_in_use(path):
    with NvmeStore(str(path), 32 * MIB, workers=1, resume=True):
        error = error_of(invoke("delete", path, "--yes"))
    assert isinstance(error, ConfigError) and "is in use by process" in str(error)
    assert invoke("verify", path).exit_code == 0
    assert invoke("delete", path, "--yes").exit_code == 0


@pytest.mark.parametrize("command", ["list", "verify", "delete"])
def test_where_there_is_no_checkpoint_the_exit_status_is_2(tmp_path, command):
    assert error_of(invoke(command, tmp_path)).exit_code == 2


def test_a_damaged_record_is_3(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.publish(5)
    ranks.close()
    flip(tmp_path / "commits.json", 60)
    for command in ("list", "verify"):
        assert error_of(invoke(command, tmp_path)).exit_code == 3


def test_the_command_line_forwards_to_it(path):
    from launch.cli import app as whole

    result = CliRunner().invoke(whole, ["checkpoint", "verify", str(path)])
    assert result.exit_code == 0, result.output
    assert "copy" in CliRunner().invoke(whole, ["checkpoint", "--help"]).output


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("command", ["verify", "copy", "delete"])
def test_a_lock_file_that_is_a_link_or_a_pipe_ends_a_command(path, tmp_path, command, kind):
    """`delete` wrote through the link and said that all was well; `verify` waited for the pipe."""
    lock, victim = path / "rank-00000/owner.lock", tmp_path / "victim"
    victim.write_text("precious")
    lock.unlink()
    lock.symlink_to(victim) if kind == "link" else os.mkfifo(lock)
    more = {"copy": ("--out", tmp_path / "out"), "delete": ("--yes",)}.get(command, ())
    error = error_of(invoke(command, path, *more))
    assert error.exit_code == (2 if command == "delete" else 3)
    assert str(lock) in str(error) and "it is " in str(error)
    assert victim.read_text() == "precious" and (path / "rank-00000/data.bin").exists()
