"""The offload engine: what a training step sees of the tiers.

    engine.initialize(values)            once: masters, zero moments
    engine.begin(stages)                 the access schedule of the coming step
    engine.enter(stage); engine.resolve(group, needed)
    with engine.use(unit, gradient=True) as use: use.weights[...]; use.add(name, dw)
    outcome = engine.finish_step(lr)     norm, clip, updates queued; the next forward chases them
    engine.drain()                       before evaluation, export and the end

Compute calls everything here from one thread. Stores and backend are handed in, so tests use
faulty, slow or in-memory ones. Knows units and schedules, nothing of attention or experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from offload.activations import ActivationSpec, ActivationStore
from offload.arena import Arena
from offload.blocks import TensorSpec, UnitLayout
from offload.config import OffloadConfig, OptimizerConfig
from offload.gradients import GradientStore
from offload.host_memory import HostMemory
from offload.ledger import Ledger
from offload.loss_scale import LossScaler
from offload.masters import MasterAccess
from offload.nvme.store import NvmeStore
from offload.pipeline import Lease, WeightPipeline
from offload.placement import MemoryPlan
from offload.residency import Shared, UnitState
from offload.schedule import AccessSchedule, Stage
from offload.stats import Stats
from offload.update_job import UpdateJob
from offload.update_stream import UpdateStream
from ops.clock import seconds
from ops.device import Backend
from ops.kernels.adamw import AdamW
from ops.kernels.pool import KernelPool, copy_flat
from ops.kernels.reduce import accumulate


def _no_delay(lane: str) -> None:
    """The default of `EngineParts.delay`: lanes run at their own speed."""


@dataclass
class EngineParts:
    """What an engine is made of besides its configuration.

    `store` may be None when the plan puts nothing on nvme. `gradient_uses` counts the gradient
    stages of each unit in a layer-major step. `delay` is called with the lane's name before each
    transfer; `verify_leases` checksums a device copy at lease and release. Both serve tests.
    """

    layouts: Sequence[UnitLayout]
    plan: MemoryPlan
    backend: Backend
    pool: KernelPool
    store: NvmeStore | None
    activations: Sequence[ActivationSpec]
    gradient_uses: dict[str, int]
    batch_major: bool = False
    loss_scaling: bool = False
    delay: Callable[[str], None] = _no_delay
    verify_leases: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """What `finish_step` found: norm before clipping, clip factor, whether the step was applied.

    `alarm` is set when training cannot go on: gradients are not finite and no loss scale is left
    to lower.
    """

    grad_norm: float
    clip_factor: float
    applied: bool
    alarm: bool
    idle_units: int
    loss_scale: float


@dataclass
class UnitUse:
    """A lease and, when it was asked for, the sum of the unit's gradients over micro-batches."""

    lease: Lease
    total: np.ndarray | None
    pool: KernelPool | None = None
    _filled: set[str] = field(default_factory=set)

    @property
    def weights(self) -> dict[str, object]:
        """Backend tensors by tensor name; valid until the use ends."""
        return self.lease.weights

    def add(self, name: str, gradient: np.ndarray) -> None:
        """Add the fp32 gradient of tensor `name` of one micro-batch; dropped for a frozen unit."""
        if self.total is None:
            return
        for place in self.lease.unit.layout.places:
            if place.spec.name == name:
                target = self.total[place.start : place.start + place.spec.size]
                source = np.ascontiguousarray(gradient, np.float32).reshape(-1)
                if name in self._filled:
                    accumulate(target, source, pool=self.pool)
                else:
                    copy_flat(target, source, pool=self.pool)
                    self._filled.add(name)
                return
        raise KeyError(f"{self.lease.unit.name} has no tensor {name}")

    @property
    def complete(self) -> bool:
        """Whether every tensor of the unit has had a gradient."""
        return len(self._filled) == len(self.lease.unit.layout.places)


