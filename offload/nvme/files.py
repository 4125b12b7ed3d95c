"""The seams between the store and the operating system: data files, and small files and names.

`DirectoryFiles` is what manifests need: whole small files, names, and what makes each durable.
`StorageFile` is the least a store needs; each of its transfers is one system call that moves pieces
of memory from or to one place in the file. It may be short, so that tests put faults below the code
that completes short transfers (`offload/testing_storage.py`). `read_fully` and `write_fully`
complete them or raise a StorageError that names path, offset and both byte counts.

Invariants: no file is opened or closed per transfer; nothing here retries an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ops.errors import StorageError
from ops.units import round_up

PREALLOCATE_STEP_BYTES_MIN = 1 << 20
PREALLOCATE_STEP_BYTES_MAX = 256 << 20
BUFFERS_MAX = 1024  # IOV_MAX of Linux: more in one system call are refused

Buffers = Sequence[memoryview]
"""Pieces of memory that lie side by side in the file; with direct I/O each is aligned."""


class StorageFile(Protocol):
    """A file of bytes. Any thread may call, several at once; transfers block until done.

    All methods but `path` raise OSError as the system call does.
    """

    @property
    def path(self) -> str:
        """Where the file is, for messages."""
        ...

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        """Fill `buffers` in turn from byte `offset`; returns the bytes read, 0 at the end."""
        ...

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        """Write `buffers` one behind the other at byte `offset`; returns the bytes written."""
        ...

    def sync(self) -> None:
        """Return once all written data is durable (fdatasync)."""
        ...

    def truncate(self, nbytes: int) -> None:
        """Make the file `nbytes` long; new bytes are zero and take no room yet."""
        ...

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve room on the disk for a range (fallocate)."""
        ...

    def close(self) -> None:
        """Close the file; must be the last call."""
        ...


OpenFile = Callable[[str, bool], StorageFile]
"""Opens (path, direct) for reading and writing, creating the file if needed."""


