"""One optimizer step and one evaluation pass, on top of forward, backward and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe.backward import Backward
from moe.config import ModelConfig, TrainConfig
from moe.context import LossSums, StepContext
from moe.forward import UNCOUNTED, Forward
from moe.parallel import ParallelGroups
from moe.params import frozen_units, unit_names
from moe.pipeline_messages import evaluation_messages, training_messages
from moe.schedule import (
    chunk_micro_batches,
    evaluation_stages,
    num_chunks,
    training_passes,
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
    """Runs steps of one model and batch shape on one engine, together with the ranks of `groups`.

    A rank whose data ran out passes fewer sequences than others, or none: it enters every stage
    and every collective all the same, with the micro-batches it has. All ranks of a pipeline pass
    the same sequences.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        engine: OffloadEngine,
        stages: Stages,
        backend: Backend,
        groups: ParallelGroups | None = None,
    ) -> None:
        """Without `groups`, this is the only rank."""
        groups = groups or ParallelGroups.single(model)
        self._model = model
        self._train = train
        self._engine = engine
        self._groups = groups
        self._context = StepContext(model, train, engine, stages, backend, groups)
        self._micro_max = chunk_micro_batches(train)
        self._context.frozen = frozen_units(unit_names(model), train.freeze)
        self._forward = Forward(self._context)
        self._backward = Backward(self._context, self._forward)
        self._passes = training_passes(train, groups.share)
        self._training = training_stages(model, train, groups.share)
        self._evaluation = evaluation_stages(model, groups.share)

    def train(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        learning_rate: float,
        commit: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """One step on i32 [sequences, seq_len] of this rank; its updates may still be streaming.

        `sequences` is a multiple of `train.micro_batch_size`, at most `train.batch_sequences`; it
        may differ from rank to rank. Losses and gradients are means over the sequences and tokens
        of all ranks. With `commit` (JSON data) the step is committed once the updates are applied.
        Nothing is updated when the loss or a gradient is not finite.
        Raises ValueError for another number of sequences, or when no rank has any.
        """
        chunks = self._chunks(tokens, targets)
        batch_sequences, batch_tokens = self._agreed_sizes(tokens)
        self._engine.begin(self._training)
        self._engine.begin_gradients(learning_rate)
        sums = LossSums()
        counts = self._context.counts = [len(inputs) for inputs, _ in chunks]
        share = self._groups.share
        self._forward.mail.follow(training_messages(self._model, self._train, share, counts))
        for step in self._passes:
            inputs, wanted = chunks[step.chunk]
            self._context.chunk, self._context.micro = step.chunk, len(inputs)
            if step.kind == "forward":
                sums.add(self._forward.run(inputs, wanted))
            else:
                scale = self._engine.scaler.scale
                self._backward.run(inputs, wanted, scale, batch_tokens, batch_sequences)
        token_loss, balance, z = self._over_ranks(sums.token_loss, sums.balance, sums.z)
        loss = np.float32(token_loss / batch_tokens)
        outcome = self._engine.finish_step(learning_rate, commit, sound=bool(np.isfinite(loss)))
        return StepResult(loss, balance / batch_sequences, z / batch_sequences, outcome)

    def evaluate(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Sum of token losses (nats) over i32 [sequences, seq_len] of all ranks; trains nothing.

        `sequences` is at most `train.batch_sequences`; ranks may pass different numbers. Raises
        ValueError for more.
        """
        total = 0.0
        self._context.chunk = 0
        share = self._groups.share
        for inputs, wanted in self._chunks(*self._completed(tokens, targets)):
            self._context.micro = len(inputs)
            self._engine.begin(self._evaluation, training=False)
            messages = evaluation_messages(self._model, self._train, share, len(inputs))
            self._forward.mail.follow(messages)
            total += self._forward.run(inputs, wanted).token_loss
        return self._over_ranks(total)[0]

    def _agreed_sizes(self, tokens: np.ndarray) -> tuple[int, int]:
        """Sequences and tokens of the batch of all ranks."""
        sizes = np.array([len(tokens), tokens.size], np.int64)
        self._groups.dp.all_reduce(sizes)
        if not sizes[0]:
            raise ValueError("no rank has a sequence to train on")
        return int(sizes[0]), int(sizes[1])

    def _over_ranks(self, *values: float) -> list[float]:
        """Each value summed over the data and, as each stage has a part of it, the pipeline."""
        sums = np.array(values, np.float64)
        self._groups.dp.all_reduce(sums)
        self._groups.pipe.all_reduce(sums)
        return [float(value) for value in sums]

    def _completed(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last micro-batch made whole, so that it has the shape of all others.

        By copies of the last sequence, which call for no expert that it does not call for itself;
        their losses do not count.
        """
        missing = -len(tokens) % self._train.micro_batch_size
        if not missing:
            return tokens, targets
        copies = np.repeat(tokens[-1:], missing, axis=0)
        uncounted = np.full((missing, targets.shape[1]), UNCOUNTED, targets.dtype)
        return np.concatenate([tokens, copies]), np.concatenate([targets, uncounted])

    def _chunks(
        self, tokens: np.ndarray, targets: np.ndarray
    ) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Micro-batches of this rank by chunk: as many chunks as a full batch has, some empty."""
        size, micro = self._train.micro_batch_size, self._micro_max
        if len(tokens) % size or len(tokens) > self._train.batch_sequences:
            raise ValueError(
                f"{len(tokens)} sequences, but a rank's batch is at most "
                f"{self._train.batch_sequences}, a multiple of train.micro_batch_size = {size}"
            )
        flat = [
            (
                np.ascontiguousarray(tokens[first : first + size], np.int32).reshape(-1),
                np.ascontiguousarray(targets[first : first + size], np.int32).reshape(-1),
            )
            for first in range(0, len(tokens), size)
        ]
        firsts = range(0, num_chunks(self._train) * micro, micro)
        chunks = [flat[first : first + micro] for first in firsts]
        return [([t for t, _ in chunk], [y for _, y in chunk]) for chunk in chunks]
