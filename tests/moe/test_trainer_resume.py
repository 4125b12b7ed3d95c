"""Saved beside training, killed, resumed: the run that was never interrupted, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from offload.testing import budgets
from tests.moe.toy_trainer import AT_EXIT, Lived, committed_step, toy_trainer
from tests.moe.trainer_lives import ON_REQUEST, STEPS, TRAIN, KilledRun, live
from tests.offload.courses import small_store
from tests.offload.kill_lives import LIFE_S_MAX, fork_server
from tests.offload.watch import hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")


def numbers_of(lived: Lived, after: int = 0) -> dict[str, Any]:
    """All that came out: losses, norms, evaluations and the digest of the weights."""
    steps = {
        f"step {record['step']}": (record["loss_hex"], record["lr"], record["grad_norm"])
        for record in lived.told.steps
        if record["step"] > after
    }
    evals = {f"eval {x['step']}": x["loss"] for x in lived.told.evals if x["step"] > after}
    return {**steps, **evals, "digest": lived.trainer.totals.weights_digest}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What comes out after any step of a run that was let be, with everything in memory."""
    config = small_store(budgets(tmp_path_factory.mktemp("whole"), idle_expert_policy="dense"))
    with toy_trainer(config, AT_EXIT, steps=STEPS, train=TRAIN) as lived:
        lived.trainer.run()
        yield lambda after: numbers_of(lived, after)


CASES = [(save, "chased") for save in range(10)] + [(x, "speculative") for x in (0, 2, 5, 9)]


@pytest.mark.parametrize(("save", "schedule"), CASES)
def test_a_run_killed_right_after_a_save_resumes_to_the_same_bits(
    tmp_path: Path, uninterrupted: Any, save: int, schedule: str
) -> None:
    """At the start, inside warm-up (steps 1 to 3), with replays pending (3 to 7), and later."""
    killed = KilledRun(tmp_path / "store", save, schedule, room=save % 2 * 40_000)
    process = fork_server.Process(target=live, args=(killed,))
    process.start()
    process.join(LIFE_S_MAX)
    assert process.exitcode == -signal.SIGKILL
    steps = [int(line) for line in (tmp_path / f"steps-{save}").read_text().split()]
    assert save == 0 or steps[-1] > save, "the save was published while training went on"
    assert committed_step(killed.folder) == save
    with toy_trainer(
        killed.config, ON_REQUEST, steps=STEPS, optimizer=killed.optimizer, train=TRAIN
    ) as lived:
        assert lived.run.resumed is not None and lived.run.resumed["step"] == save
        units = lived.run.engine._shared.units.values()
        lags = {lived.run.engine.optimizer_step - unit.synced_step for unit in units}
        if 2 < save < 8:  # in step 9 it is used, so it may have caught up before the cut of 8
            assert max(lags) == save - 1, "an expert is behind"
        lived.trainer.run()
        assert numbers_of(lived, save) == uninterrupted(save)
