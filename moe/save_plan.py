"""When a run commits, and what its commits say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SavePlan:
    """When the trainer commits, besides at its end, and what it writes into every commit.

    `every` counts steps; 0 means only at the end. With `every`, the start is committed too.
    """

    every: int
    facts: Mapping[str, Any]
