"""Encoded frames: at most 1 MiB of a block, its byte planes sorted apart and compressed with lz4.

A frame is cut into segments of one item size each. A segment is packed (shuffled by its item size,
then one lz4 block) or kept as it is: because nobody asked to pack it, or because it got no smaller.
The frame says itself how it was made, so that reading needs no knowledge of the block. Integers are
little endian:

    0    4   magic "HRF1"
    4    4   logical bytes of the frame, 1 MiB at most
    8    2   number of segments, 1 to 64
    10   2   0
    12   12  for each segment: u32 logical bytes, u32 stored bytes, u8 item bytes (1, 2, 4),
             u8 method (0 kept, 1 packed), u16 0
    ...      for each segment, without gaps: its stored bytes

Invariants: decoding gives exactly the bytes that were encoded; a header that contradicts itself,
its length or the caller's buffer is refused before anything is allocated, and nothing larger than
the caller's buffer ever is. Both directions release the GIL for the bulk of their work. This is the
only module that knows lz4; it does not know files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ops.checksum import CHUNK_BYTES
from ops.errors import StorageError
from ops.kernels.arrays import U8
from ops.kernels.shuffle import ITEM_BYTES, shuffle, unshuffle

FRAME_BYTES_MAX = CHUNK_BYTES
SEGMENTS_MAX = 64
_MAGIC = b"HRF1"
_HEAD = struct.Struct("<4sIHH")
_ROW = struct.Struct("<IIBBH")
_KEPT, _PACKED = 0, 1


class Segment(NamedTuple):
    """`nbytes` of a frame, items of `item_bytes`; with `pack`, worth an attempt to compress."""

    nbytes: int
    item_bytes: int
    pack: bool = True


class EncodedFrame(NamedTuple):
    """The bytes of an encoded frame, and what each of its segments takes of them."""

    nbytes: int
    stored_bytes: tuple[int, ...]


class CorruptFrame(StorageError):
    """An encoded frame that contradicts itself or does not decode."""


def new_scratch() -> U8:
    """Memory that `encode_frame` and `pack_segment` work in; one for each thread."""
    return np.zeros(FRAME_BYTES_MAX, np.uint8)


def pack_segment(data: memoryview, item_bytes: int, scratch: U8) -> bytes:
    """`data` (at most 1 MiB) shuffled and compressed; may be longer than `data`."""
    from lz4 import block  # here, so that planning and raw stores do without it

    if item_bytes > 1:
        shuffle(np.frombuffer(data, np.uint8), scratch[: data.nbytes], item_bytes)
        data = scratch[: data.nbytes].data
    packed: bytes = block.compress(data, store_size=False)
    return packed


def unpack_segment(packed: memoryview, data: memoryview, item_bytes: int) -> None:
    """Fill `data` with what `pack_segment` made `packed` of; CorruptFrame if it is not that."""
    from lz4 import block

    try:
        plain = block.decompress(packed, uncompressed_size=data.nbytes)
    except block.LZ4BlockError as error:
        raise CorruptFrame(f"lz4 cannot decode the segment: {error}") from error
    if len(plain) != data.nbytes:
        raise CorruptFrame(f"the segment decodes to {len(plain)} bytes, not {data.nbytes}")
    unshuffle(np.frombuffer(plain, np.uint8), np.frombuffer(data, np.uint8), item_bytes)


def encode_frame(
    data: memoryview, segments: Sequence[Segment], scratch: U8, out: memoryview
) -> EncodedFrame | None:
    """Encode `data` into `out`; None when it does not fit there.

    The `segments` cover `data` (1 to `FRAME_BYTES_MAX` bytes) in order. How little `out` is decides
    how much a frame must shrink; after None its content is undefined. `data` and `out` must not
    overlap. Raises ValueError for segments that do not describe `data`; more than `SEGMENTS_MAX`
    do not fit.
    """
    _check_segments(data.nbytes, segments)
    if len(segments) > SEGMENTS_MAX:
        return None
    end = _HEAD.size + len(segments) * _ROW.size
    start, rows = 0, []
    for segment in segments:
        source = data[start : start + segment.nbytes]
        start += segment.nbytes
        stored, method = source, _KEPT
        if segment.pack and segment.nbytes:
            packed = memoryview(pack_segment(source, segment.item_bytes, scratch))
            if packed.nbytes < segment.nbytes:
                stored, method = packed, _PACKED
        if end + stored.nbytes > out.nbytes:
            return None
        out[end : end + stored.nbytes] = stored
        end += stored.nbytes
        rows.append((segment.nbytes, stored.nbytes, segment.item_bytes, method, 0))
    _HEAD.pack_into(out, 0, _MAGIC, data.nbytes, len(rows), 0)
    for index, row in enumerate(rows):
        _ROW.pack_into(out, _HEAD.size + index * _ROW.size, *row)
    return EncodedFrame(end, tuple(row[1] for row in rows))


def decode_frame(stored: memoryview, data: memoryview) -> None:
    """Fill `data` (the frame's logical bytes) from the encoded bytes `stored`.

    Raises CorruptFrame for anything `encode_frame` cannot have made of as many bytes; the content
    of `data` is undefined then.
    """
    rows = _rows_of(stored, data.nbytes)
    source, target = _HEAD.size + len(rows) * _ROW.size, 0
    for logical_bytes, stored_bytes, item_bytes, method in rows:
        piece = stored[source : source + stored_bytes]
        place = data[target : target + logical_bytes]
        source += stored_bytes
        target += logical_bytes
        if method == _PACKED:
            unpack_segment(piece, place, item_bytes)
        else:
            place[:] = piece


def _check_segments(nbytes: int, segments: Sequence[Segment]) -> None:
    if not 1 <= nbytes <= FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {nbytes} bytes; 1 to {FRAME_BYTES_MAX} are possible")
    covered = sum(segment.nbytes for segment in segments)
    if covered != nbytes or any(segment.nbytes < 0 for segment in segments):
        raise ValueError(f"the segments cover {covered} bytes of a frame of {nbytes}")


def _rows_of(stored: memoryview, nbytes: int) -> list[tuple[int, int, int, int]]:
    """The segments' (logical bytes, stored bytes, item bytes, method), all checks made."""
    if stored.nbytes < _HEAD.size:
        raise CorruptFrame(f"an encoded frame of {stored.nbytes} bytes has no header")
    magic, logical_bytes, num_segments, zero = _HEAD.unpack_from(stored, 0)
    if magic != _MAGIC or zero:
        raise CorruptFrame("not the header of an encoded frame")
    if logical_bytes != nbytes or nbytes > FRAME_BYTES_MAX:
        raise CorruptFrame(f"the frame claims {logical_bytes} bytes where {nbytes} belong")
    body = _HEAD.size + num_segments * _ROW.size
    if not 1 <= num_segments <= SEGMENTS_MAX or body > stored.nbytes:
        raise CorruptFrame(f"the frame claims {num_segments} segments")
    rows = []
    for index in range(num_segments):
        *row, zero = _ROW.unpack_from(stored, _HEAD.size + index * _ROW.size)
        length, stored_bytes, item_bytes, method = row
        kept_whole = method == _KEPT and stored_bytes == length
        packed_smaller = method == _PACKED and stored_bytes < length
        if not (kept_whole or packed_smaller) or item_bytes not in ITEM_BYTES or zero:
            raise CorruptFrame(f"segment {index} of the frame is {tuple(row)}")
        rows.append((length, stored_bytes, item_bytes, method))
    if sum(row[0] for row in rows) != nbytes:
        raise CorruptFrame(f"the segments cover {sum(row[0] for row in rows)} bytes of {nbytes}")
    if body + sum(row[1] for row in rows) != stored.nbytes:
        raise CorruptFrame(f"the segments do not end with the frame's {stored.nbytes} bytes")
    return rows
