"""One rank of the test in which a run goes on on one mesh after the other.

    mpirun -n 2 python -m tests.launch.reshard_ranks OUT

Every life opens the stores at the newest commit, whatever mesh made it, tells the digest of all
weights, trains a step and commits. Rank 0 writes OUT/CHAIN.json: a row for each life.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from launch.build import initialize, make_engine, make_plan, make_rank_stages
from launch.config import RunConfig
from launch.origin import find_origin
from launch.rank_store import open_rank_store
from launch.ranks import detect_ranks
from launch.restore import restore_from
from launch.resume import save_plan, starting_point
from launch.world import shared_world
from moe.data.stream import Cursor
from moe.digest import weights_digest
from moe.mesh import Mesh
from moe.parallel import ParallelGroups, open_groups
from ops.comm.base import World
from ops.comm.single import SingleRank
from tests.launch.mesh_ranks import Case, batch, budgeted

_COMPILED: list[Any] = []
ONE: dict[str, Any] = {}
DP: dict[str, Any] = {"data_parallel": 2, "expert_parallel": 2}
PP: dict[str, Any] = {"pipeline_stage": 2}
OP: dict[str, Any] = {"model_parallel": 2}
REPLICAS: dict[str, Any] = {"data_parallel": 2, "optimizer_parallel": False}
# Lives marked with True have the least budgets, so that nearly everything is cold.
CHAINS: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "shared": [(ONE, False), (DP, True), (PP, False), (OP, True), (ONE, True), (REPLICAS, False)],
    "pipeline": [(ONE, True), (PP, False), (PP, True), (ONE, False)],
    "alone": [(ONE, False)] * 4,
    "apart": [(DP, False), (PP, True), (OP, False), (DP, True)],
}


def one_life(
    parallel: dict[str, Any], smallest: bool, path: Path, world: World, backend: Any
) -> dict[str, Any]:
    """Go on, train a step, commit; what was seen."""
    from moe.step import TrainingStep
    from ops.kernels.pool import KernelPool

    case = Case("reshard", parallel, smallest=smallest)
    config = budgeted(case, path, world)
    nvme = dataclasses.replace(config.offload.nvme, path=str(path))
    offload = dataclasses.replace(config.offload, nvme=nvme, durability="step")
    config = dataclasses.replace(config, offload=offload)
    origin = find_origin(config, "latest", world)
    start = starting_point(config, origin, True)
    plan = make_plan(config, True, world.rank, 0 if origin is None else origin.own_bytes)
    assert plan.fits, plan.problems
    groups = open_groups(Mesh(config.parallel), world, config.model)
    opened = open_rank_store(config, plan, origin, world)
    try:
        with KernelPool(1) as pool:
            engine = make_engine(
                config, plan, backend, pool, opened.store, groups, agree=opened.agree
            )
            try:
                if origin is None:
                    initialize(config, engine)
                elif origin.in_place:
                    engine.restore()
                else:
                    restore_from(origin, engine, config, world, pool, opened.store.directory)
                before = weights_digest(engine, world)
                stages = _stages(config, groups)
                step = TrainingStep(config.model, config.train, engine, stages, backend, groups)
                loss = _step(config, step, groups, start.step + 1)
                engine.commit(_meta(config, start.step + 1))
                after = weights_digest(engine, world)
            finally:
                engine.close()
    finally:
        opened.store.close()
        groups.free()
    in_place = None if origin is None else origin.in_place
    return {"before": before, "after": after, "loss": loss, "in_place": in_place,
            "message": start.message}  # fmt: skip


def _stages(config: RunConfig, groups: ParallelGroups) -> Any:
    """The stage functions; those of undivided operators are compiled once for all lives."""
    if groups.op.size > 1:
        return make_rank_stages(config, groups)
    if not _COMPILED:
        _COMPILED.append(make_rank_stages(config, ParallelGroups.single(config.model)))
    return _COMPILED[0]


def _step(config: RunConfig, step: Any, groups: Any, number: int) -> float:
    count, index = config.train.batch_sequences, groups.share.at.dp
    mine = slice(index * count, (index + 1) * count)
    tokens, targets = batch(config, number)
    return float(step.train(tokens[mine], targets[mine], 1e-2 / number).loss)


def _meta(config: RunConfig, number: int) -> dict[str, Any]:
    cursor = Cursor(seed=config.data.seed).to_json()
    return {"step": number, "cursor": cursor, **save_plan(config).facts}


def main() -> None:
    """Live all chains and write what was seen."""
    from ops.backend import MindSporeBackend
    from ops.kernels.warm_up import warm_up

    out = Path(sys.argv[1])
    with shared_world(detect_ranks(), 300.0, checked=True) as world:
        backend = MindSporeBackend()
        backend.configure(1)
        warm_up()
        for name, lives in CHAINS.items():
            # As on machines without a shared file system: each rank sees its own directory only.
            path = out / (f"{name}-{world.rank}" if name == "apart" else name)
            rows = []
            for parallel, smallest in lives:
                if parallel:
                    rows.append(one_life(parallel, smallest, path, world, backend))
                elif world.rank == 0:
                    rows.append(one_life(parallel, smallest, path, SingleRank(), backend))
                world.barrier()
            if world.rank == 0:
                (out / f"{name}.json").write_text(json.dumps(rows))
                print(name, flush=True)


if __name__ == "__main__":
    main()
