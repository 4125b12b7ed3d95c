"""A directory that every rank is about to use, made by one of them.

When hundreds of ranks create one directory on a shared file system, its server answers slowly and
some of them with errors; and what one machine has made, others may not see for seconds, because
they remember that it was not there. So rank 0 makes it, and each of the others asks until it sees
it, reading the parent's entries in between, which refreshes what a network file system remembers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ops.comm.base import World
from ops.errors import StorageError

_PAUSE_MIN_SECONDS = 0.01
_PAUSE_MAX_SECONDS = 1.0
_RANKS_NAMED = 8


@dataclass(frozen=True)
class FileSystem:
    """The calls made here; tests pass a slow one."""

    make: Callable[[Path], None] = lambda path: path.mkdir(parents=True, exist_ok=True)
    sees: Callable[[Path], bool] = lambda path: path.is_dir()
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic


REAL = FileSystem()


def make_shared_directory(
    path: Path, world: World, *, patience_seconds: float = 60.0, files: FileSystem = REAL
) -> None:
    """Create `path` and its parents, and return on every rank once every rank sees it.

    Entered by all ranks of `world` together. Blocks for as long as rank 0 takes to create it and
    then `patience_seconds` at most. Raises StorageError, on all ranks alike, when it cannot be
    created or some ranks do not see it.
    """
    problem = ""
    if world.rank == 0:
        try:
            files.make(path)
        except OSError as error:
            problem = error.strerror or str(error)
    problem = world.all_gather_object(problem)[0]
    if problem:
        raise StorageError(f"the directory cannot be created: {problem}", path=str(path))
    seen = world.all_gather_object(_wait_to_see(path, patience_seconds, files))
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        named = ", ".join(blind[:_RANKS_NAMED]) + (", ..." if len(blind) > _RANKS_NAMED else "")
        raise StorageError(
            f"rank 0 has created the directory, but {len(blind)} of {world.size} ranks do not see "
            f"it after {patience_seconds:g} s (ranks {named}): it has to be on a file system that "
            "all machines share, under the same path",
            path=str(path),
        )


def _wait_to_see(path: Path, patience_seconds: float, files: FileSystem) -> bool:
    deadline = files.now() + patience_seconds
    pause = _PAUSE_MIN_SECONDS
    while not files.sees(path):
        left = deadline - files.now()
        if left <= 0:
            return False
        with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
            for _ in entries:
                pass
        files.sleep(min(pause, left))
        pause = min(pause * 2, _PAUSE_MAX_SECONDS)
    return True
