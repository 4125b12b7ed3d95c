"""One request on the disk: pieces, padding, bounce buffer, checksums.

A request of an aligned buffer goes straight from or to the caller's memory. With direct I/O the
last unit of a block is padded: into the scratch behind the logical bytes if the caller's buffer is
long enough, else through the worker's bounce buffer. An unaligned buffer goes through the bounce
buffer as a whole, one checksum chunk at a time.

Invariants: checksums are computed while the bytes are in the cache, before a write and after a
read; a request covers whole checksum chunks. Called on worker threads only; blocks. No locks, no
queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from offload.nvme.aligned import AccessMode, aligned_buffer
from offload.nvme.files import Preallocator, StorageFile, read_fully, write_fully
from offload.nvme.table import StoredBlock
from offload.nvme.transfers import Direction, Request
from ops.checksum import CHUNK_BYTES, fill_checksums, first_mismatch
from ops.errors import StorageError
from ops.units import round_up

BOUNCE_BYTES = CHUNK_BYTES


def new_bounce_buffer(access: AccessMode) -> memoryview:
    """A worker's own bounce buffer, `BOUNCE_BYTES` long."""
    return aligned_buffer(BOUNCE_BYTES, access.alignment_bytes).data


class CorruptBlock(StorageError):
    """What was read does not match its checksum. Not latched: other blocks may be whole."""


class RequestIo:
    """Runs requests on one data file."""

    def __init__(self, file: StorageFile, access: AccessMode, preallocator: Preallocator) -> None:
        self._file = file
        self._io_alignment_bytes = access.io_alignment_bytes
        self._preallocator = preallocator

    def run(self, request: Request, bounce: memoryview) -> int:
        """Do `request`; returns the bytes of padding moved with it.

        Raises StorageError when the system call fails or a checksum does not match; then nothing of
        the request may be used. `bounce` belongs to the calling worker.
        """
        transfer = request.transfer
        stored = transfer.stored
        assert stored is not None
        if request.start == request.stop:
            return 0
        if transfer.direction is Direction.READ:
            return self._read(request, stored, bounce)
        return self._write(request, stored, bounce)

    def padded(self, nbytes: int) -> int:
        """`nbytes` as a transfer moves it."""
        return round_up(nbytes, self._io_alignment_bytes)

    def _read(self, request: Request, stored: StoredBlock, bounce: memoryview) -> int:
        transfer, padding_bytes = request.transfer, 0
        for start, stop, direct in self._pieces(request, stored):
            wanted_bytes = self.padded(stop - start)
            memory = transfer.data[start : start + wanted_bytes] if direct else bounce
            read_fully(
                self._file,
                [memory[:wanted_bytes]],
                stored.locate(start)[1],
                block=transfer.block,
                io_alignment_bytes=self._io_alignment_bytes,
            )
            if not direct:
                transfer.data[start:stop] = bounce[: stop - start]
            padding_bytes += wanted_bytes - (stop - start)
        self._verify(request, stored)
        return padding_bytes

    def _write(self, request: Request, stored: StoredBlock, bounce: memoryview) -> int:
        transfer, padding_bytes = request.transfer, 0
        data = transfer.data[request.start : request.stop]
        fill_checksums(stored.checksums, data, request.start)
        for start, stop, direct in self._pieces(request, stored):
            wanted_bytes = self.padded(stop - start)
            memory = transfer.data[start : start + wanted_bytes] if direct else bounce
            if not direct:
                bounce[: stop - start] = transfer.data[start:stop]
                bounce[stop - start : wanted_bytes] = bytes(wanted_bytes - (stop - start))
            offset = stored.locate(start)[1]
            end = offset + wanted_bytes
            self._preallocator.ensure(end, transfer.block, offset, wanted_bytes)
            write_fully(
                self._file,
                [memory[:wanted_bytes]],
                offset,
                block=transfer.block,
                io_alignment_bytes=self._io_alignment_bytes,
            )
            padding_bytes += wanted_bytes - (stop - start)
        return padding_bytes

    def _pieces(self, request: Request, stored: StoredBlock) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, direct) of each transfer: from the caller's memory, or via bounce.

        Each lies in one extent; all but the block's last start and stop at multiples of the
        alignment.
        """
        for start, stop, direct in self._runs(request):
            while start < stop:
                end = min(stop, start + stored.locate(start)[2])
                yield start, end, direct
                start = end

    def _runs(self, request: Request) -> Iterator[tuple[int, int, bool]]:
        """As `_pieces`, were there only one extent."""
        transfer, start, stop = request.transfer, request.start, request.stop
        if transfer.address % self._io_alignment_bytes:
            for piece in range(start, stop, BOUNCE_BYTES):
                yield piece, min(piece + BOUNCE_BYTES, stop), False
            return
        body_stop = stop
        if self.padded(stop) > transfer.data.nbytes:
            body_stop = stop - stop % self._io_alignment_bytes
        if body_stop > start:
            yield start, body_stop, True
        if body_stop < stop:
            yield body_stop, stop, False

    def _verify(self, request: Request, stored: StoredBlock) -> None:
        transfer = request.transfer
        data = transfer.data[request.start : request.stop]
        mismatch = first_mismatch(stored.checksums, data, request.start)
        if mismatch is None:
            return
        chunk, found = mismatch
        start = chunk * CHUNK_BYTES
        chunk_bytes = min(CHUNK_BYTES, transfer.nbytes - start)
        raise CorruptBlock(
            f"checksum mismatch: stored {stored.checksums[chunk]:016x}, read {found:016x}; "
            "the block is corrupt and was not used",
            path=self._file.path,
            offset=stored.locate(start)[1],
            block=transfer.block,
            wanted_bytes=chunk_bytes,
            done_bytes=chunk_bytes,
        )
