"""Commits: the cut that says what is in one, and the steps that make it durable.

`publish` of a cut, in this order:

0. wait for the cut's own writes in flight;
1. fdatasync every data file: all bytes the manifest will point to are durable;
2. write the manifest to a temporary file;
3. fsync it;
4. rename it to a slot that holds no retained commit;
5. fsync the directory: from here on, this commit is the one that opens;
6. with other ranks: wait until all of them have come here and the record of all is durable;
7. let go of the commit beyond `keep_commits`: its extents may be written again, at once or, if a
   reader holds it (`offload/nvme/hold.py`), when the reader is done or the room is needed.

A crash before 5 leaves the older commit, whose extents nobody has touched, or the new one, which is
whole since 3. The first failed step is latched like any I/O failure: nothing is tried again (after
a failed fsync the kernel may have dropped the pages), and the last commit stays.

Threads: any may call. `cut` and `abandon` never block on I/O. Publishes happen one at a time in the
order of their cuts.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.nvme.directory import remove_files
from offload.nvme.files import StorageFile, describe_os_error
from offload.nvme.handle import Handle
from offload.nvme.hold import break_holds, held_generations
from offload.nvme.manifest import Manifest, encode_manifest, json_data
from offload.nvme.members import replace_file
from offload.nvme.opening import OpenedStore
from offload.nvme.ordering import TransferOrder
from offload.nvme.recovery import slot_name
from offload.nvme.table import BlockTable, RetainedBlocks, StoredBlock
from offload.nvme.transfers import TransferQueue
from ops.errors import StorageError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommitRecord:
    """A commit that is durable. `meta` is what its cut was given.

    `skipped`: after opening, one sentence for each manifest slot that was not taken.
    """

    generation: int
    meta: Mapping[str, Any]
    num_blocks: int
    skipped: tuple[str, ...] = ()


Agree = Callable[[int], None]
"""Called with a prepared generation; returns once all ranks' commit is published, or raises."""


class _State(enum.Enum):
    OPEN = enum.auto()
    PUBLISHED = enum.auto()
    ABANDONED = enum.auto()


@dataclass(eq=False)
class CommitCut:
    """What will be in a commit: every write submitted before the cut, none submitted later.

    Its blocks stay on the disk until it is published and superseded, or abandoned.
    """

    blocks: Mapping[str, StoredBlock]
    meta: Mapping[str, Any]
    _retained: RetainedBlocks
    _in_flight: list[Handle]
    _awaited: bool
    _state: _State = _State.OPEN


@dataclass
class _Retained:
    """A durable commit: where its manifest is, and its pins."""

    record: CommitRecord
    slot: int
    blocks: RetainedBlocks


