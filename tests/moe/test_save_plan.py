"""When commits are due: counted steps, minutes of an injected clock, requests."""

from __future__ import annotations

from moe.save_plan import SavePlan, Saves


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_counted_and_zero_counts_none():
    assert [step for step in range(1, 10) if SavePlan(3, {}).counts(step)] == [3, 6, 9]
    assert not any(SavePlan(0, {}, minutes=1.0).counts(step) for step in range(10))
    assert [SavePlan(*row).periodic for row in ((0, {}), (1, {}), (0, {}, 0.1))] == [0, 1, 1]


def test_minutes_count_from_the_last_commit():
    clock = Clock()
    saves = Saves(SavePlan(0, {}, minutes=1.5), clock=clock)
    clock.now += 89.0
    assert not saves.is_overdue()
    clock.now += 1.0
    assert saves.is_overdue() and saves.is_overdue(), "until a commit is made"
    saves.saved()
    assert not saves.is_overdue()
    clock.now += 90.0
    assert saves.is_overdue()


def test_without_minutes_nothing_is_ever_overdue():
    clock = Clock()
    saves = Saves(SavePlan(3, {}), clock=clock)
    clock.now += 1e9
    assert not saves.is_overdue()


def test_a_request_without_room_is_refused_in_one_sentence():
    told: list[str] = []
    answers = iter([False, True, True, False])
    saves = Saves(SavePlan(0, {}), asked=lambda: next(answers))
    assert not any(saves.is_asked(told.append) for _ in range(3))
    (first, second) = told
    assert first == second and first.startswith("warning: save-now is refused")
    assert Saves(SavePlan(2, {}, on_request=True), lambda: True).is_asked(told.append)
    assert len(told) == 2
