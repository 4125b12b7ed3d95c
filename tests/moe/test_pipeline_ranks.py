"""Pipelines of real ranks find what one rank finds: see `pipeline_ranks.py`."""

from __future__ import annotations

import pytest

from tests.moe import pipeline_ranks
from tests.mpirun import run_ranks

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")


def test_every_pipeline_finds_the_gradients_of_one_rank() -> None:
    result = run_ranks(pipeline_ranks.RANKS, "tests.moe.pipeline_ranks", seconds_max=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == [case.name for case in pipeline_ranks.CASES]
