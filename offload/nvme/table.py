"""Which extent holds which block, and who still needs it: shadow paging in memory.

Every write of a block takes fresh extents; the table entry switches when the write is whole. An
extent is counted ("pinned") by the table or the write that fills it, by every read in flight and by
every retained snapshot, and goes back to the allocator when the last of them lets go.

Pure bookkeeping: no I/O, no threads. The store's lock serialises calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from offload.nvme.extents import Extent
from offload.nvme.striping import BlockAllocator
from ops.checksum import CHUNK_BYTES, empty_checksums
from ops.units import round_up


@dataclass(slots=True, eq=False)
class StoredBlock:
    """One version of a block on the disk.

    `nbytes` is its logical length, without padding; the `extents`, in the order of its bytes, are
    the room it takes: one, unless free room is fragmented. `checksums` has one xxh3-64 per chunk of
    the stored bytes. `version` is the caller's number for this content; what is `transient` is in
    no commit. `encoded_bytes` has the length of each chunk that is stored encoded (0: it is raw);
    None when none is.
    """

    extents: list[Extent]
    nbytes: int
    checksums: array[int]
    pins: int = 1
    version: int = 0
    transient: bool = False
    encoded_bytes: array[int] | None = None

    def locate(self, start: int) -> tuple[int, int, int]:
        """Drive and file offset of byte `start` of the block, and the bytes that follow there."""
        for extent in self.extents:
            if start < extent.nbytes:
                return extent.drive, extent.offset + start, extent.nbytes - start
            start -= extent.nbytes
        raise ValueError(f"byte {start} behind the last extent")

    def stored_bytes(self, chunk: int) -> int:
        """How many bytes a checksum chunk has on the disk, without padding."""
        encoded_bytes = 0 if self.encoded_bytes is None else self.encoded_bytes[chunk]
        return encoded_bytes or min(CHUNK_BYTES, self.nbytes - chunk * CHUNK_BYTES)

    def expect_encoded(self) -> None:
        """Make room for lengths of encoded chunks, before the block is written."""
        self.encoded_bytes = array("I", bytes(4 * len(self.checksums)))

    def one_drive_until(self, start: int, stop: int) -> int:
        """Where a request for bytes `[start, stop)` should end to stay on one drive.

        `start` is a multiple of a checksum chunk, and so is the result, unless it is `stop`.
        """
        if len(self.extents) == 1:
            return stop
        drive, end = self.locate(start)[0], 0
        for extent in self.extents:
            if end > start and extent.drive != drive:
                return min(stop, round_up(end, CHUNK_BYTES))
            end += extent.nbytes
        return stop


class RetainedBlocks:
    """The blocks of one moment, whose extents stay untouched until `BlockTable.release`."""

    def __init__(self, blocks: dict[str, StoredBlock]) -> None:
        self.blocks: Mapping[str, StoredBlock] = MappingProxyType(blocks)
        self.released = False


@dataclass(slots=True, eq=False)
class HeldVersion:
    """A version of `block` that stays on the disk while newer ones are written."""

    block: str
    stored: StoredBlock
    done: bool = False


class BlockTable:
    """Names to stored blocks, over one allocator."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._blocks: dict[str, StoredBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block: str) -> StoredBlock | None:
        """The current version of `block`, or None."""
        return self._blocks.get(block)

    def blocks(self) -> dict[str, StoredBlock]:
        """The current version of every block; a copy."""
        return dict(self._blocks)

    def reserve(self, nbytes: int, version: int = 0, transient: bool = False) -> StoredBlock | None:
        """A fresh, unnamed version with one pin, or None (and no change) when it does not fit."""
        extents = self.allocator.allocate_pieces(nbytes)
        if extents is None:
            return None
        checksums = empty_checksums(nbytes)
        return StoredBlock(extents, nbytes, checksums, version=version, transient=transient)

    def publish(self, block: str, stored: StoredBlock) -> None:
        """Make `stored` the version of `block`, taking over its writer's pin; unpin the old one."""
        if stored.encoded_bytes is not None and not any(stored.encoded_bytes):
            stored.encoded_bytes = None
        old = self._blocks.get(block)
        self._blocks[block] = stored
        if old is not None:
            self.unpin(old)

    def remove(self, block: str) -> None:
        """Forget `block`, if there is one; its extent is freed once nobody needs it."""
        stored = self._blocks.pop(block, None)
        if stored is not None:
            self.unpin(stored)

    def pin(self, stored: StoredBlock) -> None:
        """Keep the extent of `stored` until the matching `unpin`."""
        assert stored.pins > 0
        stored.pins += 1

    def unpin(self, stored: StoredBlock) -> None:
        """Undo one pin; the last one frees the extent."""
        assert stored.pins > 0
        stored.pins -= 1
        if stored.pins == 0:
            for extent in stored.extents:
                self.allocator.free(extent)

    def retain(self, blocks: dict[str, StoredBlock]) -> RetainedBlocks:
        """Pin these versions, each of which has a pin already; O(number of blocks)."""
        for stored in blocks.values():
            self.pin(stored)
        return RetainedBlocks(blocks)

    def release(self, retained: RetainedBlocks) -> None:
        """Unpin what `retained` pinned; a second release does nothing."""
        if retained.released:
            return
        retained.released = True
        for stored in retained.blocks.values():
            self.unpin(stored)

    def adopt(self, commits: Sequence[dict[str, StoredBlock]]) -> list[RetainedBlocks]:
        """Retain commits of an earlier process, oldest first; the last is current, too.

        Claims every extent once: what commits share is one StoredBlock object, with no pins yet.
        The table must be empty. Raises ValueError when an extent cannot be claimed; then nothing
        has changed.
        """
        assert not self._blocks
        versions = {id(stored): stored for blocks in commits for stored in blocks.values()}
        self.allocator.claim(x for stored in versions.values() for x in stored.extents)
        self._blocks = dict(commits[-1])
        for blocks in (self._blocks, *commits):
            for stored in blocks.values():
                stored.pins += 1
        return [RetainedBlocks(blocks) for blocks in commits]
