"""The bytes of a manifest: which blocks a commit holds, where they lie, their checksums.

A header of fixed size, a JSON section with a strict schema, and the checksums as binary numbers;
one xxh3-128 covers everything. `docs/formats/nvme_store.md` has the layout byte by byte.

Invariants: decoding believes nothing: it allocates in proportion to the bytes it was given, and a
manifest that decodes describes blocks that can exist: extents aligned, inside their files and
apart, sizes and checksums adding up. Pure: no I/O, no knowledge of slots.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from offload.nvme.extents import Extent
from offload.nvme.table import StoredBlock
from ops.checksum import CHUNK_BYTES, num_chunks

MAGIC = b"\x89HRCOLD\n"
FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 1 << 30
CODEC = "lz4"
_HEAD = struct.Struct("<8sIIQQQ")  # magic, format, zero, generation, JSON bytes, checksum bytes
_DIGEST_BYTES = 16
HEADER_BYTES = _HEAD.size + _DIGEST_BYTES
_INTEGER_MAX = (1 << 63) - 1
_ALIGNMENT_BYTES_MAX = 1 << 20
_KEYS = ("store_id", "alignment_bytes", "file_bytes", "retained", "slots", "blocks", "meta")


class ManifestError(ValueError):
    """Why bytes are no manifest, as a clause: "checksum mismatch"."""


@dataclass(frozen=True)
class Manifest:
    """One commit.

    `file_bytes`: the length of the data file of each member. `retained`: generations of the older
    commits that were kept when this one was published, ascending. `slots`: which slots were taken
    then, its own included. `meta` is the caller's, JSON data.
    """

    store_id: str
    generation: int
    alignment_bytes: int
    file_bytes: tuple[int, ...]
    retained: tuple[int, ...]
    slots: tuple[int, ...]
    blocks: dict[str, StoredBlock]
    meta: Mapping[str, Any]


def json_data(value: Mapping[str, Any]) -> Any:
    """A deep copy of `value` as JSON data; raises ValueError when it is none.

    NaN, infinities and keys that are no strings are refused; tuples become lists.
    """
    _refuse_foreign_keys(value)
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not JSON data: {error}") from None


def _refuse_foreign_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"not JSON data: the key {key!r} is no string")
            _refuse_foreign_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_foreign_keys(item)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest`; O(blocks + checksums)."""
    blocks = [
        [
            name,
            stored.nbytes,
            stored.version,
            None if stored.encoded_bytes is None else [CODEC, list(stored.encoded_bytes)],
            [[x.drive, x.offset, x.nbytes] for x in stored.extents if x.nbytes],
        ]
        for name, stored in manifest.blocks.items()
    ]
    fields = {key: getattr(manifest, key) for key in _KEYS} | {"blocks": blocks}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    checksums = array("Q")
    for stored in manifest.blocks.values():
        checksums.extend(stored.checksums)
    if sys.byteorder == "big":
        checksums.byteswap()
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, 0, manifest.generation, len(text), 8 * len(checksums))
    body = text + checksums.tobytes()
    return head + _digest(head, body) + body


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in `data`, or ManifestError saying what is wrong with it."""
    if len(data) < HEADER_BYTES:
        raise ManifestError(f"{len(data)} bytes are too few for a manifest")
    magic, version, zero, generation, text_bytes, sums_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ManifestError("it does not start as a manifest does")
    if version != FORMAT_VERSION:
        raise ManifestError(f"format version {version} (this program knows {FORMAT_VERSION})")
    if len(data) != HEADER_BYTES + text_bytes + sums_bytes:
        raise ManifestError(
            f"{len(data)} bytes long instead of {HEADER_BYTES + text_bytes + sums_bytes}"
        )
    body = memoryview(data)[HEADER_BYTES:]
    if _digest(data[: _HEAD.size], body) != data[_HEAD.size : HEADER_BYTES]:
        raise ManifestError("checksum mismatch")
    _require(zero == 0 and 0 < generation <= _INTEGER_MAX, "bad header")
    fields = _parse(bytes(body[:text_bytes]))
    _require(tuple(fields) == _KEYS, "unknown or missing fields")
    checksums = array("Q")
    _require(sums_bytes % checksums.itemsize == 0, "checksums of odd length")
    checksums.frombytes(body[text_bytes:])
    if sys.byteorder == "big":
        checksums.byteswap()
    return _manifest(generation, fields, checksums)


def _digest(head: bytes, body: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(head)
    hasher.update(body)
    return hasher.digest()


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _require(len({key for key, _ in pairs}) == len(pairs), "a key appears twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ManifestError(f"{constant} is no JSON")

    try:
        fields = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"bad JSON: {error}") from None
    _require(isinstance(fields, dict), "no JSON object")
    return dict(fields)


def _manifest(generation: int, fields: dict[str, Any], checksums: array[int]) -> Manifest:
    store_id, alignment_bytes = fields["store_id"], fields["alignment_bytes"]
    _require(is_store_id(store_id), "bad store_id")
    _require(
        _is_size(alignment_bytes)
        and 0 < alignment_bytes <= _ALIGNMENT_BYTES_MAX
        and alignment_bytes & (alignment_bytes - 1) == 0,
        "bad alignment_bytes",
    )
    for key in ("file_bytes", "retained", "slots"):
        numbers = fields[key]
        _require(isinstance(numbers, list) and all(map(_is_size, numbers)), f"bad {key}")
    _require(len(fields["file_bytes"]) > 0, "no members")
    retained = fields["retained"]
    _require(
        sorted(set(retained)) == retained and (not retained or retained[-1] < generation),
        "bad retained",
    )
    _require(isinstance(fields["meta"], dict), "bad meta")
    return Manifest(
        store_id=store_id,
        generation=generation,
        alignment_bytes=alignment_bytes,
        file_bytes=tuple(fields["file_bytes"]),
        retained=tuple(retained),
        slots=tuple(fields["slots"]),
        blocks=_blocks(fields, checksums),
        meta=fields["meta"],
    )


def _blocks(fields: dict[str, Any], checksums: array[int]) -> dict[str, StoredBlock]:
    alignment_bytes, file_bytes = fields["alignment_bytes"], fields["file_bytes"]
    blocks: dict[str, StoredBlock] = {}
    first = 0
    _require(isinstance(fields["blocks"], list), "bad blocks")
    for entry in fields["blocks"]:
        _require(isinstance(entry, list) and len(entry) == 5, "bad entry in blocks")
        name, nbytes, version, codec, rows = entry
        _require(isinstance(name, str) and name not in blocks, "bad or repeated block name")
        _require(_is_size(nbytes) and _is_size(version), f"bad numbers of block {name!r}")
        encoded_bytes = _encoded_bytes(codec, name, nbytes)
        _require(isinstance(rows, list), f"bad extents of block {name!r}")
        extents = [_extent(row, name, alignment_bytes, file_bytes) for row in rows]
        total_bytes = sum(extent.nbytes for extent in extents)
        _require(
            nbytes <= total_bytes < nbytes + alignment_bytes
            and all(extent.nbytes % alignment_bytes == 0 for extent in extents[:-1])
            and (not extents or total_bytes - extents[-1].nbytes < nbytes),
            f"sizes of block {name!r} do not add up",
        )
        last = first + num_chunks(nbytes)
        _require(last <= len(checksums), "too few checksums")
        extents = extents or [Extent(0, 0)]  # as the allocator gives an empty block
        blocks[name] = StoredBlock(
            extents,
            nbytes,
            checksums[first:last],
            pins=0,
            version=version,
            encoded_bytes=encoded_bytes,
        )
        first = last
    _require(first == len(checksums), "too many checksums")
    overlap = first_overlap(blocks)
    _require(overlap is None, f"blocks {overlap} overlap")
    return blocks


def _encoded_bytes(codec: Any, name: str, nbytes: int) -> array[int] | None:
    """Lengths of encoded chunks; each is shorter than the chunk it stands for."""
    if codec is None:
        return None
    _require(
        isinstance(codec, list) and len(codec) == 2 and codec[0] == CODEC,
        f"unknown codec of block {name!r}",
    )
    lengths = codec[1]
    _require(
        isinstance(lengths, list)
        and len(lengths) == num_chunks(nbytes)
        and all(map(_is_size, lengths))
        and all(
            length < min(CHUNK_BYTES, nbytes - chunk * CHUNK_BYTES)
            for chunk, length in enumerate(lengths)
        ),
        f"bad encoded lengths of block {name!r}",
    )
    return array("I", lengths)


def _extent(row: Any, name: str, alignment_bytes: int, file_bytes: list[int]) -> Extent:
    _require(
        isinstance(row, list) and len(row) == 3 and all(map(_is_size, row)),
        f"bad extent of block {name!r}",
    )
    drive, offset, nbytes = row
    _require(
        drive < len(file_bytes) and nbytes > 0 and offset + nbytes <= file_bytes[drive],
        f"an extent of block {name!r} lies outside of its file",
    )
    _require(offset % alignment_bytes == 0, f"an extent of block {name!r} is not aligned")
    return Extent(offset, nbytes, drive)


def first_overlap(blocks: Mapping[str, StoredBlock]) -> tuple[str, str] | None:
    """Two of `blocks` whose extents overlap, or None."""
    rows = sorted(
        (x.drive, x.offset, x.nbytes, name)
        for name, stored in blocks.items()
        for x in stored.extents
        if x.nbytes
    )
    drive_before, end, name_before = -1, 0, ""
    for drive, offset, nbytes, name in rows:
        if drive == drive_before and offset < end:
            return name_before, name
        drive_before, end, name_before = drive, offset + nbytes, name
    return None


def is_store_id(value: Any) -> bool:
    """Whether `value` is 128 random bits as 32 hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INTEGER_MAX


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ManifestError(problem)
