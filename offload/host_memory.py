"""The host tier: permanent homes, slots that guarantee progress, and the stream in between.

Everything permanent is taken at start-up. What remains is the stream: read-ahead, write-behind and
caches of cold weights. Stream memory is only ever tried for, never waited for; whoever gets none
falls back on a slot reserved for its role, so nobody waits in a circle:

    update slots (2)   one update set each; freed by their own writes, and by the eviction of the
                       updated weights that stay in them for the lease that follows
    gradient slots (2) spilled gradients on their way to nvme; freed by their own writes
    lease slot (1)     compute's, for a cold weight that finds no room; freed by the upload

Reading state ahead of the norm (`try_ahead`) leaves room in the stream for the prefetch window.

Callers hold the lock of `Shared.changed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offload.arena import Arena, Buffer
from offload.placement import MemoryPlan
from offload.policy import NEVER, choose_victim
from offload.residency import Shared, UnitState


class HostMemory:
    """The host arena and its slots."""

    def __init__(self, arena: Arena, plan: MemoryPlan, shared: Shared) -> None:
        self.arena = arena
        self._shared = shared
        self.next_use: Callable[[str], int] = lambda unit: -1
        self._cached: set[str] = set()
        self._lent: dict[str, Buffer] = {}  # units whose cached weights lie in an update slot
        self._held_bytes = 0
        self._held_bytes_max = plan.stream_bytes // 2
        self._ahead_bytes = 0
        self._ahead_bytes_max = plan.read_ahead_bytes
        for unit in shared.units.values():
            if not unit.weight_on_nvme:
                unit.host_weight = arena.require(unit.weight_bytes, unit.block("weight"))
                unit.host_ready = True
            if unit.state_bytes and not unit.state_on_nvme:
                unit.host_state = arena.require(unit.state_bytes, unit.block("state"))
            if unit.grad_bytes and not unit.spills:
                unit.host_grad = arena.require(unit.grad_bytes, unit.block("grad"))
            if unit.name in plan.undone:
                unit.host_undo = arena.require(unit.weight_bytes, f"undo copy of {unit.name}")
        self.lease_slot = self._slot(plan.lease_slot_bytes, "the lease slot")
        self.update_slots = self._slots(plan.update_slot_bytes, "update slots")
        self.grad_slots = self._slots(plan.grad_slot_bytes, "gradient slots")
        self._num_grad_slots = len(self.grad_slots)

    def _slot(self, nbytes: int, what: str) -> Buffer | None:
        return self.arena.require(nbytes, what) if nbytes else None

    def _slots(self, nbytes: int, what: str) -> list[Buffer]:
        return [self.arena.require(nbytes, what) for _ in range(2)] if nbytes else []

    def try_stream(self, nbytes: int, deadline: int) -> Buffer | None:
        """Stream memory for something needed at stage `deadline`, evicting what is needed later.

        Evicts nothing when even that would not make enough room.
        """
        buffer = self.arena.allocate(nbytes)
        if buffer is not None:
            return buffer
        victims = self._victims(self._cached, deadline)
        units = self._shared.units
        evictable_bytes = sum(units[name].weight_bytes for name, _ in victims)
        if self.arena.free_bytes + evictable_bytes < nbytes:
            return None
        while (victim := choose_victim(victims, deadline)) is not None:
            self.drop_weight(victim)
            buffer = self.arena.allocate(nbytes)
            if buffer is not None:
                return buffer
            victims = [row for row in victims if row[0] != victim]
        return None

    def _victims(self, names: Iterable[str], deadline: int) -> list[tuple[str, int]]:
        units = self._shared.units
        found = [(n, self.next_use(n)) for n in names if units[n].evictable_host_weight()]
        return [row for row in found if row[1] > deadline]

    def try_ahead(self, nbytes: int) -> Buffer | None:
        """Stream memory for state that is read before its update may run."""
        if self._ahead_bytes + nbytes > self._ahead_bytes_max:
            return None
        buffer = self.try_stream(nbytes, NEVER - 1)
        if buffer is not None:
            self._ahead_bytes += nbytes
        return buffer

    def end_ahead(self, nbytes: int) -> None:
        """What `try_ahead` gave now belongs to an update that may run (or is free again)."""
        self._ahead_bytes -= nbytes

    def take_slot(self, deadline: int) -> Buffer | None:
        """An update slot, if one is free or holds only weights that are needed later."""
        if not self.update_slots:
            victim = choose_victim(self._victims(self._lent, deadline), deadline)
            if victim is not None:
                self.drop_weight(victim)
        return self.update_slots.pop() if self.update_slots else None

    def return_slot(self, unit: UnitState, slot: Buffer) -> None:
        """The unit's update is done with `slot`; its weights may go on lying in it."""
        if self._lent.get(unit.name) is not slot:
            self.update_slots.append(slot)

    @property
    def spilling(self) -> bool:
        """Whether a spilled gradient is still on its way."""
        return len(self.grad_slots) < self._num_grad_slots

    def reclaim_slots(self) -> bool:
        """Take back the slots that only hold cached weights; False while one is being uploaded."""
        for name in [n for n in self._lent if self._shared.units[n].evictable_host_weight()]:
            self.drop_weight(name)
        return not self._lent

    def cache_weight(self, name: str, buffer: Buffer, slot: Buffer | None = None) -> None:
        """Make `buffer` the unit's host copy of a cold weight; `host_ready` is the caller's.

        It is stream memory of its own, or lies in the update slot `slot`.
        """
        unit = self._shared.units[name]
        assert unit.weight_on_nvme and unit.host_weight is None
        unit.host_weight = buffer
        if slot is None:
            self._cached.add(name)
        else:
            self._lent[name] = slot

    def drop_weight(self, name: str) -> None:
        """Give up the unit's cached host copy."""
        unit = self._shared.units[name]
        assert unit.weight_on_nvme and unit.host_weight is not None and unit.host_holds == 0
        slot = self._lent.pop(name, None)
        if slot is None:
            self.arena.free(unit.host_weight)
        else:
            self.update_slots.append(slot)
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
