"""A commit of any mesh is read on any other one: masters and moments bit for bit.

Commits are in memory and hold made-up values that say which element each is
(`tests/offload/checkpoint/saved_units.py`); layouts are those of a real model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest

from moe.checkpoint import SavedRun, saved_ledger, saved_run
from moe.config import ModelConfig, TrainConfig
from moe.mesh import ParallelConfig
from moe.mesh_check import check_mesh
from offload.checkpoint.units import UnitReader
from offload.config import OptimizerConfig
from ops.errors import ConfigError, StorageError
from ops.kernels.pool import KernelPool
from tests.offload.checkpoint.saved_units import blocks_of, part_of_units

MODEL = ModelConfig(
    vocab_size=88,
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=2,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    tie_word_embeddings=False,
    vocab_slice_rows=32,
)
# Split and kept tensors; embeddings and one layer's experts without state.
TRAIN = TrainConfig(gradient_accumulation_steps=4, freeze=["embed.*", "layers.1.experts.*"])
SIZES = (1, 2, 4, 8)


def all_meshes() -> list[ParallelConfig]:
    """Every mesh of up to 8 ranks over the four axes, sharded; some of other kinds."""
    found = []
    for pp, dp, op in itertools.product(SIZES, SIZES, SIZES):
        if pp * dp * op > max(SIZES):
            continue
        for ep in (ep for ep in SIZES if ep <= dp):
            found.append(
                ParallelConfig(
                    pipeline_stage=pp, data_parallel=dp, model_parallel=op, expert_parallel=ep
                )
            )
    found += [
        ParallelConfig(data_parallel=2, model_parallel=2, optimizer_parallel=False),
        ParallelConfig(data_parallel=4, expert_parallel=2, optimizer_parallel=False),
        ParallelConfig(pipeline_stage=2, pp_interleave_num=2),
        ParallelConfig(pipeline_stage=2, data_parallel=3, pipeline_layers=[1, 3]),
        ParallelConfig(data_parallel=5),
        ParallelConfig(data_parallel=6, expert_parallel=2),
        ParallelConfig(data_parallel=16, expert_parallel=8),
        ParallelConfig(pipeline_stage=2, data_parallel=4, model_parallel=4, expert_parallel=4),
    ]
    valid = []
    for parallel in found:
        try:
            check_mesh(parallel, MODEL, TRAIN)
        except ConfigError:
            continue
        valid.append(parallel)
    return valid


MESHES = all_meshes()


def run_of(parallel: ParallelConfig, **train: str) -> SavedRun:
    made = dataclasses.replace(TRAIN, **train)
    return SavedRun(3, MODEL, made, OptimizerConfig(), parallel, "replay")


def units_of(run: SavedRun, rank: int):
    return list(run.layouts[rank].values())


def check(saved: SavedRun, wanted: SavedRun, pool: KernelPool) -> None:
    """Every rank of `wanted` finds in a commit of `saved` what it would have stored."""
    parts = {rank: part_of_units(units_of(saved, rank)) for rank in range(saved.num_ranks)}
    ledger = saved_ledger(saved, {0: {"engine": {"ledger": {"step": 3, "rates": []}}}})
    reader = UnitReader(parts, saved.layouts, ledger, 0.1, pool)
    for rank in range(wanted.num_ranks):
        for target in units_of(wanted, rank):
            weight = np.full(target.nbytes("weight"), 0xAA, np.uint8)
            state = None if target.frozen else np.full(target.nbytes("state"), 0xAA, np.uint8)
            reader.fill(target, weight, state)
            expected = blocks_of(target)
            what = f"{target.name} of rank {rank} of {wanted.parallel}"
            np.testing.assert_array_equal(weight, expected["weight"], err_msg=what)
            if state is not None:
                np.testing.assert_array_equal(state, expected["state"], err_msg=what)
    for part in parts.values():
        part.reads.clear()


@pytest.fixture(scope="module")
def pool():
    with KernelPool(1) as made:
        yield made


def test_the_matrix_covers_every_size_and_axis():
    assert {mesh.num_ranks for mesh in MESHES} >= {1, 2, 4, 8, 5, 6, 16, 32}
    for axis in ("pipeline_stage", "data_parallel", "model_parallel", "expert_parallel"):
        assert {getattr(mesh, axis) for mesh in MESHES} >= {1, 2, 4}


def test_some_meshes_from_some_others(pool, rotating_seed):
    """C61: 12 pairs drawn anew each time; `make test-parallel` takes them all."""
    pairs = random.Random(rotating_seed).sample(list(itertools.product(MESHES, MESHES)), 12)
    for saved, wanted in pairs:
        check(run_of(saved), run_of(wanted), pool)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_mesh_from_one_rank_and_back(pool, dtype, rotating_seed):
    one = run_of(MESHES[0], weight_dtype=dtype)
    for mesh in random.Random(rotating_seed).sample(MESHES, 8):
        check(one, run_of(mesh, weight_dtype=dtype), pool)
        check(run_of(mesh, weight_dtype=dtype), one, pool)


@pytest.mark.long
@pytest.mark.parametrize("saved", MESHES, ids=str)
def test_every_mesh_from_every_mesh(saved, pool):
    for wanted in MESHES:
        check(run_of(saved), run_of(wanted), pool)


def meta_of(run: SavedRun) -> dict:
    """What a commit's manifest says, by way of JSON."""
    config = {
        "model": dataclasses.asdict(run.model),
        "train": dataclasses.asdict(run.train),
        "optimizer": dataclasses.asdict(run.optimizer),
        "offload": {"idle_expert_policy": "replay"},
    }
    parallel = dataclasses.asdict(run.parallel)
    cursor = {"epoch": 0, "position": 28, "seed": 1, "stream": "abc"}
    facts = {"step": 3, "cursor": cursor, "config": config, "ranks": run.num_ranks}
    engine = {
        "ledger": {"step": 3, "rates": [[2, 0.1], [3, 0.2]]},
        "loss_scale": {"scale": 1.0, "good_steps": 0},
    }
    meta = {"step": 3, "engine": engine, "run": {**facts, "parallel": parallel}}
    return json.loads(json.dumps(meta))


