"""Export and import on a disk without room: a storage fault, with path and bytes, never a trace."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from moe.weights import importing, writing
from offload.nvme import aligned
from ops.errors import ConfigError, StorageError
from tests.launch.test_export_command import MODEL, invoke
from tests.moe.weights.saved_weights import commit_to, make_run, numbers_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A commit of one rank, and an export of it with moments."""
    path = tmp_path_factory.mktemp("room")
    run, meta = make_run(model=MODEL)
    commit_to(path / "store", run, meta, numbers_of(run))
    invoke("export", path / "store", "--out", path / "out", "--moments")
    return path


def full(*arguments, **options):
    """A system call on a full disk, which names no file."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def export(store, out):
    invoke("export", store / "store", "--out", out, "--moments")


def import_(store, out):
    invoke("import", store / "out", "--out", out)


@pytest.mark.parametrize("command", [export, import_])
def test_too_little_room_is_a_storage_fault_that_names_both_amounts(
    store, tmp_path, monkeypatch, command
):
    """An export exited with 2 where a copy exits with 3; an import blamed offload.nvme.capacity,
    which it has not, and advised to raise offload.host.capacity."""
    status = SimpleNamespace(f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    with pytest.raises(StorageError, match=r"--out .* needs .* and has 40\.0 KiB free") as caught:
        command(store, tmp_path / "x")
    assert "offload." not in str(caught.value)
    assert caught.value.path == str(tmp_path / "x") and caught.value.wanted_bytes > 500_000


@pytest.mark.parametrize("command", [export, import_])
@pytest.mark.parametrize("call", ["pwritev", "makedirs"])
def test_a_disk_that_takes_nothing_at_all_is_a_storage_fault(
    store, tmp_path, monkeypatch, command, call
):
    """The first bytes are those that try direct I/O: that ended with a traceback."""
    monkeypatch.setattr(aligned.os, call, full)
    with pytest.raises(StorageError, match=r"ENOSPC.*path=") as caught:
        command(store, tmp_path / "x")
    assert str(tmp_path / "x") in caught.value.path


def test_a_store_that_cannot_be_made_is_a_storage_fault_of_the_import(store, tmp_path, monkeypatch):
    monkeypatch.setattr("offload.nvme.lock._write_owner", full)
    with pytest.raises(StorageError, match=r"--out .*ENOSPC") as caught:
        import_(store, tmp_path / "x")
    assert "offload." not in str(caught.value)


def test_an_import_into_a_store_in_use_speaks_of_its_own_option(store, tmp_path):
    path = tmp_path / "x"
    path.mkdir()
    refused = pytest.raises(ConfigError, match=r"--out: .* is in use by process")
    with importing._new_store(str(path), 1 << 20), refused as caught:
        import_(store, path)
    assert "offload.nvme" not in str(caught.value)


@pytest.mark.parametrize("name", ["rename", "ftruncate"])
def test_an_export_that_cannot_get_its_names_is_a_storage_fault(store, tmp_path, monkeypatch, name):
    original = getattr(os, name)

    def fail(target, *arguments):
        if isinstance(target, str) and not target.endswith(writing.PARTIAL_SUFFIX):
            return original(target, *arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writing.os, name, fail)
    with pytest.raises(StorageError, match=r"EIO.*path="):
        export(store, tmp_path / "x")
