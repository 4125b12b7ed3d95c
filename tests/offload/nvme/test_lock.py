"""One live owner per directory; dead owners are told apart from live ones (C11)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from offload.nvme.lock import LOCK_FILE_NAME, OwnerLock, this_process
from offload.nvme.store import NvmeStore
from ops.errors import ConfigError

HOLD = """
import sys
from offload.nvme.store import NvmeStore
from offload.nvme.lock import OwnerLock
lock = OwnerLock.acquire(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A second process that holds the lock of `tmp_path` until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def _leave_behind(directory, owner):
    (directory / LOCK_FILE_NAME).write_text(json.dumps(asdict(owner)))


def test_a_live_owner_is_named_to_the_second(tmp_path, holder):
    with pytest.raises(ConfigError, match=rf"offload\.nvme\.path.*process {holder.pid} on host"):
        OwnerLock.acquire(str(tmp_path))


def test_a_killed_owner_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = OwnerLock.acquire(str(tmp_path))
    assert lock.previous is not None and lock.previous.pid == holder.pid
    lock.release()


def test_the_same_process_cannot_hold_it_twice(tmp_path):
    lock = OwnerLock.acquire(str(tmp_path))
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        OwnerLock.acquire(str(tmp_path))
    lock.release()


def test_a_clean_release_leaves_no_previous_owner(tmp_path):
    OwnerLock.acquire(str(tmp_path)).release()
    lock = OwnerLock.acquire(str(tmp_path))
    assert lock.previous is None
    lock.release(delete=True)
    lock.release(delete=True)
    assert os.listdir(tmp_path) == []


def test_an_owner_of_this_machine_before_its_reboot_is_dead(tmp_path):
    _leave_behind(tmp_path, replace(this_process(), boot_id="an earlier boot"))
    lock = OwnerLock.acquire(str(tmp_path))
    assert lock.previous is not None
    lock.release()


def test_an_owner_on_another_host_is_never_taken_over(tmp_path):
    _leave_behind(tmp_path, replace(this_process(), host="node-7", boot_id="its boot"))
    with pytest.raises(ConfigError, match=r"on host node-7.*delete .*owner\.lock"):
        OwnerLock.acquire(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"host": "x"}', '{"pid": "y"}'])
def test_a_torn_lock_file_names_no_owner(tmp_path, content):
    (tmp_path / LOCK_FILE_NAME).write_text(content)
    lock = OwnerLock.acquire(str(tmp_path))
    assert lock.previous is None
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_the_process_table_decides(tmp_path, monkeypatch, code):
    def refuse(fd, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    me = this_process()
    _leave_behind(tmp_path, me)
    with pytest.raises(ConfigError, match=f"process {me.pid}"):
        OwnerLock.acquire(str(tmp_path))
    # The pid lives, but it is another process than the one that wrote the file.
    _leave_behind(tmp_path, replace(me, process_start_ticks=me.process_start_ticks + 1))
    OwnerLock.acquire(str(tmp_path)).release()


def test_a_lock_file_deleted_under_us_is_taken_anew(tmp_path, monkeypatch):
    """A clean close deletes the file; who opened it before that would lock a name nobody sees."""
    real, deleted = fcntl.flock, []

    def flock(fd, operation):
        if not deleted:
            deleted.append(True)
            os.unlink(tmp_path / LOCK_FILE_NAME)
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = OwnerLock.acquire(str(tmp_path))
    with pytest.raises(ConfigError):
        OwnerLock.acquire(str(tmp_path))
    lock.release()


@pytest.mark.parametrize("name", ["data.bin", "member.json", "manifest.1"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_somebody_elses_files_are_never_touched(tmp_path, kind, name):
    """A user pointed offload.nvme.path at a folder with a data.bin of his own, and lost it; through
    a link the file lost lay outside the folder."""
    directory = tmp_path / "rank-00000"
    directory.mkdir()
    victim = directory / name if kind == "file" else tmp_path / "elsewhere.txt"
    victim.write_text("precious")
    if kind == "link":
        (directory / name).symlink_to(victim)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"{name} exists and was not made by Headrace"):
            NvmeStore(str(tmp_path), 1 << 20)
    assert victim.read_text() == "precious"
    assert not (directory / "owner.lock").exists(), "a refusal leaves nothing behind"
