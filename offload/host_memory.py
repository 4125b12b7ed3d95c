"""The host tier: permanent homes, slots that guarantee progress, and the stream in between.

Everything permanent is taken at start-up. What remains is the stream: read-ahead, write-behind and
caches of cold weights. Stream memory is only ever tried for, never waited for; whoever gets none
falls back on a slot reserved for its role, so nobody waits in a circle:

    update slots (2)   one update set each; freed by their own writes
    gradient slots (2) spilled gradients on their way to nvme; freed by their own writes
    lease slot (1)     compute's, for a cold weight that finds no room; freed by the upload

Callers hold the lock of `Shared.changed`.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.arena import Arena, Buffer
from offload.placement import MemoryPlan
from offload.policy import choose_victim
from offload.residency import Shared, UnitState


class HostMemory:
    """The host arena and its slots."""

    def __init__(self, arena: Arena, plan: MemoryPlan, shared: Shared) -> None:
        self.arena = arena
        self._shared = shared
        self.next_use: Callable[[str], int] = lambda unit: -1
        self._cached: set[str] = set()
        self._held_bytes = 0
        self._held_bytes_max = plan.stream_bytes // 2
        for unit in shared.units.values():
            if not unit.weight_on_nvme:
                unit.host_weight = arena.require(unit.weight_bytes, unit.block("weight"))
                unit.host_ready = True
            if unit.state_bytes and not unit.state_on_nvme:
                unit.host_state = arena.require(unit.state_bytes, unit.block("state"))
            if unit.grad_bytes and not unit.spills:
                unit.host_grad = arena.require(unit.grad_bytes, unit.block("grad"))
        self.lease_slot = self._slot(plan.lease_slot_bytes, "the lease slot")
        self.update_slots = self._slots(plan.update_slot_bytes, "update slots")
        self.grad_slots = self._slots(plan.grad_slot_bytes, "gradient slots")

    def _slot(self, nbytes: int, what: str) -> Buffer | None:
        return self.arena.require(nbytes, what) if nbytes else None

    def _slots(self, nbytes: int, what: str) -> list[Buffer]:
        return [self.arena.require(nbytes, what) for _ in range(2)] if nbytes else []

    def try_stream(self, nbytes: int, deadline: int) -> Buffer | None:
        """Stream memory for something needed at stage `deadline`, evicting what is needed later."""
        while True:
            buffer = self.arena.allocate(nbytes)
            if buffer is not None:
                return buffer
            units = self._shared.units
            victim = choose_victim(
                ((n, self.next_use(n)) for n in self._cached if units[n].evictable_host_weight()),
                deadline,
            )
            if victim is None:
                return None
            self.drop_weight(victim)

    def cache_weight(self, name: str, buffer: Buffer) -> None:
        """Make `buffer` the unit's host copy of a cold weight; `host_ready` is the caller's."""
        unit = self._shared.units[name]
        assert unit.weight_on_nvme and unit.host_weight is None
        unit.host_weight = buffer
        self._cached.add(name)

    def drop_weight(self, name: str) -> None:
        """Give up the unit's cached host copy."""
        unit = self._shared.units[name]
        assert unit.weight_on_nvme and unit.host_weight is not None and unit.host_holds == 0
        self.arena.free(unit.host_weight)
        unit.host_weight = None
        unit.host_ready = False
        self._cached.discard(name)

    def hold(self, unit: UnitState) -> bool:
        """Let caught-up cold state stay in the stream unwritten, if less than half of it does so.

        The weights, which cannot be evicted meanwhile, count too.
        """
        nbytes = self._bytes_to_hold(unit)
        if self._held_bytes + nbytes > self._held_bytes_max:
            return False
        self._held_bytes += nbytes
        return True

    def unhold(self, unit: UnitState) -> None:
        """The unit's held state has been written."""
        self._held_bytes -= self._bytes_to_hold(unit)

    def _bytes_to_hold(self, unit: UnitState) -> int:
        return unit.state_bytes + (unit.weight_bytes if unit.weight_on_nvme else 0)
