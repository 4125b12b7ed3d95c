"""Reading stored blocks back, chunk by chunk, against their checksums.

For what has no transfer queue: a store that is being opened, and the inspection of one from
outside. One buffer of one chunk; blocks until read. Knows extents and checksums, not commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.nvme.aligned import AccessMode, aligned_buffer
from offload.nvme.files import StorageFile, read_fully
from offload.nvme.table import StoredBlock
from ops.checksum import CHUNK_BYTES, checksum, num_chunks
from ops.errors import StorageError
from ops.units import round_up


@dataclass(frozen=True)
class Damage:
    """A chunk that does not verify or cannot be read: `reason` is a clause.

    `offset` in `path` is where the chunk starts.
    """

    path: str
    offset: int
    block: str
    chunk: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}, byte {self.offset}: block {self.block!r}, chunk {self.chunk}"
        return f"{where}: {self.reason}"


class BlockReader:
    """Verifies blocks in the data files of a store, one per drive."""

    def __init__(self, files: Sequence[StorageFile], access: AccessMode) -> None:
        self._files = files
        self._io_alignment_bytes = access.io_alignment_bytes
        self._buffer = aligned_buffer(CHUNK_BYTES, access.alignment_bytes).data

    def chunks(self, block: str, stored: StoredBlock) -> Iterator[tuple[int, Damage | None]]:
        """Read every chunk of `stored`: (its stored bytes, what is wrong with it)."""
        for chunk in range(num_chunks(stored.nbytes)):
            start, nbytes = chunk * CHUNK_BYTES, stored.stored_bytes(chunk)
            yield nbytes, self._check(block, stored, chunk, start, start + nbytes)

    def first_damage(self, block: str, stored: StoredBlock) -> Damage | None:
        """The first damaged chunk of `stored`, if there is one."""
        return next((damage for _, damage in self.chunks(block, stored) if damage), None)

    def _check(
        self, block: str, stored: StoredBlock, chunk: int, start: int, stop: int
    ) -> Damage | None:
        done_bytes, where = 0, None
        for drive, offset, nbytes in _pieces(stored, start, stop):
            file = self._files[drive]
            where = where or (file.path, offset)
            # Whole units are read; the last one's padding lies in the extent and in the file.
            wanted_bytes = round_up(nbytes, self._io_alignment_bytes)
            memory = self._buffer[done_bytes : done_bytes + wanted_bytes]
            try:
                read_fully(
                    file, [memory], offset, block=block, io_alignment_bytes=self._io_alignment_bytes
                )
            except StorageError as error:
                return Damage(*where, block, chunk, str(error))
            done_bytes += nbytes
        assert where is not None
        found = checksum(self._buffer[:done_bytes])
        if found == stored.checksums[chunk]:
            return None
        reason = f"checksum mismatch: stored {stored.checksums[chunk]:016x}, read {found:016x}"
        return Damage(*where, block, chunk, reason)


def _pieces(stored: StoredBlock, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(drive, offset, nbytes) of the bytes `[start, stop)` of a block, in order."""
    begin = 0
    for extent in stored.extents:
        end = begin + extent.nbytes
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield extent.drive, extent.offset + first - begin, last - first
        begin = end