def test_a_commit_tells_which_run_made_it():
    run = run_of(ParallelConfig(data_parallel=2, model_parallel=4))
    assert saved_run(meta_of(run)) == run


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.pop("run"), "run = None "),
        (lambda m: m["run"].update(step="3"), r"run\.step = '3' .* whole number"),
        (lambda m: m["run"].update(step=-1), r"run\.step = -1 "),
        (lambda m: m["run"].update(step=4), r"step = 3 .*: allowed is that of run\.step, 4"),
        (lambda m: m.update(step=None), r"step = None "),
        (lambda m: m.update(run=[]), r"run = \[\] .* mapping"),
        (lambda m: m["run"].update(config=3), r"run\.config = 3 "),
        (lambda m: m["run"].pop("cursor"), r"run\.cursor = None "),
        (lambda m: m["run"].update(cursor=[1]), r"run\.cursor = \[1\] .* mapping"),
        (lambda m: m["run"]["cursor"].update(epoch=-1), r"run\.cursor\.epoch = -1 "),
        (lambda m: m["run"]["cursor"].update(seed=1 << 80), r"run\.cursor\.seed = 12089"),
        (lambda m: m["run"]["cursor"].update(stream=1), r"run\.cursor\.stream = 1 "),
        (lambda m: m.pop("engine"), "engine = None "),
        (lambda m: m.update(engine="x"), "engine = 'x' "),
        (lambda m: m["engine"].pop("ledger"), r"engine\.ledger = None "),
        (lambda m: m["engine"]["ledger"].update(step=4), r"engine\.ledger\.step = 4 .* at most 3"),
        (lambda m: m["engine"]["ledger"].update(step=-1), r"engine\.ledger\.step = -1 "),
        (lambda m: m["engine"]["ledger"].update(step=1e9), r"engine\.ledger\.step = 1000000000"),
        (lambda m: m["engine"].pop("loss_scale"), r"engine\.loss_scale = None "),
        (lambda m: m["engine"].update(loss_scale=[]), r"engine\.loss_scale = \[\] "),
        (lambda m: m["engine"]["loss_scale"].pop("scale"), r"loss_scale\.scale = None "),
        (lambda m: m["engine"]["loss_scale"].update(scale=0.0), r"loss_scale\.scale = 0\.0 "),
        (lambda m: m["engine"]["loss_scale"].update(scale=10**400), r"loss_scale\.scale = 10"),
        (lambda m: m["engine"]["loss_scale"].update(good_steps=-1), r"good_steps = -1 "),
        (lambda m: m["run"]["config"]["offload"].clear(), "idle_expert_policy = None "),
        (
            lambda m: m["run"]["config"]["model"].update(num_hidden_layers=10**6),
            r"9000007 units; .* 1048576",
        ),
        (lambda m: m["run"]["config"]["model"].update(vocab_size=10**12), r"model\.vocab_size"),
        (lambda m: m["run"]["config"]["model"].update(rope_theta=10**400), r"model\.rope_theta"),
        (lambda m: m["run"]["config"]["train"].update(seq_len=10**12), r"train\.seq_len"),
        (lambda m: m["run"].update(ranks=4), "it is of 4 ranks and of a mesh of 2"),
        (lambda m: m["run"]["config"]["model"].update(depth=3), "model.depth is not known"),
        (lambda m: m["run"]["config"]["model"].update(hidden_size=-1), "model.hidden_size"),
        (lambda m: m["run"]["config"]["model"].pop("hidden_size"), "hidden_size"),
        (lambda m: m["run"]["config"].update(train=[]), "train is no mapping"),
        (lambda m: m["run"]["parallel"].update(data_parallel=10**9), "10{9}|ranks"),
    ],
)
def test_what_tells_of_no_run_is_refused(change, why):
    """C68: a manifest of unknown origin may say anything."""
    meta = meta_of(run_of(ParallelConfig(data_parallel=2)))
    change(meta)
    with pytest.raises(StorageError, match=why):
        saved_run(meta)


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ([[4, 0.4]], r"4 instead of step 5; .* up to 5"),
        ([[3, 0.4], [5, 0.4]], "consecutive"),
        ([[5, 0.4], [4, 0.4]], "consecutive"),
        ([[5, 0.4], [5, 0.4]], "consecutive"),
        ([[6, 0.4]], "up to 5"),
        ([[x, 0.1] for x in range(0, 6)], "0 instead of step 0"),
        ([[5, float("inf")]], "finite"),
        ([[5, -1.0]], "finite"),
        ([[5, "0.1"]], "finite"),
        ([[5, True]], "finite"),
        ([[5.0, 0.1]], "consecutive"),
        ([[5]], "unpack|pair"),
        ([5], "unpack|pair"),
        (None, "iterable|list"),
        ({}, "list"),
    ],
)
def test_a_ledger_that_does_not_cover_its_steps_is_refused(rates, why):
    """`export` ended with a KeyError: the number of the step that was not there."""
    run = run_of(MESHES[0])
    with pytest.raises(StorageError, match=why):
        saved_ledger(run, {0: {"engine": {"ledger": {"step": 5, "rates": rates}}}})


