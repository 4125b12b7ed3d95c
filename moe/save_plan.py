"""When a run commits, and what its commits say of it.

Whether the next step is committed is decided at the border before it: counted steps are known to
every rank, what only rank 0 knows (its clock, a request) is agreed with the others there. A commit
changes no bit of training, so clocks may decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ops.clock import seconds

REFUSED = (
    "warning: save-now is refused, nothing is lost: under offload.durability = none "
    "offload.nvme.capacity is charged for no commit but the one at the end. Stop the run to save "
    "it (Ctrl-C or SIGTERM), or resume it with offload.durability=checkpoint."
)


@dataclass(frozen=True)
class SavePlan:
    """When the trainer commits, besides at its end, and what it writes into every commit.

    `every` counts steps, `minutes` is the time since the last commit; 0 leaves either out. With one
    of them, the start is committed too. `on_request`: whether there is room for a commit that
    somebody asks for.
    """

    every: int
    facts: Mapping[str, Any]
    minutes: float = 0.0
    on_request: bool = False

    @property
    def periodic(self) -> bool:
        """Whether there are commits besides those at the end and on request."""
        return self.every > 0 or self.minutes > 0

    def counts(self, step: int) -> bool:
        """Whether `step` is one of those that are committed by number."""
        return self.every > 0 and step % self.every == 0


def never() -> bool:
    """The `asked` of a rank that nobody can ask."""
    return False


class Saves:
    """A plan in progress. `asked` and `clock` (seconds) are only consulted on rank 0."""

    def __init__(
        self,
        plan: SavePlan,
        asked: Callable[[], bool] = never,
        clock: Callable[[], float] = seconds,
    ) -> None:
        """`asked` tells whether somebody has asked for a commit since the last call."""
        self.plan = plan
        self._asked = asked
        self._clock = clock
        self._since = clock()

    def saved(self) -> None:
        """A commit was made or requested: `plan.minutes` begin anew."""
        self._since = self._clock()

    def is_overdue(self) -> bool:
        """Whether `plan.minutes` have passed since the last commit."""
        return self.plan.minutes > 0 and self._clock() - self._since >= 60.0 * self.plan.minutes

    def is_asked(self, tell: Callable[[str], None]) -> bool:
        """Whether a commit has been asked for and is possible; `tell`s why not."""
        if not self._asked():
            return False
        if not self.plan.on_request:
            tell(REFUSED)
        return self.plan.on_request
