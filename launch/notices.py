"""Warnings of all layers, which only log, as sentences for the user."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LAYERS = ("ops", "offload", "moe", "launch")


@contextmanager
def warnings_shown(tell: Callable[[str], None]) -> Iterator[None]:
    """Within it, what our own code logs as a warning or worse is told, on whatever thread."""
    handler = _Teller(tell)
    loggers = [logging.getLogger(name) for name in _LAYERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False  # else it would be printed twice
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before):
            logger.removeHandler(handler)
            logger.propagate = propagate


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(f"{record.levelname.lower()}: {self.format(record)}")
        except Exception:
            self.handleError(record)
