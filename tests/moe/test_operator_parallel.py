"""The whole step over ranks that share every operator, in fp64, against the step of one rank.

Ranks are threads that take turns (`tests/ranks_in_turns.py`); each has its part of the same weights
and the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import moe.forward
from moe.backward import Backward
from moe.config import ModelConfig, TrainConfig
from moe.context import LossSums, StepContext
from moe.forward import Forward
from moe.memory import activation_specs, stage_dims
from moe.mesh import Mesh, ParallelConfig
from moe.mesh_check import check_mesh
from moe.parallel import ParallelGroups, open_groups
from moe.schedule import chunk_micro_batches, training_stages
from ops.nn.operator_stages import make_stages
from tests.moe.harness import shared_backend
from tests.moe.memory_engine import MemoryEngine, block_of
from tests.moe.test_model_gradients import MODEL as SMALL
from tests.ranks_in_turns import run_in_turns

MODEL: dict[str, Any] = SMALL | {"vocab_size": 22}  # slices of 12 and 10 rows
TRAIN: dict[str, Any] = {"seq_len": 6, "micro_batch_size": 3, "gradient_accumulation_steps": 2}
PLAIN = {"tie_word_embeddings": False, "qk_norm": False, "norm_topk_prob": False}
Gradients = dict[tuple[str, int], np.ndarray]


@dataclass
class Found:
    """What one rank found in a step, and where its gradients lie in the whole model's."""

    sums: LossSums
    gradients: Gradients
    engine: MemoryEngine

    def losses(self) -> list[float]:
        return [self.sums.token_loss, self.sums.balance, self.sums.z]


def step_of(model: ModelConfig, train: TrainConfig, groups: ParallelGroups) -> Found:
    """Forward and backward of one rank on the same batch."""
    backend = shared_backend()
    engine = MemoryEngine(model, train, backend, 3, groups.share)
    stages = make_stages(
        stage_dims(model, train, groups.share),
        "float64",
        groups.op,
        sequence_parallel=groups.share.mesh.config.use_seq_parallel,
    )
    context = StepContext(model, train, engine, stages, backend, groups)  # type: ignore[arg-type]
    context.micro = chunk_micro_batches(train)
    forward = Forward(context)
    rng = np.random.default_rng(5)
    shape = (2, train.gradient_accumulation_steps, train.micro_batch_tokens)
    tokens, targets = rng.integers(0, model.vocab_size, shape).astype(np.int32)
    engine.begin(training_stages(model, train))
    sums = forward.run(list(tokens), list(targets))
    sequences = train.batch_sequences
    backward = Backward(context, forward)
    backward.run(list(tokens), list(targets), 1.0, sequences * train.seq_len, sequences)
    return Found(sums, engine.gradients, engine)


def on_ranks(
    model: ModelConfig, train: TrainConfig, ranks: int, sequence_parallel: bool
) -> list[Found]:
    config = ParallelConfig(model_parallel=ranks, use_seq_parallel=sequence_parallel)
    check_mesh(config, model, train)
    mesh = Mesh(config)
    return run_in_turns(ranks, lambda world: step_of(model, train, open_groups(mesh, world, model)))


def check_same(ranks: list[Found], wanted: Found) -> None:
    """Losses and gradients of one rank, the same bits on all where all have the same."""
    for found in ranks:
        assert found.losses() == ranks[0].losses(), "the losses are not agreed"
        np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-9)
    for name, unit in wanted.engine.units.items():
        for number, tensor in enumerate(unit.tensors):
            want = wanted.gradients.get((tensor.name, tensor.row0))
            whole = np.full(tensor.shape, np.nan)
            blocks = []
            for found in ranks:
                mine = found.engine.units[name].tensors[number]
                block = found.gradients.get((mine.name, mine.row0))
                assert (block is None) == (want is None), f"{tensor.name}: not the same experts"
                if block is not None:
                    whole[block_of(mine, tensor.row0)] = block
                    blocks.append(block)
            if want is None:
                continue
            error = np.abs(whole - want).max() / np.abs(want).max()
            assert error <= 1e-9, f"{tensor.name}: relative error {error:.1e}"
            if blocks[0].shape == tensor.shape:
                same = all(np.array_equal(block, blocks[0]) for block in blocks)
                assert same, f"{tensor.name}: ranks have different gradients"


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["sums", "sequence"])
@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {}),
        pytest.param(PLAIN, {"recompute": "none"}, marks=pytest.mark.long),
        (
            {"n_shared_experts": 1, "num_hidden_layers": 3},
            {"recompute": "full", "recompute_every": 2},
        ),
        (
            {"n_shared_experts": 1, "tie_word_embeddings": False, "vocab_slice_rows": 22},
            {"recompute": "none", "micro_batch_order": "batch_major"},
        ),
    ],
    ids=["tied", "plain", "shared-full", "shared-one-slice"],
)
def test_two_ranks_find_the_losses_and_gradients_of_one(model, train, sequence_parallel):
    shape, batch = ModelConfig(**(MODEL | model)), TrainConfig(**(TRAIN | train))
    if batch.micro_batch_order == "batch_major":
        batch = TrainConfig(**(TRAIN | train | {"gradient_accumulation_steps": 1}))
    wanted = step_of(shape, batch, ParallelGroups.single(shape))
    check_same(on_ranks(shape, batch, 2, sequence_parallel), wanted)


@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["sums", "sequence"],
)
def test_four_ranks_with_one_head_each(sequence_parallel):
    model = ModelConfig(
        **(MODEL | {"num_key_value_heads": 4, "moe_intermediate_size": 8, "vocab_size": 32})
    )
    train = TrainConfig(**(TRAIN | {"micro_batch_size": 2}))
    wanted = step_of(model, train, ParallelGroups.single(model))
    check_same(on_ranks(model, train, 4, sequence_parallel), wanted)


def test_a_rank_whose_logits_differ_follows_the_first(monkeypatch):
    """Ranks that chose for themselves would disagree about experts and wait for ever."""
    model, train = ModelConfig(**MODEL), TrainConfig(**TRAIN)
    original, calls = moe.forward.choose_experts, []

    def choose(logits: np.ndarray, k: int) -> np.ndarray:
        calls.append(len(calls))
        return (original(logits, k) + len(calls)) % model.num_experts

    monkeypatch.setattr(moe.forward, "choose_experts", choose)
    first, second = on_ranks(model, train, 2, False)
    assert first.losses() == second.losses()
    gate = ("model.layers.0.mlp.gate.weight", 0)
    assert np.array_equal(first.gradients[gate], second.gradients[gate])


def test_sequence_parallelism_stores_a_part_of_the_stream():
    model, train = ModelConfig(**MODEL), TrainConfig(**TRAIN)
    specs = []
    for sequence_parallel in (False, True):
        config = ParallelConfig(model_parallel=2, use_seq_parallel=sequence_parallel)
        share = Mesh(config).share(model, 1)
        specs.append({x.name: x for x in activation_specs(model, train, share)})
    whole, divided = specs
    assert set(divided) - set(whole) == {"embedded"}
    smaller = {name for name in whole if divided[name].shape != whole[name].shape}
    assert smaller == {"h_in", "h_mid", "h_out"}
    for name in smaller:
        assert divided[name].shape == (9, 12) and whole[name].shape == (18, 12)
