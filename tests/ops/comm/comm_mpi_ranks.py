"""What each rank of `test_mpi.py` runs: `python -m tests.ops.comm.comm_mpi_ranks TASK`.

Each task prints a line that the test looks for, or fails, which aborts all ranks.
"""

from __future__ import annotations

import sys
import threading
import traceback

import numpy as np
import pytest

from ops.comm.mpi import MpiWorld
from ops.errors import CommError
from tests.ops.comm import comm_conformance


def conformance() -> None:
    """The whole suite, and what only MPI can get wrong."""
    world = MpiWorld(timeout_seconds=120, checked=True)
    passed = comm_conformance.run_all(world)
    if world.rank == 0:
        print("passed:", *passed, flush=True)
    unchecked = MpiWorld(timeout_seconds=120)
    wrong_size(unchecked)
    unchecked.free()
    world.free()


def wrong_size(world: MpiWorld) -> None:
    """A shorter message than expected must not pass for a whole one."""
    if world.rank == 0:
        world.send(np.zeros(3, np.uint8), 1)
    elif world.rank == 1:
        with pytest.raises(CommError, match="group rank 0 sent 3 bytes, 4 were expected"):
            world.recv(np.zeros(4, np.uint8), 0)
    world.barrier()


def stuck_in_compute(release: threading.Event) -> None:
    """What rank 1 is doing while rank 0 waits for it; the stacks must show it."""
    release.wait(120)


def hang() -> None:
    """Rank 1 never comes; rank 0 must end both, and both must show their stacks."""
    world = MpiWorld(timeout_seconds=1)
    if world.rank == 1:
        stuck_in_compute(threading.Event())
    else:
        world.split([[0, 1]], "expert").all_reduce(np.zeros(3))


def failure() -> None:
    """Rank 1 fails; rank 0, which waits for it, must end too."""
    world = MpiWorld(timeout_seconds=120)
    if world.rank == 1:
        raise KeyError("rank 1 broke")
    world.barrier()


def main() -> None:
    """Run the task named on the command line; any error ends all ranks with status 5."""
    try:
        {"conformance": conformance, "hang": hang, "failure": failure}[sys.argv[1]]()
    except BaseException:
        traceback.print_exc()
        MpiWorld.abort_all(5)


if __name__ == "__main__":
    main()
