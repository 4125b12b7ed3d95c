"""Memory of update jobs: stream memory first, an update slot where there is none.

An update set is the unit's weights, state and (spilled) gradient as far as they are cold. State may
be read ahead of the norm, into stream memory only. Everything is taken or nothing changes.

Nobody waits in a circle: a job without memory waits for the lease of weights that were updated
before it, and a job that compute waits for (`hurried`) may evict whatever nobody holds.

Callers hold the lock of `Shared.changed`.
"""

from __future__ import annotations

from offload.arena import Buffer
from offload.host_memory import HostMemory
from offload.policy import NEVER
from offload.residency import DeviceState, Shared, UnitState
from offload.update_job import UpdateJob

Reads = list[tuple[UpdateJob, str, Buffer]]


class UpdateMemory:
    """Takes and gives back what jobs need."""

    def __init__(self, shared: Shared, host: HostMemory) -> None:
        self._shared = shared
        self._host = host

    def read_ahead(self, job: UpdateJob) -> Reads | None:
        """Memory for the state of a coming job; None when it cannot be read now."""
        unit = job.unit
        if unit.job is not None or unit.synced_step < self._shared.optimizer_step:
            return None  # what it has to catch up on comes first, and may keep the state here
        if unit.host_state is not None:
            return []
        buffer = self._host.try_ahead(unit.state_bytes)
        if buffer is None:
            return None
        job.ahead = True
        job.state = buffer
        job.reads_left = 1
        return [(job, "state", buffer)]

    def prepare(self, job: UpdateJob) -> Reads | None:
        """Take all memory the job needs, or change nothing and return None."""
        unit = job.unit
        busy = unit.host_reading or unit.host_holds or unit.pins
        if busy or unit.device_state is DeviceState.LOADING:
            return None
        spilled = job.gradient_step is not None and unit.spills
        has_state = job.ahead or unit.host_state is not None
        needs = {
            "weight": 0 if unit.host_ready else unit.weight_bytes,
            "state": 0 if has_state else unit.state_bytes,
            "grad": unit.grad_bytes if spilled else 0,
        }
        needs = {part: nbytes for part, nbytes in needs.items() if nbytes}
        unit.host_holds += 1  # taking memory must not evict the weights that are there already
        buffers = self._take(job, needs)
        if buffers is None:
            unit.host_holds -= 1
            return None
        job.weight = buffers.get("weight", unit.host_weight)
        job.grad = buffers.get("grad", unit.host_grad)
        if job.ahead:
            job.ahead = False
            self._host.end_ahead(unit.state_bytes)
            assert job.state is not None
            job.owned.append(job.state)
        else:
            job.state = buffers.get("state", unit.host_state)
        job.prepared = True
        job.reads_left += len(buffers)
        return [(job, part, buffer) for part, buffer in buffers.items()]

    def _take(self, job: UpdateJob, needs: dict[str, int]) -> dict[str, Buffer] | None:
        name = job.unit.name
        # What is never used again gives way to a job whose unit is never used again either.
        deadline = -1 if job.hurried else min(self._host.next_use(name), NEVER - 1)
        taken: dict[str, Buffer] = {}
        for part, nbytes in needs.items():
            buffer = self._host.try_stream(nbytes, deadline)
            if buffer is not None:
                taken[part] = buffer
        left = {part: nbytes for part, nbytes in needs.items() if part not in taken}
        slot = self._host.take_slot(deadline) if left else None
        if left and slot is None:
            for buffer in taken.values():
                self._host.arena.free(buffer)
            return None
        job.owned = [taken[part] for part in ("state", "grad") if part in taken]
        job.slot = slot
        offset = 0
        for part, nbytes in left.items():
            assert slot is not None
            taken[part] = slot.slice(offset, nbytes)
            offset += nbytes
        if "weight" in needs:
            self._host.cache_weight(name, taken["weight"], slot if "weight" in left else None)
        return {part: taken[part] for part in needs}

    def cancel(self, job: UpdateJob) -> None:
        """Give back what a coming job has read ahead; its reads are done."""
        assert job.reads_left == 0 and not job.prepared
        if job.ahead:
            assert job.state is not None
            self._host.end_ahead(job.unit.state_bytes)
            self._host.arena.free(job.state)
        job.ahead, job.state = False, None

    def give_back(self, job: UpdateJob) -> None:
        """The job's writes are done and its unit is published."""
        unit = job.unit
        unit.host_holds -= 1
        for buffer in job.owned:
            self._host.arena.free(buffer)
        if unit.state_dirty and job.state is unit.host_state:
            self._end_hold(unit)
        if job.slot is not None:
            self._host.return_slot(unit, job.slot)

    def _end_hold(self, unit: UnitState) -> None:
        assert unit.host_state is not None
        self._host.arena.free(unit.host_state)
        self._host.unhold(unit)
        unit.host_state = None
        unit.state_dirty = False
