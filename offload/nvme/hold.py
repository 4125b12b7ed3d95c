"""Holds: how a reader keeps a commit of a store that others go on writing.

A reader makes a file `reading.GENERATION.RANDOM` in the store's first directory, locks it with
flock and only then reads the manifests, to see that its commit is still retained. The store
publishes a commit the other way round: it makes the new manifest durable (and, with several ranks,
the record of all) and only then looks for holds on what it is about to free. So one of the two
always sees the other: a reader whose file came too late to be seen finds a manifest that no longer
retains its commit.

A held commit keeps its extents in the store's memory alone. No manifest lists it as retained,
because its extents may be given up without a new one: a write that finds no room breaks the hold.
Breaking removes the file *before* the extents are free, so that a reader whose bytes no longer
verify can tell a broken hold from damage.

Invariants: a hold ends with its reader, whose lock the kernel drops; a file that nobody has locked
is left over and is removed by whoever sees it. Where flock does not exist there are no holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable

from offload.nvme.files import DirectoryFiles, describe_os_error, open_plain

log = logging.getLogger(__name__)

_NAME = re.compile(r"reading\.([1-9][0-9]{0,18})\.[0-9a-f]{16}")
_ATTEMPTS_MAX = 16


def held_generation(name: str) -> int | None:
    """The generation that a hold file of this name is for; None for another file."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


class Hold:
    """A reader's hold on one commit, from `place` to `release`."""

    def __init__(self, path: str, fd: int, generation: int) -> None:
        self.path = path
        self.generation = generation
        self._fd = fd

    @classmethod
    def place(cls, directory: str, generation: int) -> Hold:
        """Hold `generation` of the store whose first directory this is; does not wait.

        The caller has to read the manifests afterwards. Raises OSError where it cannot be done: a
        directory that is read only, a file system without flock.
        """
        for _ in range(_ATTEMPTS_MAX):
            path = os.path.join(directory, f"reading.{generation}.{secrets.token_hex(8)}")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            hold = cls(path, fd, generation)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                hold.release()
                if error.errno != errno.EWOULDBLOCK:
                    raise
                continue  # somebody who took it for a leftover was between our two steps
            if not hold.is_broken:
                return hold
            hold.release()
        raise OSError(errno.EBUSY, "hold files vanish as soon as they are made", directory)

    @property
    def is_broken(self) -> bool:
        """Whether the store has given the commit up: its extents may be written again."""
        try:
            return not os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except OSError:
            return True

    def release(self) -> None:
        """Let the store free the commit; a second call does nothing."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if not self.is_broken:
                os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1


def held_generations(directory: str, files: DirectoryFiles) -> set[int]:
    """The generations that living readers hold; removes what dead ones left. Does not wait.

    A directory that cannot be looked at has none: a reader must not be able to end a run.
    """
    held: set[int] = set()
    try:
        names = list(files.list(directory))
    except OSError as error:
        log.warning("%s: cannot look for readers: %s", directory, describe_os_error(error))
        return held
    for name in names:
        generation = held_generation(name)
        if generation is None:
            continue
        if _is_locked(os.path.join(directory, name), files):
            held.add(generation)
    return held


def break_holds(directory: str, generations: Callable[[int], bool], files: DirectoryFiles) -> None:
    """Remove the hold files of `generations` (a predicate), before their extents are freed."""
    try:
        remove_holds(directory, files.list(directory), files, generations)
    except OSError as error:
        log.warning("%s: a hold was not removed: %s", directory, describe_os_error(error))


def remove_holds(
    directory: str,
    names: Iterable[str],
    files: DirectoryFiles,
    generations: Callable[[int], bool] = lambda generation: True,
) -> None:
    """Remove those of `names` that are hold files of `generations`; raises OSError."""
    for name in names:
        generation = held_generation(name)
        if generation is not None and generations(generation):
            with contextlib.suppress(FileNotFoundError):  # its reader has just released it
                files.unlink(os.path.join(directory, name))


def _is_locked(path: str, files: DirectoryFiles) -> bool:
    """Whether a living reader has the file; if not, removes it under its lock."""
    try:
        fd = open_plain(path, os.O_RDONLY)
    except OSError:
        return os.path.lexists(path)  # another user's: held as long as there is room
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
    else:
        with contextlib.suppress(OSError):
            files.unlink(path)
    finally:
        os.close(fd)
    return False
