"""The access schedule: order, uncertain stages, guesses, next uses."""

from __future__ import annotations

import pytest

from offload.policy import NEVER
from offload.schedule import AccessSchedule, Stage

STAGES = (
    Stage("fwd a", ("a",)),
    Stage("fwd x", ("x0", "x1", "x2"), "x"),
    Stage("head", ("a",), None, True),
    Stage("bwd x", ("x0", "x1", "x2"), "x", True),
    Stage("bwd a", ("a",), None, True),
)


def test_entering_the_wrong_stage_is_an_error():
    schedule = AccessSchedule(STAGES)
    schedule.enter("fwd a")
    with pytest.raises(RuntimeError, match="bwd x"):
        schedule.enter("bwd x")


def test_entering_behind_the_last_stage_is_an_error():
    schedule = AccessSchedule(STAGES[:1])
    schedule.enter("fwd a")
    with pytest.raises(RuntimeError):
        schedule.enter("fwd a")


def test_upcoming_lists_dense_units_and_guessed_experts_in_order():
    schedule = AccessSchedule(STAGES, {"x": ("x1",)})
    assert list(schedule.upcoming()) == [(0, "a"), (1, "x1"), (2, "a"), (3, "x1"), (4, "a")]


def test_without_a_guess_an_uncertain_stage_expects_nobody():
    assert [name for _, name in AccessSchedule(STAGES).upcoming()] == ["a", "a", "a"]


def test_resolving_replaces_the_guess_in_both_directions():
    schedule = AccessSchedule(STAGES, {"x": ("x0", "x1")})
    assert schedule.resolve("x", ["x1", "x2"]) == ["x0"]
    assert [n for i, n in schedule.upcoming() if i in (1, 3)] == ["x1", "x2", "x1", "x2"]
    assert schedule.resolved() == {"x": ("x1", "x2")}


def test_a_group_may_need_nobody():
    """C43: no token came to any expert of the layer."""
    schedule = AccessSchedule(STAGES, {"x": ("x0",)})
    assert schedule.resolve("x", []) == ["x0"]
    assert schedule.next_use("x0") == NEVER
    assert schedule.resolved() == {"x": ()}


def test_next_use_counts_every_stage_that_may_use_an_uncertain_unit():
    schedule = AccessSchedule(STAGES)
    assert schedule.next_use("x2") == 1
    schedule.resolve("x", ["x0"])
    assert schedule.next_use("x2") == NEVER
    assert schedule.next_use("x0") == 1
    assert schedule.next_use("unknown") == NEVER


def test_a_used_unit_is_next_used_in_a_later_stage():
    schedule = AccessSchedule(STAGES)
    schedule.enter("fwd a")
    assert schedule.next_use("a") == 0
    schedule.used("a")
    assert schedule.next_use("a") == 2
    assert next(iter(schedule.upcoming())) == (2, "a")
    for name in ("fwd x", "head", "bwd x", "bwd a"):
        schedule.enter(name)
    schedule.used("a")
    assert schedule.next_use("a") == NEVER
    assert list(schedule.upcoming()) == []


def test_gradient_uses_counts_tied_units_twice():
    assert AccessSchedule(STAGES).gradient_uses() == {"a": 2, "x0": 1, "x1": 1, "x2": 1}
