"""What each rank of `test_pipeline_ranks.py` runs: `python -m tests.moe.pipeline_ranks`.

Four real ranks (or two meshes of two) train in fp64, and one rank trains the same model on the
same batch; losses and all gradients must agree. Prints the name of each case that passed.
Names of cases as arguments run only these.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from moe.config import ModelConfig, TrainConfig
from moe.memory import stage_dims
from moe.mesh import Mesh, ParallelConfig
from moe.mesh_check import check_mesh
from moe.parallel import ParallelGroups, open_groups
from moe.step import StepResult, TrainingStep
from ops.comm.base import World
from ops.nn.stages import Stages
from tests.moe.harness import shared_backend
from tests.moe.memory_engine import MemoryEngine
from tests.moe.parallel_experts import Copies
from tests.moe.test_model_gradients import MODEL as SMALL

RANKS = 4
OUTSTANDING_BYTES = 4096  # so little that senders have to wait
LAYERS = 5
MODEL: dict[str, Any] = SMALL | {"num_hidden_layers": LAYERS, "n_shared_experts": 1}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "n_shared_experts": 0}
TRAIN: dict[str, Any] = {"seq_len": 5, "micro_batch_size": 2}
FULL: dict[str, Any] = {"recompute": "full", "recompute_every": 2}
Gradients = dict[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A pipeline, a model and how it is trained.

    Each data-parallel rank has `micro_batches`, the last one so many `fewer`; they share experts.
    """

    name: str
    layers: Sequence[int]
    stages: int
    micro_batches: int
    train: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    schedule: str = "breadth_first"
    data: int = 1
    fewer: int = 0

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            pipeline_stage=self.stages,
            data_parallel=self.data,
            expert_parallel=self.data,
            pp_interleave_num=len(self.layers) // self.stages,
            pipeline_layers=list(self.layers),
            pipeline_schedule=self.schedule,
        )

    @property
    def settings(self) -> TrainConfig:
        order = {"micro_batch_order": "batch_major"} if self.schedule == "1f1b" else {}
        steps = {"gradient_accumulation_steps": self.micro_batches}
        return TrainConfig(**(TRAIN | steps | order | self.train))

    @property
    def shape(self) -> ModelConfig:
        return ModelConfig(**(MODEL | self.model))


CASES = (
    Case("two-stages", [2, 3], 2, 3),
    Case("two-stages-looped", [1, 1, 2, 1], 2, 3, {"recompute": "none"}, UNTIED),
    Case("two-stages-looped-tied", [1, 1, 1, 2], 2, 2, FULL),
    Case("four-stages", [1, 2, 1, 1], 4, 3, {"recompute": "none"}),
    Case("four-stages-untied", [1, 1, 2, 1], 4, 2, FULL, UNTIED),
    Case("batch-major", [2, 3], 2, 2, {"micro_batch_order": "batch_major"}),
    Case("frozen-embedding", [2, 3], 2, 2, {"freeze": ["embed.1", "layers.4"]}),
    Case("1f1b-two", [3, 2], 2, 3, {"recompute": "none"}, UNTIED, "1f1b"),
    Case("1f1b-four", [1, 2, 1, 1], 4, 6, {}, {}, "1f1b"),
    Case("1f1b-four-full", [1, 1, 1, 2], 4, 5, FULL, UNTIED, "1f1b"),
    Case("1f1b-fewer-micro-batches-than-stages", [1, 2, 1, 1], 4, 2, FULL, {}, "1f1b"),
    Case("with-experts", [1, 1, 1, 2], 2, 3, data=2, fewer=2),
    Case("1f1b-with-experts", [2, 3], 2, 4, schedule="1f1b", data=2, fewer=3),
)


@cache
def stages_of(model: ModelConfig) -> Stages:
    """Compiled stage functions; what they compute does not depend on the mesh."""
    return Stages(stage_dims(model, TrainConfig(**TRAIN)), "float64")