class OsFile:
    """A `StorageFile` of the operating system; its transfers release the interpreter lock."""

    def __init__(self, path: str, direct: bool) -> None:
        """Open or create `path`; with `direct`, past the page cache. Raises as `open_plain`."""
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._fd = open_plain(path, flags)

    @property
    def path(self) -> str:
        return self._path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        return os.preadv(self._fd, buffers[:BUFFERS_MAX], offset)

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        return os.pwritev(self._fd, buffers[:BUFFERS_MAX], offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def allocate(self, offset: int, nbytes: int) -> None:
        # Not os.posix_fallocate: where the file system has none, glibc writes every block instead.
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(self._fd, 0, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
        if done != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self._path)

    def close(self) -> None:
        os.close(self._fd)


def open_plain(path: str, flags: int, mode: int = 0o600) -> int:
    """`os.open` of a file of a store: never through a link, and nothing but a plain file.

    Does not wait for the other end of a pipe. Raises OSError, which says so where something else
    has the name.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        problem = _why_not_plain(path)
        if problem is not None:
            raise OSError(errno.EINVAL, problem, path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return fd


def _why_not_plain(path: str) -> str | None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return "it is a link, which is not followed"
    return None if stat.S_ISREG(mode) else "it is no plain file"


def open_os_file(path: str, direct: bool) -> StorageFile:
    """The production `OpenFile`."""
    return OsFile(path, direct)


def slice_buffers(buffers: Buffers, start: int, stop: int) -> list[memoryview]:
    """Bytes `[start, stop)` of `buffers`, seen as one run; empty pieces are left out."""
    pieces = []
    for buffer in buffers:
        piece = buffer[max(start, 0) : max(stop, 0)]
        if piece.nbytes:
            pieces.append(piece)
        start -= buffer.nbytes
        stop -= buffer.nbytes
    return pieces


def read_fully(
    file: StorageFile,
    buffers: Buffers,
    offset: int,
    *,
    block: str | None = None,
    io_alignment_bytes: int = 1,
) -> None:
    """Fill `buffers` in turn from byte `offset`; blocks.

    After a short read it goes on at the last aligned byte it has. Raises StorageError when the call
    fails or the file ends too early.
    """
    _transfer_fully(file.readv_into, "read", file, buffers, offset, block, io_alignment_bytes)


def write_fully(
    file: StorageFile,
    buffers: Buffers,
    offset: int,
    *,
    block: str | None = None,
    io_alignment_bytes: int = 1,
) -> None:
    """Write all of `buffers` at byte `offset`; blocks; raises StorageError as `read_fully` does."""
    _transfer_fully(file.writev_from, "write", file, buffers, offset, block, io_alignment_bytes)


def _transfer_fully(
    call: Callable[[Buffers, int], int],
    verb: str,
    file: StorageFile,
    buffers: Buffers,
    offset: int,
    block: str | None,
    io_alignment_bytes: int,
) -> None:
    wanted_bytes = sum(buffer.nbytes for buffer in buffers)
    rest, done_bytes = buffers, 0
    while done_bytes < wanted_bytes:
        try:
            moved_bytes = call(rest, offset + done_bytes)
        except OSError as error:
            raise transfer_error(
                f"{verb} failed: {describe_os_error(error)}",
                file.path,
                offset,
                block,
                wanted_bytes,
                done_bytes,
            ) from error
        reached = done_bytes + moved_bytes
        if reached >= wanted_bytes:
            return
        resume = reached - reached % io_alignment_bytes
        if resume <= done_bytes:
            # No progress: the end of the file, or less than one unit of direct I/O.
            reason = "file ends too early" if verb == "read" else "no progress"
            raise transfer_error(
                f"short {verb}: {reason}", file.path, offset, block, wanted_bytes, reached
            )
        rest = slice_buffers(buffers, resume, wanted_bytes)
        done_bytes = resume


def transfer_error(
    message: str, path: str, offset: int, block: str | None, wanted_bytes: int, done_bytes: int
) -> StorageError:
    """A StorageError that names everything about a transfer."""
    return StorageError(
        message,
        path=path,
        offset=offset,
        block=block,
        wanted_bytes=wanted_bytes,
        done_bytes=done_bytes,
    )


DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of a disk that is full or broken: no other choice of a path was wrong."""


def describe_os_error(error: OSError) -> str:
    """`ENOSPC: No space left on device`."""
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{code}: {error.strerror}"


class Preallocator:
    """Reserves disk room in steps ahead of the writes, so that they neither extend nor fragment.

    Any worker may call; it may block for one fallocate.
    """

    def __init__(self, file: StorageFile, start: int, end: int) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._reserved_to = start
        self._end = end
        self._supported = True

    def ensure(self, end: int, block: str, offset: int, nbytes: int) -> None:
        """Reserve room up to byte `end` of the file, for `nbytes` of `block` at `offset`.

        Raises StorageError when the disk is full. A file system without fallocate is left alone:
        there, the write itself reports a full disk.
        """
        if end <= self._reserved_to or not self._supported:
            return
        with self._lock:
            start = self._reserved_to
            if end <= start or not self._supported:
                return
            # In proportion to what is there, so that a small store stays small on the disk.
            step = min(max(end // 4, PREALLOCATE_STEP_BYTES_MIN), PREALLOCATE_STEP_BYTES_MAX)
            target = min(round_up(end + step, PREALLOCATE_STEP_BYTES_MIN), self._end)
            try:
                self._reserve(start, target, end)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    self._supported = False
                    return
                raise transfer_error(
                    f"cannot reserve disk space: {describe_os_error(error)}",
                    self._file.path,
                    offset,
                    block,
                    nbytes,
                    0,
                ) from error

    def _reserve(self, start: int, target: int, needed: int) -> None:
        try:
            self._file.allocate(start, target - start)
        except OSError as error:
            if error.errno != errno.ENOSPC or needed == target:
                raise
            target = needed  # the step does not fit, the block itself may
            self._file.allocate(start, target - start)
        self._reserved_to = target


class DirectoryFiles(Protocol):
    """Small files and names in a store's directories; every step of a commit is one call here.

    Any thread may call; all block until done and raise OSError as the system call does. A write is
    durable only after `sync_file`, a name (made, changed or removed) only after `sync_directory`.
    """

    def write_file(self, path: str, data: bytes) -> None:
        """Make or overwrite the file `path`; never through a link."""
        ...

    def sync_file(self, path: str) -> None:
        """Return once the content of `path` is durable (fsync)."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give the file `old` the name `new`, replacing what had it, at once or not at all."""
        ...

    def sync_directory(self, directory: str) -> None:
        """Return once the names in `directory` are durable (fsync)."""
        ...

    def unlink(self, path: str) -> None:
        """Remove the name `path`."""
        ...

    def list(self, directory: str) -> dict[str, int]:
        """The regular files in `directory`: name to length in bytes."""
        ...

    def names(self, directory: str) -> Sequence[str]:
        """All names in `directory`, whatever has them."""
        ...

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        """The content of `path`, at most `nbytes_max` of it; never through a link."""
        ...


class OsDirectoryFiles:
    """The `DirectoryFiles` of the operating system."""

    def write_file(self, path: str, data: bytes) -> None:
        fd = open_plain(path, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(fd, "wb", buffering=0) as file:
            file.truncate(0)
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]

    def sync_file(self, path: str) -> None:
        self._sync(open_plain(path, os.O_RDONLY))

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def sync_directory(self, directory: str) -> None:
        self._sync(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def list(self, directory: str) -> dict[str, int]:
        found = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def names(self, directory: str) -> Sequence[str]:
        return os.listdir(directory)

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            return file.read(min(nbytes, nbytes_max))  # allocates as much as it is told

    def _sync(self, fd: int) -> None:
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
