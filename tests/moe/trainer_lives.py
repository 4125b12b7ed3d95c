"""A training run that saves one step beside training and is killed as soon as that is published."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe.save_plan import SavePlan
from offload.config import OffloadConfig, OptimizerConfig, TierConfig
from offload.nvme.commit import Agree, CommitCut, CommitRecord
from offload.testing_kill import kill_this_process
from tests.moe.toy_trainer import TOY, tight, toy_trainer
from tests.offload.courses import Course, with_undo

STEPS = 12
TRAIN = {"eval_interval": 11}  # an evaluation would make the replays that are to be pending
WAIT_S_MAX = 60.0
ON_REQUEST = SavePlan(0, {"name": "toy"}, minutes=1e6, on_request=True)


@dataclass(frozen=True)
class KilledRun:
    """Saves step `save` of `STEPS`; `room`: bytes of host memory beyond the least."""

    folder: Path
    save: int
    schedule: str
    room: int

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=1e-2, warmup_steps=3, max_grad_norm=1e9, update_schedule=self.schedule
        )

    @property
    def config(self) -> OffloadConfig:
        config = tight(self.folder)
        if self.optimizer.speculative:
            config = with_undo(Course(TOY, self.optimizer), config)
        return replace(config, host=TierConfig(config.host.capacity + self.room))


def live(killed: KilledRun) -> None:
    """Train until the save is published while a later step is under way; does not return.

    The numbers of the steps that were made are appended to the file `steps` by one call each.
    """
    steps = os.open(killed.folder.parent / f"steps-{killed.save}", os.O_WRONLY | os.O_CREAT)
    done, next_made = 0, threading.Event()

    def made(number: int) -> None:
        nonlocal done
        done = number
        os.write(steps, f"{number}\n".encode())
        if number > killed.save:
            next_made.set()

    def asked() -> bool:
        return done == killed.save - 1

    with toy_trainer(
        killed.config,
        ON_REQUEST,
        steps=STEPS,
        asked=asked,
        optimizer=killed.optimizer,
        train=TRAIN,
    ) as lived:
        lived.told.then = made
        store: Any = lived.run.store
        publish = store.publish

        def publish_and_end(cut: CommitCut, agree: Agree | None = None) -> CommitRecord:
            step = cut.meta["step"]
            if step == killed.save and step > 0:
                # Its updates are in the store, those of the next step are in flight.
                next_made.wait(WAIT_S_MAX)
            record: CommitRecord = publish(cut, agree)
            if step == killed.save:
                kill_this_process()
            return record

        store.publish = publish_and_end
        lived.trainer.run()
