"""What every optimizer step did to parameters without gradient, kept until everybody has caught up.

A step's entry is (number, learning rate); weight decay is constant per tensor, so the scalars of a
missed step can be made again, bit for bit. Steps skipped for overflow are not steps and have no
entry. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ops.kernels.adamw import AdamW
from ops.kernels.arrays import F32

STEP_MAX = 1 << 53


class Ledger:
    """Learning rates of the optimizer steps that some unit may still have to replay."""

    def __init__(self, adamw: AdamW) -> None:
        self._adamw = adamw
        self._rates: dict[int, float] = {}
        self.step = 0

    def add(self, learning_rate: float) -> int:
        """Enter the next step; returns its number (the first is 1)."""
        self.step += 1
        self._rates[self.step] = learning_rate
        return self.step

    def withdraw(self) -> None:
        """Take back the last step entered, which turned out not to be one."""
        del self._rates[self.step]
        self.step -= 1

    def to_json(self) -> dict[str, Any]:
        """What a commit keeps of the ledger; JSON keeps every float exactly."""
        return {"step": self.step, "rates": [[step, rate] for step, rate in self._rates.items()]}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Become what `to_json` described; ValueError, KeyError or TypeError for anything else.

        The rates are those of consecutive steps, the last one is `step`; there may be none.
        """
        step, rows = data["step"], data["rates"]
        if type(step) is not int or not 0 <= step <= STEP_MAX:
            raise ValueError(
                f"engine.ledger.step = {step!r}: allowed is a whole number from 0 to {STEP_MAX}"
            )
        if not isinstance(rows, list):
            raise ValueError("engine.ledger.rates: allowed is a list of [step, rate]")
        rates: dict[int, float] = {}
        for number, row in enumerate(rows, step - len(rows) + 1):
            if not isinstance(row, list) or len(row) != 2:
                raise ValueError("engine.ledger.rates: each is a pair [step, rate]")
            found, rate = row
            if type(found) is not int or found != number or number < 1:
                raise ValueError(
                    f"engine.ledger.rates: {found!r} instead of step {number}; allowed are "
                    f"{len(rows)} consecutive steps up to {step}"
                )
            if type(rate) not in (int, float) or not 0 <= rate < math.inf:
                raise ValueError(
                    f"engine.ledger.rates: {rate!r} at step {number}; allowed is a finite number "
                    "of at least 0"
                )
            rates[number] = float(rate)
        self._rates, self.step = rates, step

    def covers(self, after: int) -> bool:
        """Whether `table` has all steps behind `after`."""
        return after >= self.step or after + 1 in self._rates

    @property
    def first(self) -> int:
        """The oldest step whose rate is known; without any, the one to come."""
        return min(self._rates, default=self.step + 1)

    def table(self, after: int, until: int, weight_decay: float) -> F32:
        """Scalars [until - after, 7] of the steps after `after` up to and with `until`."""
        return self._adamw.table(
            (step, self._rates[step], weight_decay) for step in range(after + 1, until + 1)
        )

    def prune(self, oldest_synced: int) -> None:
        """Forget the steps that every unit has applied; O(steps forgotten)."""
        for step in sorted(self._rates):
            if step > oldest_synced:
                break
            del self._rates[step]

    def __len__(self) -> int:
        return len(self._rates)
