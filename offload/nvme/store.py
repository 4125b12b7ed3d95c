"""The NVMe tier's store: named blocks in one data file, written out of place, verified on reading.

A write takes fresh room, is cut into requests for a bounded pool of workers, and becomes the
block's version when all of it has been written; the old room is freed when no read and no
retained snapshot needs it. A read verifies every chunk of 1 MiB; a block that does not verify is
never served.

Invariants: the capacity is hard (padding included); a read sees the writes submitted before it, in
order; the first I/O failure is latched; the data file is opened once; all buffers and the queue are
bounded and taken at open. Nothing here survives a crash yet: the table lives in memory, and an
opened store is empty (`docs/formats/nvme_store.md`). The store knows names and bytes, not models.

Threads: any thread may call; callbacks run on workers and must not call `write`, `read`, `delete`,
`drain`, `sync` or `close` (RuntimeError).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from offload.nvme.aligned import AccessMode, address_of
from offload.nvme.directory import (
    check_settings,
    delete_data_file,
    lock_directory,
    open_fresh_data_file,
)
from offload.nvme.extents import ExtentAllocator
from offload.nvme.files import OpenFile, Preallocator, describe_os_error, open_os_file
from offload.nvme.handle import Handle
from offload.nvme.ordering import TransferOrder
from offload.nvme.request_io import (
    BOUNCE_BYTES,
    CorruptBlock,
    Drive,
    Outcome,
    RequestIo,
    new_bounce_buffer,
)
from offload.nvme.stats import CAUSES, LaneStats, StoreStats
from offload.nvme.table import BlockTable, RetainedBlocks, StoredBlock
from offload.nvme.transfers import Direction, Request, Transfer, TransferQueue
from ops.errors import StorageError


class NvmeStore:
    """Blocks of bytes on one drive.

    The capacity counts extents: logical bytes rounded up to `alignment_bytes`, old versions of a
    block while somebody reads or retains them, and the new version of each block being written.
    """

    def __init__(
        self,
        directory: str,
        capacity_bytes: int,
        *,
        workers: int = 8,
        request_bytes: int = 4 << 20,
        required_bytes: int | None = None,
        transfers_max: int = 1024,
        access: AccessMode | None = None,
        base_offset: int = 0,
        open_file: OpenFile = open_os_file,
    ) -> None:
        """Become the owner of `directory` and open an empty store in it; may block for small I/O.

        `required_bytes` (default: the capacity) must be free on the disk now. `transfers_max`
        bounds transfers in flight. `access` overrides probing the file system, `base_offset` leaves
        the start of the data file unused. Raises ConfigError: bad sizes, a path that cannot be
        used, a live owner (named), too little free disk.
        """
        check_settings(capacity_bytes, workers, request_bytes, transfers_max)
        self.directory = directory
        self._lock_file = lock_directory(directory)
        try:
            self._file, self.access, file_bytes = open_fresh_data_file(
                directory,
                capacity_bytes=capacity_bytes,
                required_bytes=capacity_bytes if required_bytes is None else required_bytes,
                base_offset=base_offset,
                access=access,
                open_file=open_file,
            )
        except BaseException:
            self._lock_file.release()
            raise
        self._table = BlockTable(
            ExtentAllocator(capacity_bytes, self.access.alignment_bytes, base_offset)
        )
        drive = Drive(self._file, Preallocator(self._file, base_offset, file_bytes))
        self._io = RequestIo([drive], self.access)
        self._queue = TransferQueue(request_bytes, transfers_max)
        self._order = TransferOrder(self._table, self._queue)
        self._lanes = {direction: LaneStats() for direction in Direction}
        self._closed = False
        self._workers = [
            threading.Thread(
                target=self._work,
                args=(new_bounce_buffer(self.access),),
                name=f"nvme-{index}",
                daemon=True,  # an owner that forgot to close must not keep the process from ending
            )
            for index in range(workers)
        ]
        for worker in self._workers:
            worker.start()

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
        self, block: str, buffer: Any, cause: str, *, nbytes: int | None = None, deadline: int = 0
    ) -> Handle:
        """Store the first `nbytes` (default: all) of `buffer` as `block`; returns at once.

        `buffer`: contiguous bytes (memoryview, or uint8 array), unchanged until the handle is done.
        Without a copy when its address is aligned; what is longer than `nbytes` serves as padding
        and is written as it is. `cause` is one of `CAUSES`; a smaller `deadline` goes first. Writes
        of one block happen in the order of the calls. May block while `transfers_max` transfers are
        in flight or while room is about to be freed by them. Raises StorageError when the capacity
        is exhausted (nothing has changed then) or an earlier I/O failed; ValueError for a bad
        argument.
        """
        data, length_bytes = _bytes_of(buffer, nbytes)
        self._check_call(cause)
        with self._queue.lock:
            self._queue.admit()
            try:
                stored = self._reserve(block, length_bytes)
            except BaseException:
                self._queue.leave()
                raise
            return self._submit(Direction.WRITE, block, data, length_bytes, cause, deadline, stored)

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
        data, length_bytes = _bytes_of(buffer, nbytes)
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
            return self._submit(Direction.READ, block, data, length_bytes, cause, deadline, None)

    def hurry(self, handle: Handle, deadline: int) -> None:
        """Make a transfer in flight at least as urgent as `deadline`; does not block.

        For what was prefetched and is now waited for. A finished transfer is left alone.
        """
        with self._queue.lock:
            self._queue.hurry(handle, deadline)

    def contains(self, block: str) -> bool:
        """Whether `block` is stored or being written; does not block."""
        with self._queue.lock:
            return self._order.length_of(block) is not None

    def nbytes(self, block: str) -> int:
        """The logical length of `block` (of its last submitted write); StorageError if unknown."""
        with self._queue.lock:
            length_bytes = self._order.length_of(block)
        if length_bytes is None:
            raise StorageError("no such block", path=self._file.path, block=block)
        return length_bytes

    def delete(self, block: str) -> None:
        """Forget `block`, if it is there; waits for its writes, not for its reads."""
        self._refuse_on_worker()
        with self._queue.lock:
            while self._order.is_being_written(block):
                self._queue.changed.wait()
            self._queue.check()
            self._table.remove(block)
            self._queue.changed.notify_all()

    def retain(self) -> RetainedBlocks:
        """Pin the extents of all finished blocks, as a commit does, until `release`; O(blocks).

        Writes in flight are not part of it: `drain` first.
        """
        with self._queue.lock:
            return self._table.retain()

    def release(self, retained: RetainedBlocks) -> None:
        """Let the extents of `retained` be reused; a second call does nothing."""
        with self._queue.lock:
            self._table.release(retained)
            self._queue.changed.notify_all()

    def drain(self) -> None:
        """Wait until nothing is in flight; raise the latched failure, if any."""
        self._refuse_on_worker()
        with self._queue.lock:
            self._queue.drain()
            if self._queue.failure is not None:
                raise self._queue.failure.with_traceback(None)

    def sync(self) -> None:
        """Drain, then return when all written bytes are durable; StorageError if they are not."""
        self.drain()
        try:
            self._file.sync()
        except OSError as error:
            failure = StorageError(f"sync failed: {describe_os_error(error)}", path=self._file.path)
            failure.__cause__ = error
            with self._queue.lock:
                self._queue.latch(failure)
            raise failure from error

    def stats(self) -> StoreStats:
        """The counters now; does not block."""
        with self._queue.lock:
            allocator = self._table.allocator
            return StoreStats(
                read=self._lanes[Direction.READ].copy(),
                written=self._lanes[Direction.WRITE].copy(),
                used_bytes=allocator.used_bytes,
                used_bytes_max=allocator.used_bytes_max,
                capacity_bytes=allocator.capacity_bytes,
                num_blocks=len(self._table),
                num_transfers=self._queue.num_transfers,
                num_transfers_max=self._queue.num_transfers_peak,
                bounce_buffer_bytes=BOUNCE_BYTES * len(self._workers),
            )

    def close(self, *, delete: bool = False) -> None:
        """Refuse new transfers, finish those in flight and give up the directory.

        Raises nothing for failed transfers (their handles do). `delete` removes the store's files.
        A second call does nothing. Waits for the transfers in flight, never for callers.
        """
        self._refuse_on_worker()
        with self._queue.lock:
            self._queue.closing = True
            self._queue.changed.notify_all()
            self._queue.drain()
            self._queue.stop()
            first, self._closed = not self._closed, True
        for worker in self._workers:
            worker.join()
        if first:
            try:
                self._file.close()
                if delete:
                    delete_data_file(self.directory)
            finally:
                self._lock_file.release(delete)

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # The first three are called with the queue's lock held, the others without it.

    def _reserve(self, block: str, length_bytes: int) -> StoredBlock:
        """A fresh version, waiting for transfers in flight that may free room."""
        while True:
            stored = self._table.reserve(length_bytes)
            if stored is not None:
                return stored
            if self._order.num_submitted == 0:
                break
            self._queue.changed.wait()
            self._queue.check()
        allocator = self._table.allocator
        raise StorageError(
            f"offload.nvme.capacity: {allocator.capacity_bytes} bytes, of which "
            f"{allocator.used_bytes} are in use; raise the capacity",
            path=self._file.path,
            block=block,
            wanted_bytes=length_bytes,
        )

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
        stored: StoredBlock | None,
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
            handle=Handle(block, self._refuse_on_worker),
        )
        self._order.start(transfer)
        return transfer.handle

    def _complete(self, requests: list[Request], outcomes: list[Outcome]) -> None:
        finished: list[Transfer] = []
        with self._queue.lock:
            lane = self._lanes[requests[0].transfer.direction]
            lane.num_requests += not requests[0].skip
            for request, outcome in zip(requests, outcomes):
                transfer, error = request.transfer, outcome.error
                transfer.running -= 1
                if error is not None:
                    transfer.error = transfer.error or error
                    if not isinstance(error, CorruptBlock):
                        self._queue.latch(error)
                elif not request.skip:
                    payload_bytes = request.stop - request.start
                    lane.count(transfer.cause, payload_bytes, outcome.padding_bytes)
                if transfer.running == 0 and (transfer.exhausted or transfer.error is not None):
                    finished += self._order.settle(transfer)
        if not finished:
            return
        for done in finished:
            done.handle.complete(done.error)
        with self._queue.lock:
            self._order.leave(len(finished))

    def _work(self, bounce: memoryview) -> None:
        while (requests := self._queue.take()) is not None:
            skip = requests[0].skip
            outcomes = [Outcome()] if skip else self._io.run(requests, bounce)
            self._complete(requests, outcomes)  # an error reaches the caller at its next wait
            del requests, outcomes  # no buffer is kept while waiting for work

    def _check_call(self, cause: str) -> None:
        if cause not in CAUSES:
            raise ValueError(f"cause {cause!r} is not one of {', '.join(CAUSES)}")
        self._refuse_on_worker()

    def _refuse_on_worker(self) -> None:
        if threading.current_thread() in self._workers:
            raise RuntimeError("a callback must not wait for, or call, the store that runs it")


def _bytes_of(buffer: Any, nbytes: int | None) -> tuple[memoryview, int]:
    """`buffer` as contiguous bytes, and how many of them are the block's."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    data = view.cast("B") if view.nbytes else memoryview(bytearray())
    length_bytes = data.nbytes if nbytes is None else nbytes
    if not 0 <= length_bytes <= data.nbytes:
        raise ValueError(f"{length_bytes} bytes of a buffer of {data.nbytes}")
    return data, length_bytes
