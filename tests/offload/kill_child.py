"""One life of a run on a real store: it goes on from the newest commit until it is killed or done.

The parent starts lives through a fork server that has this module, and the kernels it loads, ready;
each life is a process of its own. What happens is appended to a file, a line by one system call
each, so that a SIGKILL loses none of it:

    resumed STEP GENERATION    published STEP GENERATION    result NAME WHAT NUMBER
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload.nvme.commit import Agree, CommitCut, CommitRecord
from offload.testing import Toy, budgets, toy_run
from offload.testing_kill import KillingDirectoryFiles, KillPoint
from tests.offload.courses import Results, random_budgets, random_course, train


@dataclass(frozen=True)
class Life:
    """Number `number` of the lives of the course of `seed`, in `folder`, and how it ends."""

    seed: int
    max_grad_norm: float
    folder: Path
    number: int
    point: tuple[str, int, str, float] = ("", 0, "", 0.0)

    @property
    def paths(self) -> list[Path]:
        """The store's directories: one, or two with unequal shares."""
        return [self.folder / name for name in ("ab" if self.seed % 4 == 0 else "a")]


def live(life: Life) -> KillPoint:
    """Train to the end, or to the kill; returns what was counted."""
    course = random_course(life.seed, life.max_grad_norm)
    rng = np.random.default_rng([life.seed, life.number, 3])
    config = random_budgets(rng, course, life.paths)
    log = os.open(life.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    point = KillPoint(*life.point)
    options = {
        "resume": True,
        "required_bytes": 0,
        "directory_files": KillingDirectoryFiles(point),
        "measure": lambda directories, access: [1.0, 2.0],
    }
    with toy_run(
        course.toy,
        config,
        course.optimizer,
        open_file=point.open_file,
        store_options=options,
        delete=False,
        delay=point.lane,
    ) as run:
        assert run.store is not None
        publish = run.store.publish

        def told(cut: CommitCut, agree: Agree | None = None) -> CommitRecord:
            record = publish(cut, agree)
            tell("published", record.meta["step"], record.generation)
            return record

        run.store.publish = told  # type: ignore[method-assign]
        if run.resumed is not None:
            assert run.store.recovered is not None
            tell("resumed", run.resumed["step"], run.store.recovered.generation)
        train(run, course, lambda name, value: tell("result", *name.split(), value))
    tell("done")
    os.close(log)
    return point


def warm_up(folder: Path) -> Results:
    """Load the kernels of every format, so that a life begins at once."""
    found: Results = {}
    for dtype, compute in (("bfloat16", "float32"), ("float32", "float32"), ("float16", "float16")):
        toy = Toy(layers=1, weight_dtype=dtype, compute_dtype=compute, needed=lambda s, x: [s % 2])
        with toy_run(toy, budgets(folder)) as run:
            run.step(1, 1e-3)
            run.step(2, 1e-3)
            found[dtype] = run.digest()
    return found
