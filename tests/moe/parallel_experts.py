"""What each rank of `test_parallel_experts.py` runs.

`python -m tests.moe.parallel_experts [CHECK ...]` under `mpirun`; all checks when none is named.

Four real ranks (or two meshes of two) train in fp64 on their parts of a batch, and one rank trains
on the whole batch; losses and all gradients must agree. Every communicator compares what the ranks
enter before each collective. Prints the name of each check that passed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

import moe.forward
from moe.config import ModelConfig, TrainConfig
from moe.data.source import TokenSource
from moe.data.split import TokenView, whole_view
from moe.data.stream import evaluation_batches
from moe.memory import activation_specs, stage_dims
from moe.mesh import Mesh, ParallelConfig
from moe.parallel import ParallelGroups, open_groups
from moe.step import StepResult, TrainingStep
from ops.comm.base import World
from ops.nn.stages import Stages
from tests.moe.harness import shared_backend
from tests.moe.memory_engine import MemoryEngine
from tests.moe.test_model_gradients import MODEL as SMALL

# One shape for all checks: most of their time is the compilation of stages, in every process.
MODEL: dict[str, Any] = SMALL | {
    "num_experts": 16,
    "n_shared_experts": 1,
    "vocab_slice_rows": 23,
}
TRAIN: dict[str, Any] = {"seq_len": 3, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
RANKS = 4
Gradients = dict[tuple[str, int], np.ndarray]


class Copies:
    """As many copies of a smaller world as fit into the world, side by side."""

    def __init__(self, world: World, size: int) -> None:
        self._world, self.size = world, size
        self.rank = world.rank % size

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Any:
        """The groups of every copy."""
        firsts = range(0, self._world.size, self.size)
        shifted = [[first + rank for rank in group] for first in firsts for group in groups]
        return self._world.split(shifted, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


class Ranks:
    """One rank of a mesh, and the model on it."""

    def __init__(self, groups: ParallelGroups, train: dict[str, Any]) -> None:
        self.model, self.train = ModelConfig(**MODEL), TrainConfig(**(TRAIN | train))
        self.groups = groups
        backend = shared_backend()
        self.engine = MemoryEngine(self.model, self.train, backend, 3, groups.share)
        stages = Stages(stage_dims(self.model, self.train), "float64")
        self.step = TrainingStep(self.model, self.train, self.engine, stages, backend, groups)  # type: ignore[arg-type]

    def run(self, tokens: np.ndarray) -> tuple[StepResult, Gradients]:
        """One step on this rank's part of a batch; gradients summed over replicas."""
        self.engine.leases.clear()
        result = self.step.train(tokens[:, :-1], tokens[:, 1:], 0.1)
        for key in sorted(self.engine.gradients):
            group = self.groups.edp if ".experts." in key[0] else self.groups.dp
            group.all_reduce(self.engine.gradients[key])
        return result, self.engine.gradients


def on_mesh(world: World, data: int, expert: int, **train: Any) -> Ranks:
    """This rank of a mesh with so many data- and expert-parallel ranks."""
    mesh = Mesh(ParallelConfig(data_parallel=data, expert_parallel=expert))
    smaller: Any = world if data == world.size else Copies(world, data)
    return Ranks(open_groups(mesh, smaller, ModelConfig(**MODEL)), train)


def batch(sequences: int, seed: int) -> np.ndarray:
    """Tokens [sequences, seq_len + 1], the same on every rank."""
    shape = (sequences, TRAIN["seq_len"] + 1)
    return np.random.default_rng(seed).integers(0, MODEL["vocab_size"], shape).astype(np.int32)


def part_of(tokens: np.ndarray, ranks: Ranks) -> np.ndarray:
    """The rows of a batch that belong to a data-parallel rank."""
    each = len(tokens) // ranks.groups.dp.size
    return tokens[ranks.groups.dp.rank * each :][:each]


def on_one_rank(tokens: np.ndarray) -> tuple[StepResult, Gradients]:
    """What a single rank finds for the whole batch."""
    train = {"gradient_accumulation_steps": len(tokens)}
    return Ranks(ParallelGroups.single(ModelConfig(**MODEL)), train).run(tokens)


@cache
def plain_reference() -> tuple[StepResult, Gradients]:
    """One rank on `batch(8, seed=1)`."""
    return on_one_rank(batch(8, seed=1))


def check_same(
    found: tuple[StepResult, Gradients], wanted: tuple[StepResult, Gradients], experts: range
) -> None:
    """Losses and gradients agree, and exactly the experts with a token have one."""
    for name, tolerance in (("loss", 2e-7), ("balance_loss", 1e-9), ("z_loss", 1e-9)):
        a, b = float(getattr(found[0], name)), float(getattr(wanted[0], name))
        assert abs(a - b) <= tolerance * abs(b), f"{name}: {a} against {b}"
    gradients = {key: x for key, x in wanted[1].items() if expert_of(key[0]) in (None, *experts)}
    assert set(found[1]) == set(gradients), set(found[1]) ^ set(gradients)
    whole = np.sqrt(sum(float((x**2).sum()) for x in wanted[1].values()))
    for key, gradient in gradients.items():
        error = np.linalg.norm(found[1][key] - gradient)
        limit = 1e-9 * np.linalg.norm(gradient) + 1e-15 * whole
        assert error <= limit, f"{key}: off by {error}, norm {np.linalg.norm(gradient)}"


