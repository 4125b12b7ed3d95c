"""Which rank this process is: read once from what its launcher left in the environment.

The only file that knows the variables of launchers. Three of them are understood: Open MPI's
`mpirun` (also Hydra's, of MPICH and Intel), MindSpore's `msrun`, and none.

`msrun` says nothing about how many ranks share a machine, so `headrace launch` adds
HEADRACE_LOCAL_SIZE; without it all ranks are taken to be on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ops.errors import ConfigError

Launcher = Literal["single", "mpirun", "msrun"]

LOCAL_SIZE_VARIABLE = "HEADRACE_LOCAL_SIZE"

# (rank, ranks, rank on this machine, ranks on this machine)
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OF_RANKS = (_OPEN_MPI[0], _HYDRA[0], "PMIX_RANK", "MS_ROLE", "RANK_ID")


@dataclass(frozen=True)
class RankEnvironment:
    """The place of this process among the ranks of a run.

    `launcher` decides which collectives connect them: mpi4py under mpirun, MindSpore's own under
    msrun. Ranks count from 0; local ones count within this machine.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{self.launcher} started this process as {name} {rank} of {size}: "
                    f"allowed is 0 to {size - 1}."
                )
        if self.local_size > self.size:
            raise ConfigError(
                f"{self.launcher} counts {self.local_size} ranks on this machine but only "
                f"{self.size} in all: the first may be at most the second."
            )

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: it prints progress and writes the reports."""
        return self.rank == 0


SINGLE = RankEnvironment("single", 0, 1, 0, 1)


def detect_ranks(environment: Mapping[str, str] = os.environ) -> RankEnvironment:
    """The place that the launcher's variables give this process; SINGLE without a launcher.

    Raises ConfigError when the variables are incomplete or contradict each other, because a rank
    that took itself for a run of its own would write over the files of the others.
    """
    if any(name in environment for name in _OPEN_MPI):
        return _of_mpirun(environment, *_OPEN_MPI)
    if "PMI_RANK" in environment and "PMI_SIZE" in environment:
        return _of_mpirun(environment, *_HYDRA)
    if "PMIX_RANK" in environment:
        raise ConfigError(
            f"PMIX_RANK is {environment['PMIX_RANK']}, but OMPI_COMM_WORLD_SIZE does not say how "
            "many ranks there are: start the run with `headrace launch` or `mpirun`."
        )
    if "MS_ROLE" in environment:
        return _of_msrun(environment, "MS_NODE_ID", "MS_WORKER_NUM")
    if environment.get("RANK_SIZE", "1") != "1":
        return _of_msrun(environment, "RANK_ID", "RANK_SIZE")
    return SINGLE


def belongs_to_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started the process of this environment as a rank, or to start one."""
    return any(name in environment for name in _OF_RANKS)


def is_scheduler(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is msrun's extra one, which connects the ranks and is none itself."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def master_host(environment: Mapping[str, str] = os.environ) -> str:
    """Under msrun, the address of rank 0's machine as the other machines reach it."""
    return environment.get("MS_SCHED_HOST", "127.0.0.1")


def rank_prefix(environment: Mapping[str, str] = os.environ) -> str:
    """`[rank 7] ` before what this rank says to a terminal that all share; empty for a single one.

    Never raises: an environment that `detect_ranks` refuses gives none.
    """
    try:
        ranks = detect_ranks(environment)
    except ConfigError:
        return ""
    return f"[rank {ranks.rank}] " if ranks.size > 1 else ""


def _of_mpirun(
    environment: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str
) -> RankEnvironment:
    names = (rank, size, local_rank, local_size)
    return RankEnvironment("mpirun", *(_number(environment, name) for name in names))


def _of_msrun(environment: Mapping[str, str], rank: str, size: str) -> RankEnvironment:
    num_ranks = _number(environment, size)
    local_size = num_ranks
    if LOCAL_SIZE_VARIABLE in environment:
        local_size = _number(environment, LOCAL_SIZE_VARIABLE)
    if is_scheduler(environment):
        return RankEnvironment("msrun", 0, num_ranks, 0, local_size)
    number = _number(environment, rank)  # missing where msrun was not told its --node_rank
    local_rank = number
    if "DEVICE_ID" in environment:
        local_rank = _number(environment, "DEVICE_ID")
    return RankEnvironment("msrun", number, num_ranks, local_rank, local_size)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.isdecimal():
        found = "not set" if text is None else f"{text!r}"
        advice = " (msrun over several machines needs --node_rank)" if name == "MS_NODE_ID" else ""
        raise ConfigError(
            f"{name} is {found}, but the launcher's other variables are there: allowed is a whole "
            f"number of at least 0{advice}; start the run with `headrace launch`."
        )
    return int(text)
