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
    facts = {"step": 3, "config": config, "ranks": run.num_ranks, "parallel": parallel}
    return json.loads(json.dumps({"run": facts}))


def test_a_commit_tells_which_run_made_it():
    run = run_of(ParallelConfig(data_parallel=2, model_parallel=4))
    assert saved_run(meta_of(run)) == run


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.pop("run"), "'run'"),
        (lambda m: m["run"].update(step="3"), "its step is no number"),
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
