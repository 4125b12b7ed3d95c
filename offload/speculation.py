"""What a speculative update overwrites, kept until the norm is known.

A unit may be updated before the norm if its old version survives: cold blocks do, because the store
writes out of place and the version is held; weights homed on the host are copied aside first
(`host_undo`, planned memory). Accepting lets go of the old versions; reverting makes them current
again, bit for bit, so that the update can be made anew with the clip factor, or not at all.

`possible` and the counters want the lock of `Shared.changed`; `keep` is called by the updater,
`accept` and `revert` by compute while no speculative job runs. Nothing here holds the lock while it
calls the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.host_memory import HostMemory
from offload.nvme.store import NvmeStore
from offload.nvme.table import HeldVersion
from offload.pipeline import WeightPipeline
from offload.residency import DeviceState, Shared, UnitState
from ops.kernels.pool import KernelPool, copy_flat


@dataclass(frozen=True)
class _Kept:
    """A unit's version before its speculative update."""

    unit: UnitState
    held: tuple[HeldVersion, ...]
    step: int
    version: int


class Speculation:
    """The old versions of the units updated before the norm of their step."""

    def __init__(
        self,
        shared: Shared,
        host: HostMemory,
        pipeline: WeightPipeline,
        store: NvmeStore | None,
        pool: KernelPool,
    ) -> None:
        self._shared = shared
        self._host = host
        self._pipeline = pipeline
        self._store = store
        self._pool = pool
        self._kept: list[_Kept] = []

    def possible(self, unit: UnitState) -> bool:
        """Whether the unit's old version can be kept, without reading anything twice."""
        if not unit.state_on_nvme:
            return False  # nothing to overlap: it waits for the norm
        if unit.weight_on_nvme:
            return unit.host_weight is not None and unit.host_ready and not unit.host_reading
        # Held state was caught up together with the weights here, so the store has neither.
        return unit.host_undo is not None and not unit.state_dirty

    def keep(self, unit: UnitState) -> None:
        """Keep what the update is about to overwrite."""
        assert self._store is not None
        parts = [("state", unit.state_on_nvme), ("weight", unit.weight_on_nvme)]
        held = tuple(self._store.hold(unit.block(part)) for part, cold in parts if cold)
        if not unit.weight_on_nvme:
            assert unit.host_undo is not None and unit.host_weight is not None
            copy_flat(unit.host_undo.array, unit.host_weight.array, pool=self._pool)
        step = unit.stored_step if unit.state_dirty else unit.synced_step
        self._kept.append(_Kept(unit, held, step, step if unit.state_dirty else unit.version))

    def accept(self) -> list[UnitState]:
        """Let go of the old versions; returns the units that were updated."""
        kept, self._kept = self._kept, []
        for item in kept:
            for held in item.held:
                assert self._store is not None
                self._store.let_go(held)
        return [item.unit for item in kept]

    def revert(self) -> list[UnitState]:
        """Make the old versions current again; their writes are done. Returns the units."""
        kept, self._kept = self._kept, []
        for item in kept:
            unit = item.unit
            for held in item.held:
                assert self._store is not None
                self._store.restore(held)
            with self._shared.changed:
                while unit.device_state is DeviceState.LOADING or unit.host_holds or unit.pins:
                    self._shared.wait()
                self._pipeline.drop_device(unit)
                if unit.weight_on_nvme:
                    if unit.host_weight is not None:
                        self._host.drop_weight(unit.name)
                else:
                    assert unit.host_undo is not None and unit.host_weight is not None
                    copy_flat(unit.host_weight.array, unit.host_undo.array, pool=self._pool)
                unit.synced_step, unit.version = item.step, item.version
        return [item.unit for item in kept]
