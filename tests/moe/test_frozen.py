"""C33: frozen parameters have no state and no gradient in any tier; unfreezing later works."""

from __future__ import annotations

import pytest

from launch.build import initialize, make_engine, make_plan, open_store
from moe.digest import weights_digest
from moe.memory import stage_dims
from moe.params import build_units
from moe.step import TrainingStep
from ops.errors import ConfigError
from ops.kernels.pool import KernelPool
from ops.nn.stages import Stages
from tests.moe.harness import batch, make_config, run, shared_backend, smallest

FREEZE = ["embed.*", "layers.1", "layers.1.experts.*"]


def masters_after(config, steps, values=None):
    """Masters by (name, row) after `steps` steps from `values` (default: the initial ones)."""
    plan = make_plan(config)
    stages = Stages(stage_dims(config.model, config.train), config.train.compute_dtype)
    store = open_store(config, plan)
    try:
        with KernelPool(2) as pool:
            engine = make_engine(config, plan, shared_backend(), pool, store)
            try:
                initialize(config, engine)
                if values is not None:
                    engine.initialize(lambda tensor: values[tensor.name, tensor.row0])
                step = TrainingStep(config.model, config.train, engine, stages, shared_backend())
                for number in range(1, steps + 1):
                    step.train(*batch(config, number), 1e-2)
                found = {(t.name, t.row0): array.copy() for t, array in engine.masters()}
                assert len(weights_digest(engine)) == 32
                return found
            finally:
                engine.close()
    finally:
        if store is not None:
            store.close(delete=True)


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens", "model.layers.1."))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_frozen_units_stay_and_the_others_move(tmp_path, dtype):
    options = {"train": {"freeze": FREEZE, "weight_dtype": dtype}}
    config = smallest(tmp_path, **options)
    before, after = masters_after(config, 0), masters_after(config, 3)
    for key, values in before.items():
        assert (values == after[key]).all() == is_frozen(key[0]), key


def test_frozen_units_have_no_state_in_any_tier(tmp_path):
    whole = make_plan(smallest(tmp_path))
    part = make_plan(smallest(tmp_path, train={"freeze": FREEZE}))
    units = build_units(make_config(tmp_path).model)
    frozen = sum(u.size for u in units if u.name.startswith(("embed.", "layers.1")))
    for component in ("exp_avg", "exp_avg_sq"):
        saved = sum(whole.components[component].values()) - sum(part.components[component].values())
        assert saved == 4 * frozen
    saved = sum(whole.components["grad"].values()) - sum(part.components["grad"].values())
    assert saved == 2 * frozen


def test_tiers_do_not_change_the_bits_of_a_run_with_frozen_units(tmp_path):
    options = {"train": {"freeze": FREEZE}}
    wide = run(make_config(tmp_path / "wide", **options))
    tight = run(smallest(tmp_path / "tight", **options))
    assert (wide.losses, wide.digest) == (tight.losses, tight.digest)


def test_unfreezing_later_trains_what_was_frozen(tmp_path):
    frozen = masters_after(smallest(tmp_path / "a", train={"freeze": FREEZE}), 2)
    thawed = masters_after(smallest(tmp_path / "b"), 2, values=frozen)
    assert all((values != thawed[key]).any() for key, values in frozen.items())


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["layer.0"], "train.freeze = 'layer.0'"),
        (["*"], "something to train"),
        ([""], "train.freeze"),
    ],
)
def test_a_pattern_that_names_nothing_or_everything_is_refused(tmp_path, freeze, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(make_config(tmp_path, train={"freeze": freeze}))
