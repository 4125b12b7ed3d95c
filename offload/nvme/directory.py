"""Opening a store's directory: refuse early, with the key, the path and both numbers.

Everything here runs once, before the first transfer, and raises ConfigError; nothing here is on the
path of a block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat

from offload.nvme.aligned import AccessMode, choose_access
from offload.nvme.files import OpenFile, StorageFile, describe_os_error
from offload.nvme.lock import OwnerLock
from ops.checksum import CHUNK_BYTES
from ops.errors import ConfigError
from ops.units import format_bytes, round_up

log = logging.getLogger(__name__)

DATA_FILE_NAME = "data.bin"
REQUEST_BYTES_MAX = 8 << 20


def check_settings(
    capacity_bytes: int, workers: int, request_bytes: int, transfers_max: int
) -> None:
    """Raise ConfigError for sizes and counts no store can have."""
    if capacity_bytes < 1:
        raise ConfigError(f"offload.nvme.capacity: {capacity_bytes} bytes; must be at least 1")
    if workers < 1:
        raise ConfigError(f"offload.io_workers: {workers}; must be at least 1")
    if request_bytes % CHUNK_BYTES or not CHUNK_BYTES <= request_bytes <= REQUEST_BYTES_MAX:
        raise ConfigError(
            f"offload.io_request_size: {request_bytes}; must be a multiple of {CHUNK_BYTES} "
            f"from {CHUNK_BYTES} to {REQUEST_BYTES_MAX}"
        )
    if transfers_max < 1:
        raise ConfigError(f"transfers_max: {transfers_max}; must be at least 1")


def lock_directory(directory: str) -> OwnerLock:
    """Make `directory` if needed and become its owner, or raise ConfigError saying why not."""
    try:
        os.makedirs(directory, exist_ok=True)
        lock = OwnerLock.acquire(directory)
    except OSError as error:
        raise path_error(directory, error) from error
    try:
        _refuse_foreign_data(directory, lock.existed)
    except ConfigError:
        lock.release(delete=not lock.existed)
        raise
    if lock.previous is not None:
        log.warning("%s: reclaimed from dead %s", directory, lock.previous)
    return lock


def _refuse_foreign_data(directory: str, used_before: bool) -> None:
    """Raise ConfigError when the data file's name belongs to something that no store has made.

    A store leaves its data file only together with its lock file; a link could lead anywhere.
    """
    path = os.path.join(directory, DATA_FILE_NAME)
    if not os.path.lexists(path):
        return
    if not stat.S_ISREG(os.lstat(path).st_mode) or not used_before:
        raise ConfigError(
            f"offload.nvme.path: {path} exists and was not made by Headrace, so it is not "
            "overwritten; choose an empty directory"
        )


def open_fresh_data_file(
    directory: str,
    *,
    capacity_bytes: int,
    required_bytes: int,
    base_offset: int,
    access: AccessMode | None,
    open_file: OpenFile,
) -> tuple[StorageFile, AccessMode, int]:
    """An empty data file as long as the store can get, its access mode and its length in bytes.

    What an earlier owner left in it is thrown away. The caller holds the directory's lock. Raises
    ConfigError when the path cannot be used or has fewer than `required_bytes` free.
    """
    path = os.path.join(directory, DATA_FILE_NAME)
    try:
        access = access or choose_access(directory)
        if base_offset % access.alignment_bytes:
            raise ValueError(f"base offset {base_offset} is not a multiple of {access}")
        _check_free_space(directory, path, required_bytes)
        file = open_file(path, access.direct)
        try:
            file_bytes = round_up(base_offset + capacity_bytes, access.alignment_bytes)
            file.truncate(0)
            file.truncate(file_bytes)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise path_error(directory, error) from error
    return file, access, file_bytes


def delete_data_file(directory: str) -> None:
    """Remove the data file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, DATA_FILE_NAME))


def path_error(directory: str, error: OSError) -> ConfigError:
    """The refusal of a directory that cannot be used."""
    return ConfigError(
        f"offload.nvme.path: {directory} cannot be used: {describe_os_error(error)}; "
        "choose a directory this user can write to"
    )


def _check_free_space(directory: str, data_path: str, required_bytes: int) -> None:
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    with contextlib.suppress(FileNotFoundError):
        free_bytes += os.stat(data_path).st_blocks * 512  # left by an earlier owner, thrown away
    if free_bytes < required_bytes:
        raise ConfigError(
            f"offload.nvme.capacity: {directory} needs {required_bytes} bytes "
            f"({format_bytes(required_bytes)}) and has {free_bytes} free "
            f"({format_bytes(free_bytes)}); free space, choose another path, or raise "
            "offload.host.capacity so that less is cold"
        )
