"""When the numbers of a run say that it has gone wrong: not finite, or far above what they were.

Pure: the same numbers in the same order give the same answer. Both numbers are those of all ranks,
so all ranks see the same; the trainer makes sure of it all the same before any of them acts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from offload.parts import StepOutcome

WINDOW_STEPS = 100
"""The running median is that of so many applied steps before."""

WINDOW_STEPS_MIN = 20
"""With fewer steps before, in this part of the run, nothing is far above them."""


class NumericWatch:
    """Compares loss and gradient norm of each step with what they were before.

    `multiple` of the running median is the limit; 0: only numbers that are not finite count.
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._before: dict[str, deque[float]] = {
            what: deque(maxlen=WINDOW_STEPS) for what in ("loss", "gradient norm")
        }

    def look(self, step: int, loss: float, outcome: StepOutcome) -> str | None:
        """Enter a step; why training cannot go on, or None.

        A step that was skipped because the loss scale was too high is none.
        """
        norm = outcome.grad_norm
        if outcome.alarm or (not math.isfinite(loss) and math.isfinite(norm)):
            return (
                f"step {step}: loss {loss:g}, gradient norm {norm:g}: one of them, or the square "
                "of a gradient, is no finite number, so nothing was updated; the weights are those "
                f"after step {step - 1}. Try a lower optimizer.learning_rate or longer "
                "optimizer.warmup_steps."
            )
        if not outcome.applied:
            return None
        found = [self._above(step, *row) for row in (("loss", loss), ("gradient norm", norm))]
        return next(filter(None, found), None)

    def _above(self, step: int, what: str, value: float) -> str | None:
        """Enter `value`; the sentence if it is above its limit."""
        before = self._before[what]
        median = statistics.median(before) if len(before) >= WINDOW_STEPS_MIN else 0.0
        limit, count = self._multiple * median, len(before)
        before.append(value)
        if limit <= 0.0 or value <= limit:
            return None
        return (
            f"step {step}: {what} {value:g} is above its limit of {limit:g} = "
            f"train.alarm_multiple {self._multiple:g} x {median:g}, its median in the last "
            f"{count} steps. Try a lower optimizer.learning_rate, or a higher limit."
        )
