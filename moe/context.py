"""What forward and backward share: engine, stage functions, names and routing decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe.config import ModelConfig, TrainConfig
from moe.parallel import ParallelGroups
from moe.params import layer_unit
from moe.schedule import segments, stage_name
from offload.engine import OffloadEngine
from offload.parts import UnitUse
from ops.device import Backend
from ops.nn.routing import SlotPlan
from ops.nn.stages import AttnSaved, AttnWeights, Stages


@dataclass
class Routing:
    """One layer's decision for one micro-batch: slots, choices idx_TK and their weights w_TK."""

    plan: SlotPlan
    idx_TK: np.ndarray
    w_TK: np.ndarray


@dataclass
class LossSums:
    """Sums of one step (or evaluation pass): token losses, balance and z losses per sequence."""

    token_loss: float = 0.0
    balance: float = 0.0
    z: float = 0.0


@dataclass
class StepContext:
    """The parts of a step. Every array that outlives a stage is in `engine.activations`.

    `micro` is the number of micro-batches that this rank has in the current chunk; a rank that ran
    out of data has fewer than others, or none, and enters every stage all the same. `needed` are
    this rank's experts of each layer that have a token of any rank, ascending.
    """

    model: ModelConfig
    train: TrainConfig
    engine: OffloadEngine
    stages: Stages
    backend: Backend
    groups: ParallelGroups
    routing: dict[tuple[int, int], Routing] = field(default_factory=dict)
    needed: dict[int, list[int]] = field(default_factory=dict)
    lse: dict[int, np.ndarray] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    chunk: int = 0
    micro: int = 1

    def trains(self, unit: str) -> bool:
        """Whether the unit has gradients."""
        return unit not in self.frozen

    def enter(self, kind: str, unit: str) -> None:
        """Enter the stage of `kind` on `unit` in the current chunk."""
        self.engine.enter(stage_name(kind, unit, self.chunk))

    # ---- activations: layer arrays are indexed by slot and micro-batch

    def slot(self, layer: int, m: int) -> int:
        """Copy index of a layer's saved arrays; under `full` a segment's slots are reused."""
        every = self.train.recompute_every if self.train.recompute == "full" else None
        return (layer if every is None else layer % every) * self.micro + m

    def stream_in(self, layer: int, m: int) -> tuple[str, int]:
        """Name and index of the residual stream entering `layer` (num_layers: the output)."""
        if layer == self.model.num_hidden_layers:
            return "h_out", m
        every = self.train.recompute_every if self.train.recompute == "full" else 1
        if layer % every == 0:
            return "h_in", layer // every * self.micro + m
        return "h_seg", layer % every * self.micro + m

    def get(self, name: str, index: int) -> Any:
        """A saved array as a device tensor."""
        return self.backend.wrap(self.engine.activations.get(name, index))

    def put(self, name: str, index: int, tensor: Any) -> None:
        """Save a device tensor."""
        self.engine.activations.put(name, index, self.backend.to_numpy(tensor))

    def rows(self, name: str, index: int, rows: slice | np.ndarray, padded: int) -> Any:
        """Rows of a saved array as a zero-padded device tensor."""
        return self.backend.wrap(self.engine.activations.get_rows(name, index, rows, padded))

    def put_rows(self, name: str, index: int, rows: slice | np.ndarray, tensor: Any) -> None:
        """Save the first rows of a device tensor as `rows` of a saved array."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        array = self.backend.to_numpy(tensor)[:count]
        self.engine.activations.put_rows(name, index, rows, array)

    def attention_saved(self, slot: int) -> AttnSaved:
        """What attention's forward saved in `slot`."""
        return AttnSaved(*(self.get(name, slot) for name in "qkvo"))

    def add(self, first: Any, second: Any) -> Any:
        """Sum of two device tensors of the residual stream, in this order."""
        return self.backend.wrap(self.backend.to_numpy(first) + self.backend.to_numpy(second))

    def saves(self, name: str) -> bool:
        """Whether this recompute policy keeps the named arrays."""
        return name in self.engine.activations

    # ---- weights

    def attention(self, layer: int, use: UnitUse) -> AttnWeights:
        """The attention weights of a leased layer unit."""
        prefix, weights = f"model.layers.{layer}", use.weights
        norms = [
            weights.get(f"{prefix}.self_attn.{name}_norm.weight") if self.model.qk_norm else None
            for name in ("q", "k")
        ]
        matrices = [weights[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkvo"]
        return AttnWeights(weights[f"{prefix}.input_layernorm.weight"], *matrices, *norms)  # type: ignore[arg-type]

    def ffn(self, prefix: str, use: UnitUse) -> Sequence[Any]:
        """Gate, up and down weights of the expert (or shared experts) under `prefix`."""
        return [use.weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down")]

    def layer_unit(self, layer: int) -> str:
        """Unit of a layer's dense weights."""
        return layer_unit(layer)

    def segments(self) -> list[range]:
        """Runs of layers between checkpoints."""
        return segments(self.model, self.train)
