"""Helpers of the engine's tests: hangs become stacks, budgets are watched from another thread."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.testing import ToyRun


@contextmanager
def stacks_after(seconds: float, stream_fd: int) -> Iterator[None]:
    """End the process with the stack of every thread if the body takes longer than `seconds`."""
    with os.fdopen(os.dup(stream_fd), "w") as stream:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stream)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def hang_guard(capfd) -> Iterator[None]:
    """A test that takes longer than two minutes hangs: show where, and end."""
    with capfd.disabled():
        real_stderr = os.dup(2)
    with stacks_after(120.0, real_stderr):
        yield
    os.close(real_stderr)


@pytest.fixture(scope="module")
def one_call_a_block() -> Iterator[None]:
    """Each block is written and read by a call of its own.

    Which neighbours share a call is a matter of timing, and so is how many calls there are: a
    fault at the 30th may never strike.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.nvme.transfers.NEIGHBOURS_MAX", 1)
        yield


def drop_cached_weights(run: ToyRun) -> None:
    """Evict every cold weight in host that nobody holds, as the need of others does (lock held)."""
    for unit in run.engine._shared.units.values():
        if unit.evictable_host_weight():
            run.engine._memory.drop_weight(unit.name)


class BudgetWatch:
    """Samples what every tier holds, from its own thread, until the body ends."""

    def __init__(self, engine: OffloadEngine, config: OffloadConfig) -> None:
        self.num_samples = 0
        self.excess: list[str] = []
        self._engine = engine
        self._config = config
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="budget watch")

    def __enter__(self) -> BudgetWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            for tier, used_bytes in self._engine.used_bytes().items():
                capacity_bytes = getattr(self._config, tier).capacity
                if used_bytes > capacity_bytes:
                    self.excess.append(f"{tier} holds {used_bytes} of {capacity_bytes}")
            self.num_samples += 1
            if self._ended.wait(1e-4):
                return
