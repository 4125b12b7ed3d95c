"""Promise 1 with a codec: encoding changes how many bytes move, never what is computed."""

from __future__ import annotations

from functools import partial

import pytest

from offload import testing
from offload.blocks import PARTS
from offload.config import OptimizerConfig
from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.store import NvmeStore
from offload.runs import runs_of
from offload.testing import Toy, budgets, smallest_budgets, toy_run

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=5.0)
STEPS = 5
# Each byte saved is worth anything, or nothing: no test depends on how busy the machine is.
CRAWLING, FLYING = DriveSpeed(1.0, 1.0), DriveSpeed(1e18, 1e18)


def needed(step: int, layer: int) -> list[int]:
    return [0, 1] if (step + layer) % 2 else [1, 2, 3]


TOY = Toy(needed=needed, dense_size=40_000, expert_size=30_001)


RUNS = {
    f"{layout.name}/{part}": runs_of(layout, part) for layout in TOY.layouts() for part in PARTS
}


class TypedStore(NvmeStore):
    """A store that is told what blocks consist of, whoever writes them."""

    def write(self, block, buffer, cause, **options):
        return super().write(block, buffer, cause, **{"runs": RUNS.get(block)} | options)


def train(config):
    with toy_run(TOY, config, OPTIMIZER) as run:
        losses = [run.step(number, 1e-2 / number) for number in range(1, STEPS + 1)]
        result = (losses, run.digest(), [outcome.grad_norm for outcome in run.outcomes])
        return result, None if run.store is None else run.store.stats()


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    return train(budgets(tmp_path_factory.mktemp("wide")))[0]


@pytest.mark.parametrize("pipeline", ["overlap", "sync"])
@pytest.mark.parametrize("speed", [CRAWLING, FLYING], ids=["slow drive", "fast drive"])
def test_encoded_state_gives_the_same_bits(tmp_path, monkeypatch, in_memory, speed, pipeline):
    store = partial(TypedStore, drive_speed=lambda: speed)
    monkeypatch.setattr(testing, "NvmeStore", store)
    small = smallest_budgets(
        TOY, budgets(tmp_path, pipeline=pipeline, gradient_spill="always", codec="lz4")
    )
    result, stats = train(small)
    assert result == in_memory
    for lane in (stats.read, stats.written):
        moved, logical = sum(lane.payload_bytes.values()), sum(lane.logical_bytes.values())
        assert moved < logical if speed is CRAWLING else moved == logical
    known = stats.codec.components
    assert {"weight", "residual", "exp_avg", "exp_avg_sq", "grad"} <= set(known)
    assert (known["exp_avg_sq"].frames_encoded > 0) == (speed is CRAWLING)
    assert known["residual"].decision == "none"
