"""The parent of killed runs on several ranks: starts lives, and checks what each has left."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload.nvme.directory import rank_directory
from offload.nvme.inspect import InspectedStore
from offload.rank_commits import RecordFile
from offload.testing import budgets, toy_run
from offload.testing_kill import MANNERS
from ops.comm.base import World
from ops.comm.local import run_local
from tests.mpirun import run_ranks
from tests.offload.courses import small_store
from tests.offload.kill_lives import LIFE_S_MAX, fork_server
from tests.offload.process_world import socket_pairs
from tests.offload.rank_child import (
    LOST,
    OPTIMIZER,
    RANKS,
    TOY,
    RankLife,
    rank_process,
    rate,
    to_json,
)

# Each with the number of calls in two commits, about: `prepared` is a rank's part that the record
# does not name yet, `copy` that of the record beside it, `recorded` the time before what the record
# no longer names is freed.
PHASES = {
    "write": 6, "fsync": 4, "rename": 2, "prepared": 2, "record": 8, "copy": 8, "recorded": 2,
}  # fmt: skip
STEPS_A_LIFE = 3
KILLS_A_RUN = 12

Runner = Callable[[RankLife], list[int]]


def by_processes(life: RankLife) -> list[int]:
    """Ranks forked here, of which one may die alone; their exit codes."""
    ends = socket_pairs(RANKS)
    ranks = [
        fork_server.Process(target=rank_process, args=(life, rank, ends[rank]))
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            rank.start()
        for sockets in ends:
            for end in sockets.values():
                end.close()
        for rank in ranks:
            rank.join(LIFE_S_MAX)
        assert all(rank.exitcode is not None for rank in ranks), f"{life} does not end"
        return [int(rank.exitcode or 0) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()


def by_mpirun(life: RankLife) -> list[int]:
    """Ranks under mpirun, which ends all when one dies; one status for all of them."""
    path = Path(life.folder) / "life.json"
    path.write_text(to_json(life))
    done = run_ranks(RANKS, "tests.offload.rank_child", str(path), seconds_max=LIFE_S_MAX)
    if done.returncode == 0:
        return [0] * RANKS
    assert "signal 9" in done.stderr, done.stderr
    return [-signal.SIGKILL] * RANKS


@dataclass
class RankLogs:
    """What the ranks of a run have told so far."""

    losses: dict[tuple[int, int], int] = field(default_factory=dict)  # rank, step
    published: int = -1
    resumed: list[int | None] = field(default_factory=list)  # of the last life
    _read: list[int] = field(default_factory=lambda: [0] * RANKS)

    def read(self, folder: Path) -> None:
        """Take what the last life has added."""
        self.resumed = []
        for rank in range(RANKS):
            path = folder / f"log-{rank}"
            lines = path.read_text().splitlines() if path.exists() else []
            resumed = None
            for line in lines[self._read[rank] :]:
                word, *rest = line.split()
                if word == "loss":
                    self.losses[rank, int(rest[0])] = int(rest[1])
                elif word == "published":
                    self.published = max(self.published, int(rest[0]))
                elif word == "resumed":
                    resumed = int(rest[0])
            self._read[rank] = len(lines)
            self.resumed.append(resumed)


def check_record(folder: Path, published: int, what: str) -> int | None:
    """The step of the newest commit, all parts of which are there and verify; None without one."""
    record = RecordFile(str(folder)).read()
    if not record:
        assert published < 0, what
        return None
    steps = set()
    for rank, (generation, store_id) in enumerate(zip(record[0].generations, record[0].stores)):
        # What was only prepared is newer, and says nothing of the commit before.
        store = InspectedStore([rank_directory(str(folder), rank)], newest=generation)
        try:
            assert not store.is_owned, what
            assert store.store_id == store_id and not store.damaged, what
            assert store.commits[0].generation == generation, what
            steps.add(store.commits[0].meta["step"])
            for name, _, damage in store.verify():
                assert not damage, f"rank {rank}, {name}: {damage}; {what}"
        finally:
            store.close()
    (step,) = steps
    assert step >= published, what
    return int(step)


def uninterrupted(folder: Path, last_step: int) -> dict[tuple[int, int], int]:
    """What every rank's losses have to be: all ranks as threads, in memory, without a commit."""

    def rank(world: World) -> list[int]:
        toy = replace(TOY, rank=world.rank)
        parts = {"sharing": toy.sharing(world), "everyone": world}
        store, config = {"rank": world.rank}, small_store(budgets(folder))
        with toy_run(toy, config, OPTIMIZER, store_options=store, **parts) as run:
            return [run.step(number, rate(number)) for number in range(1, last_step + 1)]

    losses = enumerate(run_local(RANKS, rank))
    return {(rank, i + 1): loss for rank, row in losses for i, loss in enumerate(row)}


def phases_in_turn(rng: np.random.Generator) -> Iterator[str]:
    """Every phase, in ever new orders."""
    while True:
        yield from rng.permutation(list(PHASES)).tolist()


def draw(rng: np.random.Generator, phase: str) -> dict[str, Any]:
    """Which ranks end, at which instant: one of them, or all (each at its own such instant).

    Without a phase, none.
    """
    if not phase:
        return {"killed": (), "point": ("", 0, "", 0.0)}
    everyone = tuple(range(RANKS))
    one = (0,) if phase == "record" else (int(rng.integers(RANKS)),)
    point = (
        phase,
        int(rng.integers(PHASES[phase])),
        str(rng.choice(MANNERS)),
        float(rng.random() * 2e-3),
    )
    return {"killed": everyone if rng.random() < 0.4 else one, "point": point}


def run_with_kills(
    seed: int, folder: Path, phases: Iterator[str], kills: int, runner: Runner = by_processes
) -> Counter[str]:
    """Lives of one run with so many kills, and one that is let be; kills by phase.

    Every life leaves a complete commit, no older than one that was published before; the next goes
    on from there on all ranks, and all losses are those of the uninterrupted run.
    """
    expected = uninterrupted(folder / "unused", STEPS_A_LIFE * (kills + 3))
    rng = np.random.default_rng([seed, 8])
    life = RankLife(str(folder / "run"), 0, seed, 0)
    (folder / "run").mkdir()
    logs, counts = RankLogs(), Counter[str]()
    step: int | None = None
    while True:
        is_last = counts.total() >= kills
        phase = "" if is_last else next(phases)
        life = replace(life, number=life.number + 1, last_step=(step or 0) + STEPS_A_LIFE)
        life = replace(life, **draw(rng, phase))
        codes = runner(life)
        what = f"{life}, exit codes {codes}, killed before: {dict(counts)}"
        logs.read(folder / "run")
        was_killed = -signal.SIGKILL in codes
        assert set(codes) <= {0, LOST, -signal.SIGKILL}, what
        assert set(codes) == {0} or was_killed, what
        assert logs.resumed in ([step] * RANKS, []) or was_killed, what
        assert set(logs.resumed) <= {step, None}, what
        assert logs.losses.items() <= expected.items(), what
        counts[phase] += was_killed
        step = check_record(folder / "run", logs.published, what)
        if is_last:
            assert step == life.last_step, what
            shutil.rmtree(folder)
            return +counts
