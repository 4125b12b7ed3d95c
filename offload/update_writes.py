"""The writes of updated units: out of place, behind everything compute waits for.

What a job holds is given back when its last write is done and its unit is published, in either
order (`end`). Units may also be written as they are, without an update (`write_back`): held state
at a drain, blocks homed on the host for a commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from offload.arena import Buffer
from offload.nvme.store import NvmeStore
from offload.residency import Shared, UnitState
from offload.runs import runs_of
from offload.update_job import UpdateJob
from offload.update_memory import UpdateMemory

# Deadlines are stage indices; what nobody waits for yet comes behind all of them.
WRITE_DEADLINE = 1 << 40

_Writes = list[tuple[str, Buffer, str]]


class UpdateWrites:
    """Submits writes and counts those in flight."""

    def __init__(
        self,
        shared: Shared,
        memory: UpdateMemory,
        store: NvmeStore | None,
        delay: Callable[[str], None],
    ) -> None:
        self.in_flight = 0
        self._shared = shared
        self._memory = memory
        self._store = store
        self._delay = delay
        self._committing: Counter[str] = Counter()  # writes in flight for a commit alone, by unit
        self._commit_bytes = 0

    def begin(self, job: UpdateJob, *, nothing: bool = False) -> _Writes:
        """(part, buffer, cause) of what the job writes, counted as in flight (lock held)."""
        unit = job.unit
        cause = "replay" if job.gradient_step is None else "update"
        rows = (
            ("weight", job.weight, unit.weight_on_nvme),
            ("state", job.state, unit.state_on_nvme),
        )
        writes = [
            (part, buffer, cause if cold else "commit")
            for part, buffer, cold in rows
            if not nothing and buffer is not None and (cold or job.commit)
        ]
        self.in_flight += len(writes)
        for part, _, why in writes:
            if why == "commit":
                self._committing[unit.name] += 1
                self._commit_bytes += unit.layout.nbytes(part)
        job.ends_left = len(writes) + 1
        return writes

    def submit(self, job: UpdateJob, writes: _Writes) -> None:
        """Hand the writes to the store; the lock is not held."""
        unit = job.unit

        def written(cause: str) -> None:
            self.in_flight -= 1
            self._committing[unit.name] -= cause == "commit"
            self.end(job)

        for part, buffer, cause in writes:
            assert self._store is not None
            self._delay("nvme_write")
            handle = self._store.write(
                unit.block(part),
                buffer.array,
                cause,
                nbytes=unit.layout.nbytes(part),
                deadline=WRITE_DEADLINE,
                version=unit.version,
                runs=runs_of(unit.layout, part),
            )
            handle.add_done_callback(self._shared.when_done(partial(written, cause)))

    def commits(self, unit: UnitState) -> bool:
        """Whether the unit is being written for a commit, and without one would not (lock held)."""
        return self._committing[unit.name] > 0

    def take_commit_bytes(self) -> int:
        """Bytes that only a commit has had written, since the last call."""
        with self._shared.changed:
            found, self._commit_bytes = self._commit_bytes, 0
            return found

    def end(self, job: UpdateJob) -> None:
        """A write of the job or its publishing is done; the last gives all back (lock held)."""
        job.ends_left -= 1
        if job.ends_left == 0:
            self._memory.give_back(job)

    def write_back(self, units: Iterable[UnitState]) -> None:
        """Write units as they are in the host: jobs without work of their own."""
        try:
            for unit in units:
                job = UpdateJob(unit, unit.synced_step, None, commit=True, prepared=True)
                with self._shared.changed:
                    while unit.host_holds or unit.host_reading:
                        self._shared.wait()
                    if not unit.weight_on_nvme or unit.state_dirty:
                        job.weight = unit.host_weight
                    job.state = unit.host_state
                    unit.host_holds += 1
                    writes = self.begin(job)
                self.submit(job, writes)
                with self._shared.changed:
                    self.end(job)
        except BaseException as error:
            self._shared.fail(error)  # a write that was not submitted is never counted down
            raise
