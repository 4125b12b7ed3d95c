"""One rank of the mesh tests: trains a small model on each mesh it is told and keeps the results.

    mpirun -n N python -m tests.launch.mesh_ranks CASES.json OUT

`CASES.json` is a list of cases (`Case`); rank 0 writes OUT/NAME.json (losses, norms, digest,
idle units) and OUT/NAME.npz (the gradient of every tensor in step 1). All cases run in one
process, because starting one costs seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.build import initialize, make_engine, make_plan, make_rank_stages, open_store
from launch.config import RunConfig
from launch.ranks import detect_ranks
from launch.world import shared_world
from moe.assemble import assemble
from moe.digest import weights_digest
from moe.mesh import Mesh
from moe.parallel import ParallelGroups, open_groups
from offload.blocks import TensorSpec
from offload.device_copy import field_view
from offload.engine import OffloadEngine
from ops.comm.base import World

SEQ_LEN = 16
MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_slice_rows": 32,
    "initializer_range": 0.2,
    "n_shared_experts": 1,
}


@dataclass
class Case:
    """A mesh and what differs from the usual run: overrides of the sections of the configuration.

    `smallest`: the least budgets the plan accepts. `steps` of the same batches, of so many
    `sequences`, for every mesh. `rate` is the learning rate of step 1; with gradients in bfloat16
    it is smaller, because a sum in another order then flips roundings of one part in 256, and
    what an update of the size of the weights makes of that is not about ranks.
    """

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    rate: float = 1e-2
    sequences: int = 8
    evaluate: bool = True
    smallest: bool = False


def make_config(case: Case, path: Path, device: int = 1 << 28, host: int = 1 << 28) -> RunConfig:
    """The configuration of a case; every mesh has the same batch of all ranks."""
    replicas = case.parallel.get("data_parallel", 1)
    return RunConfig.from_dict(
        {
            "name": "mesh",
            "model": MODEL | case.model,
            "train": {
                "steps": case.steps,
                "seq_len": SEQ_LEN,
                "micro_batch_size": 1,
                "gradient_accumulation_steps": case.sequences // replicas,
                "weight_dtype": "float32",
                "grad_dtype": "float32",
            }
            | case.train,
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3} | case.optimizer,
            "offload": {
                "device": {"capacity": device},
                "host": {"capacity": host},
                "nvme": {"capacity": 1 << 28, "path": str(path)},
                "prefetch_buffer_size": 1 << 16,
                "io_workers": 2,
            }
            | case.offload,
            "parallel": case.parallel,
            "runtime": {"threads": 1},
        }
    )


def budgeted(case: Case, path: Path, world: World) -> RunConfig:
    """The configuration, with the least budgets that every rank accepts where that is asked."""
    if not case.smallest:
        return make_config(case, path)
    tiers = [
        make_plan(make_config(case, path, 1, 1), rank=rank).tiers for rank in range(world.size)
    ]
    least = {name: max(plan[name].minimum_bytes for plan in tiers) for name in ("device", "host")}
    return make_config(case, path, **least)


def batch(config: RunConfig, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of all ranks: Zipf-like, so that a few experts see most tokens."""
    rng = np.random.default_rng(number)
    shape = (config.global_batch_sequences, SEQ_LEN + 1)
    tokens = np.minimum(rng.zipf(1.6, shape) - 1, config.model.vocab_size - 1).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def gradients(engine: OffloadEngine) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """The gradients of the last step, as pieces in the order of `masters`."""
    shared = engine._shared
    found = []
    for name in engine.gradients.squares:
        unit = shared.units[name]
        assert unit.host_grad is not None, "the case must not spill gradients"
        grad = field_view(unit.host_grad, unit.layout.field("grad", "grad"))
        for place in unit.layout.places:
            if place.spec.name:
                found.append((place.spec, np.array(grad[place.start :][: place.spec.size])))
    found.sort(key=lambda row: (row[0].name.encode(), *row[0].position))
    yield from found


def train(case: Case, world: World, path: Path, backend: Any) -> tuple[dict[str, Any], Any]:
    """Train one case; (results, gradients of step 1 by tensor), the latter on rank 0 only."""
    from moe.step import TrainingStep
    from ops.kernels.pool import KernelPool

    config = budgeted(case, path, world)
    groups = open_groups(Mesh(config.parallel), world, config.model)
    plan = make_plan(config, rank=world.rank)
    assert plan.fits, plan.problems
    stages = make_rank_stages(config, groups)
    store = open_store(config, plan, rank=world.rank)
    try:
        with KernelPool(1) as pool:
            engine = make_engine(config, plan, backend, pool, store, groups)
            try:
                initialize(config, engine)
                step = TrainingStep(config.model, config.train, engine, stages, backend, groups)
                return _steps(case, config, engine, step, groups)
            finally:
                engine.close()
    finally:
        store.close(delete=True)
        groups.free()


def _steps(
    case: Case, config: RunConfig, engine: OffloadEngine, step: Any, groups: ParallelGroups
) -> tuple[dict[str, Any], Any]:
    world = groups.world
    mine = slice(
        groups.share.at.dp * config.train.batch_sequences,
        (groups.share.at.dp + 1) * config.train.batch_sequences,
    )
    losses, norms, evals, found = [], [], [], {}
    applied, idle = [], []
    for number in range(1, case.steps + 1):
        tokens, targets = batch(config, number)
        result = step.train(tokens[mine], targets[mine], case.rate / number)
        losses.append(float(result.loss))
        norms.append(result.outcome.grad_norm)
        applied.append(result.outcome.applied)
        idle.append(result.outcome.idle_units)
        if number == 1 and not case.smallest:
            engine.drain()
            pieces = list(gradients(engine))
            whole = assemble(world, [tensor for tensor, _ in pieces], pieces)
            found = {f"{name}:{row0}": values.copy() for name, row0, values in whole}
        if case.evaluate and number % 5 == 0:
            engine.drain()
            tokens, targets = batch(config, 1000 + number)
            evals.append(step.evaluate(tokens[mine], targets[mine]))
    digest = weights_digest(engine, world)
    peaks = engine.peak_bytes()
    assert peaks["device"] <= config.offload.device.capacity
    assert peaks["host"] <= config.offload.host.capacity
    told = world.all_gather_object([losses, norms, evals, digest, idle])
    assert all(row == told[0] for row in told), "ranks do not agree on what they saw"
    results = {"losses": losses, "norms": norms, "evals": evals, "digest": digest, "idle": idle}
    return {**results, "applied": applied, "comm": world.stats.waited_seconds()}, found


def main() -> None:
    """Run the cases and write their results."""
    from ops.backend import MindSporeBackend
    from ops.kernels.warm_up import warm_up

    cases = [Case(**row) for row in json.loads(Path(sys.argv[1]).read_text())]
    out = Path(sys.argv[2])
    with shared_world(detect_ranks(), 300.0, checked=True) as world:
        backend = MindSporeBackend()
        backend.configure(1)
        warm_up()
        for number, case in enumerate(cases):
            results, found = train(case, world, out / f"store-{number}", backend)
            if world.rank == 0:
                (out / f"{case.name}.json").write_text(json.dumps(results))
                np.savez(out / f"{case.name}.npz", **found)
                print(case.name, flush=True)


def to_json(cases: list[Case]) -> str:
    """The content of `CASES.json`."""
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    main()
