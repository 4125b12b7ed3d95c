"""`update_schedule: speculative`: updates before the norm is known give the bits of `chased`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.config import LossScaleConfig, OffloadConfig, OptimizerConfig, TierConfig
from offload.testing import RandomDelays, Toy, budgets, smallest_budgets, toy_run
from tests.offload.test_engine_same_bits import OPTIMIZER, rate, skewed
from tests.offload.watch import BudgetWatch, hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

NEVER_CLIPPED = replace(OPTIMIZER, max_grad_norm=1e9)


def early(optimizer: OptimizerConfig) -> OptimizerConfig:
    return replace(optimizer, update_schedule="speculative")


def train(toy: Toy, config: OffloadConfig, optimizer: OptimizerConfig, steps: int = 6, **options):
    with toy_run(toy, config, optimizer, **options) as run:
        with BudgetWatch(run.engine, config) as watch:
            losses = [run.step(number, rate(number)) for number in range(1, steps + 1)]
            digest = run.digest()
        assert not watch.excess
        run.engine.drain()
        run.check_buffers()
        return (losses, digest, [o.grad_norm for o in run.outcomes]), run


def roomy(toy: Toy, config: OffloadConfig, room: int) -> OffloadConfig:
    low = smallest_budgets(toy, config)
    return replace(
        config,
        device=TierConfig(low.device.capacity + room),
        host=TierConfig(low.host.capacity + 2 * room),
    )


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """Gradient norms of the run that is never clipped, to put thresholds between."""
    config = budgets(tmp_path_factory.mktemp("norms"))
    return train(Toy(needed=skewed), config, NEVER_CLIPPED)[0][2]


@pytest.mark.parametrize("room", [0, 100_000, 600_000])
@pytest.mark.parametrize("spill", ["auto", "always"])
@pytest.mark.parametrize("clipping", ["never", "always", "sometimes"])
def test_the_bits_are_those_of_the_chased_schedule(tmp_path, norms, room, spill, clipping):
    limit = {"never": 1e9, "always": 1e-3, "sometimes": sorted(norms)[len(norms) // 2]}[clipping]
    optimizer = replace(OPTIMIZER, max_grad_norm=limit)
    toy = Toy(needed=skewed)
    expected, _ = train(toy, budgets(tmp_path / "wide"), optimizer)
    config = roomy(toy, budgets(tmp_path / "tight", gradient_spill=spill), room)
    found, run = train(toy, config, early(optimizer), verify_leases=True)
    assert found == expected
    redone = [outcome.redone for outcome in run.outcomes]
    if clipping == "never":
        assert not any(redone)
    if clipping == "always":
        assert any(redone)


@pytest.mark.parametrize("seed", range(4))
def test_random_delays_in_every_lane_give_the_same_bits(tmp_path, norms, seed):
    """C25 while updates overlap backward and some are undone."""
    optimizer = replace(OPTIMIZER, max_grad_norm=sorted(norms)[2])
    toy = Toy(needed=skewed)
    expected, _ = train(toy, budgets(tmp_path / "wide"), optimizer)
    config = roomy(toy, budgets(tmp_path / "tight"), 150_000 * seed)
    found, _ = train(toy, config, early(optimizer), delay=RandomDelays(seed), verify_leases=True)
    assert found == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_formats_and_overflowing_steps_are_undone_too(tmp_path, dtype):
    """An overflow is no step: what was updated early goes back to the bits it had."""
    compute = "float16" if dtype == "float16" else "float32"
    toy = Toy(
        needed=skewed,
        weight_dtype=dtype,
        compute_dtype=compute,
        grad_dtype="float32",
        overflow_steps=frozenset({2, 5}) if dtype == "float16" else frozenset(),
    )
    scale = LossScaleConfig(initial=1024.0)
    optimizer = replace(NEVER_CLIPPED, loss_scale=scale)
    expected, _ = train(toy, budgets(tmp_path / "wide"), optimizer)
    config = roomy(toy, budgets(tmp_path / "tight"), 600_000)
    found, run = train(toy, config, early(optimizer), verify_leases=True)
    assert found == expected
    if dtype == "float16":
        assert [o.applied for o in run.outcomes] == [True, False, True, True, False, True]
        assert [o.redone for o in run.outcomes] == [False, True, False, False, True, False]


def test_updates_really_precede_the_norm(tmp_path):
    """With room for it, cold units are up to date before the step's norm is known."""
    toy = Toy()
    config = roomy(toy, budgets(tmp_path), 600_000)
    with toy_run(toy, config, early(NEVER_CLIPPED)) as run:
        kept = []
        accept = run.engine._updates.speculation.accept

        def spy():
            kept.append(len(run.engine._updates.speculation._kept))
            return accept()

        run.engine._updates.speculation.accept = spy
        run.step(1, rate(1))
        run.engine.drain()
        assert kept and kept[0] > 0


def test_evaluation_between_steps_changes_nothing(tmp_path):
    """C30 under `speculative`."""
    toy = Toy(needed=skewed)
    config = roomy(toy, budgets(tmp_path / "tight"), 300_000)
    results = []
    for evaluates in (False, True):
        with toy_run(toy, config, early(NEVER_CLIPPED)) as run:
            losses = []
            for number in range(1, 5):
                losses.append(run.step(number, rate(number)))
                if evaluates:
                    run.evaluate()
            results.append((losses, run.digest()))
    assert results[0] == results[1]
