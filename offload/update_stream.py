"""The streamed optimizer: pending units are read, updated and written, in forward order.

A unit that will get a gradient is `coming`: the reads of its state may run ahead of the norm as far
as stream memory allows. `chased`: at the end of backward all jobs are queued, and the next forward
chases them unit by unit. `speculative`: a unit is queued as soon as its gradient is whole, as if
nothing would be clipped; `offload/speculation.py` keeps what it overwrites until the norm is known.
Writes drain behind. The updater thread is the only one that runs jobs.

Order of a job's end, which leases rely on: its writes are submitted, then the unit is published,
so whoever reads the unit from the store afterwards sees the new version. What the job holds is
given back when both the last write is done and the unit is published, in either order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from offload.arena import Buffer
from offload.commit import Commits
from offload.host_memory import HostMemory
from offload.ledger import Ledger
from offload.nvme.commit import Agree
from offload.nvme.store import NvmeStore
from offload.pipeline import WeightPipeline
from offload.residency import Shared, UnitState
from offload.speculation import Speculation
from offload.update_job import UpdateJob
from offload.update_memory import Reads, UpdateMemory
from offload.update_writes import WRITE_DEADLINE, UpdateWrites
from ops.kernels.pool import KernelPool
from ops.trace import Tracer


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
        trace: Tracer,
        agree: Agree | None = None,
    ) -> None:
        self._shared = shared
        self._host = host
        self._pipeline = pipeline
        self._store = store
        self._pool = pool
        self._ledger = ledger
        self._weight_decay = weight_decay
        self._delay = delay
        self._trace = trace
        self._memory = UpdateMemory(shared, host)
        self._place = {name: index for index, name in enumerate(shared.order)}
        self._queue: list[UpdateJob] = []
        self._coming: list[UpdateJob] = []
        self._unread: deque[UpdateJob] = deque()  # those of `_coming` whose state is not read yet
        self._current: UpdateJob | None = None
        self._cancelled = 0  # reads in flight of cancelled jobs
        self._writes = UpdateWrites(shared, self._memory, store, delay)
        self.speculation = Speculation(shared, host, pipeline, store, pool)
        self.commits = Commits(shared, store, trace, agree)
        pipeline.updates = self
        self._thread = threading.Thread(target=self._work, name="updater", daemon=True)
        self._thread.start()

    # ---- calls of compute

    def expect(self, names: Iterable[str], step: int | None) -> None:
        """These units will get a gradient: their state may be read ahead (lock held).

        With `step`, the number of the step in progress, they may also be updated before its norm.
        """
        for name in names:
            unit = self._shared.units[name]
            if unit.layout.frozen or unit.coming is not None:
                continue
            unit.coming = UpdateJob(unit, 0, None, speculative=step is not None)
            self._coming.append(unit.coming)
        order = self._pipeline.last_use if step is not None else self._place.__getitem__
        self._coming.sort(key=lambda job: order(job.unit.name))
        self._unread = deque(job for job in self._coming if not job.ahead)
        self._shared.changed.notify_all()

    def release(self, unit: UnitState, step: int) -> None:
        """The unit's gradient is whole: speculate on it, if its old version can be kept."""
        with self._shared.changed:
            job = unit.coming
            if job is None or not job.speculative or not self.speculation.possible(unit):
                return
            self._coming.remove(job)
            unit.coming, unit.job = None, job
            job.replay_until, job.gradient_step = step - 1, step
            self._queue.append(job)
            self._shared.changed.notify_all()

    def submit(self, jobs: list[UpdateJob]) -> None:
        """Queue jobs of the ended step, in forward order.

        A job takes over what has been read ahead for its unit; what was read ahead for nothing is
        given back.
        """
        with self._shared.changed:
            for job in jobs:
                unit = job.unit
                assert unit.job is None
                unit.job = job
                coming, unit.coming = unit.coming, None
                if coming is not None:
                    self._coming.remove(coming)
                    self._adopt(job, coming)
            self._queue.extend(jobs)
            self._queue.sort(key=lambda job: (not job.prepared, self._place[job.unit.name]))
            self._cancel_coming()
            self._shared.changed.notify_all()

    def _adopt(self, job: UpdateJob, coming: UpdateJob) -> None:
        """Move what `coming` has read, or is reading, to `job`."""
        job.ahead, job.state, job.reads_left = coming.ahead, coming.state, coming.reads_left
        job.handles = coming.handles
        coming.ahead, coming.state, coming.heir = False, None, job
        self._hurry_reads(job, min(self._pipeline.next_use(job.unit.name), WRITE_DEADLINE - 1))

    def _hurry_reads(self, job: UpdateJob, deadline: int) -> None:
        """Let the job's reads in flight go before what is needed later (lock held)."""
        for handle in job.handles:
            if not handle.done():
                assert self._store is not None
                self._store.hurry(handle, deadline)

    def _cancel_coming(self) -> None:
        for job in self._coming:
            job.unit.coming = None
            if job.reads_left == 0:
                self._memory.cancel(job)
            else:
                job.cancelled = True
                self._cancelled += 1
        self._coming = []
        self._unread.clear()

    def before_lease(self, unit: UnitState) -> None:
        """Queue a replay, first in line, if the unit missed steps (lock held)."""
        step = self._shared.optimizer_step
        if unit.job is None and unit.synced_step < step:
            unit.job = UpdateJob(unit, step, None, commit=self.commits.pending)
            self._queue.insert(self._first_unprepared(), unit.job)
            self._shared.changed.notify_all()

    def hurry(self, unit: UnitState) -> None:
        """Move the unit's job in front of all that have not begun (lock held)."""
        job = unit.job
        if job is None:
            return
        changed, job.hurried = not job.hurried, True
        if not job.prepared and job in self._queue:
            first = self._first_unprepared()
            if self._queue[first] is not job:
                self._queue.remove(job)
                self._queue.insert(first, job)
                changed = True
        if changed:
            self._hurry_reads(job, -1)
            self._shared.changed.notify_all()

    def wait_border(self) -> None:
        """Block until every job of earlier steps is applied and their commit has been cut."""
        with self._shared.changed:
            self._shared.check()
            while self._has_older() or self.commits.pending:
                self._hurry_all()
                self._shared.wait_as_compute()

    def _has_older(self) -> bool:
        current = self._current
        return (current is not None and not current.speculative) or any(
            not job.speculative for job in self._queue
        )

    def _hurry_all(self) -> None:
        """Nobody leases while compute waits here, so nothing is kept for a lease (lock held)."""
        changed = False
        for job in self._queue:
            changed = changed or not job.hurried
            job.hurried = True
        if changed:
            self._shared.changed.notify_all()

    def accept(self, commit: bool) -> None:
        """The norm is known and nothing is clipped: what was speculated stays; may block shortly.

        With `commit` what was queued but not begun writes host-homed blocks too.
        """
        with self._shared.changed:
            self._shared.check()
            for job in self._queue:
                job.speculative, job.commit = False, commit
            while self._current is not None and self._current.speculative:
                self._shared.wait()
        for unit in self.speculation.accept():
            self._delete_gradient(unit)

    def revert(self) -> list[UnitState]:
        """Undo all that was speculated and forget what was about to be; blocks.

        Returns the units whose update has to be made again, or dropped.
        """
        with self._shared.changed:
            self._shared.check()
            dropped = [job for job in self._queue if job.speculative and not job.prepared]
            for job in dropped:
                self._queue.remove(job)
                job.unit.job = None
                job.gradient_step = None
                job.speculative = False
                job.unit.coming = job
                self._coming.append(job)
            while self._queue or self._current is not None or self._writes.in_flight:
                self._hurry_all()
                self._shared.wait()
        return [*(job.unit for job in dropped), *self.speculation.revert()]

    def drain(self) -> None:
        """Block until every job is applied and every write is done, held state included."""
        with self._shared.changed:
            self._shared.check()
            self._cancel_coming()
            while (
                self._queue
                or self._current is not None
                or self._writes.in_flight
                or self._cancelled
                or self._host.spilling
            ):
                self._hurry_all()
                self._shared.wait_as_compute()
        self._writes.write_back(unit for unit in self._shared.units.values() if unit.state_dirty)
        with self._shared.changed:
            while self._writes.in_flight or self.commits.pending or not self._host.reclaim_slots():
                self._shared.wait_as_compute()
            self._shared.check()

    def close(self) -> None:
        """Stop the threads (the engine has set `closing`)."""
        self._thread.join()
        self.commits.close()

    # ---- the updater

    def _work(self) -> None:
        try:
            while True:
                with self._shared.changed:
                    if self._shared.closing or self._shared.failed:
                        return
                    reads = self._prepare_ahead()
                    job = self._take_ready() if not reads else None
                    cut = job is None and not reads and self._may_cut()
                    idle = not reads and job is None
                    self._shared.commit_stall.hold(cut or (idle and self._waits_for_commit()))
                    if idle and not cut:
                        self._shared.changed.wait()
                        continue
                for reader, part, buffer in reads:
                    self._read(reader, part, buffer)
                if job is not None:
                    self._run(job)
                elif cut:
                    self._cut()
        except BaseException as error:
            self._shared.fail(error)

    def _first_unprepared(self) -> int:
        for index, job in enumerate(self._queue):
            if not job.prepared:
                return index
        return len(self._queue)

    def _prepare_ahead(self) -> Reads:
        """Take memory for jobs in order until one gets none; returns the reads to submit."""
        reads: Reads = []
        for job in self._queue:
            if not job.prepared and self._may_run(job):
                wanted = self._memory.prepare(job)
                if wanted is None:
                    return reads
                reads += wanted
        while self._unread:
            job = self._unread[0]
            if job.unit.coming is job:  # else it was queued meanwhile
                wanted = self._memory.read_ahead(job)
                if wanted is None:
                    break
                reads += wanted
            self._unread.popleft()
        return reads

    def _read(self, job: UpdateJob, part: str, buffer: Buffer) -> None:
        assert self._store is not None
        unit = job.unit
        cause = "spill" if part == "grad" else "update"
        if job.prepared and job.gradient_step is None:
            cause = "replay"

        def arrived() -> None:
            owner = job if job.heir is None else job.heir
            owner.reads_left -= 1
            if owner.cancelled and owner.reads_left == 0:
                self._cancelled -= 1
                self._memory.cancel(owner)

        handle = self._store.read(
            unit.block(part),
            buffer.array,
            cause,
            nbytes=unit.layout.nbytes(part),
            deadline=self._deadline(job),
        )
        owner = job if job.heir is None else job.heir
        owner.handles.append(handle)
        handle.add_done_callback(self._shared.when_done(arrived))

    def _deadline(self, job: UpdateJob) -> int:
        if job.hurried:
            return -1
        name = job.unit.name
        if job.speculative:
            return self._pipeline.last_use(name)
        if job.prepared:
            return min(self._pipeline.next_use(name), WRITE_DEADLINE - 1)
        return WRITE_DEADLINE - len(self._place) + self._place[name]

    def _take_ready(self) -> UpdateJob | None:
        for index, job in enumerate(self._queue):
            if job.prepared and job.reads_left == 0 and self._may_run(job):
                self._current = self._queue.pop(index)
                return self._current
        return None

    def _may_run(self, job: UpdateJob) -> bool:
        """The commit of a step is cut before anything of the next one changes."""
        return not (self.commits.pending and job.speculative)

    def _run(self, job: UpdateJob) -> None:
        unit = job.unit
        self._delay("update")
        if job.speculative:
            self.speculation.keep(unit)
        with self._trace.span("update", unit.name, step=job.target_step):
            job.run(self._ledger, self._weight_decay, self._pool)
        with self._shared.changed:
            unit.version = job.target_step
            hold = self._holds_back(job)
            writes = self._writes.begin(job, nothing=hold)
        self._writes.submit(job, writes)
        if job.gradient_step is not None and not job.speculative:
            self._delete_gradient(unit)
        with self._shared.changed:
            self._publish(job, hold)

    def _delete_gradient(self, unit: UnitState) -> None:
        if unit.spills:
            assert self._store is not None
            self._store.delete(unit.block("grad"))

    def _holds_back(self, job: UpdateJob) -> bool:
        """Whether caught-up cold state stays in the stream for this step's own update."""
        unit = job.unit
        if job.gradient_step is not None or not unit.state_on_nvme or job.slot is not None:
            return False
        if unit.state_dirty:
            return True
        return self._host.hold(unit)

    def _publish(self, job: UpdateJob, hold: bool) -> None:
        """Make the unit's new version the one everybody sees (lock held)."""
        unit = job.unit
        if hold and not unit.state_dirty:
            unit.stored_step = unit.synced_step
        unit.synced_step = job.target_step
        unit.job = None
        self._pipeline.drop_device(unit)
        if unit.weight_on_nvme:
            unit.host_ready = True
        if hold:
            unit.host_state = job.state
            unit.state_dirty = True
            job.owned = []
            unit.host_holds -= 1
        else:
            self._writes.end(job)
        self._current = None
        self._shared.changed.notify_all()

    # ---- commits

    def _may_cut(self) -> bool:
        return self.commits.may_cut() and not any(not job.speculative for job in self._queue)

    def _waits_for_commit(self) -> bool:
        """Whether a commit is what the first update waits for, or the next commit (lock held)."""
        if all(job.speculative for job in self._queue) and self.commits.pending:
            return True
        if not self._queue or self._queue[0].prepared:  # its reads are under way
            return False
        return self._writes.commits(self._queue[0].unit)

    def _cut(self) -> None:
        """All jobs of the committed step are applied: write what is missing, then cut."""
        self._writes.write_back(self.commits.unwritten())
        self.commits.cut(self._writes.take_commit_bytes())
