"""How long compute stood still because of a commit.

Compute waits for a commit in three ways: at a border, for the cut of the step before, which waits
for the commit before to be published; in a lease, for an update whose unit's blocks homed on the
host are still being written for a commit; and at the end, for the last publication. Only waits are
counted, and only while nothing else is what they wait for: that transfers are slower beside a
commit's writes is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ops.clock import seconds


class CommitStall:
    """Seconds in which compute waits and a commit holds the updates up, at the same time.

    All calls hold the lock of `Shared.changed`.
    """

    def __init__(self, clock: Callable[[], float] = seconds) -> None:
        self._clock = clock
        self._num_waits = 0
        self._num_entire = 0
        self._held = False
        self._since: float | None = None
        self._seconds = 0.0

    @contextmanager
    def waiting(self, *, entirely: bool = False) -> Iterator[None]:
        """Compute waits in the body, which gives the lock up; `entirely` for a commit."""
        self._num_waits += 1
        self._num_entire += entirely
        self._change()
        try:
            yield
        finally:
            self._num_waits -= 1
            self._num_entire -= entirely
            self._change()

    def hold(self, held: bool) -> None:
        """From now on a commit is what the updates wait for, or it is not."""
        self._held = held
        self._change()

    def take(self) -> float:
        """The seconds since the last call."""
        if self._since is not None:
            now = self._clock()
            self._seconds += now - self._since
            self._since = now
        found, self._seconds = self._seconds, 0.0
        return found

    def _change(self) -> None:
        counts = self._num_waits > 0 and (self._held or self._num_entire > 0)
        if counts and self._since is None:
            self._since = self._clock()
        elif not counts and self._since is not None:
            self._seconds += self._clock() - self._since
            self._since = None
