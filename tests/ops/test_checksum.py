"""Chunked checksums: every chunk counts, and only whole chunks are compared."""

from __future__ import annotations

import numpy as np
import pytest

from ops.checksum import (
    CHUNK_BYTES,
    checksum,
    chunk_checksums,
    empty_checksums,
    fill_checksums,
    first_mismatch,
    num_chunks,
)


def _bytes(nbytes: int) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(nbytes).bytes(nbytes)))


def test_matches_the_published_value_of_xxh3():
    assert checksum(memoryview(b"")) == 0x2D06800538D394C2


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, 0), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (3 * CHUNK_BYTES, 3)],
)
def test_counts_chunks(nbytes, expected):
    assert num_chunks(nbytes) == expected
    assert len(chunk_checksums(_bytes(nbytes))) == expected


def test_pieces_filled_in_any_order_equal_the_whole():
    data = _bytes(3 * CHUNK_BYTES + 5)
    pieces = empty_checksums(data.nbytes)
    fill_checksums(pieces, data[2 * CHUNK_BYTES :], 2 * CHUNK_BYTES)
    fill_checksums(pieces, data[: 2 * CHUNK_BYTES], 0)
    assert pieces == chunk_checksums(data)


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4])
def test_names_the_chunk_of_a_flipped_bit(at):
    data = _bytes(2 * CHUNK_BYTES + 5)
    checksums = chunk_checksums(data)
    assert first_mismatch(checksums, data, 0) is None
    data[at] ^= 0x10
    mismatch = first_mismatch(checksums, data, 0)
    assert mismatch is not None and mismatch[0] == at // CHUNK_BYTES


def test_verifies_a_part_at_its_place():
    data = _bytes(4 * CHUNK_BYTES)
    checksums = chunk_checksums(data)
    part = data[CHUNK_BYTES : 3 * CHUNK_BYTES]
    assert first_mismatch(checksums, part, CHUNK_BYTES) is None
    mismatch = first_mismatch(checksums, part, 2 * CHUNK_BYTES)
    assert mismatch is not None and mismatch[0] == 2
