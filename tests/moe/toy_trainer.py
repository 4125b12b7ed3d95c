"""A `Trainer` of a toy model on the NumPy backend: the real loop and engine, no MindSpore.

The toy's loss is a number between 1 and 2 made of the checksum of the weights it used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moe.config import TrainConfig
from moe.data.stream import HeldOutBatch
from moe.save_plan import SavePlan, Saves, never
from moe.trainer import Trainer
from offload.config import OffloadConfig, OptimizerConfig
from offload.nvme.inspect import InspectedStore, find_stores
from offload.rank_commits import RankCommit, RankCommits, RecordFile
from offload.testing import Toy, ToyRun, budgets, smallest_budgets, toy_run
from ops.comm.base import World
from ops.errors import ConfigError
from tests.offload.courses import small_store

EVERY_STEP = SavePlan(1, {"name": "toy"}, on_request=True)
AT_EXIT = SavePlan(0, {"name": "toy"})
ROWS = 2


def idle_in_the_middle(step: int, layer: int) -> list[int]:
    """Expert 1 idles from step 2 to 8, expert 2 every other step."""
    return [0, *([1] if step in (1, 9) else []), *([2] if (step + layer) % 2 else [])]


TOY = Toy(layers=2, experts=3, expert_size=3001, needed=idle_in_the_middle, micro_batches=1)


@dataclass
class Told:
    """Observer that keeps what it is told; `then` is called with the number of each step."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    evals: list[Mapping[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    then: Callable[[int], object] = lambda number: None

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.steps.append(record)
        self.then(record["step"])

    def on_eval(self, record: Mapping[str, Any]) -> None:
        self.evals.append(record)

    def on_message(self, text: str) -> None:
        self.messages.append(text)


class ToyBatches:
    """Batches whose position is their number."""

    def __init__(self, done: int) -> None:
        self.done = done

    def next(self) -> SimpleNamespace:
        self.done += 1
        tokens = np.zeros((ROWS, 4), np.int32)
        return SimpleNamespace(tokens=tokens, targets=tokens)

    @property
    def cursor(self) -> SimpleNamespace:
        return SimpleNamespace(to_json=lambda: {"position": self.done})


class ToyStep:
    """`TrainingStep` of a toy; `change` may make another result of the one it has come to."""

    def __init__(self, run: ToyRun, batches: ToyBatches) -> None:
        self._run = run
        self._batches = batches
        self.change: Callable[[int, float], float] = lambda number, loss: loss

    def train(
        self, tokens: np.ndarray, targets: np.ndarray, rate: float, commit: Mapping[str, Any] | None
    ) -> SimpleNamespace:
        number = self._batches.done
        sound = math.isfinite(self.change(number, 1.0))
        found = self._run.step(number, rate, None if commit is None else dict(commit), sound)
        loss = self.change(number, 1.0 + found / 2**32)
        outcome = self._run.outcomes[-1]
        return SimpleNamespace(loss=np.float32(loss), balance_loss=0.0, z_loss=0.0, outcome=outcome)

    def evaluate(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        return self._run.evaluate() / 2**32


@dataclass
class Lived:
    """A trainer with what belongs to it."""

    run: ToyRun
    trainer: Trainer
    told: Told
    step: ToyStep
    stop: threading.Event

    def losses(self) -> dict[int, str]:
        """Bits of the loss of each step."""
        return {record["step"]: record["loss_hex"] for record in self.told.steps}


@contextmanager
def toy_trainer(
    config: OffloadConfig,
    plan: SavePlan = EVERY_STEP,
    *,
    toy: Toy = TOY,
    steps: int = 10,
    asked: Callable[[], bool] = never,
    clock: Callable[[], float] = lambda: 0.0,
    world: World | None = None,
    optimizer: OptimizerConfig | None = None,
    train: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Lived]:
    """A trainer that begins, or goes on where the store was committed; the store stays.

    `options` go to `toy_run`.
    """
    settings = TrainConfig(steps=steps, **{"seq_len": 4, "eval_interval": 4, **(train or {})})
    optimizer = optimizer or OptimizerConfig(learning_rate=1e-2, warmup_steps=3, max_grad_norm=1e9)
    store = {"required_bytes": 0, "resume": True, **options.pop("store_options", {})}
    with toy_run(toy, config, optimizer, store_options=store, delete=False, **options) as run:
        saved = run.resumed or {"step": 0, "cursor": {"position": 0}}
        batches = ToyBatches(saved["cursor"]["position"])
        step, told, stop = ToyStep(run, batches), Told(), threading.Event()
        trainer = Trainer(
            settings, optimizer, step, run.engine, run.store, batches,
            lambda: iter([HeldOutBatch(*np.zeros((2, ROWS, 4), np.int32), num_tokens=ROWS * 4)]),
            told, stop, None, saved["step"], Saves(plan, asked, clock), world,
        )  # fmt: skip
        yield Lived(run, trainer, told, step, stop)


def tight(folder: Path, toy: Toy = TOY, **options: Any) -> OffloadConfig:
    """The smallest budgets of the toy, so that most of it is cold."""
    options = {"durability": "step", **options}
    return small_store(smallest_budgets(toy, budgets(folder, **options)))


def committed_step(folder: Path) -> int | None:
    """The step of the newest commit under `folder`, all of whose blocks verify; None without."""
    try:
        (directories,) = find_stores([str(folder)])
    except ConfigError:
        return None
    store = InspectedStore(directories)
    try:
        assert not any(damage for _, _, damage in store.verify())
        return store.commits[0].meta["step"] if store.commits else None
    finally:
        store.close()


@contextmanager
def toy_rank(world: World, folder: Path, plan: SavePlan, **options: Any) -> Iterator[Lived]:
    """The same for a rank of several, whose commits are those of all of them under `folder`."""
    toy = replace(TOY, ranks=world.size, rank=world.rank, micro_batches=world.size)
    record = RecordFile(str(folder))
    told = [commit.to_json() for commit in record.read()] if world.rank == 0 else None
    commits = [RankCommit.from_json(row) for row in world.all_gather_object(told)[0]]
    ranks = world.split([list(range(world.size))], "commits")
    store = {"rank": world.rank, "resume": bool(commits)}
    if commits:
        store["newest"] = commits[0].generations[world.rank]
    publisher: list[RankCommits] = []
    with toy_trainer(
        tight(folder, toy),
        plan,
        toy=toy,
        world=world,
        store_options=store,
        sharing=toy.sharing(world),
        everyone=world,
        agree=lambda generation: publisher[0](generation),
        **options,
    ) as lived:
        assert lived.run.store is not None
        mine = record if world.rank == 0 else None
        publisher.append(RankCommits(ranks, mine, lived.run.store.store_id, {}, 1, commits))
        yield lived
