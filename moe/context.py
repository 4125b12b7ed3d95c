"""What forward and backward share: engine, stage functions, names and routing decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe.config import ModelConfig, TrainConfig
from moe.parallel import ParallelGroups
from moe.params import layer_unit, rank_slice_rows
from moe.places import Places
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

    def add(self, other: LossSums) -> None:
        """Add another chunk's sums."""
        self.token_loss += other.token_loss
        self.balance += other.balance
        self.z += other.z


@dataclass
class StepContext:
    """The parts of a step. Every array that outlives a stage is in `engine.activations`.

    `chunk` is the one whose pass runs. `micro` is the number of micro-batches that this rank has in
    it; a rank that ran out of data has fewer than others, or none, and enters every stage all the
    same. `counts` are the micro-batches of every chunk of the step.
    """

    model: ModelConfig
    train: TrainConfig
    engine: OffloadEngine
    stages: Stages
    backend: Backend
    groups: ParallelGroups
    lse: dict[int, np.ndarray] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    chunk: int = 0
    micro: int = 1
    counts: Sequence[int] = (1,)
    places: Places = field(init=False)
    _routing: dict[int, dict[tuple[int, int], Routing]] = field(default_factory=dict)
    _needed: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = Places(self.train, self.groups.share)

    @property
    def lane(self) -> int:
        """Lane of the current chunk: what is kept from its forward to its backward pass."""
        return self.places.lane(self.chunk)

    @property
    def routing(self) -> dict[tuple[int, int], Routing]:
        """Decisions of the current chunk by layer and micro-batch."""
        return self._routing.setdefault(self.lane, {})

    @property
    def needed(self) -> dict[int, list[int]]:
        """This rank's experts of each layer that have a token of any rank in the current chunk."""
        return self._needed.setdefault(self.lane, {})

    def trains(self, unit: str) -> bool:
        """Whether the unit has gradients."""
        return unit not in self.frozen

    def enter(self, kind: str, unit: str) -> None:
        """Enter the stage of `kind` on `unit` in the current chunk."""
        self.engine.enter(stage_name(kind, unit, self.chunk))

    # ---- activations: layer arrays are indexed by slot and micro-batch

    def slot(self, layer: int, m: int) -> int:
        """Copy index of a layer's saved arrays."""
        return self.places.slot(layer, m, self.chunk)

    def stream_in(self, layer: int, m: int) -> tuple[str, int]:
        """Name and index of the residual stream entering `layer` (num_layers: the output)."""
        if layer == self.model.num_hidden_layers:
            return "h_out", m
        return self.places.stream_in(layer, m, self.chunk)

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

    def slice_rows(self) -> list[tuple[int, int]]:
        """(first row, rows) of this rank's part of each vocabulary slice."""
        return rank_slice_rows(self.model, self.groups.share)

    def segments(self) -> list[range]:
        """Runs of layers between checkpoints."""
        return segments(self.train, self.groups.share)
