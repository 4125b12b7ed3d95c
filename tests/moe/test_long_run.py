"""C14 on the real model: hundreds of steps leave memory, threads and descriptors as they were."""

from __future__ import annotations

import psutil
import pytest

from tests.moe.harness import batch, make_config, run, smallest

MIB = 1 << 20


@pytest.mark.long
@pytest.mark.parametrize("tight", [True, False], ids=["three tiers", "in memory"])
def test_five_hundred_steps_keep_resident_memory_flat(tmp_path, tight):
    """MindSpore's own caches fill in the first hundred steps; the engine's arenas before."""
    process = psutil.Process()
    samples = []

    def observed(config, number):
        if number % 25 == 0:
            handles = (process.num_fds(), process.num_threads())
            samples.append((process.memory_info().rss, *handles))
        return batch(config, number % 20)

    config = smallest(tmp_path) if tight else make_config(tmp_path)
    run(config, steps=500, batches=observed)
    assert len(samples) == 20
    settled = samples[8:]
    assert len({handles for _, *rest in settled for handles in [tuple(rest)]}) == 1
    assert settled[-1][0] - settled[0][0] < 4 * MIB, [rss for rss, *_ in samples]
