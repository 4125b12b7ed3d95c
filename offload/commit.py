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
from collections.abc import Mapping
from typing import Any

from offload.nvme.commit import Agree, CommitCut, CommitRecord
from offload.nvme.store import NvmeStore
from offload.residency import Shared, UnitState
from ops.clock import seconds
from ops.trace import Tracer


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
        self.num_published = 0
        self.publish_seconds = 0.0
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

    def cut(self) -> None:
        """Take the cut; everything the commit holds has been submitted."""
        assert self._store is not None and self._wanted is not None
        cut = self._store.cut(self._wanted, awaited=True)
        with self._shared.changed:
            self._cut, self._wanted = cut, None
            self._shared.changed.notify_all()

    def wait(self) -> None:
        """Block until every requested commit is published; the stream has been drained.

        Otherwise updates may wait for leases that do not come while compute waits here.
        """
        with self._shared.changed:
            self._shared.check()
            while self._wanted is not None or self._cut is not None:
                self._shared.wait()

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
                    self.num_published += 1
                    self.publish_seconds += seconds() - started
                    self._shared.changed.notify_all()
        except BaseException as error:
            self._shared.fail(error)
