"""Ranks as threads of one process that compute one at a time, for code that is not thread-safe.

MindSpore compiles and computes in one thread at a time. A rank holds the turn while it computes and
gives it up while it waits in a collective, so several ranks share one process and its compiled
code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ops.comm.local import run_local

T = TypeVar("T")


class _InTurns:
    """A communicator whose calls give the turn up while they last."""

    def __init__(self, ranks: Any, turn: threading.Lock) -> None:
        self._ranks = ranks
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ranks, name)
        return self._releasing(found) if callable(found) else found

    def _releasing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def released(*args: Any, **kwargs: Any) -> Any:
            self._turn.release()
            try:
                result = call(*args, **kwargs)
            finally:
                self._turn.acquire()
            return _InTurns(result, self._turn) if call.__name__ == "split" else result

        return released


def run_in_turns(size: int, function: Callable[[Any], T], **options: Any) -> list[T]:
    """`function(world)` on `size` ranks, at most one of them computing; results in rank order.

    `options` are those of `run_local`.
    """
    turn = threading.Lock()

    def work(world: Any) -> T:
        with turn:
            return function(_InTurns(world, turn))

    return run_local(size, work, timeout_seconds=300.0, **options)
