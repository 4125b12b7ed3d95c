"""Checksums of stored bytes: xxh3-64 over each chunk of 1 MiB.

A chunk is the smallest range that can be read and verified alone. The checksums of a block are kept
away from its data (in the table that also holds its place on the disk), so that data found in the
wrong place fails just as a flipped bit does.

Invariants: chunk `i` of a block covers bytes `[i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES)` of its
stored bytes, the last one possibly fewer; padding behind the stored bytes is not covered. xxhash
releases the interpreter lock for inputs of this size, so threads hash in parallel. It detects
accidents, not an adversary. This module does not know files.
"""

from __future__ import annotations

from array import array

import xxhash

CHUNK_BYTES = 1 << 20


def checksum(data: memoryview) -> int:
    """The xxh3-64 of `data` (contiguous bytes) as an unsigned 64-bit integer; does not block."""
    return xxhash.xxh3_64_intdigest(data)


def num_chunks(nbytes: int) -> int:
    """How many checksums `nbytes` stored bytes have; none for none."""
    return -(-nbytes // CHUNK_BYTES)


def empty_checksums(nbytes: int) -> array[int]:
    """Zeroed room (unsigned 64-bit each) for the checksums of `nbytes` stored bytes."""
    return array("Q", bytes(8 * num_chunks(nbytes)))


def chunk_checksums(data: memoryview) -> array[int]:
    """The checksum of each chunk of `data`, whose first byte starts a chunk; does not block."""
    checksums = empty_checksums(data.nbytes)
    fill_checksums(checksums, data, 0)
    return checksums


def fill_checksums(checksums: array[int], data: memoryview, start: int) -> None:
    """Write the checksums of `data`, which lies at byte `start` of its block, into `checksums`.

    `start` is a multiple of `CHUNK_BYTES`. Threads may fill disjoint ranges of one array.
    """
    assert start % CHUNK_BYTES == 0
    first = start // CHUNK_BYTES
    for index in range(num_chunks(data.nbytes)):
        chunk = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        checksums[first + index] = checksum(chunk)


def first_mismatch(checksums: array[int], data: memoryview, start: int) -> tuple[int, int] | None:
    """The first chunk of `data` that does not verify, as (chunk index, its checksum), or None.

    `data` lies at byte `start` (a multiple of `CHUNK_BYTES`) of the block that `checksums`
    describe, and ends at a chunk border or at the end of the block.
    """
    assert start % CHUNK_BYTES == 0
    first = start // CHUNK_BYTES
    for index in range(num_chunks(data.nbytes)):
        found = checksum(data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        if found != checksums[first + index]:
            return first + index, found
    return None
