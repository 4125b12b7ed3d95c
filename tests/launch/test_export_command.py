"""`headrace checkpoint export` and `... import`: stores on the disk, there and back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from typer.testing import CliRunner

from launch.build import make_engine, make_plan, open_store
from launch.checkpoint_command import app
from launch.config import RunConfig
from moe.digest import weights_digest
from moe.mesh import ParallelConfig
from moe.weights.reading import WeightFiles
from offload.nvme.store import NvmeStore
from offload.unit_values import field_of
from ops.device import NumpyBackend
from ops.errors import ConfigError, StorageError
from ops.kernels.pool import KernelPool
from tests.moe.harness import make_config
from tests.moe.weights.saved_weights import OPTIMIZER_STEP, STEP, commit_to, make_run, numbers_of
from tests.moe.weights.test_initial import digest_of
from tests.moe.weights.weight_files import PLAIN, packed, random_weights, save_shards, started

MESH = ParallelConfig(data_parallel=2, model_parallel=2, expert_parallel=2)
MODEL = PLAIN | {"vocab_size": 64, "tie_word_embeddings": False}


def invoke(*arguments) -> str:
    """What the command printed; its error is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def files_in(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def config_in(path: Path, **train) -> RunConfig:
    """What would go on with the runs of `make_run` in the store at `path`."""
    return make_config(
        path, model=MODEL, train=train, optimizer={"weight_decay": 0.1}, idle_expert_policy="replay"
    )


def resumed(config: RunConfig, look):
    """`look(engine, run)` once the engine has restored the newest commit."""
    plan = make_plan(config, resumed=True)
    assert plan.fits, plan.problems
    with open_store(config, plan, resume=True) as store, KernelPool(2) as pool:
        engine = make_engine(config, plan, NumpyBackend(), pool, store)
        try:
            return look(engine, engine.restore())
        finally:
            engine.close()


def moments_of(engine, name: str) -> np.ndarray:
    """Both moments of the tensors of a unit that is homed on the host."""
    unit = engine._shared.units[name]
    array = unit.host_state.array
    return np.stack([field_of(unit.layout, "state", x, array) for x in ("exp_avg", "exp_avg_sq")])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A commit of four ranks and its numbers."""
    path = tmp_path_factory.mktemp("store")
    run, meta = make_run(MESH, model=MODEL)
    numbers = numbers_of(run)
    commit_to(path, run, meta, numbers)
    return path, numbers


@pytest.mark.parametrize("form", [[], ["--packed-experts"], ["--packed-experts", "--transposed"]])
def test_export_import_export_gives_identical_bytes(store, tmp_path, form):
    path, numbers = store
    options = ["--moments", "--shard-size", "100KiB", *form]
    output = invoke("export", path, "--out", tmp_path / "first", *options)
    assert f"exported weights and moments of step {STEP}" in output
    assert "resume with" in invoke("import", tmp_path / "first", "--out", tmp_path / "native")
    invoke("export", tmp_path / "native", "--out", tmp_path / "second", *options)
    assert files_in(tmp_path / "second") == files_in(tmp_path / "first")
    found: dict[str, np.ndarray] = {}
    for file in (tmp_path / "first").glob("exp_avg_sq-*.safetensors"):
        found |= load_file(file)
    wanted = numbers["exp_avg_sq"]
    if form:
        run, _ = make_run(MESH, model=MODEL)
        wanted = packed(run.model, wanted, "out-in" if "--transposed" in form else "in-out")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_run_resumes_at_an_imported_checkpoint_where_the_exported_one_stood(store, tmp_path):
    path, numbers = store
    invoke("export", path, "--out", tmp_path / "out", "--moments")
    invoke("import", tmp_path / "out", "--out", tmp_path / "native")

    def look(engine, run):
        assert (run["step"], run["cursor"]["position"], run["ranks"]) == (STEP, 28, 1)
        assert engine.optimizer_step == OPTIMIZER_STEP
        place = next(
            place
            for place in engine._shared.units["layers.2.experts.5"].layout.places
            if "up_proj" in place.spec.name
        )
        moments = moments_of(engine, "layers.2.experts.5")
        part = moments[:, place.start : place.start + place.spec.size]
        wanted = [numbers[x][place.spec.name].ravel() for x in ("exp_avg", "exp_avg_sq")]
        assert np.array_equal(part, wanted)
        return weights_digest(engine)

    assert resumed(config_in(tmp_path / "native"), look) == digest_of(numbers["master"])


def test_plain_weights_become_a_checkpoint_of_step_0_without_moments(tmp_path):
    config = config_in(tmp_path / "native")
    weights = random_weights(config.model, "BF16")
    save_shards(tmp_path / "w", packed(config.model, weights, "in-out"), 2)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    with pytest.raises(ConfigError, match=r"without moments: name the model .* --config"):
        invoke("import", tmp_path / "w", "--out", tmp_path / "native")
    arguments = ("--config", tmp_path / "run.yaml", "--set", "data.seed=5")
    invoke("import", tmp_path / "w", "--out", tmp_path / "native", *arguments)

    def look(engine, run):
        assert (run["step"], run["cursor"]["seed"], engine.optimizer_step) == (0, 5, 0)
        assert all(not moments_of(engine, name).any() for name in engine._shared.units)
        return weights_digest(engine)

    assert resumed(config, look) == digest_of(weights)


def test_what_was_frozen_can_be_trained_after_an_import_with_moments_of_zero(tmp_path):
    """C33."""
    freeze = ["layers.1.experts.*", "head.*"]
    run, meta = make_run(model=MODEL, freeze=freeze)
    commit_to(tmp_path / "store", run, meta, numbers_of(run))
    invoke("export", tmp_path / "store", "--out", tmp_path / "out", "--moments")
    free = config_in(tmp_path / "native")
    (tmp_path / "free.yaml").write_text(free.to_yaml())
    arguments = ("--out", tmp_path / "native", "--config", tmp_path / "free.yaml")
    invoke("import", tmp_path / "out", *arguments)

    def look(engine, told):
        assert engine.optimizer_step == OPTIMIZER_STEP and told["config"]["train"]["freeze"] == []
        assert told["cursor"]["position"] == 28
        assert not moments_of(engine, "layers.1.experts.3").any()
        assert not moments_of(engine, "head.0").any()
        assert moments_of(engine, "layers.0.experts.3").any()

    resumed(free, look)


def test_what_was_trained_can_be_frozen_by_an_import(store, tmp_path):
    invoke("export", store[0], "--out", tmp_path / "out", "--moments", "--packed-experts")
    frozen = config_in(tmp_path / "native", freeze=["layers.1.experts.*"])
    (tmp_path / "run.yaml").write_text(frozen.to_yaml())
    arguments = ("--out", tmp_path / "native", "--config", tmp_path / "run.yaml")
    invoke("import", tmp_path / "out", *arguments)
    units = resumed(frozen, lambda engine, run: dict(engine._shared.units))
    assert units["layers.1.experts.0"].host_state is None


def test_an_export_with_moments_can_start_a_new_run_too(store, tmp_path):
    path, numbers = store
    invoke("export", path, "--out", tmp_path / "out", "--moments")
    with started(config_in(tmp_path / "nvme", init_from=str(tmp_path / "out"))) as engine:
        assert weights_digest(engine) == digest_of(numbers["master"])
        assert engine.optimizer_step == 0 and not moments_of(engine, "layers.0").any()


def test_an_import_over_a_checkpoint_is_refused(store, tmp_path):
    path, _ = store
    invoke("export", path, "--out", tmp_path / "out", "--moments")
    for out in (path, tmp_path / "native"):
        if out != path:
            invoke("import", tmp_path / "out", "--out", out)
        with pytest.raises(ConfigError, match="holds a checkpoint"):
            invoke("import", tmp_path / "out", "--out", out)


def test_an_interrupted_import_is_no_checkpoint_and_can_be_made_again(store, tmp_path, monkeypatch):
    invoke("export", store[0], "--out", tmp_path / "out", "--moments")

    def fail(*arguments):
        raise StorageError("no power")

    monkeypatch.setattr(NvmeStore, "publish", fail)
    with pytest.raises(StorageError, match="no power"):
        invoke("import", tmp_path / "out", "--out", tmp_path / "native")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no checkpoint"):
        invoke("export", tmp_path / "native", "--out", tmp_path / "x")
    invoke("import", tmp_path / "out", "--out", tmp_path / "native")


def test_missing_moments_are_listed(store, tmp_path):
    invoke("export", store[0], "--out", tmp_path / "out", "--moments", "--shard-size", "1B")
    index = tmp_path / "out/exp_avg.safetensors.index.json"
    saved = json.loads(index.read_text())
    del saved["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"exp_avg does not hold.*1 missing: model\.norm\.weight"):
        invoke("import", tmp_path / "out", "--out", tmp_path / "native")


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda x: x.update(format="headrace export 9"), "this version reads"),
        (lambda x: x.pop("optimizer_step"), "damaged"),
        (lambda x: x.update(step=-1), "damaged"),
        (lambda x: x.update(run=[]), "damaged"),
        (lambda x: x["run"]["config"]["model"].update(depth=1), "model.depth is not known"),
        (lambda x: x["run"]["config"]["model"].update(hidden_size=64), "does not hold this model"),
    ],
)
def test_facts_of_unknown_origin_are_checked(store, tmp_path, change, why):
    """C68."""
    invoke("export", store[0], "--out", tmp_path / "out", "--moments")
    path = tmp_path / "out/headrace.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=why):
        invoke("import", tmp_path / "out", "--out", tmp_path / "native")


@pytest.mark.parametrize(
    "options, why",
    [
        (["--dtype", "float16"], "allowed is float32 or bfloat16"),
        (["--dtype", "bfloat16", "--moments"], "rounds the weights"),
        (["--transposed"], "no effect"),
        (["--shard-size", "much"], "--shard-size"),
        (["--shard-size", "0"], "at least one byte"),
        (["--step", "3"], "there are steps 7"),
    ],
)
def test_options_that_cannot_be_are_refused(store, tmp_path, options, why):
    with pytest.raises(ConfigError, match=why):
        invoke("export", store[0], "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_checkpoint_is_refused_with_what_is_missing(tmp_path):
    run, meta = make_run(MESH, model=MODEL)
    commit_to(tmp_path / "store", run, meta, numbers_of(run))
    os.rename(tmp_path / "store/rank-00002", tmp_path / "away")
    with pytest.raises(ConfigError, match=r"step 7 is incomplete: rank 2: no directory"):
        invoke("export", tmp_path / "store", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_found_while_exporting_and_leaves_no_export(tmp_path):
    run, meta = make_run(model=MODEL)
    commit_to(tmp_path / "store", run, meta, numbers_of(run))
    path = tmp_path / "store/rank-00000/data.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"data\.bin"):
        invoke("export", tmp_path / "store", "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="interrupted"):
        WeightFiles(str(tmp_path / "out"), "it")


def test_an_export_while_the_run_owns_its_store(tmp_path):
    config = config_in(tmp_path / "store")
    run, meta = make_run(model=MODEL)
    numbers = numbers_of(run)
    commit_to(tmp_path / "store", run, meta, numbers)
    with open_store(config, make_plan(config, resumed=True), resume=True) as store:
        invoke("export", tmp_path / "store", "--out", tmp_path / "out")
        assert store.recovered is not None
    name = "model.norm.weight"
    (file,) = (tmp_path / "out").glob("model-*.safetensors")
    assert np.array_equal(load_file(file)[name], numbers["master"][name])


def test_the_command_is_reached_through_the_command_line(tmp_path):
    from launch.cli import app as whole

    result = CliRunner().invoke(whole, ["checkpoint", "export", "--help"])
    assert result.exit_code == 0 and "--packed-experts" in result.output
    assert yaml.safe_load(config_in(tmp_path).to_yaml())["train"]["init_from"] == ""