def expert_of(name: str) -> int | None:
    """Number of the expert a tensor belongs to."""
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


def compare(
    world: World, data: int, expert: int, tokens: np.ndarray, **train: Any
) -> tuple[Ranks, Gradients]:
    """The mesh against one rank; this rank's part of the mesh and its gradients."""
    ranks = on_mesh(world, data, expert, **train)
    found = ranks.run(part_of(tokens, ranks))
    check_same(found, on_one_rank(tokens), ranks.groups.share.experts)
    return ranks, found[1]


def held_out_view(tokens: np.ndarray) -> TokenView:
    """The tokens as a text that is evaluated."""
    ends = np.array([len(tokens)], np.uint64)
    return whole_view(TokenSource("held out", tokens, ends, MODEL["vocab_size"], 0, "digest"))


def mean_loss(ranks: Ranks, view: TokenView, data: int) -> float:
    """The mean token loss of the whole text, evaluated as a run does."""
    each, seq_len = ranks.train.batch_sequences, ranks.train.seq_len
    rows = slice(ranks.groups.dp.rank * each, (ranks.groups.dp.rank + 1) * each)
    batches = list(evaluation_batches(view, seq_len, each * data, 100, rows=rows))
    total = sum(ranks.step.evaluate(batch.tokens, batch.targets) for batch in batches)
    return total / sum(batch.num_tokens for batch in batches)


@contextmanager
def every_token_chooses(world: World, experts: Sequence[int]) -> Iterator[None]:
    """Routers that send all tokens to the same experts; entered and left by all ranks together.

    Ranks that are threads have one router between them: each waits until all have seen the
    original, and until none needs the other any more.
    """
    original = moe.forward.choose_experts
    world.barrier()
    moe.forward.choose_experts = lambda logits, k: np.tile(np.int32(experts), (len(logits), 1))
    try:
        yield
        world.barrier()
    finally:
        moe.forward.choose_experts = original


# ---- checks: entered by all ranks


