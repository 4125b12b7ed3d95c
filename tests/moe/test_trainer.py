"""The training loop on the NumPy backend: when it saves, how it stops, what all ranks agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe.save_plan import SavePlan
from ops.comm.base import World
from ops.comm.local import run_local
from ops.errors import Stopped
from tests.moe.toy_trainer import (
    AT_EXIT,
    EVERY_STEP,
    committed_step,
    tight,
    toy_rank,
    toy_trainer,
)
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


def losses_without_commits(folder: Path) -> dict[int, str]:
    with toy_trainer(tight(folder, durability="none"), AT_EXIT) as lived:
        lived.trainer.run()
        return lived.losses() | {0: lived.trainer.totals.weights_digest}


def test_a_commit_follows_when_the_minutes_have_passed(tmp_path):
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
        found = lived.losses() | {0: lived.trainer.totals.weights_digest}
    assert committed_step(tmp_path / "a") == 10
    assert found == losses_without_commits(tmp_path / "b")


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


def test_a_request_without_room_is_refused_and_the_run_goes_on(tmp_path):
    requests = Requests(2, 5)
    config = tight(tmp_path / "a", durability="none")
    with toy_trainer(config, AT_EXIT, asked=requests) as lived:
        lived.told.then = requests.step
        steps = commits_of(lived)
        lived.trainer.run()
        assert steps == [10]
        assert ["is refused" in text for text in lived.told.messages] == [True, True]
        found = lived.losses() | {0: lived.trainer.totals.weights_digest}
    assert found == losses_without_commits(tmp_path / "b")


@pytest.mark.parametrize("plan", [EVERY_STEP, AT_EXIT])
@pytest.mark.parametrize("at", [0, 1, 6, 10])
def test_a_stop_saves_the_step_it_ends_with(tmp_path, plan, at):
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
    assert found == losses_without_commits(tmp_path / "b")[0]


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
