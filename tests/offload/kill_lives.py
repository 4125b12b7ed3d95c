"""The parent of killed runs: starts lives, ends some of them, and checks what each has left."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from offload.nvme.inspect import InspectedStore, find_stores
from offload.testing_kill import MANNERS, PHASES
from ops.clock import seconds
from ops.errors import ConfigError
from tests.offload.courses import Results, sometimes_clipped, uninterrupted
from tests.offload.kill_child import Life, live

LIVES_MAX = 12
LIFE_S_MAX = 300.0

fork_server = multiprocessing.get_context("forkserver")
fork_server.set_forkserver_preload(["pytest", "tests.offload.kill_server"])


def phases_in_turn(rng: np.random.Generator) -> Iterator[str]:
    """Every phase, and a kill from outside (`any`), in ever new orders."""
    while True:
        yield from rng.permutation([*PHASES, "any"]).tolist()


@dataclass
class Log:
    """What the lives of a run have told."""

    published: tuple[int, int] | None = None  # step, generation
    resumed: tuple[int, int] | None = None  # of the last life
    results: Results = field(default_factory=dict)
    last_step: int = 0
    done: bool = False

    def read(self, path: Path, skip: int) -> int:
        """Take the lines behind the first `skip`; returns how many there are now."""
        lines = path.read_text().splitlines() if path.exists() else []
        self.resumed = None
        for line in lines[skip:]:
            word, *rest = line.split()
            if word == "done":
                self.done = True
            elif word == "result":
                *name, value = rest
                self.results[" ".join(name)] = int(value)
                if name[0] == "step":
                    self.last_step = int(name[1])
            else:
                setattr(self, word, (int(rest[0]), int(rest[1])))
        return len(lines)


def run_to_the_end(
    seed: int, folder: Path, phases: Iterator[str], kills_max: int = LIVES_MAX
) -> Counter[str]:
    """Lives of one run until it is done; how many were ended in each phase.

    Every life is checked: the store it leaves is whole and holds what was published, the next
    goes on from there, and all that came out is what the uninterrupted run came to.
    """
    folder.mkdir()
    course = sometimes_clipped(seed, folder / "norms")
    expected = uninterrupted(course, folder / "memory")
    (folder / "counted").mkdir()
    life = Life(seed, course.optimizer.max_grad_norm, folder / "counted", 0)
    begun = seconds()
    counts = live(life).counts
    whole_s = seconds() - begun
    (folder / "killed").mkdir()
    life = replace(life, folder=folder / "killed")
    rng = np.random.default_rng([seed, 4])
    log, num_lines = Log(), 0
    kills: Counter[str] = Counter()
    while not log.done:
        before = log.published
        last_step = log.last_step
        phase = next(phases) if kills.total() < kills_max else ""
        at = int(rng.integers(0, max(1, int(0.6 * counts[phase]))))
        point = (phase, at, str(rng.choice(MANNERS)), float(rng.random() * 2e-3))
        life = replace(life, number=life.number + 1, point=point)
        what = f"{life}, killed before: {dict(kills)}"
        code = _end_of(life, rng.random() * whole_s if phase == "any" else None)
        num_lines = log.read(life.folder / "log", num_lines)
        kills[phase] += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL) and log.done == (code == 0), what
        if before is not None and (log.resumed is not None or code == 0):
            assert log.resumed is not None, what
            assert log.resumed >= before, what
            assert log.resumed[0] >= last_step - 2, what  # that one was being committed
        assert log.results.items() <= expected.items(), what
        check_store(life.paths, log.published, what)
    assert log.results == expected
    shutil.rmtree(folder)
    return kills


def _end_of(life: Life, kill_after_s: float | None) -> int | None:
    """Live; the exit code."""
    process = fork_server.Process(target=live, args=(life,))
    process.start()
    if kill_after_s is not None:
        process.join(kill_after_s)
        process.kill()
    process.join(LIFE_S_MAX)
    assert process.exitcode is not None, f"{life} does not end"
    return process.exitcode


def check_store(paths: list[Path], published: tuple[int, int] | None, what: str) -> None:
    """Every block of every commit verifies, and the newest is not older than `published`."""
    try:
        (directories,) = find_stores([str(path) for path in paths])
    except ConfigError:
        assert published is None, what
        return
    store = InspectedStore(directories)
    try:
        assert not store.is_owned and not store.damaged, what
        assert published is None or store.commits[0].generation >= published[1], what
        for name, _, damage in store.verify():
            assert not damage, f"{name}: {damage}; {what}"
    finally:
        store.close()
