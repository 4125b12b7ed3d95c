"""The directory of an export: claimed, filled, published at once or not at all.

1. The marker `model.safetensors.index.json.unfinished` is made durable; nothing of ours is there
   without it, so whoever finds it knows that the rest is not whole.
2. Data files are written under names with `.partial` and synced (`moe/weights/writing.py`), then
   get their names; the small files are written and synced.
3. The marker's content becomes the index, synced.
4. The marker is renamed to `model.safetensors.index.json`; the directory is synced.

A crash before 4 leaves the marker: no reader takes the rest for weights, and the next export into
the directory removes what this one has left. The marker is locked while its owner lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from moe.weights.reading import MARKER_SUFFIX
from offload.nvme.directory import sync_directory
from offload.nvme.files import describe_os_error
from ops.errors import ConfigError, StorageError
from ops.units import format_bytes

STEM = "model"
FACTS_FILE = "headrace.json"
CONFIG_FILE = "config.json"
_MARKER = STEM + MARKER_SUFFIX
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
            names = os.listdir(path)
            if names and _MARKER not in names:
                raise ConfigError(
                    f"--out {path} is not empty: choose an empty directory, or one that is not "
                    "there yet"
                )
            self._fd = os.open(self._marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ConfigError(f"--out {path}: {describe_os_error(error)}") from error
        try:
            self._claim(names)
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self, names: list[str]) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--out {self.path}: another export is writing there") from None
        try:
            for name in names:
                if _OURS.fullmatch(name):
                    os.unlink(os.path.join(self.path, name))
            self._sync()
        except OSError as error:
            raise StorageError(describe_os_error(error), path=error.filename) from error

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
        """Raise ConfigError unless the file system has room for so many bytes."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise ConfigError(
                f"--out {self.path} needs {format_bytes(nbytes)} and has {format_bytes(free)} free"
            )

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
            os.rename(self._marker, self._marker.removesuffix(".unfinished"))
            sync_directory(self.path)
        except OSError as error:
            raise StorageError(describe_os_error(error), path=self._marker) from error


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON as the files of an export hold it: the same bytes for the same data."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
