"""Makes a wait for other ranks that never ends a failure with every thread's stack.

Transports poll, and ask `Wait.check` between polls: nothing can be raised in a blocked call.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ops import clock
from ops.comm.base import TIMEOUT_SECONDS
from ops.errors import CommError

_YIELDS = 20
_PAUSE_MIN_SECONDS = 20e-6
_PAUSE_MAX_SECONDS = 1e-3


class Watchdog:
    """Bounds waits of one rank by `timeout_seconds` and prints stacks when one is exceeded.

    `output` is a file with a descriptor (stderr by default). `tell_others` is called after
    this rank's stacks are printed and has the other ranks print theirs, as far as the transport
    can reach them; it may block for a few seconds and must not raise.
    """

    def __init__(
        self,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        output: Any = None,
        tell_others: Callable[[str], None] | None = None,
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
        self.timeout_seconds = timeout_seconds
        self._output = output
        self.tell_others = tell_others
        self._told = threading.Lock()

    def wait(self, what: str) -> Wait:
        """Begin a wait for `what`."""
        return Wait(self, what)

    def poll(self, done: Callable[[], bool], what: str) -> None:
        """Ask until `done()`, in longer and longer pauses; raises `CommError` after too long."""
        if done():
            return
        wait = self.wait(what)
        for _ in range(_YIELDS):
            time.sleep(0)
            if done():
                return
        pause = _PAUSE_MIN_SECONDS
        while not done():
            wait.check()
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSE_MAX_SECONDS)

    def expire(self, what: str) -> CommError:
        """Print this rank's stacks, have the others print theirs; the error to raise."""
        limit = f"{self.timeout_seconds:g} s (runtime.collective_timeout)"
        message = f"{what} did not end within {limit}"
        self.dump(message)
        # Two threads may expire at once; the others need to be told once only.
        if self.tell_others is not None and self._told.acquire(blocking=False):
            self.tell_others(message)
        return CommError(
            f"{message}; raise that key if the other ranks were only slow; the stacks of all "
            "threads are on stderr"
        )

    def dump(self, message: str) -> None:
        """Print `message` and the stack of every thread of this process."""
        output = self._output or sys.__stderr__
        if output is None:
            return
        print(f"\n{message}; stacks of all threads:", file=output, flush=True)
        faulthandler.dump_traceback(file=output, all_threads=True)
        output.flush()


class Wait:
    """One wait that has begun."""

    def __init__(self, watchdog: Watchdog, what: str) -> None:
        self._watchdog = watchdog
        self._what = what
        self._end = clock.seconds() + watchdog.timeout_seconds

    def left_seconds(self) -> float:
        """Seconds until the wait has lasted too long, at least 0."""
        return max(self._end - clock.seconds(), 0.0)

    def check(self) -> None:
        """Raise `CommError` when the wait has lasted too long, after printing stacks."""
        if clock.seconds() >= self._end:
            raise self._watchdog.expire(self._what)
