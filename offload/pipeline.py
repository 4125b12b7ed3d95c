"""Weights on their way to the device: leases, prefetch within a byte window, eviction.

One loop for overlapped and plain runs: with a window of zero nothing runs ahead and every lease
does its own transfer. A transfer in progress is a state of its unit, so the same unit asked for
twice is one transfer. Compute calls `enter`, `resolve`, `lease` and `release` from one thread; the
mover thread works ahead of it. Neither ever holds the lock while it touches a store.

A unit whose parts lie on several ranks is loaded by a collective (`offload/sharing.py` has the
rules): in schedule order, one at a time; the mover gathers ahead into memory of its own, and stops
where compute is about to do it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from offload.arena import Arena, Buffer
from offload.device_copy import device_tensors, upload
from offload.host_memory import HostMemory
from offload.nvme.handle import Handle
from offload.nvme.store import NvmeStore
from offload.policy import choose_victim
from offload.residency import DeviceState, Shared, UnitState
from offload.schedule import AccessSchedule
from offload.sharing import Gathers
from offload.stats import Stats
from ops.checksum import checksum
from ops.clock import seconds
from ops.device import Backend
from ops.kernels.pool import KernelPool
from ops.trace import Tracer

_ABANDON_SECONDS = 5.0


class Updates(Protocol):
    """What the pipeline asks of the update stream (lock held)."""

    def before_lease(self, unit: UnitState) -> None:
        """Make sure a job brings the unit up to date, if it lags."""

    def hurry(self, unit: UnitState) -> None:
        """Put the unit's job first."""


@dataclass
class Lease:
    """The right to use a unit's weights on the device until released.

    `weights` maps tensor names to backend tensors; `accumulator` is a device buffer for the
    unit's fp32 gradients when it was asked for.
    """

    unit: UnitState
    weights: dict[str, Any]
    accumulator: Buffer | None
    shadow: int | None = None