class Rank:
    """One rank of a mesh, and the model on it."""

    def __init__(self, groups: ParallelGroups, model: ModelConfig, train: TrainConfig) -> None:
        backend = shared_backend()
        self.groups = groups
        self.engine = MemoryEngine(model, train, backend, 3, groups.share)
        self.step = TrainingStep(model, train, self.engine, stages_of(model), backend, groups)  # type: ignore[arg-type]

    def run(self, tokens: np.ndarray) -> tuple[StepResult, Gradients]:
        """One step on this rank's part of a batch; gradients summed over replicas."""
        result = self.step.train(tokens[:, :-1], tokens[:, 1:], 0.1)
        for key in sorted(self.engine.gradients):
            if ".experts." not in key[0]:
                self.groups.dp.all_reduce(self.engine.gradients[key])
        return result, self.engine.gradients


def batch_of(case: Case, seed: int) -> np.ndarray:
    """Tokens [sequences, seq_len + 1] of all ranks, the same on every rank."""
    sequences = case.data * case.settings.batch_sequences - case.fewer * TRAIN["micro_batch_size"]
    shape = (sequences, case.settings.seq_len + 1)
    return np.random.default_rng(seed).integers(0, MODEL["vocab_size"], shape).astype(np.int32)


def check_same(
    found: tuple[StepResult, Gradients], wanted: tuple[StepResult, Gradients], units: Any
) -> None:
    """Losses agree, and so do the gradients of the rank's units; it has no others."""
    for name, tolerance in (("loss", 2e-7), ("balance_loss", 1e-9), ("z_loss", 1e-9)):
        a, b = float(getattr(found[0], name)), float(getattr(wanted[0], name))
        assert abs(a - b) <= tolerance * abs(b), f"{name}: {a} against {b}"
    owned = {(tensor.name, tensor.row0) for unit in units for tensor in unit.tensors}
    gradients = {key: value for key, value in wanted[1].items() if key in owned}
    assert set(found[1]) == set(gradients), set(found[1]) ^ set(gradients)
    for key, gradient in gradients.items():
        error = np.linalg.norm(found[1][key] - gradient)
        limit = 1e-9 * np.linalg.norm(gradient)
        assert error <= limit, f"{key}: off by {error}, norm {np.linalg.norm(gradient)}"


def check(case: Case, world: World) -> None:
    """Two steps and an evaluation of a pipeline against one rank."""
    model, train, parallel = case.shape, case.settings, case.parallel
    check_mesh(parallel, model, train)
    smaller: Any = world if parallel.num_ranks == world.size else Copies(world, parallel.num_ranks)
    groups = open_groups(Mesh(parallel), smaller, model)
    rank = Rank(groups, model, train)
    steps = {"gradient_accumulation_steps": case.data * case.micro_batches - case.fewer}
    whole = TrainConfig(**(TRAIN | steps | {"freeze": train.freeze}))
    single = Rank(ParallelGroups.single(model), model, whole)
    for seed in (1, 2):
        tokens = batch_of(case, seed)
        own = tokens[groups.dp.rank * train.batch_sequences :][: train.batch_sequences]
        found, wanted = rank.run(own), single.run(tokens)
        check_same(found, wanted, rank.engine.units.values())
    total = rank.step.evaluate(own[:, :-1], own[:, 1:]) / tokens[:, 1:].size
    assert abs(total - float(wanted[0].loss)) <= 2e-7 * total
    # The same without the last sequence of each rank, so that its last micro-batch is not full.
    each = train.batch_sequences
    last = [min(first + each, len(tokens)) - 1 for first in range(0, len(tokens), each)]
    kept = np.delete(tokens, last, axis=0)
    wanted_total = single.step.evaluate(kept[:, :-1], kept[:, 1:])
    partial = rank.step.evaluate(own[:-1, :-1], own[:-1, 1:])
    assert abs(partial - wanted_total) <= 1e-12 * wanted_total
    losses = world.all_gather_object([float(found[0].loss), total])
    assert all(loss == losses[0] for loss in losses), losses
    groups.free()


def main() -> None:
    """Run all cases, or those named; any error ends all ranks with status 5."""
    from ops.comm.mpi import MpiWorld

    try:
        world = MpiWorld(timeout_seconds=300, checked=True, outstanding_bytes_max=OUTSTANDING_BYTES)
        assert world.size == RANKS
        for case in CASES:
            if sys.argv[1:] and case.name not in sys.argv[1:]:
                continue
            check(case, world)
            if world.rank == 0:
                print(case.name, flush=True)
        world.free()
    except BaseException:
        traceback.print_exc()
        MpiWorld.abort_all(5)


if __name__ == "__main__":
    sys.exit(main())
