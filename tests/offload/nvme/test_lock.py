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

from offload.nvme.directory import lock_directory
from offload.nvme.lock import LOCK_FILE_NAME, OwnerLock, Watch, this_process
from offload.nvme.store import NvmeStore
from ops.errors import ConfigError, StorageError

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


def _put_in_place(kind, path, target):
    """Something that is no plain file under a name that a store uses."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS = ["link", "dangling link", "pipe", "directory"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_file_that_is_no_plain_file_is_refused(tmp_path, kind):
    """`owner.lock` was a link to a file outside of the store: `delete` and training wrote their
    owner into that file, and emptied it when they left."""
    victim = tmp_path / "elsewhere.txt"
    victim.write_text("precious")
    directory = tmp_path / "rank-00000"
    directory.mkdir()
    _put_in_place(kind, directory / LOCK_FILE_NAME, victim)
    for take in (OwnerLock.acquire, lock_directory):
        with pytest.raises(ConfigError, match=r"owner\.lock cannot be used: it is .*; remove it"):
            take(str(directory))
    with pytest.raises(OSError, match="it is "):
        Watch(str(directory))
    assert victim.read_text() == "precious"
    assert not (directory / "nowhere").exists()


@pytest.mark.parametrize(
    "content",
    [
        "[" * 4000,
        '{"host": "x", "boot_id": "y", "pid": Infinity, "process_start_ticks": 1}',
        '{"host": "x", "boot_id": "y", "pid": 1, "process_start_ticks": NaN}',
        '{"host": "x", "boot_id": "y", "pid": 1e400, "process_start_ticks": 1}',
        '{"host": "x", "boot_id": "y", "pid": true, "process_start_ticks": 1}',
        '{"host": "\\u001b[2J", "boot_id": "y", "pid": 1, "process_start_ticks": 1}',
        '{"host": ["x"], "boot_id": "y", "pid": 1, "process_start_ticks": 1}',
        "\x00" * 4096,
        '{"host": "' + "x" * 100_000,
    ],
    ids=lambda content: content[:30].encode().hex(),
)
def test_an_owner_that_cannot_be_read_is_somebody(tmp_path, content):
    """Some of these ended whoever looked at the store with a traceback (RecursionError,
    OverflowError)."""
    path = tmp_path / LOCK_FILE_NAME
    path.write_text(content)
    watch = Watch(str(tmp_path))
    assert not watch.is_owned, "nobody has locked it"
    watch.close()
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        watch = Watch(str(tmp_path))
        assert watch.is_owned and watch.owner is None
        watch.close()
        with pytest.raises(ConfigError, match="is in use by another process"):
            OwnerLock.acquire(str(tmp_path))
    OwnerLock.acquire(str(tmp_path)).release()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["data.bin", "member.json", "manifest.0", "manifest.1.tmp"])
def test_a_store_waits_for_no_pipe_and_follows_no_link(tmp_path, name, kind):
    """A pipe under the name of a temporary file would have kept the first commit waiting."""
    NvmeStore(str(tmp_path), 1 << 20).close()
    path = tmp_path / "rank-00000" / name
    if path.exists():
        path.unlink()
    victim = tmp_path / "elsewhere.txt"
    victim.write_text("precious")
    _put_in_place(kind, path, victim)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=rf"{name} exists and was not made by Headrace"):
            NvmeStore(str(tmp_path), 1 << 20, resume=resume)
    assert victim.read_text() == "precious"


def test_who_only_reads_is_not_called_an_owner(tmp_path):
    """`delete` during `verify` advised to delete owner.lock if that job was certainly gone."""
    OwnerLock.acquire(str(tmp_path)).release()
    watch = Watch(str(tmp_path))
    with pytest.raises(ConfigError, match=r"is being read; try again when that is done$"):
        OwnerLock.acquire(str(tmp_path))
    watch.close()
    OwnerLock.acquire(str(tmp_path)).release()


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, StorageError), (errno.EACCES, ConfigError)]
)
def test_a_full_disk_is_no_wrong_choice_of_a_directory(tmp_path, monkeypatch, code, kind):
    """It ended with the advice to choose a directory this user can write to."""

    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("offload.nvme.directory.os.mkdir", fail)
    with pytest.raises(kind, match=errno.errorcode[code]):
        lock_directory(str(tmp_path / "new" / "rank-00000"))
