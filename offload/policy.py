"""Which copy to give up: the one whose next use is farthest away (Belady 1966).

Pure; the access schedule is known before the step, so this is the optimal choice, not a guess.
"""

from __future__ import annotations

from collections.abc import Iterable

NEVER = 1 << 62


def choose_victim(candidates: Iterable[tuple[str, int]], later_than: int) -> str | None:
    """The candidate (unit, next use) with the farthest use beyond `later_than`, or None.

    A prefetch passes its own deadline, so that it never evicts what is needed sooner; a demand
    passes -1. Equal distances are settled by name, so that runs repeat.
    """
    best: tuple[int, str] | None = None
    for unit, next_use in candidates:
        if next_use > later_than and (best is None or (next_use, unit) > best):
            best = (next_use, unit)
    return None if best is None else best[1]
