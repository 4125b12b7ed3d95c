"""SIGINT and SIGTERM: the first asks the run to stop after its step, the second ends it at once.

The handler only sets an event; the trainer reads it at the step border and raises `Stopped`, so
that no step is left half done. Handlers are those of the whole process: use from the main thread.

Commands on checkpoints have no border to wait for: either signal ends them at once, by an
exception, so that holds and locks are given up and what is not finished stays marked as that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ops.errors import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_NOTICE = b"\nStopping after this step; a second signal stops at once.\n"
_STDERR = 2


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Within it, the first signal sets `stop` and the second exits with status 130."""
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            if os.isatty(_STDERR):
                _write(_SHOW_CURSOR)
            os._exit(Stopped.exit_code)
        stop.set()
        _write(_NOTICE)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within it, SIGTERM does what SIGINT does: it raises KeyboardInterrupt, which is status 130.

    In a thread other than the main one, nothing: signals are not its business.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _write(text: bytes) -> None:
    # Not print: a handler may interrupt a print, whose buffer is not reentrant.
    with contextlib.suppress(OSError):
        os.write(_STDERR, text)