def test_a_unit_that_is_behind_what_the_ledger_tells_is_refused(pool):
    run = run_of(MESHES[0])
    parts = {0: part_of_units(units_of(run, 0), version=1)}
    ledger = saved_ledger(run, {0: {"engine": {"ledger": {"step": 3, "rates": [[3, 0.1]]}}}})
    target = next(x for x in units_of(run, 0) if not x.frozen)
    blocks = [np.zeros(target.nbytes(part), np.uint8) for part in ("weight", "state")]
    reader = UnitReader(parts, run.layouts, ledger, 0.1, pool)
    with pytest.raises(StorageError, match=r"of step 1, and the ledger tells .* from step 3"):
        reader.fill(target, *blocks, until=3)


def test_a_model_larger_than_the_blocks_of_its_commit_is_refused():
    """A manifest of a few blocks told of a model of 10^12 parameters: `export` made plans for
    minutes before it looked at the first block."""
    run = run_of(MESHES[0])
    units = units_of(run, 0)
    nbytes = sum(x.nbytes(part) for x in units for part in ("weight", "state"))
    run.require_held(1, len(units), nbytes)
    with pytest.raises(StorageError, match=rf"has {len(units) - 1} blocks, its model .* units"):
        run.require_held(1, len(units) - 1, nbytes)
    with pytest.raises(StorageError, match=r"has 100 bytes, its model .* parameters"):
        run.require_held(1, len(units), 100)
    with pytest.raises(StorageError, match="has 2 parts, its mesh 1 rank"):
        run.require_held(2, len(units), nbytes)


def test_the_ledger_of_all_ranks_goes_back_as_far_as_any():
    run = run_of(MESHES[0])
    metas = {
        0: {"engine": {"ledger": {"step": 5, "rates": [[4, 0.4], [5, 0.5]]}}},
        1: {"engine": {"ledger": {"step": 5, "rates": [[3, 0.3], [4, 0.4], [5, 0.5]]}}},
    }
    assert saved_ledger(run, metas).to_json()["rates"] == [[3, 0.3], [4, 0.4], [5, 0.5]]
    metas[1]["engine"]["ledger"]["step"] = 6
    with pytest.raises(StorageError, match=r"optimizer steps \[5, 6\]"):
        saved_ledger(run, metas)
