"""Ranks as real processes under `mpirun`: the conformance suite, a hang, a failing rank."""

from __future__ import annotations

import subprocess

import pytest

from tests.mpirun import run_ranks
from tests.ops.comm import comm_conformance

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")

SECONDS_MAX = 240


def mpirun(ranks: int, task: str) -> subprocess.CompletedProcess[str]:
    """Run a task of `comm_mpi_ranks` on so many ranks; no process is left behind."""
    return run_ranks(ranks, "tests.ops.comm.comm_mpi_ranks", task, seconds_max=SECONDS_MAX)


def test_conformance_on_four_ranks() -> None:
    result = mpirun(4, "conformance")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [
        "passed:",
        *(check.__name__ for check in comm_conformance.CHECKS),
    ]


def test_a_hang_ends_all_ranks_and_shows_the_stacks_of_all() -> None:
    result = mpirun(2, "hang")
    assert result.returncode == 5, result.stderr
    assert (
        "barrier of group 'world' (rank 0) did not end within 1 s (runtime.collective_timeout)"
        in result.stderr
    )
    assert "rank 0 reports: barrier" in result.stderr
    assert "in stuck_in_compute" in result.stderr and "in poll" in result.stderr


def test_a_failing_rank_ends_the_others() -> None:
    result = mpirun(2, "failure")
    assert result.returncode == 5
    assert "rank 1 broke" in result.stderr
