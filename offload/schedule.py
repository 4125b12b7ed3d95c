"""The access schedule of a step: which units are used, in which order.

Dense units are known before the step. Which experts a layer needs is known once its router has
run; until then the stage is uncertain and only a guess (the set of the step before) is available.
Pure: no I/O, no threads, no clock; the owner serialises calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.policy import NEVER


@dataclass(frozen=True)
class Stage:
    """Units used one after another. With a `group`, only the resolved ones of the group are."""

    name: str
    units: tuple[str, ...]
    group: str | None = None
    gradient: bool = False


class AccessSchedule:
    """The stages of one step (or evaluation batch) and a cursor that walks over them."""

    def __init__(
        self, stages: Sequence[Stage], guesses: dict[str, tuple[str, ...]] | None = None
    ) -> None:
        self.stages = tuple(stages)
        self.cursor = -1
        self._guesses = guesses or {}
        self._resolved: dict[str, frozenset[str]] = {}
        self._done: set[str] = set()
        self._places: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            for unit in stage.units:
                self._places.setdefault(unit, []).append(index)

    def enter(self, name: str) -> Stage:
        """Advance to the next stage, which must be `name`: the step and its schedule agree."""
        self.cursor += 1
        stage = self.stages[self.cursor] if self.cursor < len(self.stages) else None
        if stage is None or stage.name != name:
            raise RuntimeError(f"the step entered {name}, its schedule expects {stage}")
        self._done = set()
        return stage

    @property
    def current(self) -> Stage:
        """The stage that was entered last."""
        return self.stages[self.cursor]

    def resolve(self, group: str, needed: Sequence[str]) -> list[str]:
        """Fix the units of `group`; returns guessed units that are not needed after all."""
        self._resolved[group] = frozenset(needed)
        return [u for u in self._guesses.get(group, ()) if u not in self._resolved[group]]

    def resolved(self) -> dict[str, tuple[str, ...]]:
        """The resolved groups so far: the guesses of the next step."""
        return {group: tuple(sorted(units)) for group, units in self._resolved.items()}

    def used(self, unit: str) -> None:
        """The unit was leased in the current stage; its next use lies in a later one."""
        self._done.add(unit)

    def upcoming(self) -> Iterator[tuple[int, str]]:
        """(stage index, unit) of every expected use from the cursor on, in order."""
        for index in range(max(self.cursor, 0), len(self.stages)):
            for unit in self._expected(index):
                if index > self.cursor or unit not in self._done:
                    yield index, unit

    def first_unresolved(self) -> int:
        """Index of the first stage to come whose units are not known yet, or NEVER."""
        for index in range(max(self.cursor, 0), len(self.stages)):
            group = self.stages[index].group
            if group is not None and group not in self._resolved:
                return index
        return NEVER

    def next_use(self, unit: str) -> int:
        """Index of the next stage that may use `unit`, or NEVER."""
        places = self._places.get(unit, ())
        for index in places[bisect_left(places, max(self.cursor, 0)) :]:
            if index == self.cursor and unit in self._done:
                continue
            group = self.stages[index].group
            if group is None or group not in self._resolved or unit in self._resolved[group]:
                return index
        return NEVER

    def last_use(self, unit: str) -> int:
        """Index of the last stage that may use `unit` in the whole schedule, or NEVER."""
        places = self._places.get(unit)
        return places[-1] if places else NEVER

    def gradient_units(self) -> list[str]:
        """Units that will certainly get a gradient, in forward order."""
        certain = {u for s in self.stages if s.gradient and s.group is None for u in s.units}
        return [unit for unit in self._places if unit in certain]

    def gradient_uses(self) -> dict[str, int]:
        """How many stages deposit a gradient for each unit."""
        counts: dict[str, int] = {}
        for stage in self.stages:
            if stage.gradient:
                for unit in stage.units:
                    counts[unit] = counts.get(unit, 0) + 1
        return counts

    def _expected(self, index: int) -> Sequence[str]:
        stage = self.stages[index]
        if stage.group is None:
            return stage.units
        if stage.group in self._resolved:
            needed = self._resolved[stage.group]
        else:
            needed = frozenset(self._guesses.get(stage.group, ()))
        return [unit for unit in stage.units if unit in needed]
