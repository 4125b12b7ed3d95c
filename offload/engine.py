"""The offload engine: what a training step sees of the tiers.

    engine.initialize(values)            once: masters, zero moments
    engine.begin(stages)                 the access schedule of the coming step
    engine.enter(stage); engine.resolve(group, needed)
    with engine.use(unit, gradient=True) as use: use.weights[...]; use.add(name, dw)
    outcome = engine.finish_step(lr)     norm, clip, updates queued; the next forward chases them
    engine.drain()                       before evaluation, export and the end
    engine.commit(meta)                  all of it durable; `finish_step(lr, meta)` in passing
    meta = engine.restore()              instead of `initialize`: what the store's commit holds

Compute calls everything here from one thread. Stores and backend are handed in, so tests use
faulty, slow or in-memory ones. Knows units and schedules, nothing of attention or experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import numpy as np

from offload.activations import ActivationStore
from offload.arena import Arena, Buffer
from offload.blocks import TensorSpec, UnitLayout
from offload.commit import Commits
from offload.config import OffloadConfig, OptimizerConfig
from offload.gradients import GradientStore
from offload.host_memory import HostMemory
from offload.ledger import Ledger
from offload.loss_scale import LossScaler
from offload.masters import Fill, MasterAccess
from offload.parts import EngineParts, StepOutcome, UnitUse
from offload.pipeline import WeightPipeline
from offload.residency import Shared, UnitState
from offload.schedule import AccessSchedule, Stage
from offload.sharing import Gathers, clear_padding
from offload.stats import Stats
from offload.update_job import UpdateJob
from offload.update_stream import UpdateStream
from ops.clock import seconds
from ops.errors import ConfigError, StorageError
from ops.kernels.adamw import AdamW


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
            parts.trace,
            parts.sharing,
        )
        # All memory is taken before the first thread starts.
        gathers = Gathers(
            parts.sharing,
            parts.pool,
            self._device_buffer(plan.staging_bytes, "staging"),
            self._device_buffer(plan.ahead_bytes, "units gathered ahead"),
        )
        self._pipeline = WeightPipeline(
            self._shared,
            memory,
            self.device,
            parts.store,
            parts.backend,
            parts.pool,
            self.stats,
            config.window_bytes,
            gathers,
            parts.delay,
            parts.verify_leases,
            parts.trace,
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
            parts.trace,
            parts.agree,
        )
        self.gradients.on_complete = self._gradient_complete
        self._masters = MasterAccess(self._shared, memory, parts.store, parts.pool)
        self.scaler = LossScaler(optimizer.loss_scale, parts.loss_scaling)
        self._schedule = AccessSchedule(())
        self._guesses: dict[str, tuple[str, ...]] = {}
        self._stage = ""
        self._expected: list[str] = []  # units that will get a gradient, until backward begins
        self._in_backward = False
        self._early_step: int | None = None  # number of the step whose updates may precede its norm
        self._closed = False

    def _device_buffer(self, nbytes: int, what: str) -> Buffer | None:
        return self.device.require(nbytes, what) if nbytes else None

    # ---- values

    def initialize(self, values: Callable[[TensorSpec], np.ndarray]) -> None:
        """Set every master to `values(tensor)` (fp32, flat) and every moment to zero."""
        self._masters.initialize(values)

    def layouts(self) -> list[UnitLayout]:
        """What this rank stores of each unit, in forward order."""
        return [unit.layout for unit in self._shared.units.values()]

    def tensors(self) -> list[TensorSpec]:
        """The tensors, or pieces of them, that this rank stores, in the order of `masters`."""
        return self._masters.tensors()

    def masters(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """(tensor, flat fp32 masters), sorted by name as UTF-8, then row; drains first.

        The array is only valid until the next one is asked for.
        """
        self.catch_up()
        yield from self._masters.sorted()

    # ---- a step

    def begin(self, stages: Sequence[Stage], training: bool = True) -> None:
        """Follow these stages next; the expert sets of the last training step are the guesses."""
        self._follow(AccessSchedule(stages, self._guesses if training else None), agreed=True)

    def _follow(self, schedule: AccessSchedule, agreed: bool) -> None:
        self._schedule = schedule
        self._pipeline.begin(schedule, agreed)

    def begin_gradients(self, learning_rate: float | None = None) -> None:
        """Forget the gradients of the step before; called before the first deposit.

        Under `speculative`, updates may precede the norm if `learning_rate` is given, which must be
        that of `finish_step`.
        """
        self.gradients.begin(self.scaler.scale)
        self._early_step = None
        if self._optimizer.speculative and learning_rate is not None:
            self._early_step = self._ledger.add(learning_rate)
        self._expected = list(self._schedule.gradient_units())
        self._in_backward = False

    def _expect_gradients(self) -> None:
        """Backward has begun: the state of units with a gradient may be read ahead.

        Not before, because forward may have idle experts to catch up on, which need that memory.
        """
        self._in_backward = True
        with self._shared.changed:
            self._updates.expect(self._expected, self._early_step)
        self._expected = []

    def _gradient_complete(self, unit: UnitState) -> None:
        if self._early_step is not None:
            self._updates.release(unit, self._early_step)

    def enter(self, stage: str) -> None:
        """Compute enters the schedule's next stage."""
        self._pipeline.enter(stage)
        self._stage = stage
        if self._expected and self._schedule.current.gradient:
            self._expect_gradients()

    def resolve(self, group: str, needed: Sequence[str]) -> None:
        """Fix which units of a group of stages are needed."""
        self._pipeline.resolve(group, list(needed))
        if self._expected:
            self._expected += needed
        elif self._in_backward:
            with self._shared.changed:
                self._updates.expect(needed, self._early_step)

    @contextmanager
    def use(self, name: str, *, gradient: bool = False, use: int = 0) -> Iterator[UnitUse]:
        """Lease a unit; with `gradient`, deposit the sums as its use number `use` at the end."""
        lease = self._pipeline.lease(name, gradient=gradient)
        total = None
        if lease.accumulator is not None:
            whole = lease.unit.layout.gathered
            total = lease.accumulator.view("float32", 0, whole.size)
            clear_padding(whole, total)
        held = UnitUse(lease, total, self._parts.pool)
        try:
            with self._parts.trace.span("compute", self._stage, unit=name):
                yield held
                if total is not None:
                    assert held.complete, f"{name}: some tensors got no gradient"
                    self.gradients.deposit(lease.unit, total, use)
        finally:
            self._parts.backend.sync()
            self._pipeline.release(lease)

    def finish_step(
        self, learning_rate: float, commit: Mapping[str, Any] | None = None, *, sound: bool = True
    ) -> StepOutcome:
        """Close the gradients, decide, and queue the updates; returns before they are applied.

        With `commit` (JSON data) this step is committed as soon as its updates are applied. It is
        not applied when a gradient is not finite, or not `sound` (the loss is not) on any rank:
        so what is committed was never made of such numbers.
        """
        self.gradients.finish()
        self.gradients.finite = self.gradients.finite and sound
        idle = [
            unit.layout
            for name, unit in self._shared.units.items()
            if name not in self.gradients.squares and not unit.layout.frozen
        ]
        told = sum(map(self._parts.is_told_here, idle))
        norm, num_idle = self.gradients.agree(self._parts.everyone, told)
        finite = self.gradients.finite and isfinite(norm)
        scale_before = self.scaler.scale
        alive = self.scaler.update(finite)
        self._guesses = self._schedule.resolved()
        self._in_backward = False
        started = seconds()
        with self._parts.trace.span("stall", "updates of the step before"):
            self._updates.wait_border()
        limit = self._optimizer.max_grad_norm
        clip = 1.0 if not finite or norm <= limit else limit / norm
        redone = self._settle_early(finite and clip == 1.0, commit is not None)
        self.stats.add(stall_seconds=seconds() - started)
        if finite:
            self._apply(learning_rate, clip, commit)
        else:
            self._skip(commit)
        return StepOutcome(
            norm, clip, finite, not finite and not alive, num_idle, scale_before, redone
        )

    def _settle_early(self, accepted: bool, commit: bool) -> bool:
        """Keep or undo the updates that preceded the norm; whether any was undone."""
        if self._early_step is None:
            return False
        if accepted:
            self._updates.accept(commit)
            return False
        return bool(self._updates.revert())

    def _apply(self, learning_rate: float, clip: float, commit: Mapping[str, Any] | None) -> None:
        """Queue the step's updates and, if wanted, its commit."""
        early = self._early_step
        step = self._ledger.add(learning_rate) if early is None else early
        self._early_step = None
        with self._shared.changed:
            self._shared.optimizer_step = step
            jobs = self._jobs(step, clip, commit is not None)
            # What all ranks do next (train or evaluate) is not agreed yet.
            self._follow(AccessSchedule(self._schedule.stages, self._guesses), agreed=False)
            self._updates.submit(jobs)
            if commit is not None:
                self._updates.commits.request(self._meta(commit))
            units = self._shared.units.values()
            oldest = min(u.stored_step if u.state_dirty else u.synced_step for u in units)
        self._ledger.prune(oldest)

    def _skip(self, commit: Mapping[str, Any] | None) -> None:
        """The gradients are not finite: this is not a step, nothing is updated."""
        if self._early_step is not None:
            self._ledger.withdraw()
            self._early_step = None
        self._drop_spilled()
        with self._shared.changed:
            self._updates.submit([])
            if commit is not None:
                self._updates.commits.request(self._meta(commit))

    def _jobs(self, step: int, clip: float, commit: bool) -> list[UpdateJob]:
        jobs = []
        policy = self._config.idle_expert_policy
        for name in self._shared.order:
            unit = self._shared.units[name]
            if name in self.gradients.squares:
                if unit.job is None and unit.synced_step < step:  # not updated early
                    jobs.append(UpdateJob(unit, step - 1, step, clip, commit=commit))
            elif policy == "skip" or unit.layout.frozen:
                unit.synced_step = step
            elif policy == "dense" or step - unit.synced_step >= self._config.replay_lag_max:
                jobs.append(UpdateJob(unit, step, None, commit=commit))
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

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Make everything as it is now durable, with `meta` (JSON data); blocks until it is."""
        self._updates.drain()
        with self._shared.changed:
            self._updates.commits.request(self._meta(meta))
        self._updates.commits.wait()

    def _meta(self, run: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "step": run.get("step"),
            "engine": {"ledger": self._ledger.to_json(), "loss_scale": self.scaler.to_json()},
            "run": dict(run),
        }

    def restore(self) -> Mapping[str, Any]:
        """Take every value from the commit the store was opened at; returns the run's `meta`.

        Instead of `initialize`. Cold blocks stay where they are; the others are read. Raises
        StorageError when the commit does not hold this model or a block is corrupt.
        """
        store = self._parts.store
        record = None if store is None else store.recovered
        assert store is not None and record is not None, "the store was not opened at a commit"
        run = self._restore_meta(record.meta)
        self._masters.restore(self._ledger.step, self._idle_are_skipped)
        self._require_covered()
        return run

    def restore_from(self, meta: Mapping[str, Any], read: Fill) -> Mapping[str, Any]:
        """Take every value from another store's commit, or another mesh's: unit by unit by `read`.

        `meta` is what the commit says, its ledger that of all of its parts. The store holds none of
        the blocks before. Else as `restore`, and what `read` raises.
        """
        run = self._restore_meta(meta)
        self._masters.fill(read, self._ledger.step, self._idle_are_skipped)
        self._require_covered()
        return run

    def _restore_meta(self, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the ledger and the loss scale; returns the run's part."""
        try:
            saved = meta["engine"]
            self._ledger.restore(saved["ledger"])
            self.scaler.restore(saved["loss_scale"])
            run = dict(meta["run"])
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise StorageError(f"the commit says nothing usable of its run: {error!r}") from error
        self._shared.optimizer_step = self._ledger.step
        return run

    def _require_covered(self) -> None:
        """Raise StorageError unless the ledger has every step that some unit still misses."""
        for unit in self._shared.units.values():
            if not self._ledger.covers(unit.synced_step):
                raise StorageError(
                    f"the blocks of {unit.name} are of step {unit.synced_step}, and the ledger "
                    f"tells of what they missed only from step {self._ledger.first}"
                )

    @property
    def _idle_are_skipped(self) -> bool:
        return self._config.idle_expert_policy == "skip"

    @property
    def commits(self) -> Commits:
        """What has been committed."""
        return self._updates.commits

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
