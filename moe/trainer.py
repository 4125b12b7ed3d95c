"""The training loop: batches, steps, records, evaluation, and the ways a run can end.

Reads top down: `Trainer.run` is the loop; everything it needs is handed in by `launch/build.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from moe.alarm import NumericWatch
from moe.config import TrainConfig
from moe.data.stream import BatchStream, HeldOutBatch
from moe.digest import weights_digest
from moe.lr import learning_rate
from moe.save_plan import Saves
from offload.config import OptimizerConfig
from offload.engine import OffloadEngine
from offload.nvme.store import NvmeStore
from ops.clock import seconds
from ops.comm.base import MAX, World
from ops.comm.single import SingleRank
from ops.errors import NumericAlarm, Stopped

if TYPE_CHECKING:  # they import MindSpore, which the loop does without
    from moe.step import StepResult, TrainingStep


class RunObserver(Protocol):
    """Who is told about the run; records are plain dictionaries."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""

    def on_eval(self, record: Mapping[str, Any]) -> None:
        """An evaluation has ended."""

    def on_message(self, text: str) -> None:
        """A sentence for the user."""


@dataclass
class RunTotals:
    """What the report says about the run as a whole."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    comm_seconds: float = 0.0
    redone_steps: int = 0
    evals: list[dict[str, Any]] = field(default_factory=list)
    weights_digest: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second of step time (evaluation excluded)."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def stall_share(self) -> float:
        """Share of step time in which compute waited for a lease."""
        return self.stall_seconds / self.seconds if self.seconds else 0.0

    @property
    def comm_share(self) -> float:
        """Share of step time in which compute waited in a collective."""
        return self.comm_seconds / self.seconds if self.seconds else 0.0


class LaneCounter:
    """Differences of the byte counters from step to step."""

    def __init__(self, engine: OffloadEngine, store: NvmeStore | None, world: World) -> None:
        self._engine = engine
        self._store = store
        self._comm = world.stats
        self._last = self._read()

    def _read(self) -> dict[str, Any]:
        lanes = self._engine.stats.snapshot()
        found: dict[str, Any] = {
            "h2d_bytes": lanes.h2d_bytes,
            "d2h_bytes": lanes.d2h_bytes,
            "stall": lanes.stall_seconds,
            "wrong_guess_bytes": lanes.wrong_guess_bytes,
            "comm": self._comm.waited_seconds(),
        }
        for way in ("read", "write"):
            causes: dict[str, int] = {}
            if self._store is not None:
                stats = self._store.stats()
                lane = stats.read if way == "read" else stats.written
                causes = {**lane.payload_bytes, "padding": sum(lane.padding_bytes.values())}
            found[way] = causes
        return found

    def begin(self) -> None:
        """A step begins; waits for other ranks until now are not of its time."""
        self._last["comm"] = self._comm.waited_seconds()

    def step(self) -> dict[str, Any]:
        """What has moved since the last call, in the form of `steps.jsonl`; waits since `begin`."""
        now, last = self._read(), self._last
        self._last = now
        causes = {
            cause: {
                f"{way}_bytes": now[way].get(cause, 0) - last[way].get(cause, 0)
                for way in ("read", "write")
            }
            for cause in now["read"]
        }
        return {
            "stall_seconds": now["stall"] - last["stall"],
            "comm_seconds": now["comm"] - last["comm"],
            "lanes": {
                "nvme_read_bytes": sum(row["read_bytes"] for row in causes.values()),
                "nvme_write_bytes": sum(row["write_bytes"] for row in causes.values()),
                "h2d_bytes": now["h2d_bytes"] - last["h2d_bytes"],
                "d2h_bytes": now["d2h_bytes"] - last["d2h_bytes"],
            },
            "nvme_by_cause": causes,
            "wrong_guess_bytes": now["wrong_guess_bytes"] - last["wrong_guess_bytes"],
        }


class Trainer:
    """Runs up to `steps_limit` of the configured steps (the schedule is that of the total)."""

    def __init__(
        self,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        step: TrainingStep,
        engine: OffloadEngine,
        store: NvmeStore | None,
        batches: BatchStream,
        held_out: Callable[[], Iterator[HeldOutBatch]],
        observer: RunObserver,
        stop: threading.Event,
        steps_limit: int | None = None,
        first_step: int = 0,
        saves: Saves | None = None,
        world: World | None = None,
        data_parallel: int = 1,
        is_saved: bool = True,
    ) -> None:
        """`first_step`: steps done before, in the run that is continued; `saves` wants a store.
        `is_saved`: whether what is continued is in that store, in the form that this mesh has.

        With several ranks in `world` all of them run a trainer, and they end together;
        `data_parallel` of them read other rows of each batch.
        """
        self._train = train
        self._optimizer = optimizer
        self._step = step
        self._engine = engine
        self._batches = batches
        self._held_out = held_out
        self._observer = observer
        self._stop = stop
        self.num_steps = train.steps if steps_limit is None else min(steps_limit, train.steps)
        self._first_step = first_step
        self._saves = saves
        self._saved_step: int | None = first_step if first_step and is_saved else None
        self._asked_step: int | None = None  # that will answer a request
        self._watch = NumericWatch(train.alarm_multiple)
        self._world = world or SingleRank()
        self._data_parallel = data_parallel
        self._lanes = LaneCounter(engine, store, self._world)
        self.totals = RunTotals(steps=first_step)

    def run(self) -> None:
        """Train; raises Stopped or NumericAlarm after the step that saw the reason."""
        if self._saves is not None and self._saves.plan.periodic and self._saved_step is None:
            self._commit(self._first_step)
        save = self._border(self._first_step)
        for number in range(self._first_step + 1, self.num_steps + 1):
            alarm = self._one(number, save)
            save = self._border(number, alarm)
            interval = self._train.eval_interval
            if number == self.num_steps or (interval and number % interval == 0):
                self._evaluate(number)
        if self._first_step >= self.num_steps:  # resumed after its last step
            self._evaluate(self._first_step)
        self._commit(max(self.num_steps, self._first_step))
        self.totals.weights_digest = weights_digest(self._engine, self._world)

    def _border(self, number: int, alarm: str | None = None) -> bool:
        """What all ranks do after step `number`, by one collective: whether to save the next step.

        Commits, and raises Stopped or NumericAlarm, when any rank was asked to stop or has an
        `alarm`.
        """
        flags = np.array([self._stop.is_set(), False, False, alarm is not None], np.uint8)
        if self._saves is not None and self._world.rank == 0:
            flags[1] = self._saves.is_overdue()
            flags[2] = self._saves.is_asked(self._observer.on_message)
        self._world.all_reduce(flags, MAX)
        stops, overdue, asked, alarmed = map(bool, flags)
        self._answer()
        if asked and self._asked_step is None:
            is_last = stops or alarmed or number >= self.num_steps
            self._asked_step = number if is_last else number + 1
        if alarmed:
            self._give_up(number, alarm or f"step {number}: another rank has a numeric alarm")
        if stops:
            self._commit(number)
            raise Stopped(f"stopped after step {number} of {self.num_steps}, as asked")
        return overdue or asked

    def _give_up(self, number: int, alarm: str) -> NoReturn:
        """Commit step `number`, whose batch is used up even if it changed nothing, and raise."""
        try:
            self._commit(number)
        except BaseException:
            self._observer.on_message(f"warning: {alarm}")
            raise
        saved = (
            "" if self._saves is None else f" Step {number} is saved: --resume goes on after it."
        )
        raise NumericAlarm(f"{alarm}{saved}")

    def _one(self, number: int, save: bool) -> str | None:
        """Make step `number`; the alarm it gives."""
        started = seconds()
        self._lanes.begin()
        batch = self._batches.next()
        # A step skipped for overflow is not a step of the schedule.
        rate = learning_rate(self._engine.optimizer_step + 1, self._train.steps, self._optimizer)
        commit = None
        if self._saves is not None and (save or self._saves.plan.counts(number)):
            commit = self._state(number)
            self._saved_step = number
            self._saves.saved()
        result = self._step.train(batch.tokens, batch.targets, rate, commit)
        spent = seconds() - started
        self._record(number, batch.tokens.size * self._data_parallel, rate, spent, result)
        outcome = result.outcome
        alarm = self._watch.look(number, float(result.loss), outcome)
        if alarm is None and not outcome.applied:
            self._observer.on_message(
                f"step {number} skipped: gradients overflowed at loss scale {outcome.loss_scale:g}"
            )
        return alarm

    def _state(self, number: int) -> dict[str, Any]:
        """What a run needs, besides the engine's state, to go on after step `number`."""
        assert self._saves is not None
        cursor = self._batches.cursor.to_json()
        return {"step": number, "cursor": cursor, **self._saves.plan.facts}

    def _commit(self, number: int) -> None:
        """Commit the state after step `number`, if there is a store; blocks until durable."""
        self._engine.drain()
        if self._saves is None:
            return
        if self._saved_step != number:
            self._saved_step = number
            self._engine.commit(self._state(number))
            self._saves.saved()
        self._engine.commits.wait()
        self._answer()

    def _answer(self) -> None:
        """Tell whoever asked for a save that it is there."""
        if self._asked_step is None:
            return
        published = self._engine.commits.last_step
        last = self._first_step if published is None else published
        if last >= self._asked_step:
            self._asked_step = None
            self._observer.on_message(f"save-now: step {last} is saved")

    def _record(
        self, number: int, tokens: int, rate: float, spent: float, result: StepResult
    ) -> None:
        outcome, loss, totals = result.outcome, float(result.loss), self.totals
        moved = self._lanes.step()
        totals.steps, totals.tokens = number, totals.tokens + tokens
        totals.seconds += spent
        totals.stall_seconds += moved["stall_seconds"]
        totals.comm_seconds += moved["comm_seconds"]
        totals.redone_steps += outcome.redone
        self._observer.on_step(
            {
                "step": number,
                "loss": loss,
                "loss_hex": loss.hex(),
                "grad_norm": outcome.grad_norm,
                "clip_factor": outcome.clip_factor,
                "lr": rate,
                "tokens": tokens,
                "seconds": spent,
                "experts_idle": outcome.idle_units,
                "balance_loss": result.balance_loss,
                "z_loss": result.z_loss,
                "applied": outcome.applied,
                "loss_scale": outcome.loss_scale,
                "redone": outcome.redone,
                "commits": [asdict(row) for row in self._engine.commits.take_published()],
                **moved,
            }
        )

    def _evaluate(self, number: int) -> None:
        self._engine.drain()
        total, tokens = 0.0, 0
        for batch in self._held_out():
            total += self._step.evaluate(batch.tokens, batch.targets)
            tokens += batch.num_tokens
        loss = total / tokens
        record = {"step": number, "loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        self.totals.evals.append(record)
        self._observer.on_eval(record)
        self._lanes.step()
