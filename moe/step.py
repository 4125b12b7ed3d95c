"""One optimizer step and one evaluation pass, on top of forward, backward and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe.backward import Backward
from moe.config import ModelConfig, TrainConfig
from moe.context import LossSums, StepContext
from moe.forward import Forward
from moe.params import build_units, frozen_units
from moe.schedule import (
    chunk_micro_batches,
    evaluation_stages,
    num_chunks,
    training_stages,
)
from offload.engine import OffloadEngine
from offload.parts import StepOutcome
from ops.device import Backend
from ops.nn.stages import Stages


@dataclass(frozen=True)
class StepResult:
    """Losses of a step: `loss` is the mean token loss (nats, fp32), the others per sequence."""

    loss: np.float32
    balance_loss: float
    z_loss: float
    outcome: StepOutcome


class TrainingStep:
    """Runs steps of one model and batch shape on one engine."""

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        engine: OffloadEngine,
        stages: Stages,
        backend: Backend,
    ) -> None:
        self._model = model
        self._train = train
        self._engine = engine
        self._context = StepContext(model, train, engine, stages, backend)
        self._context.micro = chunk_micro_batches(train)
        names = [unit.name for unit in build_units(model)]
        self._context.frozen = frozen_units(names, train.freeze)
        self._forward = Forward(self._context)
        self._backward = Backward(self._context, self._forward)
        self._training = training_stages(model, train)
        self._evaluation = evaluation_stages(model)

    def train(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        learning_rate: float,
        commit: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """One step on i32 [batch_sequences, seq_len]; its updates may still be streaming.

        With `commit` (JSON data) the step is committed once they are applied.
        """
        self._engine.begin(self._training)
        self._engine.begin_gradients(learning_rate)
        sums = LossSums()
        sequences = len(tokens)
        for chunk, (inputs, wanted) in enumerate(self._chunks(tokens, targets)):
            self._context.chunk = chunk
            part = self._forward.run(inputs, wanted)
            sums.token_loss += part.token_loss
            sums.balance += part.balance
            sums.z += part.z
            scale = self._engine.scaler.scale
            self._backward.run(inputs, wanted, scale, tokens.size, sequences)
        outcome = self._engine.finish_step(learning_rate, commit)
        loss = np.float32(sums.token_loss / tokens.size)
        return StepResult(loss, sums.balance / sequences, sums.z / sequences, outcome)

    def evaluate(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Sum of token losses (nats) over i32 [batch_sequences, seq_len]; trains nothing."""
        total = 0.0
        self._context.chunk = 0
        for inputs, wanted in self._chunks(tokens, targets):
            self._engine.begin(self._evaluation, training=False)
            total += self._forward.run(inputs, wanted).token_loss
        return total

    def _chunks(
        self, tokens: np.ndarray, targets: np.ndarray
    ) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        size, micro = self._train.micro_batch_size, self._context.micro
        flat = [
            (
                np.ascontiguousarray(tokens[first : first + size], np.int32).reshape(-1),
                np.ascontiguousarray(targets[first : first + size], np.int32).reshape(-1),
            )
            for first in range(0, len(tokens), size)
        ]
        chunks = [flat[first : first + micro] for first in range(0, len(flat), micro)]
        expected = num_chunks(self._train)
        assert len(chunks) == expected, f"{len(chunks)} chunks of micro-batches, not {expected}"
        return [([t for t, _ in chunk], [y for _, y in chunk]) for chunk in chunks]
