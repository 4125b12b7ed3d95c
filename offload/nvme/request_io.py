"""Requests on the disk: parts, padding, bounce buffer, checksums.

A request is cut into parts, each a piece of memory for one place on one drive; parts that lie side
by side there, of one request or of several neighbours, move by one system call. The memory is the
caller's where its address is aligned. With direct I/O the last unit of a block is padded: into the
scratch behind the logical bytes if the caller's buffer is long enough, else through the worker's
bounce buffer. An unaligned buffer goes through the bounce buffer as a whole.

Invariants: checksums of a write are computed while its first call is in flight, so that the drive
never waits for them, and those of a read right after it, while the bytes are in the cache; a
request covers whole checksum chunks. A request that fails alone is never tried again;
neighbours whose common call failed are, one by one, so that the error names the right block. Called
on worker threads only; blocks. No locks, no queue.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.nvme.aligned import AccessMode, aligned_buffer
from offload.nvme.files import Preallocator, StorageFile, read_fully, write_fully
from offload.nvme.movers import Movers
from offload.nvme.table import StoredBlock
from offload.nvme.transfers import Direction, Request, Transfer
from ops.checksum import CHUNK_BYTES, fill_checksums, first_mismatch
from ops.errors import StorageError
from ops.units import round_up

log = logging.getLogger(__name__)

BOUNCE_BYTES = CHUNK_BYTES


def new_bounce_buffer(access: AccessMode) -> memoryview:
    """A worker's own bounce buffer, `BOUNCE_BYTES` long."""
    return aligned_buffer(BOUNCE_BYTES, access.alignment_bytes).data


class CorruptBlock(StorageError):
    """What was read does not match its checksum. Not latched: other blocks may be whole."""


@dataclass(frozen=True, slots=True)
class Drive:
    """One data file, and who reserves its room."""

    file: StorageFile
    preallocator: Preallocator


@dataclass(slots=True)
class Outcome:
    """What became of one request: the bytes moved for it and the padding, or why it failed."""

    payload_bytes: int = 0
    padding_bytes: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class Part:
    """`memory` for bytes `[start, stop)` of a block and their padding, at `offset` of `drive`."""

    request: Request
    start: int
    stop: int
    drive: int
    offset: int
    memory: memoryview
    bounced: bool

    @property
    def end(self) -> int:
        """Where the next part on the drive would begin."""
        return self.offset + self.memory.nbytes


class CallFailed(Exception):
    """A system call failed with `error`; `request` is the first that it may not have moved."""

    def __init__(self, request: Request, error: StorageError) -> None:
        super().__init__(str(error))
        self.request = request
        self.error = error


