"""What lies under a run's own path and is not what it goes on from: refused, lest it be discarded.

A run that is not told to go on may discard what is there, and says so. One that is told to wants
nothing lost: so a commit under `offload.nvme.path` that `--resume` does not take, or does not even
find because the paths of its store are others, ends the run before anything is opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from launch.config import RunConfig
from launch.origin import Origin
from offload.nvme.directory import is_commit, rank_directory, ranks_under
from ops.comm.base import World
from ops.errors import ConfigError


def require_nothing_lost(
    config: RunConfig, origin: Origin | None, resume: str | None, world: World
) -> None:
    """Raise ConfigError on every rank when going on from `origin` would discard commits.

    `origin`: what `--resume resume` has found, None for nothing. Entered by all ranks; only looks.
    """
    if resume is None or (origin is not None and origin.is_own):
        return
    paths = config.offload.nvme.paths
    # Without an origin the first path has been looked at: what is there may be discarded.
    found = _with_commits(paths if origin is not None else paths[1:])
    told = world.all_gather_object(found)
    seen = next((f"rank {rank}: {x}" for rank, x in enumerate(told) if x), "")
    if not seen:
        return
    if origin is None:
        raise ConfigError(
            f"--resume {resume}: offload.nvme.path = {', '.join(paths)} is not what the store "
            f"there was made with, because {seen} holds commits; name its paths in their order"
        )
    if _shared(paths, origin.paths):
        raise ConfigError(
            f"--resume {resume}: offload.nvme.path = {', '.join(paths)} has some of its paths, not "
            "all of them in their order; go on in its own paths, or `headrace checkpoint copy` it "
            "elsewhere and go on from the copy"
        )
    raise ConfigError(
        f"--resume {resume}: there are commits under offload.nvme.path ({seen}), which going on "
        "from elsewhere would discard; go on from them with --resume latest, delete them with "
        "`headrace checkpoint delete`, or set another offload.nvme.path"
    )


def _with_commits(paths: Sequence[str]) -> str:
    """The first directory of a rank under `paths` that says something is committed; "" for none."""
    for path in paths:
        for rank in ranks_under(path):
            directory = rank_directory(path, rank)
            try:
                names = os.listdir(directory)
            except OSError:
                continue
            if any(map(is_commit, names)):
                return directory
    return ""


def _shared(one: Sequence[str], other: Sequence[str]) -> bool:
    return bool({os.path.realpath(x) for x in one} & {os.path.realpath(x) for x in other})