@dataclass(eq=False)
class Commits:
    """The commits of one store. The queue's lock guards all of its state."""

    opened: OpenedStore
    queue: TransferQueue
    table: BlockTable
    order: TransferOrder
    keep_commits: int
    recovered: CommitRecord | None = None
    _retained: list[_Retained] = field(default_factory=list)  # oldest first
    _held: list[_Retained] = field(default_factory=list)  # superseded, kept for readers alone
    _cuts: list[CommitCut] = field(default_factory=list)  # neither published nor abandoned
    _slots: set[int] = field(default_factory=set)  # that have a file
    _generation: int = 0
    _publishing: bool = False

    def __post_init__(self) -> None:
        """Adopt what opening found; raises StorageError when it cannot be (it was checked)."""
        found = self.opened.found
        if found is None:
            return
        kept = {commit.generation for commit in found.commits}
        # What an earlier owner kept for a reader, no manifest protects: its room is free now.
        break_holds(self._directory, lambda x: x not in kept, self.opened.directory_files)
        try:
            pins = self.table.adopt([commit.blocks for commit in found.commits])
        except ValueError as error:
            raise StorageError(
                f"a commit cannot be opened: {error}", path=self._directory
            ) from None
        for commit, retained in zip(found.commits, pins):
            record = CommitRecord(commit.generation, commit.meta, len(commit.blocks), found.skipped)
            self._retained.append(_Retained(record, commit.slot, retained))
        self.recovered = self._retained[-1].record
        self._generation = found.generation_max
        self._slots = set(found.slots)

    def let_go_of_surplus(self) -> None:
        """Commit what was opened anew if it retains more than `keep_commits`; before any write.

        The newest manifest says that what it retains is whole, so it may not be freed before there
        is one that does not. Raises as `publish`; may block for its steps.
        """
        if len(self._retained) > self.keep_commits:
            self.publish(self.cut(self._retained[-1].record.meta, awaited=False))

    @property
    def may_free_room(self) -> bool:
        """Whether a publish in progress, or certain to come, will free room. Wants the lock."""
        return self._publishing or any(cut._awaited for cut in self._cuts)

    @property
    def is_publishing(self) -> bool:
        """Whether a publish is in progress. Wants the lock."""
        return self._publishing

    def cut(self, meta: Mapping[str, Any], awaited: bool) -> CommitCut:
        """See `NvmeStore.cut`."""
        frozen_meta = json_data(meta)
        with self.queue.lock:
            self.queue.check()
            blocks, in_flight = self.order.latest()
            blocks = {name: x for name, x in blocks.items() if not x.transient}
            handles = [handle for name, handle in in_flight.items() if name in blocks]
            retained = self.table.retain(blocks)
            cut = CommitCut(retained.blocks, frozen_meta, retained, handles, awaited)
            self._cuts.append(cut)
            return cut

    def abandon(self, cut: CommitCut) -> None:
        """See `NvmeStore.abandon`."""
        with self.queue.lock:
            if cut._state is _State.OPEN:
                self._settle(cut, _State.ABANDONED)
                self.table.release(cut._retained)

    def publish(self, cut: CommitCut, agree: Agree | None = None) -> CommitRecord:
        """See `NvmeStore.publish`."""
        with self.queue.lock:
            self._take_turn(cut)
            generation, slot = self._generation + 1, self._next_slot()
            kept = self._retained[max(0, len(self._retained) - self.keep_commits + 1) :]
            kept_slots = {commit.slot for commit in kept} | {slot}
            surplus = {x for x in self._slots if x > self.keep_commits} - kept_slots
        try:
            for handle in cut._in_flight:
                handle.wait()
            manifest = Manifest(
                store_id=self.opened.store_id,
                generation=generation,
                alignment_bytes=self.opened.access.alignment_bytes,
                file_bytes=tuple(self.opened.file_bytes),
                retained=tuple(commit.record.generation for commit in kept),
                slots=tuple(sorted((self._slots | {slot}) - surplus)),
                blocks=dict(cut.blocks),
                meta=cut.meta,
            )
            self._make_durable(manifest, slot)
            if agree is not None:
                self._agree(agree, generation)
        except BaseException:
            with self.queue.lock:
                self._publishing = False
                self.queue.changed.notify_all()
            raise
        record = CommitRecord(generation, cut.meta, len(cut.blocks))
        wanted = held_generations(self._directory, self.opened.directory_files)
        with self.queue.lock:
            self._generation = generation
            self._slots.add(slot)
            self._settle(cut, _State.PUBLISHED)
            self._retained.append(_Retained(record, slot, cut._retained))
            self._held += self._retained[: -self.keep_commits]
            del self._retained[: -self.keep_commits]
            self._release_held(wanted)
            self._slots -= surplus
            self._publishing = False
            self.queue.changed.notify_all()
        self._remove_slots(surplus)
        return record

    def break_oldest_hold(self) -> bool:
        """Free the oldest commit that only its readers keep, if there is one. Wants the lock.

        Blocks for looking at the hold files and removing them, which comes first.
        """
        if not self._held:
            return False
        wanted = held_generations(self._directory, self.opened.directory_files)
        generation = self._held[0].record.generation
        if generation not in wanted:
            self._release_held(wanted)
            return True
        log.warning(
            "%s: commit %d is given up while it is being read: its room is needed",
            self._directory,
            generation,
        )
        break_holds(self._directory, lambda x: x == generation, self.opened.directory_files)
        self._release_held(wanted - {generation})
        return True

    def no_room(self, path: str, block: str, wanted_bytes: int) -> StorageError:
        """The refusal of a write for which there is no room. Wants the lock; O(blocks)."""
        allocator = self.table.allocator
        return StorageError(
            f"offload.nvme.capacity: {allocator.capacity_bytes} bytes, of which "
            f"{allocator.used_bytes} are in use ({self._describe_use()}); raise the capacity",
            path=path,
            block=block,
            wanted_bytes=wanted_bytes,
        )

    def _describe_use(self) -> str:
        """The bytes in use, by who needs them."""
        seen: set[int] = set()

        def new_bytes(versions: Iterable[StoredBlock]) -> int:
            total_bytes = 0
            for stored in versions:
                if id(stored) not in seen:
                    seen.add(id(stored))
                    total_bytes += sum(extent.nbytes for extent in stored.extents)
            return total_bytes

        parts = [f"{new_bytes(self.table.blocks().values())} current"]
        for commit in reversed(self._retained):
            nbytes = new_bytes(commit.blocks.blocks.values())
            parts.append(f"{nbytes} more in retained commit {commit.record.generation}")
        if self._cuts:
            nbytes = sum(new_bytes(cut.blocks.values()) for cut in self._cuts)
            parts.append(f"{nbytes} more in {len(self._cuts)} unpublished cuts")
        return ", ".join(parts)

    @property
    def _directory(self) -> str:
        return self.opened.directories[0]

    def _release_held(self, wanted: set[int]) -> None:
        """Free superseded commits but for the `wanted` generations. Wants the lock."""
        for commit in self._held:
            if commit.record.generation not in wanted:
                self.table.release(commit.blocks)
        self._held = [x for x in self._held if x.record.generation in wanted]

    def _settle(self, cut: CommitCut, state: _State) -> None:
        cut._state = state
        self._cuts.remove(cut)
        self.queue.changed.notify_all()

    def _take_turn(self, cut: CommitCut) -> None:
        while True:
            self.queue.check()
            if cut._state is not _State.OPEN:
                raise ValueError(f"the cut has been {cut._state.name.lower()} already")
            if not self._publishing and self._cuts[0] is cut:
                break
            self.queue.changed.wait()
        self._publishing = True

    def _next_slot(self) -> int:
        """The slot for the next generation: one that holds no retained commit."""
        held = {commit.slot for commit in self._retained}
        num_slots = self.keep_commits + 1
        preferred = (self._generation + 1) % num_slots
        return next(x for x in (preferred, *range(num_slots + len(held))) if x not in held)

    def _make_durable(self, manifest: Manifest, slot: int) -> None:
        """Steps 1 to 5; latches and raises StorageError."""
        data = encode_manifest(manifest)
        path = os.path.join(self._directory, slot_name(slot))
        try:
            for file in self.opened.files:
                sync_data(file)
            replace_file(self.opened.directory_files, path, data)
        except StorageError as error:
            failure = StorageError(
                f"commit {manifest.generation} failed, the last one stays: {error}"
            )
            failure.path = error.path  # which it names already
            failure.__cause__ = error
            with self.queue.lock:
                self.queue.latch(failure)
            raise failure from error

    def _agree(self, agree: Agree, generation: int) -> None:
        """Step 6; whatever it raises is latched: this commit may never be published again."""
        try:
            agree(generation)
        except BaseException as error:
            failure = StorageError(
                f"commit {generation} was not published by all ranks, the last one stays: {error}",
                path=self._directory,
            )
            failure.__cause__ = error
            with self.queue.lock:
                self.queue.latch(failure)
            raise failure from error

    def _remove_slots(self, slots: set[int]) -> None:
        """Remove slots of superseded commits that will not be used again."""
        for slot in sorted(slots):
            try:
                remove_files(self._directory, [slot_name(slot)], self.opened.directory_files)
            except OSError as error:  # it only takes room: the newest manifest does not name it
                log.warning("%s: %s not removed: %s", self._directory, slot_name(slot), error)


def sync_data(file: StorageFile) -> None:
    """Return once all written bytes of `file` are durable; StorageError if they are not."""
    try:
        file.sync()
    except OSError as error:
        raise StorageError(f"sync failed: {describe_os_error(error)}", path=file.path) from error
