"""Reading stored blocks back, chunk by chunk, against their checksums.

For what has no transfer queue: a store that is being opened, and readers from outside. One buffer a
reader; blocks until read. Knows extents and checksums, not commits; does not decode.
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
    """Reads and verifies runs of chunks in the data files of a store, one per drive."""

    def __init__(
        self, files: Sequence[StorageFile], access: AccessMode, buffer: memoryview | None = None
    ) -> None:
        """`buffer`: aligned memory of as many whole chunks as one `read` may ask for; default 1."""
        self._files = files
        self._io_alignment_bytes = access.io_alignment_bytes
        if buffer is None:
            buffer = aligned_buffer(CHUNK_BYTES, access.alignment_bytes).data
        self._buffer = buffer
        self._chunks_max = buffer.nbytes // CHUNK_BYTES

    def read(
        self, block: str, stored: StoredBlock, first: int, num: int
    ) -> list[memoryview | Damage]:
        """Chunks `[first, first + num)`: the stored bytes of each, or what is wrong with it.

        Raw neighbours are read by one request. The bytes are valid until the next call.
        """
        assert 0 < num <= self._chunks_max
        slots = [self._buffer[x * CHUNK_BYTES : (x + 1) * CHUNK_BYTES] for x in range(num)]
        if num > 1 and stored.encoded_bytes is None:
            start, stop = first * CHUNK_BYTES, min((first + num) * CHUNK_BYTES, stored.nbytes)
            if self._fill(block, stored, start, stop, self._buffer) is None:
                return [self._check(block, stored, first + x, slots[x]) for x in range(num)]
        # One by one: frames, whose places have gaps, or to learn which of them cannot be read.
        found: list[memoryview | Damage] = []
        for chunk, slot in enumerate(slots, first):
            start = chunk * CHUNK_BYTES
            stop = start + stored.stored_bytes(chunk)
            reason = self._fill(block, stored, start, stop, slot)
            if reason is None:
                found.append(self._check(block, stored, chunk, slot))
            else:
                found.append(self._damage(block, stored, chunk, reason))
        return found

    def chunks(self, block: str, stored: StoredBlock) -> Iterator[tuple[int, Damage | None]]:
        """Read every chunk of `stored`: (its stored bytes, what is wrong with it)."""
        total = num_chunks(stored.nbytes)
        for first in range(0, total, self._chunks_max):
            num = min(self._chunks_max, total - first)
            for chunk, found in enumerate(self.read(block, stored, first, num), first):
                damage = found if isinstance(found, Damage) else None
                yield stored.stored_bytes(chunk), damage

    def first_damage(self, block: str, stored: StoredBlock) -> Damage | None:
        """The first damaged chunk of `stored`, if there is one."""
        return next((damage for _, damage in self.chunks(block, stored) if damage), None)

    def _fill(
        self, block: str, stored: StoredBlock, start: int, stop: int, memory: memoryview
    ) -> str | None:
        """Read bytes `[start, stop)` of the block's places; why that is impossible, if it is."""
        done_bytes = 0
        for drive, offset, nbytes in pieces_of(stored, start, stop):
            # Whole units are read; the last one's padding lies in the extent and in the file.
            wanted_bytes = round_up(nbytes, self._io_alignment_bytes)
            piece = memory[done_bytes : done_bytes + wanted_bytes]
            try:
                read_fully(
                    self._files[drive],
                    [piece],
                    offset,
                    block=block,
                    io_alignment_bytes=self._io_alignment_bytes,
                )
            except StorageError as error:
                return str(error)
            done_bytes += nbytes
        return None

    def _check(
        self, block: str, stored: StoredBlock, chunk: int, slot: memoryview
    ) -> memoryview | Damage:
        data = slot[: stored.stored_bytes(chunk)]
        found = checksum(data)
        if found == stored.checksums[chunk]:
            return data
        reason = f"checksum mismatch: stored {stored.checksums[chunk]:016x}, read {found:016x}"
        return self._damage(block, stored, chunk, reason)

    def _damage(self, block: str, stored: StoredBlock, chunk: int, reason: str) -> Damage:
        drive, offset, _ = stored.locate(chunk * CHUNK_BYTES)
        return Damage(self._files[drive].path, offset, block, chunk, reason)


def pieces_of(stored: StoredBlock, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(drive, offset, nbytes) of the bytes `[start, stop)` of a block, in order."""
    begin = 0
    for extent in stored.extents:
        end = begin + extent.nbytes
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield extent.drive, extent.offset + first - begin, last - first
        begin = end
