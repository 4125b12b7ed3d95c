"""One rank's part of a life of a run on several ranks: it saves every step, until it is killed.

Like `kill_child.py`, for ranks: all go on from the newest commit of the record; what happens is
appended to a file a rank, a line by one system call each:

    resumed STEP    published STEP    loss STEP NUMBER    done

    mpirun -n N python -m tests.offload.rank_child LIFE.json

runs the same under MPI.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload.config import OffloadConfig, OptimizerConfig
from offload.nvme.commit import Agree, CommitCut, CommitRecord
from offload.rank_commits import RankCommit, RankCommits, RecordFile, published_copy
from offload.testing import Toy, ToyRun, budgets, smallest_budgets, toy_run
from offload.testing_kill import KillingDirectoryFiles, KillPoint
from ops.comm.base import World
from ops.errors import CommError, StorageError
from tests.offload.courses import small_store
from tests.offload.process_world import ProcessWorld

RANKS = 4
LOST = 5
"""Exit status of a rank that was left by another."""

OPTIMIZER = OptimizerConfig(max_grad_norm=1e9)


def idle(step: int, layer: int) -> list[int]:
    """Expert 3 idles most steps, expert 2 every other one."""
    return [0, 1, *([2] if step % 2 else []), *([3] if step % 5 == 1 else [])]


TOY = Toy(
    layers=1,
    needed=idle,
    dense_size=700,
    expert_size=1023,
    micro_batches=RANKS,
    ranks=RANKS,
    expert_parallel=2,
)


@dataclass(frozen=True)
class RankLife:
    """A life of all ranks in `folder`: the steps up to `last_step`, and how which ranks end.

    `seed` draws the budgets; `killed` are the ranks whose process ends at `point`.
    """

    folder: str
    number: int
    seed: int
    last_step: int
    killed: tuple[int, ...] = ()
    point: tuple[str, int, str, float] = ("", 0, "", 0.0)


def rate(step: int) -> float:
    return 1e-2 / step


def config_of(life: RankLife, toy: Toy) -> OffloadConfig:
    """Everything on the drive, most of it, or nothing but commits; every rank has the same."""
    rng = np.random.default_rng([life.seed, life.number])
    config = budgets(
        Path(life.folder), durability="step", keep_in_store=1 + life.seed % 2, io_workers=2
    )
    small = smallest_budgets(toy, config)
    room = int(rng.choice([0, 20_000, 1 << 24]))
    host = replace(small.host, capacity=small.host.capacity + room)
    return small_store(replace(small, host=host))


def train(run: ToyRun, life: RankLife, tell: Callable[..., None]) -> None:
    """From where `run` is to the last step, saving every one beside the next."""
    done = 0
    if run.resumed is None:
        run.engine.commit({"step": 0})
    else:
        done = int(run.resumed["step"])
        tell("resumed", done)
    for number in range(done + 1, life.last_step + 1):
        tell("loss", number, run.step(number, rate(number), {"step": number}))
    run.engine.drain()
    run.engine.commits.wait()


def live(
    life: RankLife,
    world: World,
    tell: Callable[..., None],
    leave: Callable[[BaseException], None] = lambda error: None,
) -> None:
    """This rank's part; `leave` is called when the others are lost, before anything is closed."""
    point = KillPoint()
    toy = replace(TOY, rank=world.rank)
    record = RecordFile(life.folder, KillingDirectoryFiles(point, "record"))
    told = [commit.to_json() for commit in record.read()] if world.rank == 0 else None
    commits = [RankCommit.from_json(row) for row in world.all_gather_object(told)[0]]
    store: dict[str, Any] = {
        "rank": world.rank,
        "resume": bool(commits),
        "required_bytes": 0,
        "directory_files": KillingDirectoryFiles(point),
    }
    if commits:
        store["newest"] = commits[0].generations[world.rank]
    publisher: list[RankCommits] = []

    def agree(generation: int) -> None:
        with point.around("prepared"):
            publisher[0](generation)
        with point.around("recorded"):
            pass

    config = config_of(life, toy)
    with toy_run(
        toy,
        config,
        OPTIMIZER,
        open_file=point.open_file,
        store_options=store,
        delete=False,
        sharing=toy.sharing(world),
        everyone=world,
        agree=agree,
    ) as run:
        assert run.store is not None
        ranks = world.split([list(range(world.size))], "commits")
        mine = record if world.rank == 0 else None
        keep = config.keep_in_store
        copy = published_copy(run.store.directory, KillingDirectoryFiles(point, "copy"))
        store_id = run.store.store_id
        publisher.append(RankCommits(ranks, mine, store_id, {}, keep, commits, copy=copy))
        publish = run.store.publish

        def publish_and_tell(cut: CommitCut, agree: Agree | None = None) -> CommitRecord:
            found = publish(cut, agree)
            tell("published", found.meta["step"])
            return found

        run.store.publish = publish_and_tell  # type: ignore[method-assign]
        if world.rank in life.killed:  # only now: opening has phases of the same names
            point.counts.clear()
            point.phase, point.at, point.manner, point.delay_s = life.point
        try:
            train(run, life, tell)
        except (CommError, StorageError) as error:
            leave(error)
            raise
    world.barrier()


def live_and_log(life: RankLife, world: World) -> None:
    """The same in a process of its own, which ends as a rank of a real run would."""
    path = Path(life.folder) / f"log-{world.rank}"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    def leave(error: BaseException) -> None:
        """Nothing is closed: threads may wait for ranks that will not come."""
        tell("lost", str(error).replace("\n", " "))
        world.abort(LOST)

    try:
        live(life, world, tell, leave)
    except (CommError, StorageError) as error:
        leave(error)
    tell("done")


def rank_process(life: RankLife, rank: int, sockets: Mapping[int, socket.socket]) -> None:
    """The body of a rank that was forked."""

    class Processes(ProcessWorld):
        def abort(self, code: int) -> None:
            os._exit(code)

    live_and_log(life, Processes(rank, sockets))


def main(arguments: Sequence[str]) -> None:
    """A rank under mpirun."""
    from ops.comm.mpi import MpiWorld

    fields = json.loads(Path(arguments[0]).read_text())
    life = RankLife(**{key: tuple(x) if isinstance(x, list) else x for key, x in fields.items()})
    world = MpiWorld()
    live_and_log(life, world)
    world.free()


def to_json(life: RankLife) -> str:
    """What `main` reads."""
    return json.dumps(asdict(life))


if __name__ == "__main__":
    main(sys.argv[1:])