class WeightPipeline:
    """Leases units, moving their weights nvme → host → device as the schedule asks."""

    def __init__(
        self,
        shared: Shared,
        host: HostMemory,
        device: Arena,
        store: NvmeStore | None,
        backend: Backend,
        pool: KernelPool,
        stats: Stats,
        window_bytes: int,
        gathers: Gathers,
        delay: Callable[[str], None],
        verify_leases: bool,
        trace: Tracer,
    ) -> None:
        self._shared = shared
        self._host = host
        self._device = device
        self._store = store
        self._backend = backend
        self._pool = pool
        self._stats = stats
        self._window_bytes = window_bytes
        self._gathers = gathers
        self._delay = delay
        self._verify = verify_leases
        self._trace = trace
        self._resident: set[str] = set()
        self._schedule = AccessSchedule(())
        self.updates: Updates | None = None
        # The unit compute is leasing: the mover neither loads nor evicts it.
        self._wanted: str | None = None
        # Compute waits for device memory: the mover must not take what becomes free.
        self._starved = False
        host.next_use = self.next_use
        self._mover: threading.Thread | None = None
        if window_bytes:
            self._mover = threading.Thread(target=self._move, name="mover", daemon=True)
            self._mover.start()

    # ---- compute's calls

    def begin(self, schedule: AccessSchedule, agreed: bool = True) -> None:
        """Follow `schedule` from now on; what it does not expect leaves the window.

        Only an `agreed` schedule, which all ranks follow, is gathered for ahead of compute.
        """
        with self._shared.changed:
            self._schedule = schedule
            self._gathers.agreed = agreed
            left = [x.name for x in self._shared.units.values() if x.is_ahead]
            assert not left, f"{left} were gathered for a step that did not use them"
            expected = {name for _, name in schedule.upcoming()}
            for unit in self._shared.units.values():
                unit.prefetched = unit.prefetched and unit.name in expected
            self._shared.changed.notify_all()

    def enter(self, stage: str) -> None:
        """Compute enters the schedule's next stage, which must be `stage`."""
        with self._shared.changed:
            self._schedule.enter(stage)
            self._shared.changed.notify_all()

    def resolve(self, group: str, needed: list[str]) -> None:
        """The router's choice is known; guesses that were wrong are given back and counted."""
        with self._shared.changed:
            for name in self._schedule.resolve(group, needed):
                unit = self._shared.units[name]
                if unit.prefetched:
                    unit.prefetched = False
                    self._stats.add(wrong_guess_bytes=unit.device_nbytes)
            assert self.updates is not None
            for name in reversed(needed):  # each replay goes first in line
                self.updates.before_lease(self._shared.units[name])
            self._shared.changed.notify_all()

    def next_use(self, name: str) -> int:
        """Stage index of the unit's next use in the current schedule (lock held)."""
        return self._schedule.next_use(name)

    def last_use(self, name: str) -> int:
        """Stage index of the unit's last use in the whole of the current schedule (lock held)."""
        return self._schedule.last_use(name)

    def lease(self, name: str, *, gradient: bool = False) -> Lease:
        """Block until the unit's up-to-date weights are on the device; count the wait as stall.

        With `gradient` the lease also reserves an fp32 accumulator for the whole unit.
        """
        unit = self._shared.units[name]
        started = seconds()
        lease = Lease(unit, {}, None)
        with self._shared.changed:
            assert self.updates is not None
            self.updates.before_lease(unit)
            self._wanted = name
        while not self._grant(lease, gradient):
            self._load(unit)
        if not unit.device_tensors:
            assert unit.device is not None
            whole = unit.layout.gathered
            unit.device_tensors = device_tensors(whole, unit.device, self._backend)
        lease.weights = unit.device_tensors
        ended = seconds()
        self._stats.add(stall_seconds=ended - started)
        self._trace.complete("stall", name, started, ended)
        if self._verify:
            lease.shadow = self._shadow(unit)
        return lease

    def release(self, lease: Lease) -> None:
        """End the lease; the device copy stays as a cache until something evicts it.

        A gathered copy does not: what this rank has and another lacks could not be agreed on.
        """
        if lease.shadow is not None and lease.shadow != self._shadow(lease.unit):
            raise AssertionError(f"{lease.unit.name} was overwritten while leased")
        with self._shared.changed:
            lease.unit.pins -= 1
            assert lease.unit.pins >= 0
            if lease.accumulator is not None:
                self._device.free(lease.accumulator)
                lease.accumulator = None
            if lease.unit.gathers:
                self.drop_device(lease.unit)
            self._shared.changed.notify_all()

    def drop_device(self, unit: UnitState) -> None:
        """Drop the unit's device copy, which an update made stale (lock held)."""
        if unit.device_state is DeviceState.READY:
            assert unit.pins == 0 and unit.device is not None
            if unit.is_ahead:
                self._gathers.ahead.free(unit.device)
                unit.is_ahead = False
            else:
                self._device.free(unit.device)
            unit.device = None
            unit.device_tensors = {}
            unit.device_state = DeviceState.NONE
            unit.prefetched = False
            self._resident.discard(unit.name)

    def close(self) -> None:
        """Stop the mover (the engine has set `closing`).

        After a failure the mover may be in a collective that some rank never enters: it is left.
        """
        if self._mover is not None:
            self._mover.join(_ABANDON_SECONDS if self._shared.failed else None)

    # ---- loading

    def _grant(self, lease: Lease, gradient: bool) -> bool:
        """Pin the unit and return True, or return False when the caller has to load it itself."""
        unit = lease.unit
        with self._shared.changed:
            self._wait_for_others(unit)
            if gradient and lease.accumulator is None:
                # May evict the unit's own copy, as the last resort; then it is loaded again.
                nbytes = unit.layout.gathered.accumulator_nbytes
                lease.accumulator = self._demand_device(nbytes)
            if unit.device_state is DeviceState.READY:
                if gradient and lease.accumulator is None:
                    raise MemoryError(f"device arena: no room for gradients of {unit.name}")
                self._schedule.used(unit.name)
                unit.pins += 1
                unit.prefetched = False
                self._wanted = None
                self._shared.changed.notify_all()
                return True
            buffer = self._demand_device(unit.device_nbytes)
            if buffer is None and lease.accumulator is not None:
                # The accumulator lies in the middle of what is free: let the weights choose first.
                self._device.free(lease.accumulator)
                lease.accumulator = None
                buffer = self._demand_device(unit.device_nbytes)
            if buffer is None:
                raise MemoryError(f"device arena: no room to lease {unit.name}")
            self._start_loading(unit, buffer)
            return False

    def _wait_for_others(self, unit: UnitState) -> None:
        """Wait until no job and no transfer of somebody else holds the unit (lock held)."""
        self._shared.check()
        while unit.job is not None or unit.host_reading or self._is_loading(unit):
            if unit.job is not None:
                assert self.updates is not None
                self.updates.hurry(unit)
            if unit.host_reading and unit.weight_handle is not None:
                assert self._store is not None
                self._store.hurry(unit.weight_handle, -1)
            self._shared.wait_as_compute()

    def _is_loading(self, unit: UnitState) -> bool:
        return unit.device_state is DeviceState.LOADING

    def _start_loading(self, unit: UnitState, buffer: Buffer) -> None:
        unit.device = buffer
        unit.device_state = DeviceState.LOADING
        unit.host_holds += 1

    def _load(self, unit: UnitState) -> None:
        """Demand load: read if cold, then upload, on compute's thread."""
        slot = None
        try:
            if not unit.host_ready:
                assert self._store is not None
                with self._shared.changed:
                    buffer = self._host.try_stream(unit.weight_bytes, self.next_use(unit.name))
                    unit.host_reading = True
                    if buffer is not None:
                        self._host.cache_weight(unit.name, buffer)
                    else:
                        slot = buffer = self._host.lease_slot
                assert buffer is not None
                self._read(unit, buffer, -1).wait()
                with self._shared.changed:
                    unit.host_reading = False
                    unit.host_ready = slot is None
            self._upload(unit, slot)
        except BaseException as error:
            self._shared.fail(error)
            raise

    def _read(self, unit: UnitState, buffer: Buffer, deadline: int) -> Handle:
        assert self._store is not None
        return self._store.read(
            unit.block("weight"),
            buffer.array,
            "weight",
            nbytes=unit.layout.nbytes("weight"),
            deadline=deadline,
        )

    def _upload(self, unit: UnitState, slot: Buffer | None = None) -> None:
        source = slot if slot is not None else unit.host_weight
        assert source is not None and unit.device is not None
        self._delay("h2d")
        how = "gather" if unit.gathers else "host to device"
        with self._trace.span(how, unit.name, bytes=unit.device_nbytes):
            if unit.gathers:
                self._gathers.gather(unit.layout, unit.name, source, unit.device)
            else:
                upload(unit.layout, source, unit.device, self._pool)
        self._stats.add(h2d_bytes=unit.device_nbytes, transfers=1)
        with self._shared.changed:
            unit.device_state = DeviceState.READY
            unit.host_holds -= 1
            if not unit.gathers:
                self._resident.add(unit.name)
            self._shared.changed.notify_all()

    # ---- device memory (lock held)

    def _try_device(self, nbytes: int, deadline: int) -> Buffer | None:
        """Device memory for a use at stage `deadline`, evicting what is needed later."""
        while True:
            buffer = self._device.allocate(nbytes)
            if buffer is not None:
                return buffer
            victim = choose_victim(
                ((n, self.next_use(n)) for n in self._resident if self._may_evict(n)), deadline
            )
            if victim is None:
                return None
            self.drop_device(self._shared.units[victim])

    def _may_evict(self, name: str) -> bool:
        return name != self._wanted and self._shared.units[name].evictable_device()

    def _demand_device(self, nbytes: int) -> Buffer | None:
        """Device memory for compute, which may take all that nobody uses, its own unit's last."""
        assert self._wanted is not None
        wanted = self._shared.units[self._wanted]
        try:
            while True:
                buffer = self._try_device(nbytes, -1)
                if buffer is not None:
                    return buffer
                if self._any_loading():
                    # A mover that loads again what is evicted here would make this endless.
                    self._starved = True
                    self._shared.wait()
                elif wanted.evictable_device() and not wanted.gathers:
                    self.drop_device(wanted)
                else:
                    return None
        finally:
            self._starved = False

    def _any_loading(self) -> bool:
        """Whether the mover is about to have memory that compute could evict."""
        units = self._shared.units.values()
        return any(self._is_loading(unit) and not unit.is_ahead for unit in units)

    # ---- the mover

    def _move(self) -> None:
        try:
            while True:
                with self._shared.changed:
                    if self._shared.closing or self._shared.failed:
                        return
                    reads, ready = self._choose_work()
                    if not reads and ready is None:
                        self._shared.changed.wait()
                        continue
                for unit, deadline in reads:
                    self._read_ahead(unit, deadline)
                if ready is not None:
                    self._upload(ready)
        except BaseException as error:
            self._shared.fail(error)

    def _read_ahead(self, unit: UnitState, deadline: int) -> None:
        assert unit.host_weight is not None

        def arrived() -> None:
            unit.host_reading = False
            unit.host_ready = True
            unit.weight_handle = None

        handle = self._read(unit, unit.host_weight, deadline)
        unit.weight_handle = handle
        handle.add_done_callback(self._shared.when_done(arrived))

    def _choose_work(self) -> tuple[list[tuple[UnitState, int]], UnitState | None]:
        """Reads (with deadlines) and one unit to upload, nearest use first, inside the window."""
        units = self._shared.units
        reads: list[tuple[UnitState, int]] = []
        window = self._window_bytes - sum(
            unit.device_nbytes for unit in units.values() if unit.prefetched
        )
        gathers = self._gathers.in_order(self._schedule.first_unresolved(), self._wanted)
        for deadline, name in self._schedule.upcoming():
            unit = units[name]
            if unit.job is not None or unit.synced_step < self._shared.optimizer_step:
                break
            may_load = gathers.may_load(unit, deadline) if unit.gathers else True
            if unit.device_state is not DeviceState.NONE or name == self._wanted:
                continue
            if not unit.prefetched:
                window -= unit.device_nbytes
                if window < 0:
                    break
            if unit.host_ready:
                if not may_load:
                    continue
                if self._starved:
                    break
                target = self._room_ahead(unit, deadline)
                if target is None:
                    break
                self._start_loading(unit, target)
                unit.prefetched = True
                return reads, unit
            if not unit.host_reading:
                buffer = self._host.try_stream(unit.weight_bytes, deadline)
                if buffer is None:
                    break
                self._host.cache_weight(name, buffer)
                unit.host_reading = True
                unit.prefetched = True
                reads.append((unit, deadline))
        return reads, None

    def _room_ahead(self, unit: UnitState, deadline: int) -> Buffer | None:
        """Device memory for a unit that compute does not wait for yet (lock held)."""
        if not unit.gathers:
            return self._try_device(unit.device_nbytes, deadline)
        buffer = self._gathers.ahead.allocate(unit.device_nbytes)
        unit.is_ahead = buffer is not None
        return buffer

    # ---- checks for tests

    def _shadow(self, unit: UnitState) -> int:
        assert unit.device is not None
        return checksum(unit.device.array.data)
