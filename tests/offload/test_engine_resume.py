"""Resuming at every kind of step, and what is refused; the bits are those of the unbroken run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from offload.config import LossScaleConfig, OffloadConfig, OptimizerConfig, TierConfig
from offload.testing import Toy, budgets, smallest_budgets, toy_run
from ops.errors import StorageError
from tests.offload.courses import (
    WARM_UP_STEPS,
    Course,
    after,
    rate,
    small_store,
    train,
    uninterrupted,
    with_undo,
)
from tests.offload.watch import hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

STEPS = 6
OPTIMIZER = OptimizerConfig(
    max_grad_norm=1e9, loss_scale=LossScaleConfig(initial=1024.0, growth_interval=2)
)


def idle_in_the_middle(step: int, layer: int) -> list[int]:
    """Expert 1 has a gradient in the first and the last step only, expert 2 in every other."""
    return [0, *([1] if step in (1, STEPS) else []), *([2] if (step + layer) % 2 else [])]


TOY = Toy(layers=2, experts=3, expert_size=3001, needed=idle_in_the_middle, micro_batches=1)
HALF = replace(
    TOY, weight_dtype="float16", compute_dtype="float16", overflow_steps=frozenset({2, 5})
)
PLAIN = Course(TOY, OPTIMIZER, STEPS)
SPECULATIVE = replace(OPTIMIZER, update_schedule="speculative")
COURSES = {
    "chased": PLAIN,
    "speculative": replace(PLAIN, optimizer=SPECULATIVE),
    "speculative, redone": replace(PLAIN, optimizer=replace(SPECULATIVE, max_grad_norm=1e-3)),
    "half precision": replace(PLAIN, toy=HALF),
    "skip": replace(PLAIN, policy="skip"),
    "frozen": replace(PLAIN, toy=replace(TOY, frozen=frozenset({"l0", "l1.e0"}))),
    "evaluated": replace(PLAIN, evaluate_after=frozenset(range(STEPS + 1))),
}


def tight(course: Course, folder, room: int = 0, **options) -> OffloadConfig:
    """The smallest budgets with some room more; every step is committed."""
    config = budgets(folder, durability="step", idle_expert_policy=course.policy, **options)
    config = smallest_budgets(course.toy, config)
    if course.optimizer.speculative:
        config = with_undo(course, config)
    return small_store(
        replace(
            config,
            device=TierConfig(config.device.capacity + room),
            host=TierConfig(config.host.capacity + 2 * room),
        )
    )


def on_disk(course: Course, config: OffloadConfig, **store_options):
    """A run whose store stays on the disk; `resume` among the options goes on with it."""
    options = {"required_bytes": 0, "measure": lambda directories, access: [1.0, 2.0]}
    return toy_run(
        course.toy,
        config,
        course.optimizer,
        store_options={**options, **store_options},
        delete=False,
    )


def stop_after(course: Course, config: OffloadConfig, step: int) -> None:
    """Train up to `step` and commit it."""
    with on_disk(course, config) as run:
        train(run, replace(course, steps=step))


def check_resumes(course: Course, config: OffloadConfig, folder: Path, step: int) -> None:
    """Go on after `step`: the same losses, evaluations and masters as without a break."""
    with on_disk(course, config, resume=True) as run:
        assert run.resumed == {"step": step}
        found = train(run, course)
        run.check_buffers()
    assert found == after(uninterrupted(course, folder / "memory"), step)


@pytest.mark.parametrize("room", [0, 300_000])
@pytest.mark.parametrize("name", COURSES)
def test_a_run_resumes_after_any_step(tmp_path, name, room):
    """C29: at the start, inside warm-up, with replays pending, after an overflow, at the end."""
    course = COURSES[name]
    assert WARM_UP_STEPS > 2
    for step in range(STEPS + 1):
        config = tight(course, tmp_path / str(step), room)
        stop_after(course, config, step)
        check_resumes(course, config, tmp_path, step)
        shutil.rmtree(tmp_path / str(step))


@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_run_resumes_with_other_budgets_paths_kept_commits_and_schedule(tmp_path, step):
    paths = [tmp_path / "a", tmp_path / "b"]
    course = COURSES["chased"]
    stop_after(course, tight(course, paths, keep_in_store=3), step)
    for room, kept in ((300_000, 1), (0, 2)):
        config = tight(COURSES["speculative"], paths, room, keep_in_store=kept)
        with on_disk(COURSES["speculative"], config, resume=True) as run:
            assert run.resumed == {"step": step}
            step += 1
            run.step(step, rate(step), {"step": step})
            run.engine.drain()
            run.engine.commits.wait()
    ample = small_store(budgets(paths, durability="step"))
    check_resumes(course, ample, tmp_path, step)


def test_replays_that_were_pending_are_made_after_resuming(tmp_path):
    course = COURSES["chased"]
    config = tight(course, tmp_path)
    stop = replace(course, steps=4)
    with on_disk(course, config) as run:
        for number in range(1, stop.steps + 1):
            run.step(number, rate(number), {"step": number})
        run.engine.drain()
        run.engine.commits.wait()
    with on_disk(course, config, resume=True) as run:
        units = run.engine._shared.units
        assert {x.synced_step for x in units.values()} > {4}, "somebody is behind"
        assert len(run.engine._ledger) >= 3
    check_resumes(course, config, tmp_path, 4)


@pytest.mark.parametrize("name", ["chased", "speculative", "half precision"])
def test_a_run_that_ends_with_its_stream_in_flight_loses_the_pending_step_at_most(tmp_path, name):
    course = COURSES[name]
    config = tight(course, tmp_path, 300_000)
    with on_disk(course, config) as run:
        run.engine.commit({"step": 0})
        for number in range(1, 5):
            run.step(number, rate(number), {"step": number})
        published = run.engine.commits.last_step
        run.engine.close()
    with on_disk(course, config, resume=True) as run:
        step = run.resumed["step"]
    assert published is not None and step >= published >= 2
    check_resumes(course, config, tmp_path, step)


def test_the_loss_scale_goes_on_where_it_was(tmp_path):
    # C64
    course = COURSES["half precision"]
    config = tight(course, tmp_path)
    with on_disk(course, config) as run:
        train(run, replace(course, steps=3))
        scale = run.engine.scaler.to_json()
    assert run.engine.scaler.scale != course.optimizer.loss_scale.initial
    with on_disk(course, config, resume=True) as run:
        assert run.engine.scaler.to_json() == scale
        assert run.engine.optimizer_step == 2, "step 2 overflowed, so it was none"


def test_a_damaged_newest_manifest_falls_back_to_the_commit_before_and_says_so(tmp_path):
    """C28: the older commit is verified whole, and the lost step is made again."""
    course = COURSES["chased"]
    config = tight(course, tmp_path, keep_in_store=2)
    stop_after(course, config, 4)
    newest = max((tmp_path / "rank-00000").glob("manifest.*"), key=lambda x: x.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with on_disk(course, config, resume=True) as run:
        said = run.store.recovered.skipped
        assert any(x.startswith(f"{newest.name}: ") and "superseded" not in x for x in said)
        assert run.resumed == {"step": 3}
    check_resumes(course, config, tmp_path, 3)


@pytest.mark.parametrize(
    "other",
    [
        replace(TOY, expert_size=3101),
        replace(TOY, layers=3),
        replace(TOY, weight_dtype="float32"),
        replace(TOY, frozen=frozenset({"l0"}), dense_size=5101),
    ],
    ids=["size", "layers", "format", "frozen"],
)
def test_a_commit_of_another_model_is_refused_and_stays(tmp_path, other):
    course = COURSES["chased"]
    config = tight(course, tmp_path, 500_000)
    stop_after(course, config, 2)
    with (
        pytest.raises(StorageError, match="another model"),
        on_disk(replace(course, toy=other), config, resume=True),
    ):
        pass
    check_resumes(course, config, tmp_path, 2)
