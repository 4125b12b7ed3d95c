"""What each rank of `test_mindspore.py` runs under `msrun`; the argument names the task.

A second argument `ascend` takes cards in place of CPUs, by hand (`docs/ascend.md`).
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # msrun runs files, not modules

from launch.ranks import master_host
from ops.comm.base import World
from ops.comm.mindspore import MindSporeCpuWorld, end_process
from tests.ops.comm import comm_conformance


def make_world(**options: Any) -> World:
    """The world of CPUs or of cards."""
    if sys.argv[2:] == ["ascend"]:
        from ops.comm.mindspore_device import MindSporeDeviceWorld

        return MindSporeDeviceWorld(store_host=master_host(), **options)
    return MindSporeCpuWorld(store_host=master_host(), **options)


def conformance() -> None:
    """The suite with shorter messages and fewer types."""
    comm_conformance.MESSAGE_BYTES = 1 << 20
    comm_conformance.SUMMED = ("float32", "int64")
    comm_conformance.CARRIED = ("float32", "uint16", "uint8")
    comm_conformance.OUTSTANDING = 4 << 20
    world = make_world(timeout_seconds=120, checked=True, outstanding_bytes_max=4 << 20)
    part = np.empty(5000, np.int64)
    world.reduce_scatter(np.full((world.size, 5000), 2**53 + 1, np.int64), part)
    if (part != world.size * (2**53 + 1)).any():
        raise AssertionError("reduce_scatter went through another type")
    passed = comm_conformance.run_all(world, skip=comm_conformance.LONG)
    if world.rank == 0:
        print("passed:", *passed, flush=True)
    world.free()


def stuck_in_compute() -> None:
    """What rank 1 is doing while rank 0 waits for it; the stacks must show it."""
    threading.Event().wait(120)


def hang() -> None:
    """Rank 1 never comes; rank 0 must end both, and both must show their stacks."""
    # Cards take longer than 2 s to be connected.
    world = make_world(timeout_seconds=60 if sys.argv[2:] else 2)
    if world.rank == 1:
        stuck_in_compute()
    world.all_reduce(np.zeros(3))


def main() -> None:
    """Run the task; any error ends this rank with status 5, and with it the others."""
    try:
        {"conformance": conformance, "hang": hang}[sys.argv[1]]()
    except BaseException:
        traceback.print_exc()
        end_process(5)


if __name__ == "__main__":
    main()
