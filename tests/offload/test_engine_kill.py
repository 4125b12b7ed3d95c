"""`kill -9` at any instant of a run on a real drive: it resumes to the uninterrupted bits.

The instants are drawn from a seed that changes with every run and is printed at its end; with
`--rotating-seed` the same ones are drawn again.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from offload.testing_kill import PHASES
from tests.offload.kill_lives import phases_in_turn, run_to_the_end


def check_kills(seed: int, folder, kills_min: int, phase_min: int) -> Counter[str]:
    """Runs until there were so many kills, and so many in every phase."""
    rng = np.random.default_rng([seed, 5])
    phases = phases_in_turn(rng)
    kills: Counter[str] = Counter()
    number = 0
    while kills.total() < kills_min or min(kills[phase] for phase in PHASES) < phase_min:
        kills += run_to_the_end(int(rng.integers(1 << 30)), folder / str(number), phases)
        number += 1
    return kills


def test_thirty_kills_in_every_phase_lose_nothing_committed(tmp_path, rotating_seed):
    """At least 5 in each of read, update, write, fsync, rename and publish."""
    kills = check_kills(rotating_seed, tmp_path, 30, 5)
    assert all(kills[phase] >= 5 for phase in PHASES)


@pytest.mark.long
def test_two_hundred_kills_lose_nothing_committed(tmp_path, rotating_seed, capsys):
    kills = check_kills(rotating_seed, tmp_path, 200, 5)
    with capsys.disabled():
        print(f"\n{kills.total()} kills: {dict(kills)}; every run resumed to the same bits")
