"""An engine of plain dictionaries in fp64, for gradient checks: same calls, no tiers.

It walks the same access schedule as the real engine, so the step under test is the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from moe.config import ModelConfig, TrainConfig
from moe.memory import activation_specs
from moe.mesh import Share
from moe.params import build_units
from offload.blocks import TensorSpec, UnitSpec
from offload.schedule import AccessSchedule
from offload.stats import Stats


class MemoryActivations:
    """Saved arrays in a dictionary; keeps the names the recompute policy keeps."""

    def __init__(self, names: set[str], rows: dict[str, tuple[int, int]]) -> None:
        self._names = names
        self._rows = rows
        self._arrays: dict[tuple[str, int], np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def put(self, name: str, index: int, value: np.ndarray) -> None:
        assert name in self._names
        assert value.shape == self._rows[name]
        self._arrays[name, index] = value.copy()

    def put_rows(self, name: str, index: int, rows: slice, value: np.ndarray) -> None:
        self.host(name, index)[rows] = value

    def host(self, name: str, index: int) -> np.ndarray:
        if (name, index) not in self._arrays:
            self._arrays[name, index] = np.full(self._rows[name], np.nan)
        return self._arrays[name, index]

    def get(self, name: str, index: int) -> np.ndarray:
        return self._arrays[name, index].copy()

    def get_rows(self, name: str, index: int, rows: Any, padded_rows: int) -> np.ndarray:
        chosen = self._arrays[name, index][rows]
        out = np.zeros((padded_rows, *chosen.shape[1:]), chosen.dtype)
        out[: len(chosen)] = chosen
        return out


def block_of(tensor: TensorSpec, row0: int) -> tuple[slice, ...]:
    """Where the elements of `tensor` lie in an array whose first row is `row0`."""
    firsts = (tensor.row0 - row0, tensor.col0)
    return tuple(slice(first, first + size) for first, size in zip(firsts, tensor.shape))


class MemoryEngine:
    """Weights and gradients by tensor name (slices by row), float64.

    With the `share` of one rank it has that rank's part of the same weights, and that rank's
    gradients: adding them up over replicas is the test's part.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        backend: Any,
        seed: int,
        share: Share | None = None,
    ) -> None:
        self._backend = backend
        share = share or Share.whole(model)
        self.units = {unit.name: unit for unit in build_units(model)}
        rng = np.random.default_rng(seed)
        self.weights: dict[tuple[str, int], np.ndarray] = {}
        for unit in self.units.values():
            for tensor in unit.tensors:
                values = rng.standard_normal(tensor.shape) * (tensor.init_std or 0.2)
                if tensor.init_std is None:
                    values += 1.0
                self.weights[tensor.name, tensor.row0] = values
        self._keep(build_units(model, share=share))
        self.leases: list[str] = []
        self.gradients: dict[tuple[str, int], np.ndarray] = {}
        specs = activation_specs(model, train, share)
        rows = {spec.name: spec.shape for spec in specs}
        self.activations = MemoryActivations(set(rows), rows)  # type: ignore[arg-type]
        self.stats = Stats()
        self.scaler = SimpleNamespace(scale=1.0)
        self._schedule = AccessSchedule(())
        self.sound: bool | None = None

    def _keep(self, units: Sequence[UnitSpec]) -> None:
        """Keep of the whole model what `units` have: some units, some rows and columns."""
        whole, self.weights = self.weights, {}
        first_rows = {(u.name, t.name): t.row0 for u in self.units.values() for t in u.tensors}
        self.units = {unit.name: unit for unit in units}
        for unit in units:
            for tensor in unit.tensors:
                row0 = first_rows[unit.name, tensor.name]
                block = block_of(tensor, row0)
                self.weights[tensor.name, tensor.row0] = whole[tensor.name, row0][block].copy()

    def begin(self, stages: Any, training: bool = True) -> None:
        self._schedule = AccessSchedule(stages)

    def begin_gradients(self, learning_rate: float) -> None:
        self.gradients = {}

    def finish_step(self, learning_rate: float, commit: Any, *, sound: bool) -> None:
        """Nothing is updated: the gradients are what a test wants."""
        self.sound = sound

    def enter(self, stage: str) -> None:
        self._schedule.enter(stage)

    def resolve(self, group: str, needed: list[str]) -> None:
        self._schedule.resolve(group, needed)

    @contextmanager
    def use(self, name: str, *, gradient: bool = False, use: int = 0) -> Iterator[Any]:
        self.leases.append(name)
        stage = self._schedule.stages[self._schedule.cursor]
        assert name in stage.units and stage.gradient >= gradient  # frozen units have none
        unit = self.units[name]
        rows = {tensor.name: tensor.row0 for tensor in unit.tensors}
        weights = {
            tensor: self._backend.wrap(self.weights[tensor, row0]) for tensor, row0 in rows.items()
        }

        added = set()

        def add(tensor: str, value: np.ndarray) -> None:
            key = (tensor, rows[tensor])
            added.add(tensor)
            if not gradient:
                return
            old = self.gradients.get(key, 0.0)
            self.gradients[key] = old + value.reshape(self.weights[key].shape)

        def add_nothing() -> None:
            for tensor in set(rows) - added:
                add(tensor, np.zeros_like(self.weights[tensor, rows[tensor]]))

        yield SimpleNamespace(weights=weights, add=add, add_nothing=add_nothing)
        assert not gradient or added == set(rows), f"{name}: some tensors got no gradient"