class OffloadEngine:
    """Units in three tiers; see the module for the order of calls."""

    def __init__(self, parts: EngineParts, config: OffloadConfig, optimizer: OptimizerConfig):
        """Take the arenas and start the threads; MemoryError when the machine lacks the memory."""
        plan = parts.plan
        self._parts = parts
        self._config = config
        self._optimizer = optimizer
        self.stats = Stats()
        self.host = Arena("host", config.host.capacity)
        self.device = Arena("device", config.device.capacity - plan.workspace_bytes)
        self._shared = Shared(UnitState(layout, plan) for layout in parts.layouts)
        memory = self._memory = HostMemory(self.host, plan, self._shared)
        self.activations = ActivationStore(parts.activations, self.host, self.stats, parts.delay)
        self.gradients = GradientStore(
            self._shared,
            memory,
            self.host,
            parts.store,
            parts.pool,
            self.stats,
            parts.gradient_uses,
            parts.batch_major,
            parts.delay,
        )
        # All memory is taken before the first thread starts.
        self._pipeline = WeightPipeline(
            self._shared,
            memory,
            self.device,
            parts.store,
            parts.backend,
            parts.pool,
            self.stats,
            config.window_bytes,
            parts.delay,
            parts.verify_leases,
        )
        self._ledger = Ledger(AdamW(optimizer.beta1, optimizer.beta2, optimizer.eps))
        self._updates = UpdateStream(
            self._shared,
            memory,
            self._pipeline,
            parts.store,
            parts.pool,
            self._ledger,
            optimizer.weight_decay,
            parts.delay,
        )
        self._masters = MasterAccess(self._shared, memory, parts.store, parts.pool)
        self.scaler = LossScaler(optimizer.loss_scale, parts.loss_scaling)
        self._schedule = AccessSchedule(())
        self._guesses: dict[str, tuple[str, ...]] = {}
        self._closed = False

    # ---- values

    def initialize(self, values: Callable[[TensorSpec], np.ndarray]) -> None:
        """Set every master to `values(tensor)` (fp32, flat) and every moment to zero."""
        self._masters.initialize(values)

    def masters(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """(tensor, flat fp32 masters), sorted by name as UTF-8, then row; drains first.

        The array is only valid until the next one is asked for.
        """
        self.catch_up()
        yield from self._masters.sorted()

    # ---- a step

    def begin(self, stages: Sequence[Stage], training: bool = True) -> None:
        """Follow these stages next; the expert sets of the last training step are the guesses."""
        self._schedule = AccessSchedule(stages, self._guesses if training else None)
        self._pipeline.begin(self._schedule)

    def begin_gradients(self) -> None:
        """Forget the gradients of the step before; called before the first deposit."""
        self.gradients.begin(self.scaler.scale)

    def enter(self, stage: str) -> None:
        """Compute enters the schedule's next stage."""
        self._pipeline.enter(stage)

    def resolve(self, group: str, needed: Sequence[str]) -> None:
        """Fix which units of a group of stages are needed."""
        self._pipeline.resolve(group, list(needed))

    @contextmanager
    def use(self, name: str, *, gradient: bool = False, use: int = 0) -> Iterator[UnitUse]:
        """Lease a unit; with `gradient`, deposit the sums as its use number `use` at the end."""
        lease = self._pipeline.lease(name, gradient=gradient)
        total = None
        if lease.accumulator is not None:
            total = lease.accumulator.view("float32", 0, lease.unit.layout.size)
        held = UnitUse(lease, total, self._parts.pool)
        try:
            yield held
            if total is not None:
                assert held.complete, f"{name}: some tensors got no gradient"
                self.gradients.deposit(lease.unit, total, use)
        finally:
            self._parts.backend.sync()
            self._pipeline.release(lease)

    def finish_step(self, learning_rate: float) -> StepOutcome:
        """Close the gradients, decide, and queue the updates; returns before they are applied."""
        self.gradients.finish()
        norm = self.gradients.norm()
        finite = self.gradients.finite and isfinite(norm)
        scale_before = self.scaler.scale
        alive = self.scaler.update(finite)
        self._guesses = self._schedule.resolved()
        idle = [
            name
            for name, unit in self._shared.units.items()
            if name not in self.gradients.squares and not unit.layout.frozen
        ]
        if not finite:
            self._drop_spilled()
            return StepOutcome(norm, 1.0, False, not alive, len(idle), scale_before)
        limit = self._optimizer.max_grad_norm
        clip = 1.0 if norm <= limit else limit / norm
        started = seconds()
        self._updates.wait_applied()
        self.stats.add(stall_seconds=seconds() - started)
        step = self._ledger.add(learning_rate)
        with self._shared.changed:
            self._shared.optimizer_step = step
            jobs = self._jobs(step, clip)
            self.begin(self._schedule.stages)
            self._updates.submit(jobs)
        self._ledger.prune(min(unit.synced_step for unit in self._shared.units.values()))
        return StepOutcome(norm, clip, True, False, len(idle), scale_before)

    def _jobs(self, step: int, clip: float) -> list[UpdateJob]:
        jobs = []
        policy = self._config.idle_expert_policy
        for name in self._shared.order:
            unit = self._shared.units[name]
            if name in self.gradients.squares:
                jobs.append(UpdateJob(unit, step - 1, step, clip))
            elif policy == "skip" or unit.layout.frozen:
                unit.synced_step = step
            elif policy == "dense" or step - unit.synced_step >= self._config.replay_lag_max:
                jobs.append(UpdateJob(unit, step, None, 1.0))
        return jobs

    def _drop_spilled(self) -> None:
        for name in self.gradients.squares:
            unit = self._shared.units[name]
            if unit.spills and self._parts.store is not None:
                self._parts.store.delete(unit.block("grad"))

    # ---- borders

    def drain(self) -> None:
        """Block until every queued update is applied and every write is done."""
        self._updates.drain()

    def catch_up(self) -> None:
        """Drain, and replay what idle units still miss."""
        with self._shared.changed:
            for unit in self._shared.units.values():
                self._updates.before_lease(unit)
        self._updates.drain()

    def peak_bytes(self) -> dict[str, int]:
        """The most bytes each tier has held, the device's declared workspace included."""
        store = self._parts.store
        return {
            "device": self.device.peak_bytes + self._parts.plan.workspace_bytes,
            "host": self.host.peak_bytes,
            "nvme": 0 if store is None else store.stats().used_bytes_max,
        }

    def used_bytes(self) -> dict[str, int]:
        """The bytes each tier holds now."""
        store = self._parts.store
        return {
            "device": self.device.used_bytes + self._parts.plan.workspace_bytes,
            "host": self.host.used_bytes,
            "nvme": 0 if store is None else store.used_bytes,
        }

    @property
    def optimizer_step(self) -> int:
        """Number of optimizer steps entered so far (overflow steps are not steps)."""
        return self._ledger.step

    def close(self) -> None:
        """Stop the threads; does not drain, does not close the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._shared.changed:
            self._shared.closing = True
            self._shared.changed.notify_all()
        self._pipeline.close()
        self._updates.close()
