"""The streamed optimizer: pending units are read, updated and written, in forward order.

The queue is filled at the end of backward; the next forward chases it and waits unit by unit. Reads
run ahead and writes drain behind as far as stream memory allows; two update slots guarantee
progress when there is none. The updater thread is the only one that runs jobs.

Order of a job's end, which leases rely on: its writes are submitted, then the unit is published,
so whoever reads the unit from the store afterwards sees the new version. What the job holds is
given back when both the last write is done and the unit is published, in either order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from offload.arena import Buffer
from offload.host_memory import HostMemory
from offload.ledger import Ledger
from offload.nvme.store import NvmeStore
from offload.pipeline import WeightPipeline
from offload.policy import NEVER
from offload.residency import DeviceState, Shared, UnitState
from offload.update_job import UpdateJob
from ops.kernels.pool import KernelPool

_Reads = list[tuple[UpdateJob, str, Buffer]]


class UpdateStream:
    """Queue of jobs and the thread that works them off."""

    def __init__(
        self,
        shared: Shared,
        host: HostMemory,
        pipeline: WeightPipeline,
        store: NvmeStore | None,
        pool: KernelPool,
        ledger: Ledger,
        weight_decay: float,
        delay: Callable[[str], None],
    ) -> None:
        self._shared = shared
        self._host = host
        self._pipeline = pipeline
        self._store = store
        self._pool = pool
        self._ledger = ledger
        self._weight_decay = weight_decay
        self._delay = delay
        self._queue: list[UpdateJob] = []
        self._running = 0
        self._writing = 0
        pipeline.updates = self
        self._thread = threading.Thread(target=self._work, name="updater", daemon=True)
        self._thread.start()

    # ---- calls of compute (all return at once, except drain)

    def submit(self, jobs: list[UpdateJob]) -> None:
        """Queue jobs of the ended step, in forward order."""
        with self._shared.changed:
            for job in jobs:
                assert job.unit.job is None
                job.unit.job = job
            self._queue.extend(jobs)
            self._shared.changed.notify_all()

    def before_lease(self, unit: UnitState) -> None:
        """Queue a replay, first in line, if the unit missed steps (lock held)."""
        step = self._shared.optimizer_step
        if unit.job is None and unit.synced_step < step:
            unit.job = UpdateJob(unit, step, None, 1.0)
            self._queue.insert(self._first_unprepared(), unit.job)
            self._shared.changed.notify_all()

    def hurry(self, unit: UnitState) -> None:
        """Move the unit's job in front of all that have not begun (lock held)."""
        job = unit.job
        if job is None or job.prepared or job not in self._queue:
            return
        self._queue.remove(job)
        self._queue.insert(self._first_unprepared(), job)
        self._shared.changed.notify_all()

    def wait_applied(self) -> None:
        """Block until every job is applied; writes may still be draining."""
        with self._shared.changed:
            self._shared.check()
            while self._queue or self._running:
                self._shared.wait()

    def drain(self) -> None:
        """Block until every job is applied and every write is done, held state included."""
        with self._shared.changed:
            self._shared.check()
            while self._queue or self._running or self._writing:
                self._shared.wait()
        try:
            for unit in self._shared.units.values():
                if unit.state_dirty:
                    self._flush(unit)
        except BaseException as error:
            self._shared.fail(error)  # a write that was not submitted is never counted down
            raise
        with self._shared.changed:
            while self._writing:
                self._shared.wait()
            self._shared.check()

    def close(self) -> None:
        """Stop the updater (the engine has set `closing`)."""
        self._thread.join()

    # ---- the updater

    def _work(self) -> None:
        try:
            while True:
                with self._shared.changed:
                    if self._shared.closing or self._shared.failed:
                        return
                    reads = self._prepare_ahead()
                    job = self._take_ready() if not reads else None
                    if not reads and job is None:
                        self._shared.changed.wait()
                        continue
                for reader, part, buffer in reads:
                    self._read(reader, part, buffer)
                if job is not None:
                    self._run(job)
        except BaseException as error:
            self._shared.fail(error)

    def _first_unprepared(self) -> int:
        for index, job in enumerate(self._queue):
            if not job.prepared:
                return index
        return len(self._queue)

    def _prepare_ahead(self) -> _Reads:
        """Take memory for jobs in order until one gets none; returns the reads to submit."""
        reads: _Reads = []
        for job in self._queue:
            if not job.prepared:
                wanted = self._prepare(job)
                if wanted is None:
                    break
                reads += wanted
        return reads

    def _prepare(self, job: UpdateJob) -> _Reads | None:
        """Take all memory the job needs, or change nothing and return None (lock held)."""
        unit = job.unit
        busy = unit.host_reading or unit.host_holds or unit.pins
        if busy or unit.device_state is DeviceState.LOADING:
            return None
        spilled = job.gradient_step is not None and unit.spills
        needs = {
            "weight": 0 if unit.host_ready else unit.weight_bytes,
            "state": 0 if unit.host_state is not None else unit.state_bytes,
            "grad": unit.grad_bytes if spilled else 0,
        }
        needs = {part: nbytes for part, nbytes in needs.items() if nbytes}
        unit.host_holds += 1  # taking memory must not evict the weights that are there already
        buffers = self._take(job, needs)
        if buffers is None:
            unit.host_holds -= 1
            return None
        if "weight" in buffers and job.slot is None:
            self._host.cache_weight(unit.name, buffers["weight"])
        job.weight = buffers.get("weight", unit.host_weight)
        job.state = buffers.get("state", unit.host_state)
        job.grad = buffers.get("grad", unit.host_grad)
        job.prepared = True
        job.reads_left = len(buffers)
        return [(job, part, buffer) for part, buffer in buffers.items()]

    def _take(self, job: UpdateJob, needs: dict[str, int]) -> dict[str, Buffer] | None:
        deadline = min(self._pipeline.next_use(job.unit.name), NEVER - 1)
        taken: dict[str, Buffer] = {}
        for part, nbytes in needs.items():
            buffer = self._host.try_stream(nbytes, deadline)
            if buffer is None:
                break
            taken[part] = buffer
        if len(taken) == len(needs):
            job.owned = [taken[part] for part in ("state", "grad") if part in taken]
            return taken
        for buffer in taken.values():
            self._host.arena.free(buffer)
        if not self._host.update_slots:
            return None
        job.slot = self._host.update_slots.pop()
        offset, parts = 0, {}
        for part, nbytes in needs.items():
            parts[part] = job.slot.slice(offset, nbytes)
            offset += nbytes
        return parts

    def _read(self, job: UpdateJob, part: str, buffer: Buffer) -> None:
        assert self._store is not None
        unit = job.unit
        cause = "replay" if job.gradient_step is None else "update"
        if part == "grad":
            cause = "spill"
        nbytes = unit.layout.nbytes(part)
        handle = self._store.read(unit.block(part), buffer.array, cause, nbytes=nbytes)

        def arrived() -> None:
            job.reads_left -= 1

        handle.add_done_callback(self._shared.when_done(arrived))

    def _take_ready(self) -> UpdateJob | None:
        for index, job in enumerate(self._queue):
            if job.prepared and job.reads_left == 0:
                self._running += 1
                return self._queue.pop(index)
        return None

    def _run(self, job: UpdateJob) -> None:
        unit = job.unit
        self._delay("update")
        job.run(self._ledger, self._weight_decay, self._pool)
        with self._shared.changed:
            hold = self._holds_back(job)
            writes = [] if hold else self._writes(unit, job)
            self._writing += len(writes)
            job.ends_left = len(writes) + 1
        self._submit_writes(job, writes)
        if job.gradient_step is not None and unit.spills:
            assert self._store is not None
            self._store.delete(unit.block("grad"))
        with self._shared.changed:
            self._publish(job, hold)

    def _holds_back(self, job: UpdateJob) -> bool:
        """Whether caught-up cold state stays in the stream for this step's own update."""
        unit = job.unit
        if job.gradient_step is not None or not unit.state_on_nvme or job.slot is not None:
            return False
        if unit.state_dirty:
            return True
        return self._host.hold(unit)

    def _writes(self, unit: UnitState, job: UpdateJob) -> list[tuple[str, Buffer]]:
        writes = []
        if unit.weight_on_nvme:
            assert job.weight is not None
            writes.append(("weight", job.weight))
        if unit.state_on_nvme:
            assert job.state is not None
            writes.append(("state", job.state))
        return writes

    def _submit_writes(self, job: UpdateJob, writes: list[tuple[str, Buffer]]) -> None:
        unit = job.unit
        cause = "replay" if job.gradient_step is None else "update"

        def written() -> None:
            self._writing -= 1
            self._end(job)

        for part, buffer in writes:
            assert self._store is not None
            self._delay("nvme_write")
            nbytes = unit.layout.nbytes(part)
            handle = self._store.write(unit.block(part), buffer.array, cause, nbytes=nbytes)
            handle.add_done_callback(self._shared.when_done(written))

    def _publish(self, job: UpdateJob, hold: bool) -> None:
        """Make the unit's new version the one everybody sees (lock held)."""
        unit = job.unit
        unit.synced_step = job.target_step
        unit.job = None
        self._pipeline.drop_device(unit)
        if unit.weight_on_nvme and job.slot is None:
            unit.host_ready = True
        if hold:
            unit.host_state = job.state
            unit.state_dirty = True
            job.owned = []
            unit.host_holds -= 1
        else:
            self._end(job)
        self._running -= 1
        self._shared.changed.notify_all()

    def _end(self, job: UpdateJob) -> None:
        """A write of the job or its publishing is done; the last gives all back (lock held)."""
        job.ends_left -= 1
        if job.ends_left:
            return
        unit = job.unit
        unit.host_holds -= 1
        for buffer in job.owned:
            self._host.arena.free(buffer)
        if unit.state_dirty and job.state is unit.host_state:
            assert unit.host_state is not None
            self._host.arena.free(unit.host_state)
            self._host.unhold(unit)
            unit.host_state = None
            unit.state_dirty = False
        if job.slot is not None:
            self._host.update_slots.append(job.slot)

    def _flush(self, unit: UnitState) -> None:
        """Write held state: a job without work of its own."""
        job = UpdateJob(unit, unit.synced_step, None, 1.0, prepared=True)
        job.weight, job.state = unit.host_weight, unit.host_state
        with self._shared.changed:
            unit.host_holds += 1
            writes = self._writes(unit, job)
            self._writing += len(writes)
            job.ends_left = len(writes)
        self._submit_writes(job, writes)
