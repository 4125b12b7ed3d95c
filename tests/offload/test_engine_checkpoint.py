"""Commits of an engine: what saving and restoring leave where it is. Toy model, real store."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest

from offload.blocks import UnitLayout
from offload.checkpoint.source import CommitPart
from offload.checkpoint.units import UnitReader
from offload.config import OptimizerConfig
from offload.ledger import Ledger
from offload.nvme.directory import rank_directory
from offload.testing import Toy, budgets, smallest_budgets, toy_run
from ops.kernels.adamw import AdamW
from ops.kernels.pool import KernelPool
from tests.offload.watch import hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")
TOY = Toy(layers=2, needed=lambda step, layer: [0, 1, 2] if step % 2 else [0, 3])
OPTIMIZER = OptimizerConfig()


def homes(run) -> dict[str, tuple[bool, bool, bool, bool]]:
    """Of each unit: which blocks are homed on nvme, which have a permanent place on the host."""
    return {
        name: (
            unit.weight_on_nvme,
            unit.state_on_nvme,
            unit.host_weight is not None and not unit.weight_on_nvme,
            unit.host_state is not None and not unit.state_on_nvme,
        )
        for name, unit in run.engine._shared.units.items()
    }


def test_the_tier_of_every_block_is_the_same_after_a_save(tmp_path):
    """C66: a save moved state to the disk and left it there, and the next step was slow."""
    config = smallest_budgets(TOY, budgets(tmp_path, durability="step"))
    with toy_run(TOY, config, OPTIMIZER) as run:
        moved = []
        for number in range(1, 7):
            before = run.store.stats()
            commit = {"step": number} if number == 4 else None
            run.step(number, 1e-3, commit)
            run.engine.drain()
            run.engine.commits.wait()
            after = run.store.stats()
            moved.append(after.read.payload_bytes["update"] - before.read.payload_bytes["update"])
            if number == 1:
                first = homes(run), run.engine.host.used_bytes
        assert (homes(run), run.engine.host.used_bytes) == first
        assert moved[4] == moved[2] and moved[5] == moved[3], "bytes that updates read"


@pytest.mark.parametrize("from_huge", [True, False])
def test_restoring_takes_no_more_host_memory_than_training(tmp_path, from_huge):
    """C60, C63: from any tiers to any others, in the memory that training has anyway."""
    tight = smallest_budgets(TOY, budgets(tmp_path / "new", durability="step"))
    saved = budgets(tmp_path / "old", durability="step")
    if not from_huge:
        saved = smallest_budgets(TOY, saved)
    with toy_run(TOY, saved, OPTIMIZER, delete=False) as run:
        for number in range(1, 4):
            run.step(number, 1e-3)
        run.engine.commit({"step": 3})
        expected, layouts = run.digest(), {x.name: x for x in run.engine.layouts()}
    directory = rank_directory(str(tmp_path / "old"), 0)
    with (
        toy_run(TOY, tight, OPTIMIZER) as run,
        closing(CommitPart([directory])) as part,
        KernelPool(1) as pool,
    ):
        ledger = Ledger(AdamW(OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.eps))
        ledger.restore(json.loads(json.dumps(part.meta["engine"]["ledger"])))
        reader = UnitReader({0: part}, {0: layouts}, ledger, OPTIMIZER.weight_decay, pool)
        asked: list[int] = []

        def fill(layout: UnitLayout, weight: np.ndarray, state: np.ndarray | None) -> int:
            asked.append(weight.nbytes + (0 if state is None else state.nbytes))
            return reader.fill(layout, weight, state)

        run.engine.restore_from(part.meta, fill)
        assert run.engine.host.peak_bytes <= tight.host.capacity
        assert run.digest() == expected
        needed = sum(len(chunks) for x in layouts.values() for chunks in reader.needed(x).values())
        assert part.chunks_read == needed, "no chunk is read twice"
        run.step(4, 1e-3)
        run.engine.drain()
        assert max(asked) <= tight.host.capacity
        assert run.engine.host.peak_bytes <= tight.host.capacity
