"""A store's directories: names, ownership, refusals, removal.

Each path has a directory for each rank, so that ranks that share a path never meet. Everything here
runs once, before the first transfer or after the last, and raises ConfigError that names the key
and the path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence

from offload.nvme.files import DISK_FAULTS, DirectoryFiles, describe_os_error
from offload.nvme.hold import remove_holds
from offload.nvme.lock import OwnerLock
from offload.nvme.members import MEMBER_FILE_NAME, TEMPORARY_SUFFIX
from offload.nvme.recovery import slot_index
from ops.checksum import CHUNK_BYTES
from ops.errors import ConfigError, HeadraceError, StorageError
from ops.units import format_bytes

log = logging.getLogger(__name__)

DATA_FILE_NAME = "data.bin"
PUBLISHED_FILE_NAME = "published.json"
"""A rank's copy of the record of commits (`offload/rank_commits.py`)."""
_RANK_NAME = re.compile(r"rank-[0-9]{5}")
REQUEST_BYTES_MAX = 8 << 20


def check_settings(
    capacity_bytes: int, workers: int, request_bytes: int, transfers_max: int, keep_commits: int
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
    if keep_commits < 1:
        raise ConfigError(f"keep_commits: {keep_commits}; must be at least 1")


def rank_directory(path: str, rank: int) -> str:
    """Where `rank` keeps its part of a store under `path`."""
    return os.path.join(path, f"rank-{rank:05d}")


def ranks_under(path: str) -> list[int]:
    """The ranks that have a directory under `path`, ascending; none where it cannot be listed."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(int(name[len("rank-") :]) for name in names if _RANK_NAME.fullmatch(name))


def link_problem(directory: str) -> str | None:
    """A sentence if the `directory` of a rank is a link; those above it may be links."""
    if os.path.islink(directory):
        return f"{directory} is a link, which is not followed"
    return None


def lock_directory(directory: str) -> OwnerLock:
    """Make `directory` if needed and become its owner, or raise saying why not (`path_error`)."""
    problem = link_problem(directory)
    if problem is not None:
        raise ConfigError(f"offload.nvme.path: {problem}; only the path itself may be a link")
    try:
        try:
            lock = _make_and_lock(directory)
        except FileNotFoundError:  # its last owner deleted it between the two steps
            lock = _make_and_lock(directory)
    except OSError as error:
        raise path_error(directory, error) from error
    try:
        _refuse_foreign_files(directory, lock.existed)
        if not lock.existed:
            # A crash that kept the files and lost the lock would make them look like foreign ones.
            sync_directory(directory)
    except BaseException:
        lock.release(delete=not lock.existed)
        raise
    if lock.previous is not None:
        log.warning("%s: taken over from dead %s", directory, lock.previous)
    return lock


def _make_and_lock(directory: str) -> OwnerLock:
    missing = []
    while directory and not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank's, or a file: acquire will tell
            os.mkdir(new)
        sync_directory(os.path.dirname(new) or ".")
    return OwnerLock.acquire(missing[0] if missing else directory)


def sync_directory(directory: str) -> None:
    """Make the names in `directory` durable; raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_foreign_files(directory: str, used_before: bool) -> None:
    """Raise ConfigError when a name that a store would use belongs to what no store has made.

    A store leaves its files only together with its lock file; a link could lead anywhere.
    """
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        own = (DATA_FILE_NAME, MEMBER_FILE_NAME, PUBLISHED_FILE_NAME)
        is_ours = name in own or slot_index(name) is not None
        is_ours = is_ours or is_temporary(name)
        if is_ours and not (used_before and stat.S_ISREG(os.lstat(path).st_mode)):
            raise ConfigError(
                f"offload.nvme.path: {path} exists and was not made by Headrace, so it is not "
                "overwritten; choose an empty directory"
            )


def path_error(directory: str, error: OSError) -> HeadraceError:
    """What ends the use of a directory: a ConfigError, or a StorageError where the disk is full or
    broken and no other choice was better."""
    if error.errno in DISK_FAULTS:
        return StorageError(describe_os_error(error), path=directory)
    return ConfigError(
        f"offload.nvme.path: {directory} cannot be used: {describe_os_error(error)}; "
        "choose a directory this user can write to"
    )


def check_free_space(directories: Sequence[str], required_bytes: int) -> None:
    """Raise ConfigError when the directories' file systems have less room than this in all.

    What data files of earlier owners hold counts as free: it is reused or thrown away.
    """
    free_bytes = dict.fromkeys((os.stat(x).st_dev for x in directories), 0)
    for directory in directories:
        status = os.statvfs(directory)
        free_bytes[os.stat(directory).st_dev] = status.f_bavail * status.f_frsize
    total_bytes = sum(free_bytes.values())
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            total_bytes += os.stat(os.path.join(directory, DATA_FILE_NAME)).st_blocks * 512
    if total_bytes < required_bytes:
        raise ConfigError(
            f"offload.nvme.capacity: {', '.join(directories)} needs {required_bytes} bytes "
            f"({format_bytes(required_bytes)}) and has {total_bytes} free "
            f"({format_bytes(total_bytes)}); free space, choose another path, or raise "
            "offload.host.capacity so that less is cold"
        )


def free_bytes_at(directory: str) -> int:
    """Room for a data file in `directory`: what is free there, and what its old one has."""
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    with contextlib.suppress(FileNotFoundError):
        free_bytes += os.stat(os.path.join(directory, DATA_FILE_NAME)).st_blocks * 512
    return free_bytes


def delete_store_files(directories: Sequence[str], files: DirectoryFiles) -> None:
    """Remove what stores make, but for the locks; commits first, as a crash may come between."""
    for directory in directories:
        names = files.list(directory)
        remove_files(directory, filter(is_commit, names), files)
        files.sync_directory(directory)
        own = (DATA_FILE_NAME, MEMBER_FILE_NAME)
        remove_files(directory, (x for x in names if x in own or is_temporary(x)), files)
        remove_holds(directory, names, files)


def remove_files(directory: str, names: Iterable[str], files: DirectoryFiles) -> None:
    """Remove these names from `directory`; raises OSError."""
    for name in names:
        files.unlink(os.path.join(directory, name))


def is_commit(name: str) -> bool:
    """Whether a file says that something is committed: a manifest, or the copy of the record."""
    return name == PUBLISHED_FILE_NAME or slot_index(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a crash between two steps of replacing a small file has left it."""
    stem = name.removesuffix(TEMPORARY_SUFFIX)
    return stem != name and (stem == MEMBER_FILE_NAME or is_commit(stem))
