"""The directory of an export: claimed, filled, published at once or not at all.

1. The marker `model.safetensors.index.json.unfinished` is made durable; nothing of ours is there
   without it, so whoever finds it knows that the rest is not whole.
2. Data files are written under names with `.partial` and synced (`moe/weights/writing.py`), then
   get their names; the small files are written and synced.
3. The marker's content becomes the index, synced.
4. The marker is renamed to `model.safetensors.index.json`; the directory is synced.

A crash before 4 leaves the marker: no reader takes the rest for weights, and the next export into
the directory removes what this one has left.

The marker is locked while its owner lives. What is there counts as left over only once the lock is
held on the file that has the marker's name now, and only as it is listed after that: another export
may have published between any two steps before. An index under its final name is never removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from moe.weights.reading import MARKER_SUFFIX
from offload.nvme.directory import sync_directory
from offload.nvme.files import DISK_FAULTS, describe_os_error
from ops.errors import ConfigError, HeadraceError, StorageError
from ops.units import format_bytes

STEM = "model"
FACTS_FILE = "headrace.json"
CONFIG_FILE = "config.json"
_MARKER = STEM + MARKER_SUFFIX
_INDEX = _MARKER.removesuffix(".unfinished")
_PROBE = ".probe-"
"""What the file begins with that `choose_access` makes and removes."""

_OURS = re.compile(
    r"(model|exp_avg|exp_avg_sq)(-\d{5,}-of-\d{5,}\.safetensors(\.partial)?"
    r"|\.safetensors\.index\.json)|headrace\.json|config\.json"
)


class ExportDirectory:
    """A directory that this process fills."""

    def __init__(self, path: str) -> None:
        """Make and claim `path`, and remove what an unfinished export has left in it.

        Raises ConfigError when something else is there, or another export goes on; StorageError.
        """
        self.path = path
        self._marker = os.path.join(path, _MARKER)
        try:
            os.makedirs(path, exist_ok=True)
            self._fd = self._claim()
        except OSError as error:
            raise out_error(path, error) from error
        try:
            self._clear()
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self) -> int:
        """The marker's file, locked; raises ConfigError and OSError."""
        while True:
            names = os.listdir(self.path)
            if names and _MARKER not in names:
                raise self._occupied()
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._marker, flags, 0o666)
            try:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                        raise
                    raise ConfigError(
                        f"--out {self.path}: another export is writing there"
                    ) from None
                if _is_named(fd, self._marker):
                    claimed, fd = fd, -1
                    return claimed
            finally:
                if fd >= 0:
                    os.close(fd)
            # Whoever owned it has published it, or given it up, since it was opened.

    def _clear(self) -> None:
        """Remove what an unfinished export has left; refuse a finished one, and anything else."""
        try:
            names = set(os.listdir(self.path)) - {_MARKER}
            ours = {name for name in names if _OURS.fullmatch(name) or name.startswith(_PROBE)}
            if _INDEX in names or names - ours:
                if _INDEX in names or not ours:  # the marker marks nothing: it is of this moment
                    os.unlink(self._marker)
                raise self._occupied()
            for name in ours:
                os.unlink(os.path.join(self.path, name))
            self._sync()
        except OSError as error:
            raise StorageError(describe_os_error(error), path=error.filename) from error

    def _occupied(self) -> ConfigError:
        return ConfigError(
            f"--out {self.path} is not empty: choose an empty directory, or one that is not there "
            "yet"
        )

    def _sync(self) -> None:
        os.fsync(self._fd)
        sync_directory(self.path)

    def __enter__(self) -> ExportDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the claim up; without `publish` what is there stays marked as unfinished."""
        os.close(self._fd)

    def require_room(self, nbytes: int) -> None:
        """Raise StorageError unless the file system has room for so many bytes."""
        try:
            status = os.statvfs(self.path)
        except OSError as error:
            raise out_error(self.path, error) from error
        require_room(self.path, nbytes, status.f_bavail * status.f_frsize)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """A small file, durable; raises StorageError."""
        path = os.path.join(self.path, name)
        try:
            with open(path, "wb") as file:
                file.write(json_bytes(data))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(describe_os_error(error), path=path) from error

    def publish(self, index: Mapping[str, Any]) -> None:
        """Steps 3 and 4: everything else is there. Raises StorageError."""
        try:
            sync_directory(self.path)
            data = json_bytes(index)
            os.ftruncate(self._fd, 0)
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], written)
            os.fsync(self._fd)
            if not _is_named(self._fd, self._marker):
                raise StorageError("the mark of this export was taken away", path=self._marker)
            os.rename(self._marker, os.path.join(self.path, _INDEX))
            sync_directory(self.path)
        except OSError as error:
            raise StorageError(describe_os_error(error), path=self._marker) from error


def _is_named(fd: int, path: str) -> bool:
    """Whether `path` is still the name of the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def require_room(path: str, nbytes: int, free_bytes: int) -> None:
    """Raise StorageError unless what is written under `--out path` finds so many bytes free."""
    if free_bytes < nbytes:
        raise StorageError(
            f"--out {path} needs {format_bytes(nbytes)} and has {format_bytes(free_bytes)} free; "
            "free space or choose another directory",
            path=path,
            wanted_bytes=nbytes,
        )


def out_error(path: str, error: OSError) -> HeadraceError:
    """What to raise when `--out` cannot be used: refused, but a full or failing disk is a fault."""
    text = f"--out {path}: {describe_os_error(error)}"
    if error.errno in DISK_FAULTS:
        return StorageError(text, path=error.filename or path)
    return ConfigError(text)


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON as the files of an export hold it: the same bytes for the same data."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
