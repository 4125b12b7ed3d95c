"""Commits of a run: when the cut of a step is taken, and the thread that publishes it.

A commit of step t is requested at its border. Once every job of t is applied, and before anything
of t + 1 changes, the updater writes what the store does not have yet (blocks homed on the host)
and takes the cut; the publisher makes it durable while training goes on. One commit is published at
a time; the next cut waits for it.

What a commit holds of a unit are its `weight` and `state` block in one version: the step whose
content they have. A version older than the step of the commit is what the ledger replays from.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.nvme.commit import Agree, CommitCut, CommitRecord
from offload.nvme.store import NvmeStore
from offload.residency import Shared, UnitState
from ops.clock import seconds
from ops.trace import Tracer

_PUBLISHED_MAX = 256


@dataclass(frozen=True)
class PublishedCommit:
    """What a commit has cost: `stall_seconds` of compute, `publish_seconds` beside training.

    `written_bytes` were written for it alone: blocks homed on the host; what is cold stays where it
    is. `stall_seconds` as `offload/commit_stall.py` counts them, from the publication before.
    """

    step: int | None
    generation: int
    stall_seconds: float
    publish_seconds: float
    written_bytes: int


@dataclass
class CommitTotals:
    """Sums over the commits this run has published, and the longest stall of one."""

    published: int = 0
    publish_seconds: float = 0.0
    stall_seconds: float = 0.0
    stall_seconds_max: float = 0.0
    written_bytes: int = 0

    def add(self, commit: PublishedCommit) -> None:
        """Enter a commit."""
        self.published += 1
        self.publish_seconds += commit.publish_seconds
        self.stall_seconds += commit.stall_seconds
        self.stall_seconds_max = max(self.stall_seconds_max, commit.stall_seconds)
        self.written_bytes += commit.written_bytes


class Commits:
    """Requests, cuts and publishes commits. Without a store nothing may be requested."""

    def __init__(
        self, shared: Shared, store: NvmeStore | None, trace: Tracer, agree: Agree | None = None
    ) -> None:
        """`agree` is what the publisher calls with each commit that is durable on this rank."""
        self._shared = shared
        self._agree = agree
        self._store = store
        self._trace = trace
        self._wanted: Mapping[str, Any] | None = None
        self._cut: CommitCut | None = None
        self._cut_bytes = 0
        self.totals = CommitTotals()
        self._published: deque[PublishedCommit] = deque(maxlen=_PUBLISHED_MAX)
        self.last: CommitRecord | None = None  # that this run has published
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
            self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether a commit was requested whose cut has not been taken (lock held)."""
        return self._wanted is not None

    @property
    def last_step(self) -> int | None:
        """The step of the last commit of this run; None when there is none yet."""
        return None if self.last is None else self.last.meta.get("step")

    def request(self, meta: Mapping[str, Any]) -> None:
        """Commit the step that has just ended, with `meta` (JSON data) in it (lock held)."""
        assert self._store is not None, "a commit wants a store"
        assert self._wanted is None
        self._wanted = meta
        self._shared.changed.notify_all()

    def may_cut(self) -> bool:
        """Whether a commit waits for its cut and the one before it is published (lock held)."""
        return self._wanted is not None and self._cut is None

    def unwritten(self) -> list[UnitState]:
        """Units of which the store has no consistent version, or not their last one."""
        assert self._store is not None
        stored = {name: version for name, (_, version) in self._store.blocks().items()}
        found = []
        for unit in self._shared.units.values():
            parts = ["weight"] if unit.layout.frozen else ["weight", "state"]
            versions = {stored.get(unit.block(part)) for part in parts}
            # Held state was replayed from the stored version, which the ledger still covers.
            wanted = unit.stored_step if unit.state_dirty else unit.version
            if versions != {wanted}:
                found.append(unit)
        return found

    def cut(self, written_bytes: int) -> None:
        """Take the cut; everything it holds has been submitted, `written_bytes` for it alone."""
        assert self._store is not None and self._wanted is not None
        cut = self._store.cut(self._wanted, awaited=True)
        with self._shared.changed:
            self._cut, self._cut_bytes, self._wanted = cut, written_bytes, None
            self._shared.changed.notify_all()

    def wait(self) -> None:
        """Block until every requested commit is published; the stream has been drained.

        Otherwise updates may wait for leases that do not come while compute waits here.
        """
        with self._shared.changed:
            self._shared.check()
            with self._shared.commit_stall.waiting(entirely=True):
                while self._wanted is not None or self._cut is not None:
                    self._shared.wait()

    def take_published(self) -> list[PublishedCommit]:
        """The commits published since the last call, oldest first; the newest 256 at most."""
        with self._shared.changed:
            found = list(self._published)
            self._published.clear()
            return found

    def close(self) -> None:
        """Stop the publisher once it is idle (the engine has set `closing`)."""
        if self._thread is not None:
            self._thread.join()
        if self._cut is not None:
            assert self._store is not None
            self._store.abandon(self._cut)
            self._cut = None

    def _work(self) -> None:
        assert self._store is not None
        try:
            while True:
                with self._shared.changed:
                    while self._cut is None:
                        if self._shared.closing or self._shared.failed:
                            return
                        self._shared.changed.wait()
                    cut = self._cut
                started = seconds()
                with self._trace.span("commit", "publish"):
                    record = self._store.publish(cut, self._agree)
                with self._shared.changed:
                    self._cut = None
                    self.last = record
                    self._note(record, seconds() - started)
                    self._shared.changed.notify_all()
        except BaseException as error:
            self._shared.fail(error)

    def _note(self, record: CommitRecord, publish_seconds: float) -> None:
        """Enter a published commit (lock held)."""
        stall_seconds = self._shared.commit_stall.take()
        step = record.meta.get("step")
        cost = (stall_seconds, publish_seconds, self._cut_bytes)
        published = PublishedCommit(step, record.generation, *cost)
        self._published.append(published)
        self.totals.add(published)
