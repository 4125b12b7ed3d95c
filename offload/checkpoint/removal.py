"""Deleting a checkpoint: the store or the copy under its paths, as a whole.

The copies of the record go first, then the record, then every manifest, durably, before any data:
until the record is gone all of it is whole, what is half deleted is never read as live, and
deleting it again goes on. Nothing is followed through links, and only what stores and copies make
is removed.

A store that somebody owns or reads is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import ExitStack

from offload.checkpoint.catalog import UNFINISHED_NAME
from offload.nvme.directory import delete_store_files
from offload.nvme.files import OsDirectoryFiles, describe_os_error
from offload.nvme.hold import held_generations
from offload.nvme.inspect import find_stores
from offload.nvme.lock import OwnerLock
from offload.nvme.members import read_member
from offload.rank_commits import RecordFile, published_copy
from ops.errors import ConfigError, StorageError

_FILES = OsDirectoryFiles()


def delete_checkpoint(paths: Sequence[str]) -> None:
    """Remove every commit under `paths`, all ranks', and their data; blocks until it is done.

    Raises ConfigError, and changes nothing, when there is no checkpoint, when one of its
    directories is not named, is a link, or is in use. Raises StorageError when a file cannot be
    removed; then call it again.
    """
    ranks = find_stores(paths)
    if ranks == [list(paths)]:
        raise ConfigError(f"{paths[0]} is the directory of one rank; name the one above it")
    directories = [directory for found in ranks for directory in found]
    with ExitStack() as stack:
        locks = [_lock(directory, stack) for directory in directories]
        for found in ranks:
            _check(found)
        try:
            for found in ranks:
                published_copy(found[0]).remove()
            RecordFile(paths[0]).remove()
            RecordFile(paths[0], name=UNFINISHED_NAME).remove()
            for found in ranks:
                delete_store_files(found, _FILES)
            for lock in locks:
                lock.release(delete=True)
            for directory in (*directories, *paths):
                with contextlib.suppress(OSError):  # something else is in it
                    os.rmdir(directory)
        except OSError as error:
            raise StorageError(
                f"cannot be deleted: {describe_os_error(error)}", path=error.filename
            ) from error


def _lock(directory: str, stack: ExitStack) -> OwnerLock:
    """The lock of `directory`, released again at the end of `stack`."""
    if os.path.islink(directory) or not os.path.isdir(directory):
        raise ConfigError(f"{directory} is no directory, so nothing is deleted")
    try:
        lock = OwnerLock.acquire(directory)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("offload.nvme.path: ")) from None
    except OSError as error:
        raise ConfigError(f"{directory}: {describe_os_error(error)}") from error
    stack.callback(lock.release, delete=not lock.existed)
    return lock


def _check(directories: list[str]) -> None:
    """Refuse what is read now, and directories that are not all of one store."""
    first = directories[0]
    held = held_generations(first, _FILES)
    if held:
        raise ConfigError(f"{first}: commit {min(held)} is being read; try again when that is done")
    member = read_member(first, _FILES)
    if member is not None and (member.index, member.count) != (0, len(directories)):
        raise ConfigError(
            f"{first} is directory {member.index} of the {member.count} of its store; name all of "
            "its paths, in order"
        )
