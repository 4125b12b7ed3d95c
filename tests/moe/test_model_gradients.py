"""The gradients of the whole model, in fp64, by the step that trains: schedule, stages, routing.

Every dtype is float64, the router's choices are frozen (a perturbation must not move a token), and
each tensor's gradient is compared with a central difference along a random direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moe.forward
from moe.backward import Backward
from moe.config import ModelConfig, TrainConfig
from moe.context import StepContext
from moe.forward import Forward
from moe.memory import stage_dims
from moe.parallel import ParallelGroups
from moe.schedule import chunk_micro_batches, training_stages
from ops.nn.stages import Stages
from tests.moe.harness import shared_backend
from tests.moe.memory_engine import MemoryEngine

MODEL: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "moe_intermediate_size": 10,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_slice_rows": 12,
    "initializer_range": 0.4,
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.2,
}


class Checked:
    """The model's loss as a function of its weights, and its gradients by the real backward."""

    def __init__(self, model: ModelConfig, train: TrainConfig, frozen: Any) -> None:
        backend = shared_backend()
        self.engine = MemoryEngine(model, train, backend, seed=3)
        stages = Stages(stage_dims(model, train), "float64")
        self.context = StepContext(
            model,
            train,
            self.engine,
            stages,
            backend,
            ParallelGroups.single(model),  # type: ignore[arg-type]
        )
        self.context.micro = chunk_micro_batches(train)
        self.forward = Forward(self.context)
        self.model, self.train, self.frozen = model, train, frozen
        rng = np.random.default_rng(5)
        shape = (train.gradient_accumulation_steps, train.micro_batch_tokens)
        self.tokens = list(rng.integers(0, model.vocab_size, shape).astype(np.int32))
        self.targets = list(rng.integers(0, model.vocab_size, shape).astype(np.int32))

    def loss(self) -> float:
        self.engine.begin(training_stages(self.model, self.train))
        sums = self.forward.run(self.tokens, self.targets)
        sequences = self.train.batch_sequences
        return (
            sums.token_loss / (sequences * self.train.seq_len)
            + self.model.moe_aux_loss_coeff * sums.balance / sequences
            + self.model.moe_z_loss_coeff * sums.z / sequences
        )

    def backward(self) -> None:
        sequences = self.train.batch_sequences
        backward = Backward(self.context, self.forward)
        backward.run(self.tokens, self.targets, 1.0, sequences * self.train.seq_len, sequences)


@pytest.fixture
def frozen_choices(monkeypatch):
    """Record each router decision in the first forward and repeat it in all later ones."""
    original, decisions, calls = moe.forward.choose_experts, [], [0]

    def choose(logits: np.ndarray, k: int) -> np.ndarray:
        if calls[0] == len(decisions):
            decisions.append(original(logits, k))
        calls[0] += 1
        return decisions[calls[0] - 1]

    def restart() -> None:
        calls[0] = 0

    monkeypatch.setattr(moe.forward, "choose_experts", choose)
    return restart


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({}, "selective"),
        ({"tie_word_embeddings": False, "qk_norm": False, "norm_topk_prob": False}, "none"),
        ({"n_shared_experts": 1}, "selective"),
    ],
    ids=["tied", "untied-plain", "shared"],
)
def test_gradients_agree_with_central_differences(model, recompute, frozen_choices):
    train = TrainConfig(
        seq_len=5, micro_batch_size=2, gradient_accumulation_steps=2, recompute=recompute
    )
    checked = Checked(ModelConfig(**(MODEL | model)), train, frozen_choices)
    checked.loss()
    checked.backward()
    gradients = dict(checked.engine.gradients)
    assert set(gradients) == set(checked.engine.weights), "some tensor got no gradient"
    rng = np.random.default_rng(9)
    for key, weight in checked.engine.weights.items():
        direction = rng.standard_normal(weight.shape)
        direction /= np.linalg.norm(direction)
        original, values = weight.copy(), []
        for sign in (1.0, -1.0):
            weight[...] = original + sign * 1e-5 * direction
            frozen_choices()
            values.append(checked.loss())
        weight[...] = original
        numeric = (values[0] - values[1]) / 2e-5
        exact = float((gradients[key] * direction).sum())
        scale = max(abs(exact), np.linalg.norm(gradients[key]) / np.sqrt(weight.size), 1e-5)
        assert abs(numeric - exact) <= 1e-6 * scale, f"{key}: {numeric} against {exact}"


def test_recomputation_repeats_the_choices(frozen_choices):
    """Under `full` the router runs twice a step; both times on the same bits."""
    train = TrainConfig(seq_len=5, micro_batch_size=2, gradient_accumulation_steps=2)
    plain = Checked(ModelConfig(**MODEL), train, frozen_choices)
    plain.loss()
    plain.backward()
    full = TrainConfig(
        seq_len=5,
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        recompute="full",
        recompute_every=2,
    )
    frozen_choices()
    again = Checked(ModelConfig(**MODEL), full, frozen_choices)
    again.loss()
    again.backward()
    for key, gradient in plain.engine.gradients.items():
        assert np.array_equal(gradient, again.engine.gradients[key])
