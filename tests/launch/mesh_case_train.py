"""The real command on one of several ranks, in which one thing happens at a chosen moment.

    mpirun -n 2 python -m tests.launch.mesh_case_train WHAT RANK STEP train CONFIG ...

WHAT is a function of `HAPPENINGS`; it happens on RANK, at or after STEP. Nothing that hangs here
lasts longer than `HANG_SECONDS`, and no test waits that long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch import environment
from launch.cli import main
from launch.config import load_config
from launch.ranks import detect_ranks

HANG_SECONDS = 900.0
WATCHDOG_SECONDS = 10.0
Happening = Callable[[bool, int], None]


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait(HANG_SECONDS)


def before_step(call: Callable[[int, Any], None]) -> None:
    """Have `call(number, trainer)` called before each step of this rank."""
    from moe.trainer import Trainer

    original = Trainer._one

    def one(self: Trainer, number: int, save: bool) -> str | None:
        call(number, self)
        return original(self, number, save)

    Trainer._one = one  # type: ignore[method-assign]


def after_record(call: Callable[[int], None]) -> None:
    """Have `call(number)` called after the record of each step, on every rank."""
    from moe.trainer import Trainer

    original = Trainer._record

    def record(self: Trainer, number: int, *arguments: Any) -> None:
        original(self, number, *arguments)
        call(number)

    Trainer._record = record  # type: ignore[method-assign]


def on_publish(call: Callable[[int], None]) -> None:
    """Have `call(step)` called before this rank makes its part of a commit durable."""
    from offload.nvme.commit import Commits

    original = Commits.publish

    def publish(self: Commits, cut: Any, agree: Any = None) -> Any:
        call(cut.meta["step"])
        return original(self, cut, agree)

    Commits.publish = publish  # type: ignore[method-assign]


def on_agree(call: Callable[[int], None]) -> None:
    """Have `call(step)` called when this rank's part is durable, before it tells the others."""
    from offload.rank_commits import RankCommits

    step = [0]
    on_publish(lambda number: step.__setitem__(0, number))
    original = RankCommits.__call__

    def agree(self: RankCommits, generation: int) -> None:
        call(step[0])
        original(self, generation)

    RankCommits.__call__ = agree  # type: ignore[method-assign]


# ---- what may happen


def nothing(here: bool, step: int) -> None:
    """A run that nobody disturbs."""


def killed_before_prepare(here: bool, step: int) -> None:
    """SIGKILL before this rank's part is durable, when the other's is."""
    from launch.resume import RANKS_FACT
    from offload.nvme.files import OsDirectoryFiles
    from offload.nvme.recovery import read_slots

    config = load_config(sys.argv[2])
    (path,) = config.offload.nvme.paths

    def other_is_prepared() -> bool:
        slots = read_slots(os.path.join(path, "rank-00000"), OsDirectoryFiles())
        metas = [slot.manifest.meta for slot in slots if slot.manifest is not None]
        return any(x["step"] == step and x["run"][RANKS_FACT] == 2 for x in metas)

    def publish(number: int) -> None:
        if number == step:
            deadline = time.monotonic() + HANG_SECONDS
            while not other_is_prepared():
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
            kill_myself()

    if here:
        on_publish(publish)


def killed_before_record(here: bool, step: int) -> None:
    """SIGKILL when this rank's part is durable, before it tells the others."""
    if here:
        on_agree(lambda number: kill_myself() if number == step else None)


def killed_after_record(here: bool, step: int) -> None:
    """SIGKILL when the record is written, before any other rank knows (for rank 0)."""
    from offload.rank_commits import RecordFile

    now = [0]
    on_publish(lambda number: now.__setitem__(0, number))
    original = RecordFile.write

    def write(self: RecordFile, commits: Any) -> None:
        original(self, commits)
        if now[0] == step:
            kill_myself()

    if here:
        RecordFile.write = write  # type: ignore[method-assign]


def told_to_stop(here: bool, step: int) -> None:
    """SIGTERM after a step, to one rank alone; the cores of all are looked at."""
    import launch.run

    allowed: set[int] = set()

    def look(number: int) -> None:
        for task in os.listdir("/proc/self/task"):
            allowed.update(os.sched_getaffinity(int(task)))
        if here and number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    run = launch.run._run

    def measured(*arguments: Any) -> Any:
        used, wall = time.process_time(), time.perf_counter()
        failure = run(*arguments)
        used, wall = time.process_time() - used, time.perf_counter() - wall
        told = {"cores": sorted(allowed), "used": used, "wall": wall}
        folder = Path(load_config(sys.argv[2]).offload.nvme.paths[0]).parent
        (folder / f"cores-{detect_ranks().rank}.json").write_text(json.dumps(told))
        return failure

    after_record(look)
    launch.run._run = measured


def not_finite(here: bool, step: int) -> None:
    """A gradient is not a number; the rank is late with the commit of this step."""
    from offload.commit import Commits
    from offload.engine import OffloadEngine
    from offload.parts import UnitUse

    steps, drained = [0], threading.Event()
    before_step(lambda number, _: steps.__setitem__(0, number))
    add, may_cut, drain = UnitUse.add, Commits.may_cut, OffloadEngine.drain

    def poisoned(self: UnitUse, name: str, gradient: Any) -> None:
        add(self, name, gradient * float("nan") if steps[0] == step else gradient)

    def late(self: Commits) -> bool:
        wanted = self._wanted
        is_late = wanted is not None and wanted["step"] == step and not drained.is_set()
        return may_cut(self) and not is_late

    def let_go(self: OffloadEngine) -> None:
        if steps[0] == step:
            drained.set()
            with self._shared.changed:
                self._shared.changed.notify_all()
        drain(self)

    if here:
        UnitUse.add = poisoned  # type: ignore[method-assign]
        Commits.may_cut = late  # type: ignore[method-assign]
        OffloadEngine.drain = let_go  # type: ignore[method-assign]


def fails(here: bool, step: int) -> None:
    """An exception in compute, while this rank's publisher waits for one that is not coming."""
    waits = threading.Event()

    def before(number: int, _: Any) -> None:
        if number == step:
            assert waits.wait(HANG_SECONDS)
            raise RuntimeError(f"something broke in step {number}")

    if here:
        on_agree(lambda number: waits.set() if number == step - 1 else None)
        before_step(before)
    else:
        on_publish(lambda number: hang() if number == step - 1 else None)


def hangs(here: bool, step: int) -> None:
    """Compute of one rank goes on no more; the others give up after `WATCHDOG_SECONDS`."""

    def before(number: int, trainer: Any) -> None:
        if number == step:
            trainer._world._watchdog.timeout_seconds = WATCHDOG_SECONDS
            if here:
                hang()

    before_step(before)


HAPPENINGS: dict[str, Happening] = {
    call.__name__: call
    for call in (
        nothing,
        killed_before_prepare,
        killed_before_record,
        killed_after_record,
        told_to_stop,
        not_finite,
        fails,
        hangs,
    )
}


if __name__ == "__main__":
    what, rank, step = sys.argv[1:4]
    del sys.argv[1:4]
    # What loads NumPy comes after what sets its environment, as in the command.
    environment.prepare(load_config(sys.argv[2]).runtime)
    HAPPENINGS[what](detect_ranks().rank == int(rank), int(step))
    main()
