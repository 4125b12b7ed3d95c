"""The training loop on the NumPy backend: when it saves, how it stops, what all ranks agree on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.data.stream import HeldOutBatch
from moe.save_plan import SavePlan
from offload.config import OffloadConfig, OptimizerConfig
from offload.testing import budgets
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import NumericAlarm, Stopped, StorageError
from tests.moe.toy_trainer import (
    AT_EXIT,
    EVERY_STEP,
    TOY,
    committed_step,
    tight,
    toy_rank,
    toy_trainer,
)
from tests.offload.courses import Course, small_store, with_undo
from tests.offload.watch import hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

BY_MINUTES = SavePlan(0, {}, minutes=1.0, on_request=True)
ON_REQUEST = SavePlan(0, {}, minutes=1e6, on_request=True)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Requests:
    """Asks for a save once after each of these steps."""

    def __init__(self, *steps: int) -> None:
        self._open = set(steps)
        self._done = 0

    def step(self, number: int) -> None:
        self._done = number

    def __call__(self) -> bool:
        due = self._done in self._open
        self._open.discard(self._done)
        return due


def commits_of(lived: Any) -> list[int]:
    """The steps whose state a trainer hands to the engine, noted as it does."""
    steps: list[int] = []
    state = lived.trainer._state

    def noted(number: int) -> dict[str, Any]:
        steps.append(number)
        return state(number)

    lived.trainer._state = noted
    return steps


def in_memory(folder: Path) -> OffloadConfig:
    return small_store(budgets(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, str]:
    """The losses of a run that commits at its end only; 0: the digest of its weights."""
    with toy_trainer(in_memory(tmp_path_factory.mktemp("whole")), AT_EXIT) as lived:
        lived.trainer.run()
        return lived.losses() | {0: lived.trainer.totals.weights_digest}


def test_a_commit_follows_when_the_minutes_have_passed(tmp_path, whole):
    """40 seconds a step: due after every second one; what is trained does not notice."""
    clock = Clock()

    def passes(number: int) -> None:
        clock.now += 40.0

    with toy_trainer(tight(tmp_path / "a"), BY_MINUTES, clock=clock) as lived:
        lived.told.then = passes
        steps = commits_of(lived)
        lived.trainer.run()
        # 80 s after the commit at the start, step 3 is; its own commit restarts the clock.
        assert steps == [0, 3, 5, 7, 9, 10]
        told = [row for record in lived.told.steps for row in record["commits"]]
        assert [row["step"] for row in told] == steps[: len(told)] and told
        assert lived.told.steps[0]["commits"][0]["stall_seconds"] > 0, "nothing ran beside it"
        found = lived.losses() | {0: lived.trainer.totals.weights_digest}
    assert committed_step(tmp_path / "a") == 10
    assert found == whole


def test_the_held_out_loss_is_a_mean_over_the_tokens_of_all_ranks(tmp_path):
    """The last batch is smaller, and this rank may have nothing of it."""
    rows, nothing = np.zeros((2, 3, 4), np.int32), np.zeros((2, 0, 4), np.int32)
    parts = [HeldOutBatch(*rows, num_tokens=24), HeldOutBatch(*nothing, num_tokens=4)]
    with toy_trainer(in_memory(tmp_path), AT_EXIT, steps=1) as lived:
        lived.trainer._held_out = lambda: iter(parts)
        lived.step.evaluate = lambda tokens, targets: 24.0 if len(tokens) else 18.0
        lived.trainer.run()
    assert [record["loss"] for record in lived.told.evals] == [1.5]


def test_minutes_and_steps_together_commit_whichever_comes_first(tmp_path):
    clock = Clock()

    def passes(number: int) -> None:
        clock.now += 90.0 if number == 1 else 15.0

    plan = SavePlan(4, {}, minutes=1.0)
    with toy_trainer(tight(tmp_path), plan, clock=clock) as lived:
        lived.told.then = passes
        steps = commits_of(lived)
        lived.trainer.run()
    assert steps == [0, 2, 4, 8, 10]


def test_a_request_is_answered_by_the_next_step_without_draining(tmp_path):
    requests = Requests(0, 4)
    with toy_trainer(tight(tmp_path), ON_REQUEST, asked=requests, train={"eval_interval": 0}) as (
        lived
    ):
        drains = []
        drain = lived.run.engine.drain
        lived.run.engine.drain = lambda: drains.append(lived.trainer.totals.steps) or drain()
        lived.told.then = requests.step
        steps = commits_of(lived)
        lived.trainer.run()
        assert steps == [0, 1, 5, 10]
        assert [text for text in lived.told.messages if "save-now" in text] == [
            "save-now: step 1 is saved",
            "save-now: step 5 is saved",
        ]
        assert set(drains) == {0, 10}, "only at the start and at the end"


def test_waits_for_other_ranks_between_steps_are_no_share_of_the_steps(tmp_path):
    """A run whose ranks began at different times reported that it waited 300 % of the time."""
    world = SingleRank()
    with toy_trainer(tight(tmp_path), world=world) as lived:
        world.stats.add("all_reduce", 0, 1000.0)
        lived.told.then = lambda number: world.stats.add("all_reduce", 0, 1000.0)
        train = lived.step.train

        def train_and_wait(*arguments):
            world.stats.add("all_gather", 0, 0.5)
            return train(*arguments)

        lived.step.train = train_and_wait
        lived.trainer.run()
        waits = [record["comm_seconds"] for record in lived.told.steps]
        assert waits == pytest.approx([0.5] * 10, abs=0.01)
        assert lived.trainer.totals.comm_seconds == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize(("plan", "number"), [(ON_REQUEST, 10), (EVERY_STEP, 10)])
def test_a_request_after_the_last_step_is_answered_by_the_last_commit(tmp_path, plan, number):
    requests = Requests(10)
    with toy_trainer(tight(tmp_path), plan, asked=requests) as lived:
        lived.told.then = requests.step
        lived.trainer.run()
        assert lived.told.messages == [f"save-now: step {number} is saved"]


def test_a_request_together_with_a_stop_is_answered_by_its_commit(tmp_path):
    requests = Requests(3)
    with toy_trainer(tight(tmp_path), ON_REQUEST, asked=requests) as lived:

        def stops(number: int) -> None:
            requests.step(number)
            if number == 3:
                lived.stop.set()

        lived.told.then = stops
        with pytest.raises(Stopped, match="after step 3 of 10"):
            lived.trainer.run()
        assert lived.told.messages == ["save-now: step 3 is saved"]
    assert committed_step(tmp_path) == 3


def test_a_request_without_room_is_refused_and_the_run_goes_on(tmp_path, whole):
    requests = Requests(2, 5)
    config = tight(tmp_path / "a", durability="none")
    with toy_trainer(config, AT_EXIT, asked=requests) as lived:
        lived.told.then = requests.step
        steps = commits_of(lived)
        lived.trainer.run()
        assert steps == [10]
        assert ["is refused" in text for text in lived.told.messages] == [True, True]
        found = lived.losses() | {0: lived.trainer.totals.weights_digest}
    assert found == whole


@pytest.mark.parametrize("plan", [EVERY_STEP, AT_EXIT])
@pytest.mark.parametrize("at", [0, 1, 6, 10])
def test_a_stop_saves_the_step_it_ends_with(tmp_path, whole, plan, at):
    durability = "none" if plan is AT_EXIT else "step"
    with toy_trainer(tight(tmp_path, durability=durability), plan) as lived:
        lived.told.then = lambda number: lived.stop.set() if number == at else None
        if at == 0:
            lived.stop.set()
        with pytest.raises(Stopped, match=f"stopped after step {at} of 10"):
            lived.trainer.run()
        assert lived.trainer.totals.steps == at
    assert committed_step(tmp_path) == at
    with toy_trainer(tight(tmp_path, durability=durability), plan) as lived:
        assert lived.run.resumed["step"] == at
        lived.trainer.run()
        found = lived.trainer.totals.weights_digest
    assert found == whole[0]


def test_all_ranks_save_by_the_clock_of_the_first_and_stop_when_any_is_asked(tmp_path):
    """Rank 1 has another clock and its own requests, and would save alone; it must not."""

    def rank(world: World) -> tuple[list[int], str]:
        clock, requests = Clock(), Requests(*((5,) if world.rank == 0 else (1, 2)))

        def passes(number: int) -> None:
            requests.step(number)
            clock.now += 25.0 if world.rank == 0 else 1000.0
            if number == 7 and world.rank == 1:
                lived.stop.set()

        with toy_rank(world, tmp_path, BY_MINUTES, clock=clock, asked=requests) as lived:
            lived.told.then = passes
            steps = commits_of(lived)
            with pytest.raises(Stopped) as caught:
                lived.trainer.run()
            return steps, str(caught.value)

    assert run_local(2, rank) == [([0, 4, 6, 7], "stopped after step 7 of 10, as asked")] * 2

    def resumed(world: World) -> tuple[int, str]:
        with toy_rank(world, tmp_path, BY_MINUTES) as lived:
            lived.trainer.run()
            return lived.run.resumed["step"], lived.trainer.totals.weights_digest

    def whole(world: World) -> tuple[int, str]:
        with toy_rank(world, tmp_path / "whole", AT_EXIT) as lived:
            lived.trainer.run()
            return 7, lived.trainer.totals.weights_digest

    assert run_local(2, resumed) == run_local(2, whole)


SPECULATIVE = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=3, max_grad_norm=1e9, update_schedule="speculative"
)
BAD = 5


def bad_loss(number: int, loss: float) -> float:
    return math.nan if number == BAD else loss


def masters(lived: Any) -> dict[str, bytes]:
    return {tensor.name: values.tobytes() for tensor, values in lived.run.engine.masters()}


@pytest.fixture(scope="module")
def masters_before(tmp_path_factory) -> dict[str, bytes]:
    """The masters after the step before `BAD`, however a run does it."""
    with toy_trainer(in_memory(tmp_path_factory.mktemp("before")), AT_EXIT) as lived:
        lived.trainer.num_steps = BAD - 1
        lived.trainer.run()
        return masters(lived)


@pytest.mark.parametrize("optimizer", [None, SPECULATIVE], ids=["chased", "speculative"])
@pytest.mark.parametrize("plan", [EVERY_STEP, AT_EXIT, ON_REQUEST])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_saved_at_an_alarm_was_never_made_of_such_numbers(
    tmp_path, masters_before, plan, optimizer, what
):
    """The weights of the step before, the batch after the bad one; and it goes on from there."""
    durability = "none" if plan is AT_EXIT else "step"
    toy = replace(TOY, overflow_steps=frozenset({BAD} if what == "gradient" else ()))

    config = tight(tmp_path, toy, durability=durability)
    if optimizer is not None:
        config = with_undo(Course(toy, optimizer), config)

    def trainer() -> Any:
        return toy_trainer(config, plan, toy=toy, optimizer=optimizer)

    with trainer() as lived:
        lived.step.change = bad_loss if what == "loss" else lived.step.change
        with pytest.raises(NumericAlarm, match=f"step {BAD}: .* Step {BAD} is saved"):
            lived.trainer.run()
        assert [record["applied"] for record in lived.told.steps] == [True] * 4 + [False]
    assert committed_step(tmp_path) == BAD
    with trainer() as lived:
        assert (lived.run.resumed["step"], lived.run.resumed["cursor"]) == (BAD, {"position": BAD})
        assert masters(lived) == masters_before
        lived.trainer.num_steps = BAD + 1
        lived.trainer.run()
        ((number, applied),) = [(x["step"], x["applied"]) for x in lived.told.steps]
        assert (number, applied) == (BAD + 1, True)
    assert committed_step(tmp_path) == BAD + 1


def test_with_half_precision_only_a_loss_that_no_scale_can_cure_is_an_alarm(tmp_path):
    toy = replace(
        TOY, weight_dtype="float16", compute_dtype="float16", overflow_steps=frozenset({3})
    )
    with toy_trainer(tight(tmp_path, toy), toy=toy) as lived:
        lived.step.change = bad_loss
        with pytest.raises(NumericAlarm, match=f"step {BAD}: loss nan"):
            lived.trainer.run()
        skipped = [record["step"] for record in lived.told.steps if not record["applied"]]
        assert skipped == [3, BAD]
        assert lived.told.messages == ["step 3 skipped: gradients overflowed at loss scale 65536"]


def test_a_loss_far_above_its_median_is_saved_and_ends_the_run(tmp_path):
    clock = {"train": {"alarm_multiple": 2.5, "eval_interval": 0}, "steps": 40}
    with toy_trainer(tight(tmp_path / "a"), ON_REQUEST, **clock) as lived:
        lived.step.change = lambda number, loss: 7.0 if number == 30 else loss
        with pytest.raises(NumericAlarm) as caught:
            lived.trainer.run()
        said = str(caught.value)
        assert said.startswith("step 30: loss 7 is above its limit of ")
        assert said.endswith("Step 30 is saved: --resume goes on after it.")
    assert committed_step(tmp_path / "a") == 30
    with toy_trainer(tight(tmp_path / "a"), ON_REQUEST, **clock) as lived:
        lived.trainer.run()
        found = lived.trainer.totals.weights_digest
    with toy_trainer(tight(tmp_path / "b"), ON_REQUEST, steps=40) as lived:
        lived.trainer.run()
        assert lived.trainer.totals.weights_digest == found


def test_an_alarm_whose_save_fails_is_told_and_the_failure_is_raised(tmp_path):
    with toy_trainer(tight(tmp_path), ON_REQUEST) as lived:
        lived.step.change = bad_loss

        def full(state: dict[str, Any]) -> None:
            raise StorageError("the drive is full")

        lived.told.then = lambda number: setattr(lived.run.engine, "commit", full)
        with pytest.raises(StorageError, match="the drive is full"):
            lived.trainer.run()
        assert lived.told.messages[-1].startswith(f"warning: step {BAD}: loss nan")
    assert committed_step(tmp_path) == 0


def test_an_alarm_of_one_rank_is_one_of_all(tmp_path):
    """Its loss is not finite, so no rank updates anything, and all of them end with that step."""

    def rank(world: World) -> tuple[str, int, list[bool]]:
        with toy_rank(world, tmp_path, EVERY_STEP) as lived:
            if world.rank == 1:
                lived.step.change = bad_loss
            with pytest.raises(NumericAlarm) as caught:
                lived.trainer.run()
            assert lived.run.engine.commits.last_step == BAD
            applied = [record["applied"] for record in lived.told.steps]
            return str(caught.value).split(":")[0], lived.run.engine.optimizer_step, applied

    expected = (f"step {BAD}", BAD - 1, [True] * 4 + [False])
    assert run_local(2, rank) == [expected, expected]
