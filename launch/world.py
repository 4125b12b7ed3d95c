"""The world of a run's ranks: the transport that fits the launcher, opened and left in order.

MPI waits for all ranks when an interpreter ends. So a rank that fails while others go on must not
just exit, or it would hang, and they with it: `shared_world` ends them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from launch.failures import show_failure
from launch.ranks import RankEnvironment, master_host
from ops.comm.base import TIMEOUT_SECONDS, World
from ops.comm.single import SingleRank
from ops.errors import ConfigError, NumericAlarm, Stopped

AGREED = (Stopped, NumericAlarm)
"""Errors that all ranks raise in the same step; whoever raises them has made sure of that."""


class RefusedByAll(ConfigError):
    """A refusal that all ranks raise together, while none of them is in a collective."""


def open_world(
    ranks: RankEnvironment, timeout_seconds: float = TIMEOUT_SECONDS, *, checked: bool = False
) -> World:
    """Connect this process with the other ranks; every rank calls it, once.

    `timeout_seconds` bounds every wait in a collective; `checked` compares what ranks enter.
    Blocks until all ranks are there. msrun's scheduler, which is no rank, has to call it too, and
    ends in it together with them. Raises ConfigError when the transport is not installed or is
    not the launcher's, CommError when it does not allow calls from several threads.
    """
    if ranks.launcher == "msrun":
        return _mindspore_world()(
            timeout_seconds=timeout_seconds, checked=checked, store_host=master_host()
        )
    if ranks.size == 1:
        return SingleRank()
    try:
        from ops.comm.mpi import MpiWorld
    except ImportError as error:
        raise ConfigError(
            f"mpirun started {ranks.size} ranks, but mpi4py does not load ({error}): install it "
            'with `pip install "headrace[mpi]"`.'
        ) from None
    world = MpiWorld(timeout_seconds=timeout_seconds, checked=checked)
    if (world.rank, world.size) != (ranks.rank, ranks.size):
        raise ConfigError(
            f"mpirun started this process as rank {ranks.rank} of {ranks.size}, but mpi4py sees "
            f"rank {world.rank} of {world.size}: they are of different MPI installations; use the "
            "mpirun beside this interpreter."
        )
    return world


@contextlib.contextmanager
def shared_world(
    ranks: RankEnvironment, timeout_seconds: float = TIMEOUT_SECONDS, *, checked: bool = False
) -> Iterator[World]:
    """`open_world`, and an end for all ranks together.

    What is raised inside is passed on when all ranks raise it (`AGREED`, `RefusedByAll`) and when
    there is only one. Any other error is shown here, and ends every rank with its exit status; so
    does an exit with another status than 0.
    """
    world = open_world(ranks, timeout_seconds, checked=checked)
    try:
        yield world
    except AGREED:
        raise
    except RefusedByAll:
        world.free()  # or a rank that is quicker would end the others before they say why
        raise
    except BaseException as error:
        if ranks.size == 1:
            raise
        status = _status(error)
        if status != 0:
            world.abort(status)
        raise
    world.free()


def _mindspore_world() -> Callable[..., World]:
    """The world for the device that this process computes on, whatever else the machine has.

    MindSpore has one device a process, which cannot be changed once it is set; whether there is a
    card is therefore not what decides.
    """
    from ops.backend import MindSporeBackend

    if MindSporeBackend.device_target == "Ascend":
        from ops.comm.mindspore_device import MindSporeDeviceWorld

        return MindSporeDeviceWorld
    from ops.comm.mindspore import MindSporeCpuWorld

    return MindSporeCpuWorld


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return show_failure(error)
