"""`kill -9` of one or all of 4 ranks at any instant of a save: a complete earlier commit, always.

The ranks are real processes with real stores; the instants are drawn from a seed that changes with
every run and is printed at its end (`--rotating-seed` draws the same ones again).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.offload.rank_lives import (
    KILLS_A_RUN,
    PHASES,
    by_mpirun,
    phases_in_turn,
    run_with_kills,
)


def check_kills(seed: int, folder, kills_min: int, phase_min: int) -> Counter[str]:
    """Runs until there were so many kills, and so many in every phase."""
    rng = np.random.default_rng([seed, 9])
    phases = phases_in_turn(rng)
    kills: Counter[str] = Counter()
    number = 0
    while kills.total() < kills_min or min(kills[phase] for phase in PHASES) < phase_min:
        wanted = min(KILLS_A_RUN, max(kills_min - kills.total(), 1))
        (folder / str(number)).mkdir()
        kills += run_with_kills(int(rng.integers(1 << 30)), folder / str(number), phases, wanted)
        number += 1
    return kills


def test_ten_kills_during_a_save_on_four_ranks_lose_nothing_committed(tmp_path, rotating_seed):
    kills = check_kills(rotating_seed, tmp_path, 10, 1)
    assert kills.total() >= 10 and set(kills) == set(PHASES)


@pytest.mark.long
def test_a_hundred_kills_during_a_save_on_four_ranks(tmp_path, rotating_seed, capsys):
    """The last ten under mpirun, which ends the other ranks when one is gone."""
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    kills = check_kills(rotating_seed, tmp_path, 90, 5)
    rng = np.random.default_rng([rotating_seed, 10])
    (tmp_path / "mpi").mkdir()
    seed = int(rng.integers(1 << 30))
    mpi = run_with_kills(seed, tmp_path / "mpi", phases_in_turn(rng), 10, by_mpirun)
    with capsys.disabled():
        print(f"\n{kills.total()} kills: {dict(kills)}; under mpirun: {dict(mpi)}")
    assert mpi.total() >= 10
