"""Experts over data- and expert-parallel ranks, with real ranks: see `parallel_experts.py`."""

from __future__ import annotations

import pytest

from tests.moe import parallel_experts
from tests.mpirun import run_ranks

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")


def test_every_check_passes_on_four_ranks() -> None:
    """C40, C41, C42, C43, and gradients as on one rank."""
    result = run_ranks(parallel_experts.RANKS, "tests.moe.parallel_experts", seconds_max=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == [check.__name__ for check in parallel_experts.CHECKS]