class RequestIo:
    """Runs requests on the data files of a store."""

    def __init__(self, drives: Sequence[Drive], access: AccessMode, calls_max: int) -> None:
        """`drives` in the order of `Extent.drive`; `calls_max` transfers are in the system at once.

        With a few more workers than that, a call is always ready when one has been made. Starts
        the threads that make the calls; `stop` ends them.
        """
        self._drives = drives
        self._movers = Movers(calls_max)
        self._alignment_bytes = access.alignment_bytes
        self._io_alignment_bytes = access.io_alignment_bytes

    def stop(self) -> None:
        """End the threads that make the calls; nobody is in `run` any more, or ever again."""
        self._movers.stop()

    def run(self, requests: Sequence[Request], bounce: memoryview) -> list[Outcome]:
        """Do `requests`, which lie side by side on one drive when there are several; never raises.

        What failed must not be used: its system call failed, or a checksum does not match. After a
        failed call the requests behind it are not tried and fail as well. `bounce` belongs to the
        calling worker.
        """
        outcomes = [Outcome() for _ in requests]
        first = 0  # of those still to be done, one by one
        if len(requests) > 1:
            try:
                self.move(requests, bounce, outcomes)
                first = len(requests)
            except CallFailed as failed:
                first = next(i for i, request in enumerate(requests) if request is failed.request)
                log.warning("%s; trying %d blocks one by one", failed, len(requests) - first)
            except Exception as error:
                return [Outcome(error=error) for _ in requests]
        failure: Exception | None = None
        for index, (request, outcome) in enumerate(zip(requests, outcomes)):
            try:
                if failure is None and index >= first:
                    outcome.payload_bytes = outcome.padding_bytes = 0
                    self.move([request], bounce, [outcome])
                if failure is None and request.transfer.direction is Direction.READ:
                    self.verify(request)
            except CorruptBlock as error:
                outcome.error = error
            except CallFailed as failed:
                failure = failed.error
            except Exception as error:
                failure = error
            outcome.error = outcome.error or failure
        return outcomes

    def move(
        self, requests: Sequence[Request], bounce: memoryview, outcomes: Sequence[Outcome]
    ) -> None:
        """All parts of `requests`, in as few calls as lie side by side; raises CallFailed."""
        # Neighbours are moved with the gaps between them, so that they are one run of bytes.
        unit = self._io_alignment_bytes if len(requests) == 1 else self._alignment_bytes
        call: list[Part] = []
        unhashed: list[Request] = []
        bounced_bytes = 0
        for request, outcome in zip(requests, outcomes):
            transfer, stored = request.transfer, stored_of(request)
            is_write = transfer.direction is Direction.WRITE
            if is_write:
                unhashed.append(request)
            for start, stop, direct in self._pieces(request, stored, unit):
                drive, offset, _ = stored.locate(start)
                wanted_bytes = round_up(stop - start, unit)
                fits = direct or bounced_bytes + wanted_bytes <= bounce.nbytes
                if call and not (fits and (call[-1].drive, call[-1].end) == (drive, offset)):
                    self.call(call, unhashed)
                    call, unhashed, bounced_bytes = [], [], 0
                if direct:
                    memory = transfer.data[start : start + wanted_bytes]
                else:
                    memory = bounce[bounced_bytes : bounced_bytes + wanted_bytes]
                    bounced_bytes += wanted_bytes
                    if is_write:
                        memory[: stop - start] = transfer.data[start:stop]
                        memory[stop - start :] = bytes(wanted_bytes - (stop - start))
                call.append(Part(request, start, stop, drive, offset, memory, not direct))
                outcome.payload_bytes += stop - start
                outcome.padding_bytes += wanted_bytes - (stop - start)
        if call:
            self.call(call, unhashed)

    def call(self, parts: list[Part], unhashed: Sequence[Request] = ()) -> None:
        """Move `parts`, which lie side by side on one drive, by one system call (if not short).

        Meanwhile computes the checksums of the writes `unhashed`.
        """
        first, last = parts[0], parts[-1]
        drive, transfer = self._drives[first.drive], first.request.transfer
        is_write = transfer.direction is Direction.WRITE
        move_fully = write_fully if is_write else read_fully
        done_bytes = wanted_bytes = last.end - first.offset
        failure = None
        try:
            if is_write:
                drive.preallocator.ensure(last.end, transfer.block, first.offset, wanted_bytes)
            call = self._movers.start(
                functools.partial(
                    move_fully,
                    drive.file,
                    [part.memory for part in parts],
                    first.offset,
                    block=transfer.block,
                    io_alignment_bytes=self._io_alignment_bytes,
                )
            )
            try:
                for request in unhashed:
                    data = request.transfer.data[request.start : request.stop]
                    fill_checksums(stored_of(request).checksums, data, request.start)
            finally:
                call.wait()  # or the caller's memory would be in use behind its back
        except StorageError as error:
            failure, done_bytes = error, error.done_bytes or 0
        for part in parts:
            if part.end - first.offset > done_bytes:
                assert failure is not None
                raise CallFailed(part.request, failure) from failure
            if part.bounced and not is_write:
                part.request.transfer.data[part.start : part.stop] = part.memory[
                    : part.stop - part.start
                ]

    def _pieces(
        self, request: Request, stored: StoredBlock, unit: int
    ) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, direct) of each part: from the caller's memory, or via bounce.

        Each lies in one extent; all but the block's last start and stop at multiples of the
        alignment.
        """
        for start, stop, direct in self._runs(request, unit):
            while start < stop:
                end = min(stop, start + stored.locate(start)[2])
                yield start, end, direct
                start = end

    def _runs(self, request: Request, unit: int) -> Iterator[tuple[int, int, bool]]:
        """As `_pieces`, were there only one extent."""
        transfer, start, stop = request.transfer, request.start, request.stop
        if transfer.address % self._io_alignment_bytes:
            for piece in range(start, stop, BOUNCE_BYTES):
                yield piece, min(piece + BOUNCE_BYTES, stop), False
            return
        body_stop = stop
        if round_up(stop, unit) > transfer.data.nbytes:
            body_stop = stop - stop % unit
        if body_stop > start:
            yield start, body_stop, True
        if body_stop < stop:
            yield body_stop, stop, False

    def verify(self, request: Request) -> None:
        """Raise CorruptBlock unless the raw bytes that were read are those that were written."""
        transfer, stored = request.transfer, stored_of(request)
        data = transfer.data[request.start : request.stop]
        mismatch = first_mismatch(stored.checksums, data, request.start)
        if mismatch is not None:
            chunk, found = mismatch
            chunk_bytes = min(CHUNK_BYTES, transfer.nbytes - chunk * CHUNK_BYTES)
            raise self.corrupt(
                transfer,
                chunk,
                f"checksum mismatch: stored {stored.checksums[chunk]:016x}, read {found:016x}",
                chunk_bytes,
            )

    def corrupt(self, transfer: Transfer, chunk: int, reason: str, nbytes: int) -> CorruptBlock:
        """The error for a chunk of which `nbytes` were read; names where it is."""
        assert transfer.stored is not None
        drive, offset, _ = transfer.stored.locate(chunk * CHUNK_BYTES)
        return CorruptBlock(
            f"{reason}; the block is corrupt and was not used",
            path=self._drives[drive].file.path,
            offset=offset,
            block=transfer.block,
            wanted_bytes=nbytes,
            done_bytes=nbytes,
        )


def stored_of(request: Request) -> StoredBlock:
    """The version of the block that `request` writes or reads."""
    stored = request.transfer.stored
    assert stored is not None
    return stored
