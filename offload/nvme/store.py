"""The NVMe tier's store: named blocks in one data file, written out of place, verified on reading.

A write takes fresh room, is cut into requests for a bounded pool of workers, and becomes the
block's version when all of it has been written; the old room is freed when no read and no
retained snapshot needs it. A read verifies every chunk of 1 MiB; a block that does not verify is
never served.

Invariants: the capacity is hard (padding included); a read sees the writes submitted before it, in
order; the first I/O failure is latched; the data file is opened once; all buffers and the queue are
bounded and taken at open. What has been published as a commit survives any crash
(`offload/nvme/commit.py`, `docs/formats/nvme_store.md`); a store is opened empty or, with `resume`,
at its newest commit. The store knows names and bytes, not models.

Threads: any thread may call; callbacks run on workers and must not call `write`, `read`, `delete`,
`drain`, `sync`, `publish` or `close` (RuntimeError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from offload.nvme.aligned import AccessMode, address_of, bytes_of
from offload.nvme.bandwidth import Measure, measure_bandwidth
from offload.nvme.codec import CodecSetup
from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.commit import Agree, CommitCut, CommitRecord, Commits, sync_data
from offload.nvme.directory import check_settings
from offload.nvme.files import (
    DirectoryFiles,
    OpenFile,
    OsDirectoryFiles,
    Preallocator,
    open_os_file,
)
from offload.nvme.frame_io import FrameIo
from offload.nvme.handle import Handle
from offload.nvme.opening import Opening
from offload.nvme.ordering import TransferOrder
from offload.nvme.request_io import Drive, RequestIo
from offload.nvme.stats import CAUSES, StoreStats
from offload.nvme.table import BlockTable, HeldVersion, StoredBlock
from offload.nvme.transfers import Direction, Transfer, TransferQueue
from offload.nvme.workers import Workers
from offload.runs import Run, checked_runs
from ops.errors import StorageError
from ops.trace import NO_TRACE, Tracer


class NvmeStore:
    """Blocks of bytes of one rank, in one data file for each path.

    The capacity counts extents: logical bytes rounded up to `alignment_bytes`, old versions of a
    block while somebody reads, holds or retains them, and the new version of each block being
    written.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        capacity_bytes: int,
        *,
        rank: int = 0,
        workers: int = 8,
        request_bytes: int = 4 << 20,
        required_bytes: int | None = None,
        transfers_max: int = 1024,
        access: AccessMode | None = None,
        base_offset: int = 0,
        open_file: OpenFile = open_os_file,
        keep_commits: int = 1,
        resume: bool = False,
        newest: int | None = None,
        before_discard: Callable[[], None] | None = None,
        directory_files: DirectoryFiles | None = None,
        measure: Measure = measure_bandwidth,
        codec: str = "none",
        drive_speed: Callable[[], DriveSpeed] | None = None,
        trace: Tracer = NO_TRACE,
    ) -> None:
        """Become the owner of this rank's directory under `paths` and open a store in it.

        The store is empty, what was there is discarded; with `resume` it holds the newest commit
        (`recovered`), up to generation `newest`, if there is one. `keep_commits` are retained.
        `before_discard` is called once nothing can be refused any more, before a store that is
        begun anew loses what was there.
        `required_bytes` (default: the capacity) must be free on the disk. `transfers_max` bounds
        transfers in flight. `access` overrides probing, `base_offset` leaves the data file's start
        unused, `open_file` and `directory_files` replace the operating system. Several
        paths share the blocks in proportion to what `measure` says of them. With `codec` `lz4`
        frames are encoded where it pays (`offload/nvme/codec.py`), at the drive's speed as measured
        or as `drive_speed` tells; what is encoded already is read with any codec. Requests are
        drawn into `trace`. May block for small I/O, measurements, and for reading whole commits
        when a manifest is damaged.

        Raises ConfigError: bad sizes, paths that cannot be used or do not belong together, a live
        owner (named), too little free disk, a capacity or alignment the commit does not fit.
        Raises StorageError: there are commits, but none can be opened; a data file or directory of
        the store is missing.
        """
        check_settings(capacity_bytes, workers, request_bytes, transfers_max, keep_commits)
        setup = CodecSetup(codec, drive_speed)
        opening = Opening(
            paths=(paths,) if isinstance(paths, str) else tuple(paths),
            rank=rank,
            capacity_bytes=capacity_bytes,
            required_bytes=capacity_bytes if required_bytes is None else required_bytes,
            base_offset=base_offset,
            access=access,
            open_file=setup.watched(open_file),
            directory_files=directory_files or OsDirectoryFiles(),
            measure=measure,
            newest=newest,
            before_discard=before_discard,
        )
        self._opened = opening.open(resume)
        self.access = self._opened.access
        self._file = self._opened.files[0]
        self._table = BlockTable(self._opened.new_allocator(base_offset))
        drives = [
            Drive(file, Preallocator(file, base_offset, file_bytes))
            for file, file_bytes in zip(self._opened.files, self._opened.file_bytes)
        ]
        self._codec = setup.new_codec(self.directory, self.access)
        self._queue = TransferQueue(request_bytes, transfers_max)
        self._order = TransferOrder(self._table, self._queue)
        try:
            self._commits = Commits(
                self._opened, self._queue, self._table, self._order, keep_commits
            )
            self._commits.let_go_of_surplus()
        except BaseException:
            self._opened.close()
            raise
        self._closed = False
        io = FrameIo(RequestIo(drives, self.access, workers), self.access, self._codec)
        self._workers = Workers(workers, self._queue, self._order, io, trace)

    @property
    def directory(self) -> str:
        """This rank's directory under the first path."""
        return self._opened.directories[0]

    @property
    def store_id(self) -> str:
        """What tells this store from any other one."""
        return self._opened.store_id

    @property
    def recovered(self) -> CommitRecord | None:
        """The commit the store was opened at; None when it was opened empty."""
        return self._commits.recovered

    @property
    def alignment_bytes(self) -> int:
        """Buffers whose address and length are multiples of this are moved without a copy."""
        return self.access.alignment_bytes

    @property
    def capacity_bytes(self) -> int:
        """The limit of `used_bytes`."""
        return self._table.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in extents now, padding included."""
        return self._table.allocator.used_bytes

    def write(
        self,
        block: str,
        buffer: Any,
        cause: str,
        *,
        nbytes: int | None = None,
        deadline: int = 0,
        version: int = 0,
        transient: bool = False,
        runs: Sequence[Run] | None = None,
    ) -> Handle:
        """Store the first `nbytes` (default: all) of `buffer` as `block`; returns at once.

        `buffer`: contiguous bytes (memoryview, or uint8 array), unchanged until the handle is done.
        Without a copy when its address is aligned; what is longer than `nbytes` serves as padding
        and is written as it is. `cause` is one of `CAUSES`; a smaller `deadline` goes first. Writes
        of one block happen in the order of the calls. `version` (at least 0) is kept with the
        block; a `transient` block is in no commit. `runs` (default: plain bytes) say what the block
        consists of, which helps a codec. May block while `transfers_max` transfers are in flight or
        while room is about to be freed by them or by a publish. Raises StorageError when the
        capacity is exhausted (nothing has changed then) or an earlier I/O failed; ValueError for a
        bad argument.
        """
        data, length_bytes = bytes_of(buffer, nbytes)
        self._check_call(cause)
        if version < 0:
            raise ValueError(f"version {version} of block {block!r} is negative")
        typed = checked_runs(runs, length_bytes)
        encodes = self._codec is not None and self._codec.wants(typed, length_bytes)
        with self._queue.lock:
            self._queue.admit()
            try:
                stored = self._reserve(block, length_bytes, version, transient)
            except BaseException:
                self._queue.leave()
                raise
            if encodes:
                stored.expect_encoded()
            return self._submit(
                Direction.WRITE, block, data, length_bytes, cause, deadline, stored, typed
            )

    def read(
        self, block: str, buffer: Any, cause: str, *, nbytes: int | None = None, deadline: int = 0
    ) -> Handle:
        """Fill the first `nbytes` (default: all) of `buffer` with `block`; returns at once.

        `nbytes` must be the block's logical length, so that sizes are never mixed up; what is
        longer in `buffer` is scratch for padding and may change. Sees the last write submitted
        before it, and waits for it. The content counts only once the handle is done without error:
        its `wait` raises StorageError naming path, offset and block when a chunk does not verify.
        May block as `write`. Raises StorageError for an unknown block, another length or an earlier
        I/O failure.
        """
        data, length_bytes = bytes_of(buffer, nbytes)
        if data.readonly:
            raise ValueError(f"cannot read block {block!r} into a read-only buffer")
        self._check_call(cause)
        with self._queue.lock:
            self._queue.admit()
            try:
                self._check_length(block, length_bytes)
            except BaseException:
                self._queue.leave()
                raise
            return self._submit(Direction.READ, block, data, length_bytes, cause, deadline)

    def hurry(self, handle: Handle, deadline: int) -> None:
        """Make a transfer in flight at least as urgent as `deadline`; does not block.

        For what was prefetched and is now waited for. A finished transfer is left alone.
        """
        with self._queue.lock:
            self._queue.hurry(handle, deadline)

    def nbytes(self, block: str) -> int:
        """The logical length of `block` (of its last submitted write); StorageError if unknown."""
        with self._queue.lock:
            length_bytes = self._order.length_of(block)
        if length_bytes is None:
            raise StorageError("no such block", path=self._file.path, block=block)
        return length_bytes

    def delete(self, block: str) -> None:
        """Forget `block`, if it is there; waits for its writes, not for its reads."""
        self._workers.refuse_on_worker()
        with self._queue.lock:
            while self._order.is_being_written(block):
                self._queue.changed.wait()
            self._queue.check()
            self._table.remove(block)
            self._queue.changed.notify_all()

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Every block that is not transient: name to (nbytes, version); O(blocks)."""
        with self._queue.lock:
            latest = self._order.latest()[0].items()
            return {name: (x.nbytes, x.version) for name, x in latest if not x.transient}

    def cut(self, meta: Mapping[str, Any], *, awaited: bool = False) -> CommitCut:
        """What a commit made now would hold: every write submitted so far, none submitted later.

        Never blocks on I/O; O(blocks). `meta` is JSON data, copied. The blocks stay on the disk
        until the cut is published and superseded, or abandoned. With `awaited` another thread is
        certain to publish or abandon the cut, so writes that find no room wait for that. Raises
        ValueError for other data, StorageError after an I/O failure.
        """
        return self._commits.cut(meta, awaited)

    def publish(self, cut: CommitCut, agree: Agree | None = None) -> CommitRecord:
        """Make `cut` the newest commit and let go of the one beyond `keep_commits`; blocks.

        Waits for its writes in flight and for earlier cuts to be published or abandoned. When it
        returns, the commit survives any crash. `agree` is called once it is durable and returns
        when that of all ranks is, before the older one is let go. Raises StorageError, latched, and
        then the last commit is intact; ValueError for a cut that is published or abandoned.
        """
        self._workers.refuse_on_worker()
        return self._commits.publish(cut, agree)

    def abandon(self, cut: CommitCut) -> None:
        """Let go of a cut that will not be published; again, or after publishing: nothing."""
        self._commits.abandon(cut)

    def hold(self, block: str) -> HeldVersion:
        """Keep the current version of `block` while newer ones are written, until it is restored
        or let go. Raises RuntimeError while a write of it is in flight, StorageError if unknown."""
        with self._queue.lock:
            return self._order.hold(block)

    def restore(self, held: HeldVersion) -> None:
        """Make `held` the current version again and free the newer one; ends the hold.

        Raises RuntimeError while a write of the block is in flight or when the hold has ended.
        """
        with self._queue.lock:
            self._order.restore(held)
            self._queue.changed.notify_all()

    def let_go(self, held: HeldVersion) -> None:
        """End the hold; the newer version stays. Again, or after `restore`: nothing."""
        with self._queue.lock:
            self._order.let_go(held)
            self._queue.changed.notify_all()

    def drain(self) -> None:
        """Wait until nothing is in flight; raise the latched failure, if any."""
        self._workers.refuse_on_worker()
        with self._queue.lock:
            self._queue.drain()
            if self._queue.failure is not None:
                raise self._queue.failure.with_traceback(None)

    def sync(self) -> None:
        """Drain, then return when all written bytes are durable; StorageError if they are not."""
        self.drain()
        try:
            for file in self._opened.files:
                sync_data(file)
        except StorageError as failure:
            with self._queue.lock:
                self._queue.latch(failure)
            raise

    def stats(self) -> StoreStats:
        """The counters now; does not block."""
        with self._queue.lock:
            allocator = self._table.allocator
            return StoreStats(
                read=self._workers.lanes[Direction.READ].copy(),
                written=self._workers.lanes[Direction.WRITE].copy(),
                used_bytes=allocator.used_bytes,
                used_bytes_max=allocator.used_bytes_max,
                used_bytes_by_drive=allocator.used_bytes_by_drive,
                capacity_bytes=allocator.capacity_bytes,
                num_blocks=len(self._table),
                num_transfers=self._queue.num_transfers,
                num_transfers_max=self._queue.num_transfers_peak,
                bounce_buffer_bytes=self._workers.memory_bytes,
                codec=None if self._codec is None else self._codec.stats(),
            )

    def close(self, *, delete: bool = False) -> None:
        """Refuse new transfers, finish those in flight and give up the directory.

        Raises nothing for failed transfers (their handles do). The commits stay, unless `delete`
        removes all of the store's files. A second call does nothing. Waits for the transfers and
        the publish in flight, never for callers.
        """
        self._workers.refuse_on_worker()
        with self._queue.lock:
            self._queue.closing = True
            self._queue.changed.notify_all()
            self._queue.drain()
            while self._commits.is_publishing:
                self._queue.changed.wait()
            self._queue.stop()
            first, self._closed = not self._closed, True
        self._workers.join()
        if first:
            self._opened.close(delete)

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Called with the queue's lock held, but for the last one.

    def _reserve(self, block: str, length_bytes: int, version: int, transient: bool) -> StoredBlock:
        """A fresh version, waiting for transfers and publishes in flight that may free room."""
        while True:
            stored = self._table.reserve(length_bytes, version, transient)
            if stored is not None:
                return stored
            if not self._commits.may_free_room:
                # Readers yield to the run before it waits for anything but a publish.
                if self._commits.break_oldest_hold():
                    continue
                if self._order.num_submitted == 0:
                    raise self._commits.no_room(self._file.path, block, length_bytes)
            self._queue.changed.wait()
            self._queue.check()

    def _check_length(self, block: str, wanted_bytes: int) -> None:
        length_bytes = self._order.length_of(block)
        if length_bytes is None:
            raise StorageError("no such block", path=self._file.path, block=block)
        if length_bytes != wanted_bytes:
            raise StorageError(
                f"the block has {length_bytes} bytes, not {wanted_bytes}",
                path=self._file.path,
                block=block,
                wanted_bytes=wanted_bytes,
            )

    def _submit(
        self,
        direction: Direction,
        block: str,
        data: memoryview,
        length_bytes: int,
        cause: str,
        deadline: int,
        stored: StoredBlock | None = None,
        runs: tuple[Run, ...] = (),
    ) -> Handle:
        transfer = Transfer(
            direction=direction,
            block=block,
            data=data,
            nbytes=length_bytes,
            address=address_of(data),
            cause=cause,
            deadline=deadline,
            stored=stored,
            handle=Handle(block, self._workers.refuse_on_worker),
            runs=runs,
        )
        self._order.start(transfer)
        return transfer.handle

    def _check_call(self, cause: str) -> None:
        if cause not in CAUSES:
            raise ValueError(f"cause {cause!r} is not one of {', '.join(CAUSES)}")
        self._workers.refuse_on_worker()
