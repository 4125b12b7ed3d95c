"""The stall of a save: what counts, and whose it is. The clock is the test's."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.commit_stall import CommitStall
from offload.config import OptimizerConfig
from offload.nvme.files import Buffers, StorageFile, open_os_file
from offload.testing import Toy, ToyRun, budgets, smallest_budgets, toy_run
from tests.offload.courses import small_store
from tests.offload.watch import hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

TOY = Toy(layers=2, experts=2, micro_batches=1, needed=lambda step, layer: [0, 1])
OPTIMIZER = OptimizerConfig(max_grad_norm=1e9)
GATE_S_MAX = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_time_in_which_compute_waits_and_a_commit_holds_counts():
    clock = Clock()
    stall = CommitStall(clock)

    def passes(seconds: float) -> None:
        clock.now += seconds

    stall.hold(True)
    passes(1.0)
    with stall.waiting():
        passes(2.0)
        stall.hold(False)
        passes(4.0)
        stall.hold(True)
        passes(8.0)
        with stall.waiting():
            passes(16.0)
        passes(32.0)
    passes(64.0)
    assert stall.take() == 2.0 + 8.0 + 16.0 + 32.0
    assert stall.take() == 0.0


def test_what_is_taken_in_the_middle_of_a_wait_is_counted_once():
    clock = Clock()
    stall = CommitStall(clock)
    with stall.waiting(entirely=True):
        clock.now += 3.0
        assert stall.take() == 3.0
        clock.now += 5.0
    clock.now += 7.0
    assert stall.take() == 5.0


def test_a_wait_that_fails_ends():
    clock = Clock()
    stall = CommitStall(clock)
    with pytest.raises(RuntimeError), stall.waiting(entirely=True):
        clock.now += 1.0
        raise RuntimeError
    clock.now += 1.0
    assert stall.take() == 1.0


class GateClock:
    """Its first call, when a stall begins, opens `gate`; the stall has taken `seconds` then."""

    def __init__(self, run: ToyRun, seconds: float) -> None:
        self.gate = threading.Event()
        self.num_calls = 0
        self._seconds = seconds
        run.engine._shared.commit_stall._clock = self

    def __call__(self) -> float:
        self.num_calls += 1
        self.gate.set()
        return 0.0 if self.num_calls == 1 else self._seconds

    def wait(self) -> None:
        assert self.gate.wait(GATE_S_MAX), "compute does not wait for the commit"


def stalls(run: ToyRun) -> dict[int, float]:
    found = {row.step: row.stall_seconds for row in run.engine.commits.take_published()}
    assert run.engine.commits.totals.stall_seconds == sum(found.values())
    assert run.engine.commits.totals.stall_seconds_max == max(found.values())
    return found


def small(folder: Path, tight: bool, **options: Any) -> Any:
    config = budgets(folder, **options)
    return small_store(smallest_budgets(TOY, config) if tight else config)


def train(run: ToyRun, steps: int, *commits: int) -> None:
    for number in range(1, steps + 1):
        run.step(number, 1e-3, {"step": number} if number in commits else None)
    run.engine.drain()
    run.engine.commits.wait()


@pytest.mark.parametrize("schedule", ["chased", "speculative"])
def test_waiting_for_the_publication_before_counts_for_that_one(tmp_path, schedule):
    optimizer = replace(OPTIMIZER, update_schedule=schedule)
    config = small(tmp_path, False, durability="step")
    with toy_run(TOY, config, optimizer) as run:
        clock = GateClock(run, 7.0)
        publish = run.store.publish

        def slow(cut, agree=None):
            if cut.meta["step"] == 1:
                clock.wait()
            return publish(cut, agree)

        run.store.publish = slow
        train(run, 4, 1, 2)
        assert stalls(run) == {1: 7.0, 2: 0.0}


class SlowFile:
    """Writes wait for the gate, once there is one."""

    clock: GateClock | None = None

    def __init__(self, inner: StorageFile) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        if self.clock is not None:
            self.clock.wait()
        return self._inner.writev_from(buffers, offset)


def test_an_update_that_waits_for_the_writes_of_a_commit_counts(tmp_path):
    """All is homed on the host, so a commit writes everything, and nothing else is written."""
    files = []

    def open_file(path: str, direct: bool) -> Any:
        files.append(SlowFile(open_os_file(path, direct)))
        return files[-1]

    config = small(tmp_path, False, durability="step")
    with toy_run(TOY, config, OPTIMIZER, open_file=open_file) as run:
        clock = GateClock(run, 5.0)
        for file in files:
            file.clock = clock
        train(run, 4, 1)
        (published,) = run.engine.commits.take_published()
        assert (published.step, published.stall_seconds) == (1, 5.0)
        layouts = TOY.layouts()
        everything = sum(x.nbytes(part) for x in layouts for part in ("weight", "state"))
        assert published.written_bytes == everything
        assert run.engine.commits.totals.written_bytes == everything


def test_a_commit_of_what_is_cold_writes_nothing_of_its_own(tmp_path):
    with toy_run(TOY, small(tmp_path, True, durability="step"), OPTIMIZER) as run:
        train(run, 3, 1, 3)
        found = run.engine.commits.take_published()
        assert [(row.step, row.written_bytes) for row in found] == [(1, 0), (3, 0)]
        assert all(row.publish_seconds > 0 for row in found)
        assert run.engine.commits.take_published() == []


def test_without_a_commit_nothing_is_a_stall_of_one(tmp_path):
    with toy_run(TOY, small(tmp_path, True), OPTIMIZER) as run:
        clock = GateClock(run, 1.0)
        for number in range(1, 4):
            run.step(number, 1e-3)
        run.evaluate()
        assert clock.num_calls == 0


def test_the_last_commit_is_all_stall(tmp_path):
    with toy_run(TOY, small(tmp_path, False, durability="none"), OPTIMIZER) as run:
        GateClock(run, 9.0)
        run.step(1, 1e-3)
        run.engine.drain()
        run.engine.commit({"step": 1})
        assert stalls(run) == {1: 9.0}
