"""Pipelines find what one rank finds: see `pipeline_ranks.py`.

Ranks that are threads take turns in one process, which compiles once; real ones start slowly.
"""

from __future__ import annotations

import pytest

from tests.moe import pipeline_ranks
from tests.mpirun import run_ranks
from tests.ranks_in_turns import run_in_turns

# Each schedule, looped or with as many stages as ranks, and what else changes the messages.
SHORT = (
    "two-stages-looped-tied",
    "batch-major",
    "frozen-embedding",
    "1f1b-two",
    "1f1b-four",
    "with-experts",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in SHORT else pytest.mark.long, id=case.name)
        for case in pipeline_ranks.CASES
    ],
)
def test_a_pipeline_finds_the_gradients_of_one_rank(case: pipeline_ranks.Case) -> None:
    run_in_turns(
        pipeline_ranks.RANKS,
        lambda world: pipeline_ranks.check(case, world),
        outstanding_bytes_max=pipeline_ranks.OUTSTANDING_BYTES,
    )


@pytest.mark.long
def test_every_pipeline_of_real_ranks_finds_the_gradients_of_one() -> None:
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    result = run_ranks(pipeline_ranks.RANKS, "tests.moe.pipeline_ranks", seconds_max=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == [case.name for case in pipeline_ranks.CASES]
