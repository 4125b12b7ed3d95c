"""One live owner per store directory: `owner.lock`.

The file holds JSON (host, boot id, pid, start of the process) and is locked with flock for as long
as the owner lives, so the lock of a killed process is free at once. What the file says decides
where flock cannot: on file systems without it, and between hosts that do not share locks.

A lock that was left behind is taken over when its owner is known to be dead: flock shows it on this
boot of this machine, a new boot id on this host, or the process table. A lock of another host is
never taken over; the message says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass

from offload.nvme.files import open_plain
from ops.errors import ConfigError

LOCK_FILE_NAME = "owner.lock"
_LOCK_BYTES_MAX = 4096
_TEXT_MAX = 256  # characters of a host's name, of a boot id
_NUMBER_MAX = (1 << 63) - 1
_TEXTS = ("host", "boot_id")
_NUMBERS = ("pid", "process_start_ticks")


@dataclass(frozen=True)
class Owner:
    """Who holds a directory. `process_start_ticks` tells two processes of one pid apart."""

    host: str
    boot_id: str
    pid: int
    process_start_ticks: int

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def this_process() -> Owner:
    """The calling process as an owner."""
    pid = os.getpid()
    return Owner(socket.gethostname(), _boot_id(), pid, _process_start_ticks(pid) or 0)


class OwnerLock:
    """The held lock of a directory; `release` gives it up."""

    def __init__(self, path: str, fd: int, previous: Owner | None, existed: bool) -> None:
        self.path = path
        self.previous = previous
        self.existed = existed
        self._fd = fd

    @classmethod
    def acquire(cls, directory: str) -> OwnerLock:
        """Take the lock of `directory`, or raise ConfigError that says who holds it.

        `previous` of the result is the dead owner whose lock was taken over, if any; `existed` says
        whether a store had used the directory before. Raises ConfigError, too, where a link or
        something else has the name of the lock file: nothing is written through it. Raises OSError
        when the lock file cannot be made. Does not wait for the holder.
        """
        path = os.path.join(directory, LOCK_FILE_NAME)
        while True:
            existed = os.path.lexists(path)
            fd = _open(path)
            try:
                locked_here = _try_flock(fd, path)
                if locked_here and not _same_file(fd, path):
                    continue  # a clean close deleted it between our open and our flock
                previous = _read_owner(fd)
                if previous is not None and not _is_dead(previous, locked_here):
                    raise ConfigError(_refusal(path, previous))
                _write_owner(fd, this_process())
                lock, fd = cls(path, fd, previous, existed), -1
                return lock
            finally:
                if fd >= 0:
                    os.close(fd)

    def release(self, delete: bool = False) -> None:
        """Mark the directory as cleanly left, or delete the lock file; again: nothing."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # a full or broken disk must not keep us from leaving
            if delete:
                os.unlink(self.path)
            else:
                os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1


class Watch:
    """A look at a directory without owning it: its live `owner`, or nobody can become one.

    While nobody owns the directory, a shared lock keeps new owners out until `close`, so that what
    is looked at stays as it is.
    """

    def __init__(self, directory: str) -> None:
        """Raises OSError when there is a lock file that cannot be opened. Does not wait."""
        self.owner: Owner | None = None
        self.is_owned = False
        self._fd = -1
        path = os.path.join(directory, LOCK_FILE_NAME)
        try:
            self._fd = open_plain(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        locked_here = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            locked_here = False
            self.is_owned = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        owner = _read_owner(self._fd)
        if owner is not None and (self.is_owned or not _is_dead(owner, locked_here)):
            self.owner, self.is_owned = owner, True

    def close(self) -> None:
        """Let owners in again; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _open(path: str) -> int:
    try:
        return open_plain(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ConfigError(
                f"offload.nvme.path: {path} cannot be used: {error.strerror}; remove it or choose "
                "another path"
            ) from None
        raise


def _try_flock(fd: int, path: str) -> bool:
    """True when the lock is ours, False where flock does not exist; ConfigError when it is held."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            if _is_only_read(fd):
                raise ConfigError(
                    f"offload.nvme.path: {os.path.dirname(path)} is being read; try again when "
                    "that is done"
                ) from None
            raise ConfigError(_refusal(path, _read_owner(fd))) from None
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise
    return True


def _is_only_read(fd: int) -> bool:
    """Whether who keeps owners out looks (`Watch`) and owns nothing."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _refusal(path: str, owner: Owner | None) -> str:
    holder = "another process" if owner is None else str(owner)
    return (
        f"offload.nvme.path: {os.path.dirname(path)} is in use by {holder}; stop that job or "
        f"choose another path (if that job is certainly gone, delete {path})"
    )


def _is_dead(owner: Owner, locked_here: bool) -> bool:
    if owner.boot_id == _boot_id():
        if locked_here:
            return True  # the kernel that ran the owner has dropped its flock
        return _process_start_ticks(owner.pid) != owner.process_start_ticks
    return owner.host == socket.gethostname()  # this machine has rebooted since


def _read_owner(fd: int) -> Owner | None:
    """The owner the file names; None when it was left cleanly or holds no owner (torn write).

    Reads 4096 bytes and believes none of them: names are short and printable, numbers are numbers.
    """
    try:
        fields = json.loads(os.pread(fd, _LOCK_BYTES_MAX, 0))
        texts, numbers = [fields[x] for x in _TEXTS], [fields[x] for x in _NUMBERS]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    sound = all(type(x) is str and len(x) <= _TEXT_MAX and x.isprintable() for x in texts)
    if not sound or not all(type(x) is int and 0 <= x <= _NUMBER_MAX for x in numbers):
        return None
    return Owner(*texts, *numbers)


def _write_owner(fd: int, owner: Owner) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(asdict(owner)).encode(), 0)
    os.fsync(fd)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _process_start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of process `pid`; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command name, in parentheses, may hold spaces: count fields behind it.
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
