"""Random courses of training, to be interrupted: what is trained, and what comes out uninterrupted.

A course says everything that decides bits; budgets and directories are drawn apart, since they may
change from one process of a run to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload.config import LossScaleConfig, NvmeConfig, OffloadConfig, OptimizerConfig, TierConfig
from offload.testing import Toy, ToyRun, budgets, smallest_budgets, toy_plan, toy_run

Results = dict[str, int]

WARM_UP_STEPS = 3

# Room for every version a course may keep; a store reserves the disk in large steps up to it.
STORE_BYTES = 16 << 20


def rate(step: int) -> float:
    """Warm-up, then decay, so that every step has a rate of its own."""
    return 1e-2 * min(step, WARM_UP_STEPS) / max(step, WARM_UP_STEPS)


@dataclass(frozen=True)
class Course:
    """What is trained, in how many steps, and after which of them (0: before) it is evaluated."""

    toy: Toy
    optimizer: OptimizerConfig
    steps: int = 6
    evaluate_after: frozenset[int] = frozenset()
    policy: str = "replay"


def random_course(seed: int, max_grad_norm: float = 1e9, steps: int = 6) -> Course:
    """A small model with idle experts; formats, schedule, overflows and evaluations by the seed."""
    rng = np.random.default_rng([seed, 31])
    experts = int(rng.integers(2, 5))
    dtype = str(rng.choice(["bfloat16", "bfloat16", "float32", "float16"]))
    used = rng.random((steps + 1, 3, experts)) < rng.choice([0.3, 0.6])
    overflows = frozenset(int(x) for x in rng.integers(1, steps + 1, 2))
    toy = Toy(
        layers=int(rng.integers(1, 4)),
        experts=experts,
        dense_size=int(rng.choice([700, 3000])),
        expert_size=int(rng.choice([1023, 5001])),
        weight_dtype=dtype,
        grad_dtype=str(rng.choice(["bfloat16", "float32"])),
        compute_dtype="float16" if dtype == "float16" else "float32",
        micro_batches=1,
        needed=lambda step, layer: [int(e) for e in np.flatnonzero(used[step, layer])],
        overflow_steps=overflows if dtype == "float16" else frozenset(),
        frozen=frozenset({"l0", "l0.e1"}) if rng.random() < 0.2 else frozenset(),
    )
    optimizer = OptimizerConfig(
        max_grad_norm=max_grad_norm,
        update_schedule=str(rng.choice(["chased", "speculative"])),
        loss_scale=LossScaleConfig(initial=1024.0, growth_interval=2),
    )
    evaluated = frozenset(int(x) for x in np.flatnonzero(rng.random(steps + 1) < 0.25))
    return Course(toy, optimizer, steps, evaluated, str(rng.choice(["replay", "replay", "skip"])))


def sometimes_clipped(seed: int, directory: Path, steps: int = 6) -> Course:
    """`random_course` with a limit between the norms of its gradients: half of them are clipped."""
    course = random_course(seed, steps=steps)
    with toy_run(course.toy, in_memory(course, directory), course.optimizer) as run:
        train(run, course)
        norms = sorted(x.grad_norm for x in run.outcomes if np.isfinite(x.grad_norm))
    limit = norms[len(norms) // 2]
    return replace(course, optimizer=replace(course.optimizer, max_grad_norm=float(limit)))


def in_memory(course: Course, directory: Path) -> OffloadConfig:
    """Budgets so large that nothing moves, and no commits."""
    policy = "skip" if course.policy == "skip" else "dense"
    return budgets(directory, idle_expert_policy=policy, pipeline="sync")


def uninterrupted(course: Course, directory: Path) -> Results:
    """What every interrupted run of the course has to come to."""
    chased = replace(course.optimizer, update_schedule="chased")
    with toy_run(course.toy, in_memory(course, directory), chased) as run:
        return train(run, course)


def after(expected: Results, step: int) -> Results:
    """What comes behind the commit of `step`."""
    return {
        name: value
        for name, value in expected.items()
        if name == "digest" or int(name.split()[1]) > step or name == f"eval {step}"
    }


def random_budgets(
    rng: np.random.Generator,
    course: Course,
    directories: Path | Sequence[Path],
    **options: Any,
) -> OffloadConfig:
    """Budgets from the smallest to ample; every step is committed."""
    config = budgets(
        directories,
        durability="step",
        idle_expert_policy=course.policy,
        **{
            "prefetch_buffer_size": int(rng.choice([0, 1 << 15, 1 << 18])),
            "replay_lag_max": int(rng.choice([2, 64, 64])),
            "gradient_spill": str(rng.choice(["auto", "always"])),
            "io_workers": int(rng.integers(1, 5)),
            "keep_in_store": int(rng.integers(1, 3)),
            **options,
        },
    )
    small = smallest_budgets(course.toy, config)
    room = float(rng.choice([0.0, 0.1, 0.3, 0.6, 1.0]))
    if course.optimizer.speculative:
        # The old versions of what is updated early are planned for, too.
        small = with_undo(course, small)
    device, host = (int(share * 1_000_000) for share in room * rng.random(2))
    return small_store(
        replace(
            config,
            device=TierConfig(small.device.capacity + device),
            host=TierConfig(small.host.capacity + host),
        )
    )


def small_store(config: OffloadConfig) -> OffloadConfig:
    """`config` with a store that takes little of a real disk."""
    return replace(config, nvme=NvmeConfig(STORE_BYTES, config.nvme.path))


def with_undo(course: Course, config: OffloadConfig) -> OffloadConfig:
    """`config` with the least host capacity that the speculative plan accepts."""
    tiers = toy_plan(course.toy, config, speculative=True).tiers
    return replace(config, host=TierConfig(tiers["host"].minimum_bytes))


def just_enough(course: Course, config: OffloadConfig) -> OffloadConfig:
    """`config` with the nvme capacity its plan asks for, and not a byte more."""
    plan = toy_plan(course.toy, config, speculative=course.optimizer.speculative)
    nbytes = max(plan.tiers["nvme"].minimum_bytes, 4096)
    return replace(config, nvme=NvmeConfig(nbytes, config.nvme.path))


def train(
    run: ToyRun, course: Course, tell: Callable[[str, int], object] = lambda name, value: None
) -> Results:
    """Train from where `run` is to the end, committing every step if there is a store.

    Returns what came out, by name, and `tell`s each at once.
    """
    found: Results = {}

    def note(name: str, value: int) -> None:
        found[name] = value
        tell(name, value)

    commits = run.store is not None
    start = 0 if run.resumed is None else int(run.resumed["step"])
    if commits and run.resumed is None:
        run.engine.commit({"step": 0})
    for number in range(start, course.steps + 1):
        if number > start:
            commit = {"step": number} if commits else None
            note(f"step {number}", run.step(number, rate(number), commit))
        if number in course.evaluate_after:
            note(f"eval {number}", run.evaluate())
    run.engine.drain()
    if commits:
        run.engine.commits.wait()
    note("digest", run.digest())
    return found
