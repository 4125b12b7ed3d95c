"""Crash images of a whole run: what any crash leaves resumes to the uninterrupted bits.

A toy run that commits every step is recorded on a simulated disk. Each image of a crash is opened,
checked to be a whole commit, at least the last published one, and trained to the end; every loss
and the digest must be those of the run that nobody interrupted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.config import OffloadConfig, TierConfig
from offload.nvme.commit import Agree, CommitCut, CommitRecord
from offload.nvme.verify import BlockReader
from offload.testing import HUGE_BYTES, RandomDelays, ToyRun, budgets, smallest_budgets, toy_run
from offload.testing_crash import Crash, SimulatedDisk
from offload.testing_storage import BUFFERED
from tests.offload.courses import (
    Course,
    Results,
    after,
    just_enough,
    random_budgets,
    sometimes_clipped,
    train,
    uninterrupted,
    with_undo,
)
from tests.offload.watch import hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

IMAGES = 25  # of each of the 12 recorded runs: 300 in all
FIXED_SEEDS = range(11)


@dataclass(frozen=True)
class Recording:
    """A run on a simulated disk, and what it came to."""

    course: Course
    paths: list[Path]
    disk: SimulatedDisk
    expected: Results


def store_options(disk: SimulatedDisk, **options: Any) -> dict[str, Any]:
    """Everything on `disk`, and drives of unequal speed if there are several."""
    return {
        "directory_files": disk,
        "required_bytes": 0,
        "measure": lambda directories, access: [1.0, 2.0],
        **options,
    }


def mark_published(run: ToyRun, disk: SimulatedDisk) -> None:
    """Mark on `disk` what has been published, as soon as `publish` returns."""
    assert run.store is not None
    publish = run.store.publish

    def marked(cut: CommitCut, agree: Agree | None = None) -> CommitRecord:
        record = publish(cut, agree)
        disk.mark((record.generation, record.meta["step"]))
        return record

    run.store.publish = marked  # type: ignore[method-assign]


def record(seed: int, folder: Path) -> Recording:
    """Train the course of `seed` on a simulated disk."""
    rng = np.random.default_rng([seed, 1])
    course = sometimes_clipped(seed, folder)
    paths = [folder / name for name in ("ab" if rng.random() < 0.25 else "a")]
    config = random_budgets(rng, course, paths)
    if len(paths) == 1:
        config = just_enough(course, config)
    disk = SimulatedDisk()
    options = {"delay": RandomDelays(seed, 5e-4)} if rng.random() < 0.5 else {}
    with toy_run(
        course.toy,
        config,
        course.optimizer,
        open_file=disk.open_file,
        access=BUFFERED,
        store_options=store_options(disk),
        delete=False,
        **options,
    ) as run:
        mark_published(run, disk)
        found = train(run, course)
    expected = uninterrupted(course, folder)
    assert found == expected
    return Recording(course, paths, disk, expected)


def points(disk: SimulatedDisk, rng: np.random.Generator, count: int) -> list[int]:
    """Where to crash: a third inside commits, the rest anywhere."""
    steps = disk.points("name", "sync", "rename", "sync_directory", "unlink", "mark")
    chosen = set(rng.choice(steps, count // 3, replace=False).tolist())
    others = rng.permutation(disk.num_operations + 1).tolist()
    while len(chosen) < count:
        chosen.add(others.pop())
    return sorted(chosen)


def other_budgets(rng: np.random.Generator, course: Course, paths: list[Path]) -> OffloadConfig:
    """What the run goes on with: anything, all of it cold, or all of it in the host."""
    choice = rng.choice(["any", "cold", "host"])
    if choice == "any":
        return random_budgets(rng, course, paths)
    config = budgets(paths, durability="step", idle_expert_policy=course.policy)
    if choice == "cold":
        config = smallest_budgets(course.toy, config)
        return with_undo(course, config) if course.optimizer.speculative else config
    assert config.host == TierConfig(HUGE_BYTES)
    return config


def check_image(crash: Crash, recording: Recording, rng: np.random.Generator) -> str:
    """Open the image, check the commit, train to the end; where it resumed, for the count."""
    course = recording.course
    with toy_run(
        course.toy,
        other_budgets(rng, course, recording.paths),
        course.optimizer,
        open_file=crash.disk.open_file,
        access=BUFFERED,
        store_options=store_options(crash.disk, resume=True),
        delete=False,
    ) as run:
        store = run.store
        assert store is not None
        step = None if run.resumed is None else run.resumed["step"]
        if crash.mark is not None:
            assert store.recovered is not None and step is not None
            assert store.recovered.generation >= crash.mark[0] and step >= crash.mark[1]
        reader = BlockReader(store._opened.files, store.access)
        for commit in store._commits._retained:
            for name, stored in commit.blocks.blocks.items():
                assert reader.first_damage(name, stored) is None
        mark_published(run, crash.disk)
        found = train(run, course)
    wanted = recording.expected if step is None else after(recording.expected, step)
    assert found == wanted, f"crash in {crash.kind} at operation {crash.number}, step {step}"
    return "afresh" if step is None else f"step {step}"


def check_seed(seed: int, folder: Path, images: int) -> Counter[str]:
    """Record, crash, resume; returns how often each kind of operation was struck."""
    recording = record(seed, folder)
    rng = np.random.default_rng([seed, 2])
    struck: Counter[str] = Counter()
    for crash in recording.disk.crashes(points(recording.disk, rng, images), seed):
        struck[crash.kind] += 1
        struck[check_image(crash, recording, rng)] += 1
    return struck


@pytest.mark.parametrize("seed", [*FIXED_SEEDS, "rotating"])
def test_every_crash_of_a_run_resumes_to_the_same_bits(tmp_path, seed, rotating_seed):
    """C28, C29: nothing committed is lost, whatever was in flight, whatever the budgets then."""
    number = rotating_seed if seed == "rotating" else seed
    struck = check_seed(number, tmp_path, IMAGES)
    assert struck["write"] and struck["sync"] + struck["rename"] + struck["sync_directory"]
    assert sum(count for name, count in struck.items() if name.startswith("step")) > IMAGES // 2


@pytest.mark.long
def test_every_crash_of_many_runs_resumes_to_the_same_bits(tmp_path, rotating_seed):
    for number in range(40):
        folder = tmp_path / str(number)
        check_seed(rotating_seed + 1 + number, folder, 2 * IMAGES)
