"""One of several real ranks that all begin in a directory that is not there.

    mpirun -n 8 python -m tests.launch.directory_ranks FOLDER ROUNDS

Every call that makes a directory takes long, as on a shared file system that is busy, and longer on
some ranks than on others.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from launch.ranks import detect_ranks
from launch.world import shared_world
from tests.launch.test_rank_store import commit, configured, open_one, step_found

SECONDS_MAX = 300.0


def slow_down(rank: int) -> None:
    """Make every `mkdir` of this process slow, before and after the fact."""
    make = os.mkdir

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.003 * (rank % 3))
        make(*arguments, **options)
        time.sleep(0.005 * (rank % 4))

    os.mkdir = slow


def main(folder: str, rounds: int) -> None:
    """Open, commit, and open again, so many times."""
    with shared_world(detect_ranks(), SECONDS_MAX) as world:
        slow_down(world.rank)
        for number in range(rounds):
            config = configured(Path(folder) / f"{number}" / "deep" / "store", world.size)
            for resume, expected in ((False, None), (True, 1)):
                opened = open_one(world, config, resume)
                try:
                    assert step_found(world, opened) == expected
                    if not resume:
                        commit(config, opened, 1)
                finally:
                    opened.store.close()
            world.barrier()
        print(f"rank {world.rank} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