def every_mesh_finds_the_gradients_of_one_rank(world: World) -> None:
    """Data parallel alone, with one replica of each expert, and with several."""
    for data, expert in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        ranks = on_mesh(world, data, expert, gradient_accumulation_steps=8 // data)
        found = ranks.run(part_of(batch(8, seed=1), ranks))
        check_same(found, plain_reference(), ranks.groups.share.experts)


def recomputation_and_order_change_nothing(world: World) -> None:
    """The exchange is repeated with the layers of a segment, and done chunk by chunk."""
    forms: list[dict[str, Any]] = [
        {"recompute": "none"},
        {"recompute": "full", "recompute_every": 2},
        {"micro_batch_order": "batch_major"},
    ]
    for form in forms:
        ranks = on_mesh(world, 4, 2, **form)
        found = ranks.run(part_of(batch(8, seed=1), ranks))
        check_same(found, plain_reference(), ranks.groups.share.experts)


def expert_gradients_have_one_scale(world: World) -> None:
    """C42: gradients of experts are the same with expert_parallel 1 and 4."""
    tokens = batch(8, seed=2)
    one, four = (on_mesh(world, 4, expert) for expert in (1, 4))
    wanted, found = (ranks.run(part_of(tokens, ranks))[1] for ranks in (one, four))
    keys = [key for key in found if ".experts." in key[0]]
    assert keys, "no expert of this rank has a token"
    for key in keys:
        ratio = float((found[key] * wanted[key]).sum() / (wanted[key] ** 2).sum())
        assert abs(ratio - 1.0) <= 1e-9, f"{key} is scaled by {ratio}"


def all_tokens_go_to_the_experts_of_one_rank(world: World) -> None:
    """C43: the buffers of one rank are full to the last row, the others own no needed expert."""
    layers = MODEL["num_hidden_layers"]
    with every_token_chooses(world, (9, 8)):
        ranks, gradients = compare(world, 4, 4, batch(8, seed=6))
    names = [key[0] for key in gradients if ".experts." in key[0]]
    assert world.all_gather_object(len(names)) == [0, 0, 2 * 3 * layers, 0]
    buffers = {
        x.name: x.shape for x in activation_specs(ranks.model, ranks.train, ranks.groups.share)
    }
    full = RANKS * ranks.train.micro_batch_tokens * 2
    assert buffers["recv_x"][0] == full
    # One rank of dp=4, ep=2 has all tokens of its half, the other none.
    with every_token_chooses(world, (0, 7)):
        compare(world, 4, 2, batch(8, seed=6))


def a_batch_has_fewer_tokens_than_experts(world: World) -> None:
    """C43: twelve tokens, three a rank, and sixteen experts."""
    for expert in (1, 2, 4):
        compare(world, 4, expert, batch(4, seed=3), gradient_accumulation_steps=1)


def ranks_route_to_disjoint_experts(world: World) -> None:
    """C40: each step ranks need different experts, and still lease in one order.

    Ranks that take turns do a few of the steps: each lasts as long as on all ranks together.
    """
    ranks = on_mesh(world, 4, 2)
    disjoint, steps = 0, 50 if world.kind == "mpi" else 10
    for step in range(steps):
        token = np.random.default_rng(100 * step + world.rank).integers(MODEL["vocab_size"])
        ranks.run(np.full((2, TRAIN["seq_len"] + 1), token, np.int32))
        counts_E = ranks.step._context.routing[0, 0].plan.counts_E
        chosen = world.all_gather_object(np.nonzero(counts_E)[0].tolist())
        disjoint += not set(chosen[0]) & set(chosen[2]) and not set(chosen[1]) & set(chosen[3])
        dense = [name for name in ranks.engine.leases if ".experts." not in name]
        experts = [name for name in ranks.engine.leases if ".experts." in name]
        for group, names in ((ranks.groups.dp, dense), (ranks.groups.edp, experts)):
            lists = group.all_gather_object(names)
            assert all(found == lists[0] for found in lists), f"step {step}: {lists}"
    assert disjoint >= steps // 5, "replicas of experts route alike, so nothing was tested"


def ranks_have_different_numbers_of_micro_batches(world: World) -> None:
    """C41: no rank waits, and means are those of the sequences there are."""
    counts = [2, 1, 0, 2]
    tokens = batch(sum(counts), seed=4)
    own = tokens[sum(counts[: world.rank]) :][: counts[world.rank]]
    wanted = on_one_rank(tokens)
    for expert, order in ((1, "layer_major"), (2, "layer_major"), (4, "batch_major")):
        ranks = on_mesh(world, 4, expert, micro_batch_order=order)
        check_same(ranks.run(own), wanted, ranks.groups.share.experts)
        mean = ranks.step.evaluate(own[:, :-1], own[:, 1:]) / tokens[:, 1:].size
        assert abs(mean - float(wanted[0].loss)) <= 2e-7 * mean


def a_short_held_out_text_is_evaluated_alike_on_every_mesh(world: World) -> None:
    """Seven sequences, two micro-batches of three a rank, and not one of them twice.

    The last micro-batch is not full, on four ranks one rank has a sequence and two have none. On
    one rank all are computed one by one, as the reference.
    """
    tokens = np.random.default_rng(7).integers(0, MODEL["vocab_size"], 7 * TRAIN["seq_len"] + 2)
    view = held_out_view(tokens.astype(np.uint16))
    single = ParallelGroups.single(ModelConfig(**MODEL))
    wanted = mean_loss(Ranks(single, {"gradient_accumulation_steps": 1}), view, 1)
    for data, expert, order in (
        (1, 1, "layer_major"),
        (1, 1, "batch_major"),
        (2, 1, "layer_major"),
        (4, 2, "layer_major"),
        (4, 4, "batch_major"),
    ):
        train = {"micro_batch_size": 3, "micro_batch_order": order}
        ranks = Ranks(single, train) if data == 1 else on_mesh(world, data, expert, **train)
        found = mean_loss(ranks, view, data)
        assert abs(found - wanted) <= 1e-12 * wanted, f"{data}, {expert}: {found}, not {wanted}"


def two_runs_agree_bit_for_bit(world: World) -> None:
    """The order of rows, and so every bit, is a function of the mesh."""
    tokens = batch(8, seed=5)
    runs = []
    for _ in range(2):
        ranks = on_mesh(world, 4, 4)
        runs.append(ranks.run(part_of(tokens, ranks)))
    assert runs[0][0].loss == runs[1][0].loss
    assert all((runs[0][1][key] == value).all() for key, value in runs[1][1].items())


CHECKS: tuple[Callable[[World], None], ...] = (
    every_mesh_finds_the_gradients_of_one_rank,
    recomputation_and_order_change_nothing,
    expert_gradients_have_one_scale,
    all_tokens_go_to_the_experts_of_one_rank,
    a_batch_has_fewer_tokens_than_experts,
    ranks_route_to_disjoint_experts,
    ranks_have_different_numbers_of_micro_batches,
    a_short_held_out_text_is_evaluated_alike_on_every_mesh,
    two_runs_agree_bit_for_bit,
)


def main() -> None:
    """Run checks; any error ends all ranks with status 5."""
    from ops.comm.mpi import MpiWorld

    try:
        world = MpiWorld(timeout_seconds=300, checked=True)
        assert world.size == RANKS
        for check in CHECKS:
            if sys.argv[1:] and check.__name__ not in sys.argv[1:]:
                continue
            check(world)
            if world.rank == 0:
                print(check.__name__, flush=True)
        world.free()
    except BaseException:
        traceback.print_exc()
        MpiWorld.abort_all(5)


if __name__ == "__main__":
    sys.exit(main())
