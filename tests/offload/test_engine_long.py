"""The engine under random shapes, budgets, windows, policies, routing and delays.

Every case is compared with its in-memory result bit for bit; a hang ends with stacks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import psutil
import pytest

from offload.config import LossScaleConfig, NvmeConfig, OptimizerConfig, TierConfig
from offload.testing import RandomDelays, Toy, budgets, smallest_budgets, toy_plan, toy_run
from tests.offload.watch import BudgetWatch, hang_guard  # noqa: F401

STEPS = 4


def random_toy(rng: np.random.Generator) -> Toy:
    """A toy of random shape and routing; some experts idle, sometimes all of a layer."""
    experts = int(rng.integers(1, 6))
    weight_dtype = str(rng.choice(["bfloat16", "bfloat16", "float32", "float16"]))
    table = rng.random((64, 8, experts)) < rng.choice([0.2, 0.6, 0.95])
    steps = frozenset({2}) if weight_dtype == "float16" and rng.random() < 0.5 else frozenset()
    return Toy(
        layers=int(rng.integers(1, 4)),
        experts=experts,
        dense_size=int(rng.choice([1, 700, 5000, 20_001])),
        expert_size=int(rng.choice([1, 1023, 9001, 16_384])),
        weight_dtype=weight_dtype,
        grad_dtype=str(rng.choice(["bfloat16", "float32"])),
        compute_dtype="float16" if weight_dtype == "float16" else "float32",
        micro_batches=int(rng.integers(1, 3)),
        needed=lambda step, layer: [int(e) for e in np.flatnonzero(table[step, layer])],
        overflow_steps=steps,
    )


def random_config(rng: np.random.Generator, toy: Toy, directory):
    """Budgets between the minimum and ample, the nvme capacity just what the plan asks for."""
    config = budgets(
        directory,
        prefetch_buffer_size=int(rng.choice([0, 1 << 12, 1 << 16, 1 << 18, 1 << 22])),
        pipeline=str(rng.choice(["overlap", "overlap", "sync"])),
        idle_expert_policy=str(rng.choice(["replay", "replay", "dense", "skip"])),
        replay_lag_max=int(rng.choice([1, 2, 64])),
        gradient_spill=str(rng.choice(["auto", "always"])),
        io_workers=int(rng.integers(1, 5)),
    )
    small = smallest_budgets(toy, config)
    device_share, host_share = (rng.choice([0.0, 0.0, 0.1, 0.4, 1.0]) * rng.random(2)).tolist()
    config = replace(
        config,
        device=TierConfig(small.device.capacity + int(device_share * 600_000)),
        host=TierConfig(small.host.capacity + int(host_share * 2_000_000)),
    )
    nvme_bytes = max(toy_plan(toy, config).tiers["nvme"].minimum_bytes, 4096)
    return replace(config, nvme=NvmeConfig(nvme_bytes, str(directory)))


def train(toy, config, optimizer, evaluate_after=frozenset(), **options):
    with toy_run(toy, config, optimizer, **options) as run:
        with BudgetWatch(run.engine, config) as watch:
            losses = []
            for number in range(1, STEPS + 1):
                losses.append(run.step(number, 1e-2 / number))
                if number in evaluate_after:
                    losses.append(run.evaluate())
            digest = run.digest()
            run.check_buffers()
        assert watch.num_samples and not watch.excess
        for tier, peak_bytes in run.engine.peak_bytes().items():
            assert peak_bytes <= getattr(config, tier).capacity
        return losses, digest, [outcome.grad_norm for outcome in run.outcomes]


def check_case(seed: int, directory) -> None:
    """One random case against the same steps in memory."""
    rng = np.random.default_rng([seed, 77])
    toy = random_toy(rng)
    config = random_config(rng, toy, directory / f"{seed}")
    optimizer = OptimizerConfig(
        learning_rate=1e-2,
        max_grad_norm=float(rng.choice([0.5, 5.0, 1e9])),
        loss_scale=LossScaleConfig(initial=1024.0),
    )
    evaluate_after = frozenset(int(n) for n in range(1, STEPS + 1) if rng.random() < 0.3)
    policy = "skip" if config.idle_expert_policy == "skip" else "dense"
    ample = budgets(directory / f"{seed}", idle_expert_policy=policy, pipeline="sync")
    expected = train(toy, ample, optimizer, evaluate_after)
    options = {"verify_leases": True}
    if rng.random() < 0.6:
        options["delay"] = RandomDelays(seed, float(rng.choice([1e-4, 1e-3])))
    found = train(toy, config, optimizer, evaluate_after, **options)
    assert found == expected, f"seed {seed}: {toy} {config}"


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_cases_give_the_bits_of_memory(tmp_path, hang_guard, first):  # noqa: F811
    for seed in range(first, first + 10):
        check_case(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_many_random_cases_give_the_bits_of_memory(tmp_path, hang_guard, first):  # noqa: F811
    for seed in range(first, first + 50):
        check_case(seed, tmp_path)


def steady_state(num_steps: int, directory) -> None:
    """C14: train `num_steps` steps at a tight budget; nothing may grow."""
    toy = Toy(
        layers=1,
        experts=3,
        dense_size=700,
        expert_size=1023,
        micro_batches=1,
        needed=lambda step, layer: [step % 3, (step // 3) % 3][: 1 + step % 2],
    )
    config = budgets(directory, gradient_spill="always", replay_lag_max=5)
    config = smallest_budgets(toy, config)
    config = replace(config, host=TierConfig(config.host.capacity + 30_000))
    process = psutil.Process()
    with toy_run(toy, config) as run:
        samples = []
        for number in range(1, num_steps + 1):
            run.step(number, 1e-3)
            run.engine.drain()
            run.check_buffers()
            if number % (num_steps // 10) == 0:
                samples.append(
                    (
                        run.store.stats().num_blocks,
                        run.engine.used_bytes()["nvme"],
                        process.num_fds(),
                        process.num_threads(),
                        len(run.engine._ledger) <= 6,
                        process.memory_info().rss,
                    )
                )
        assert len({sample[:-1] for sample in samples}) == 1
        # Arenas are mapped at the start; outside of them, less than a page a step (second half).
        growth_bytes = samples[-1][-1] - samples[len(samples) // 2][-1]
        assert growth_bytes < num_steps * 2048


def test_five_hundred_steps_return_every_buffer_and_grow_nothing(tmp_path, hang_guard):  # noqa: F811
    steady_state(500, tmp_path)


@pytest.mark.long
def test_five_thousand_steps_return_every_buffer_and_grow_nothing(tmp_path, hang_guard):  # noqa: F811
    steady_state(5000, tmp_path)
