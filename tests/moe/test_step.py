"""A step of the real model whose loss is not a finite number updates nothing."""

from __future__ import annotations

import math
from typing import Any

from moe.step import TrainingStep
from offload.engine import OffloadEngine
from tests.moe.harness import make_config, run


def test_a_loss_that_is_not_finite_is_no_step(tmp_path, monkeypatch):
    """Its gradients may be finite all the same, and would have made a commit worth nothing."""
    outcomes = []
    finish, over_ranks = OffloadEngine.finish_step, TrainingStep._over_ranks

    def noted(engine: OffloadEngine, *args: Any, **options: Any) -> Any:
        outcomes.append(finish(engine, *args, **options))
        return outcomes[-1]

    def lost(step: TrainingStep, *values: float) -> list[float]:
        found = over_ranks(step, *values)
        return [math.nan, *found[1:]] if len(outcomes) == 1 else found

    monkeypatch.setattr(OffloadEngine, "finish_step", noted)
    monkeypatch.setattr(TrainingStep, "_over_ranks", lost)
    trained = run(make_config(tmp_path), steps=3)
    assert [outcome.applied for outcome in outcomes] == [True, False, True]
    assert [loss == "nan" for loss in trained.losses] == [False, True, False]
    assert math.isfinite(outcomes[1].grad_norm) and outcomes[1].alarm
    assert trained.engine.optimizer_step == 2
