"""A rank knows its place from its launcher's variables, or refuses to guess."""

from __future__ import annotations

import os

import pytest

from launch.ranks import SINGLE, RankEnvironment, detect_ranks, is_scheduler
from ops.errors import ConfigError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "32",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "7",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_NODE_ID": "6",
    "MS_WORKER_NUM": "8",
    "RANK_ID": "6",
    "RANK_SIZE": "8",
    "DEVICE_ID": "2",
    "HEADRACE_LOCAL_SIZE": "4",
}


def test_without_a_launcher_a_process_is_alone() -> None:
    assert detect_ranks({}) == SINGLE == RankEnvironment("single", 0, 1, 0, 1)
    assert detect_ranks({"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "3"}) == SINGLE
    assert SINGLE.is_first


def test_the_variables_of_open_mpi_and_hydra_are_understood() -> None:
    assert detect_ranks(OPEN_MPI) == RankEnvironment("mpirun", 7, 32, 3, 4)
    assert not detect_ranks(OPEN_MPI).is_first
    assert detect_ranks(HYDRA) == RankEnvironment("mpirun", 5, 8, 1, 2)


def test_the_variables_of_msrun_are_understood() -> None:
    assert detect_ranks(MSRUN) == RankEnvironment("msrun", 6, 8, 2, 4)
    on_one_machine = {**MSRUN, "DEVICE_ID": "6"}
    del on_one_machine["HEADRACE_LOCAL_SIZE"]
    assert detect_ranks(on_one_machine) == RankEnvironment("msrun", 6, 8, 6, 8)
    rank_table = {"RANK_ID": "1", "RANK_SIZE": "2"}
    assert detect_ranks(rank_table) == RankEnvironment("msrun", 1, 2, 1, 2)


def test_the_scheduler_of_msrun_is_no_rank() -> None:
    """It inherits RANK_ID=0 and has no MS_NODE_ID."""
    scheduler = {**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
    del scheduler["MS_NODE_ID"]
    assert is_scheduler(scheduler)
    assert not is_scheduler(MSRUN) and not is_scheduler({})
    assert detect_ranks(scheduler).launcher == "msrun"


def test_msrun_that_gave_no_rank_is_refused_although_rank_id_is_inherited() -> None:
    """Without --node_rank its workers all see the RANK_ID=0 that it set for its scheduler."""
    variables = {**MSRUN, "RANK_ID": "0"}
    del variables["MS_NODE_ID"]
    with pytest.raises(ConfigError, match=r"MS_NODE_ID is not set.*--node_rank"):
        detect_ranks(variables)


@pytest.mark.parametrize("name", [name for name in OPEN_MPI if name != "PMIX_RANK"])
@pytest.mark.parametrize("value", [None, "", "x", "-1", "1.5"])
def test_incomplete_variables_are_refused_and_named(name: str, value: str | None) -> None:
    """A rank that took itself for a single run would write over the files of the others."""
    variables = {key: text for key, text in OPEN_MPI.items() if key != name}
    if value is not None:
        variables[name] = value
    with pytest.raises(ConfigError, match=f"{name} is .*allowed is a whole number"):
        detect_ranks(variables)


def test_ranks_beyond_their_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 32 of 32: allowed is 0 to 31"):
        detect_ranks({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "32"})
    with pytest.raises(ConfigError, match="local rank 4 of 4: allowed is 0 to 3"):
        detect_ranks({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"})
    with pytest.raises(ConfigError, match="64 ranks on this machine but only 32"):
        detect_ranks({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "64"})


def test_a_pmix_process_of_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="PMIX_RANK is 3, but OMPI_COMM_WORLD_SIZE"):
        detect_ranks({"PMIX_RANK": "3"})


def test_this_process_reads_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_ranks() == detect_ranks(os.environ)
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert detect_ranks() == RankEnvironment("mpirun", 7, 32, 3, 4)
