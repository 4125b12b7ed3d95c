"""`headrace store`: what it prints, and its exit status."""

import pytest
from typer.testing import CliRunner

from launch.store_command import app
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
from ops.errors import ConfigError

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    with NvmeStore(str(tmp_path), 16 * MIB, workers=1, keep_commits=2) as store:
        for step in (10, 20):
            store.write("layer[0]/state", filled_buffer(MIB, seed=step), "update", version=step)
            store.publish(store.cut({"step": step}))
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_list_shows_each_retained_commit_with_its_step(path):
    result = invoke("list", path)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "1.0 MiB" in line]
    assert len(rows) == 2 and "20" in rows[0] and "10" in rows[1]
    assert str(path / "rank-00000") in result.output
    assert "layer[0]" not in result.output
    assert "layer[0]/state" in invoke("list", path, "--blocks").output


def test_verify_counts_what_is_whole(path):
    result = invoke("verify", path)
    assert result.exit_code == 0, result.output
    assert "verified 2 blocks, 2.0 MiB, of commits 2, 1: all whole" in result.output


def test_verify_names_every_damaged_chunk_and_exits_with_3(path):
    # C05
    data = path / "rank-00000/data.bin"
    for offset in (5, MIB + 5):
        flip(data, offset)
    result = invoke("verify", path)
    assert result.exit_code == 3
    for offset in (0, MIB):
        place = f"damaged: {data}, byte {offset}: block 'layer[0]/state', chunk 0: checksum"
        assert place in result.output
    assert "2 chunks are damaged" in result.output


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_damaged_manifest_exits_with_3_and_is_named(path, command):
    flip(path / "rank-00000/manifest.1", 70)
    result = invoke(command, path)
    assert result.exit_code == 3
    assert "manifest.1: checksum mismatch" in result.output


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_path_that_is_no_store_is_refused_with_2(tmp_path, command):
    result = invoke(command, tmp_path)
    assert isinstance(result.exception, ConfigError) and result.exception.exit_code == 2
    assert "is no store" in str(result.exception)


def test_a_store_in_use_says_by_whom(path):
    with NvmeStore(str(path), 16 * MIB, workers=1, resume=True):
        result = invoke("list", path)
    assert result.exit_code == 0 and "in use by process" in result.output


def test_the_command_line_forwards_to_it(path):
    from launch.cli import app as whole

    result = CliRunner().invoke(whole, ["store", "verify", str(path)])
    assert result.exit_code == 0, result.output
    assert "all whole" in result.output
    assert "verify" in CliRunner().invoke(whole, ["store", "--help"]).output
