"""Experts over data- and expert-parallel ranks: see `parallel_experts.py`.

Ranks that are threads take turns in one process, which compiles once; real ones start slowly.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ops.comm.base import World
from tests.moe import parallel_experts
from tests.mpirun import run_ranks
from tests.ranks_in_turns import run_in_turns


@pytest.mark.parametrize("check", parallel_experts.CHECKS, ids=lambda check: check.__name__)
def test_four_ranks_in_turns(check: Callable[[World], None]) -> None:
    """C40, C41, C42, C43, and gradients as on one rank."""
    run_in_turns(parallel_experts.RANKS, check)


@pytest.mark.long
def test_four_real_ranks() -> None:
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    result = run_ranks(parallel_experts.RANKS, "tests.moe.parallel_experts", seconds_max=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == [check.__name__ for check in parallel_experts.CHECKS]
