"""Which numbers end a run: not finite ones, and those far above their running median."""

from __future__ import annotations

import math

import pytest

from moe.alarm import WINDOW_STEPS, WINDOW_STEPS_MIN, NumericWatch
from offload.parts import StepOutcome


def outcome(norm: float = 1.0, *, applied: bool = True, alarm: bool = False) -> StepOutcome:
    return StepOutcome(norm, 1.0, applied, alarm, 0, 1.0)


def watched(multiple: float, steps: int, loss: float = 2.0, norm: float = 0.5) -> NumericWatch:
    """A watch that has seen so many steps with these numbers."""
    watch = NumericWatch(multiple)
    for step in range(1, steps + 1):
        assert watch.look(step, loss, outcome(norm)) is None
    return watch


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (math.nan, outcome(1.0, applied=False)),  # only the loss: nothing a loss scale could cure
        (math.inf, outcome(1.0, applied=False)),
        (2.0, outcome(math.inf, applied=False, alarm=True)),
        (2.0, outcome(1e30, applied=False, alarm=True)),  # the squares have overflowed
        (math.nan, outcome(math.nan, applied=False, alarm=True)),
    ],
)
def test_numbers_that_are_not_finite_are_an_alarm_even_without_a_limit(loss, found):
    said = NumericWatch(0.0).look(7, loss, found)
    assert said is not None and said.startswith(f"step 7: loss {loss:g}, gradient norm")
    assert "the weights are those after step 6" in said


def test_a_step_skipped_for_its_loss_scale_is_none_and_does_not_count():
    watch = watched(2.0, WINDOW_STEPS_MIN - 1)
    for loss in (100.0, math.nan):
        assert watch.look(50, loss, outcome(math.inf, applied=False)) is None
    assert watch.look(51, 100.0, outcome(0.5)) is None, "one step too few for a median"


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (2.0, 1.5, None),  # at the limit
        (6.0, 1.5, None),
        (6.1, 0.5, "loss 6.1 is above its limit of 6 = train.alarm_multiple 3 x 2"),
        (2.0, 1.6, "gradient norm 1.6 is above its limit of 1.5 = train.alarm_multiple 3 x 0.5"),
    ],
)
def test_the_sentence_names_step_value_median_and_limit(loss, norm, said):
    found = watched(3.0, WINDOW_STEPS_MIN).look(21, loss, outcome(norm))
    if said is None:
        assert found is None
    else:
        assert found is not None and f"step 21: {said}, its median in the last 20 steps" in found


def test_without_a_limit_any_finite_number_will_do():
    assert watched(0.0, 200).look(201, 1e30, outcome(1e30)) is None


def test_the_median_runs_with_the_last_hundred_steps():
    """Two hundred steps at 8.0 are forgotten one by one."""
    watch = watched(3.0, 200, loss=8.0)
    for step in range(WINDOW_STEPS // 2 + 1):
        assert watch.look(step, 1.0, outcome(0.5)) is None
    found = watch.look(300, 4.0, outcome(0.5))
    assert found is not None and "3 x 1, its median in the last 100 steps" in found


def test_a_median_of_zero_sets_no_limit():
    assert watched(3.0, 50, loss=0.0).look(51, 1.0, outcome(0.5)) is None
