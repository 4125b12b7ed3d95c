"""Commits of a small model on any mesh, made of numbers that are known as whole tensors.

Blocks are put together here with NumPy alone, after the description in `offload/blocks.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe.checkpoint import SavedRun, saved_run
from moe.mesh import ParallelConfig
from offload.blocks import TensorSpec, UnitLayout
from offload.nvme.store import NvmeStore
from offload.rank_commits import RankCommit, RecordFile
from tests.moe.harness import make_config
from tests.moe.weights.weight_files import PLAIN, Tensors, random_weights
from tests.offload.checkpoint.saved_units import MemoryBlock, MemoryPart

COMPONENTS = ("master", "exp_avg", "exp_avg_sq")
Numbers = dict[str, Tensors]
STEP, OPTIMIZER_STEP = 7, 6


def make_run(
    parallel: ParallelConfig | None = None,
    policy: str = "replay",
    model: Mapping[str, Any] | None = None,
    rates: Mapping[int, float] | None = None,
    **train: Any,
) -> tuple[SavedRun, dict[str, Any]]:
    """A run that has done `STEP` steps, and the meta of each of its commits."""
    config = make_config(
        Path("/nowhere"),
        model=PLAIN | dict(model or {}),
        train=train,
        optimizer={"weight_decay": 0.1},
        idle_expert_policy=policy,
    ).to_dict()
    parallel = parallel or ParallelConfig()
    told = {key: config[key] for key in ("model", "train", "optimizer", "data")}
    run = {
        "step": STEP,
        "cursor": {"epoch": 0, "position": 28, "seed": 1, "stream": "abc"},
        "name": "harness",
        "config": {
            **told,
            "offload": {"idle_expert_policy": policy},
            "runtime": {"threads": 2, "onednn_fpmath": "strict"},
        },
        "ranks": parallel.num_ranks,
        "parallel": dataclasses.asdict(parallel),
    }
    engine = {
        "ledger": {"step": OPTIMIZER_STEP, "rates": [list(x) for x in (rates or {}).items()]},
        "loss_scale": {"scale": 1.0, "good_steps": 0},
    }
    meta = json.loads(json.dumps({"step": STEP, "engine": engine, "run": run}))
    return saved_run(meta), meta


def numbers_of(run: SavedRun) -> Numbers:
    """Masters and moments of every tensor."""
    found = {x: random_weights(run.model, seed=i) for i, x in enumerate(COMPONENTS)}
    found["exp_avg_sq"] = {name: np.abs(array) for name, array in found["exp_avg_sq"].items()}
    return found


def elements(whole: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The elements of a tensor that a block or piece of it holds, flat."""
    block = spec.piece_of or spec
    matrix = whole.reshape(whole.shape[0], -1)
    rows, columns = block.shape[0], block.size // block.shape[0]
    part = matrix[block.row0 : block.row0 + rows, block.col0 : block.col0 + columns]
    return part.ravel()[spec.flat0 : spec.flat0 + spec.size]


def blocks_of(layout: UnitLayout, numbers: Numbers) -> dict[str, np.ndarray]:
    """The weight and state block of a layout, u8."""
    found = {part: np.zeros(layout.nbytes(part), np.uint8) for part in ("weight", "state")}

    def put(part: str, component: str, lo: int, values: np.ndarray) -> None:
        for field in layout.fields[part]:
            if field.component == component:
                at = field.offset + lo * values.itemsize
                found[part][at : at + values.nbytes] = values.view(np.uint8)

    for place in layout.places:
        spec = place.spec
        if not spec.name:
            continue
        master = elements(numbers["master"][spec.name], spec)
        if place.kept:
            put("weight", "master", place.start - layout.num_split, master)
        elif layout.weight_dtype == "float16":
            put("weight", "weight", place.start, master.astype(np.float16))
            put("state", "master_split", place.start, master)
        else:
            bits = master.view(np.uint32)
            weight = ((bits + 0x8000) >> 16).astype(np.uint16)
            residual = (bits.astype(np.int64) - (weight.astype(np.int64) << 16)).astype(np.int16)
            put("weight", "weight", place.start, weight)
            put("state", "residual", place.start, residual)
        for component in ("exp_avg", "exp_avg_sq"):
            put("state", component, place.start, elements(numbers[component][spec.name], spec))
    return found


def parts_in_memory(
    run: SavedRun, numbers: Numbers, version: int = OPTIMIZER_STEP
) -> dict[int, MemoryPart]:
    """The parts of a commit, by rank."""
    parts = {}
    for rank in range(run.num_ranks):
        blocks = {}
        for name, layout in run.layouts[rank].items():
            for part, data in blocks_of(layout, numbers).items():
                if data.size:
                    blocks[f"{name}/{part}"] = MemoryBlock(data, version)
        parts[rank] = MemoryPart(blocks)
    return parts


def commit_to(
    path: Path,
    run: SavedRun,
    meta: Mapping[str, Any],
    numbers: Numbers,
    version: int = OPTIMIZER_STEP,
) -> None:
    """The same on the disk: a store for each rank, and the record of all of them."""
    generations, stores = [], []
    for rank, part in parts_in_memory(run, numbers, version).items():
        with NvmeStore(str(path), 8 << 20, rank=rank, workers=1) as store:
            for name, block in part.blocks.items():
                store.write(name, block.data, "commit", version=block.version)
            generations.append(store.publish(store.cut(meta)).generation)
            stores.append(store.store_id)
    if run.num_ranks > 1:
        facts = {"step": run.step, "parallel": meta["run"]["parallel"]}
        commit = RankCommit(1, tuple(generations), tuple(stores), facts)
        RecordFile(str(path)).write([commit])
