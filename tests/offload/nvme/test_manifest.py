"""Manifests: exact round trips, and nothing believed that the bytes merely claim (C05, C68)."""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.nvme.extents import Extent
from offload.nvme.manifest import (
    HEADER_BYTES,
    Manifest,
    ManifestError,
    decode_manifest,
    encode_manifest,
    first_overlap,
    json_data,
)
from offload.nvme.table import StoredBlock
from ops.checksum import CHUNK_BYTES, num_chunks

UNIT = 4096
STORE_ID = "0123456789abcdef" * 2


def stored(nbytes, *extents, version=0):
    sums = array("Q", range(1, num_chunks(nbytes) + 1))
    return StoredBlock([Extent(*extent) for extent in extents], nbytes, sums, 0, version)


def manifest(**changes):
    blocks = {
        "a": stored(UNIT + 5, (0, UNIT), (5 * UNIT, UNIT), version=3),
        "empty": stored(0, (0, 0)),
        "ünï/\ud800": stored(3 * CHUNK_BYTES - 1, (UNIT, 3 * CHUNK_BYTES, 1)),
    }
    base = Manifest(STORE_ID, 7, UNIT, (6 * UNIT, 1 << 30), (5, 6), (0, 1, 2), blocks, {"step": 7})
    return replace(base, **changes)


def seal(fields, checksums=b"", head=(b"\x89HRCOLD\n", 1, 0, 7)):
    """Bytes with a right digest around any JSON section."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    start = struct.pack("<8sIIQQQ", *head, len(text), len(checksums))
    return start + xxhash.xxh3_128_digest(start + text + checksums) + text + checksums


def fields_of(data):
    text_bytes, sums_bytes = struct.unpack_from("<QQ", data, 24)
    end = HEADER_BYTES + text_bytes
    assert len(data) == end + sums_bytes
    return json.loads(data[HEADER_BYTES:end]), data[end:]


def contents(found):
    blocks = {
        name: (x.extents, x.nbytes, x.checksums, x.version) for name, x in found.blocks.items()
    }
    return replace(found, blocks=blocks)


def test_a_manifest_survives_encoding():
    assert contents(decode_manifest(encode_manifest(manifest()))) == contents(manifest())


def test_the_layout_is_the_documented_one():
    """Written with struct alone, as another program would."""
    data = encode_manifest(manifest())
    assert data[:8] == b"\x89HRCOLD\n"
    assert struct.unpack_from("<IIQ", data, 8) == (1, 0, 7)
    assert data[40:56] == xxhash.xxh3_128_digest(data[:40] + data[56:])
    fields, sums = fields_of(data)
    assert fields["blocks"][0] == ["a", UNIT + 5, 3, None, [[0, 0, UNIT], [0, 5 * UNIT, UNIT]]]
    assert struct.unpack("<4Q", sums) == (1, 1, 2, 3)
    assert seal(json.dumps(fields, separators=(",", ":")).encode(), sums) == data


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(at, bit):
    # C05
    data = bytearray(encode_manifest(manifest()))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(ManifestError):
        decode_manifest(bytes(data))


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10**6))
def test_a_torn_manifest_is_found_wherever_it_ends(at):
    data = encode_manifest(manifest())
    with pytest.raises(ManifestError):
        decode_manifest(data[: at % len(data)])
    with pytest.raises(ManifestError):
        decode_manifest(data + data[: 1 + at % 100])


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300))
def test_bytes_of_unknown_origin_give_one_error(data):
    for candidate in (data, seal(data), seal(b"[" * 100_000)):
        with pytest.raises(ManifestError):
            decode_manifest(candidate)


def change(path, value):
    def apply(fields):
        target = fields
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return apply


BIG = 1 << 62
BAD = {
    "id": (change(["store_id"], "g" * 32), "store_id"),
    "alignment": (change(["alignment_bytes"], 3000), "alignment"),
    "alignment zero": (change(["alignment_bytes"], 0), "alignment"),
    "alignment bool": (change(["alignment_bytes"], True), "alignment"),
    "no member": (change(["file_bytes"], []), "members"),
    "file float": (change(["file_bytes"], [1e9, 2]), "file_bytes"),
    "retained newer": (change(["retained"], [8]), "retained"),
    "retained order": (change(["retained"], [6, 5]), "retained"),
    "slots": (change(["slots"], {}), "slots"),
    "meta": (change(["meta"], []), "meta"),
    "extra": (change(["more"], 1), "fields"),
    "blocks": (change(["blocks"], {}), "blocks"),
    "entry": (change(["blocks", 0], ["a", 1]), "entry"),
    "name": (change(["blocks", 0, 0], 3), "name"),
    "repeated": (change(["blocks", 0, 0], "empty"), "repeated"),
    "nbytes": (change(["blocks", 0, 1], -1), "numbers"),
    "nbytes bool": (change(["blocks", 0, 1], True), "numbers"),
    "version": (change(["blocks", 0, 2], "3"), "numbers"),
    "codec": (change(["blocks", 0, 3], "rot13"), "codec"),
    "extents": (change(["blocks", 0, 4], 3), "extents"),
    "extent": (change(["blocks", 0, 4, 0], [0, 0]), "extent"),
    "drive": (change(["blocks", 0, 4, 0, 0], 2), "outside"),
    "behind the file": (change(["blocks", 0, 4, 1, 1], 6 * UNIT), "outside"),
    "huge offset": (change(["blocks", 0, 4, 1, 1], BIG), "outside"),
    "unaligned": (change(["blocks", 0, 4, 1, 1], 4 * UNIT + 8), "aligned"),
    "short piece": (change(["blocks", 0, 4, 0, 2], UNIT - 8), "add up"),
    "more room than bytes": (change(["blocks", 0, 1], 5), "add up"),
    "more bytes than room": (change(["blocks", 0, 1], BIG), "add up"),
    "empty with room": (change(["blocks", 1, 4], [[0, 3 * UNIT, UNIT]]), "add up"),
    "overlap": (change(["blocks", 0, 4, 1, 1], 0), "overlap"),
    "claims terabytes": (
        lambda fields: (
            change(["blocks", 2, 1], 1 << 45)(fields),
            change(["blocks", 2, 4, 0, 2], 1 << 45)(fields),
            change(["file_bytes"], [6 * UNIT, 1 << 50])(fields),
        ),
        "too few checksums",
    ),
    "block gone": (lambda fields: fields["blocks"].pop(), "too many checksums"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_sealed_manifest_that_cannot_be_true_is_refused_with_its_reason(case):
    # C68: one error per way it can be bad
    apply, reason = BAD[case]
    fields, sums = fields_of(encode_manifest(manifest()))
    apply(fields)
    with pytest.raises(ManifestError, match=reason):
        decode_manifest(seal(fields, sums))


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ((b"\x89HRCOLD\n", 2, 0, 7), "format version 2"),
        ((b"PK\x03\x04....", 1, 0, 7), "start"),
        ((b"\x89HRCOLD\n", 1, 1, 7), "header"),
        ((b"\x89HRCOLD\n", 1, 0, 0), "header"),
    ],
)
def test_a_header_of_another_kind_is_refused(head, reason):
    fields, sums = fields_of(encode_manifest(manifest()))
    with pytest.raises(ManifestError, match=reason):
        decode_manifest(seal(fields, sums, head))


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff", b"3", b"[]", b"{}"])
def test_json_that_others_would_read_differently_is_refused(text):
    with pytest.raises(ManifestError):
        decode_manifest(seal(text))


def test_overlaps_are_seen_only_within_one_drive():
    near, far = stored(UNIT, (0, UNIT, 0)), stored(UNIT, (0, UNIT, 1))
    assert first_overlap({"near": near, "far": far}) is None
    inside = stored(2 * UNIT, (UNIT, 2 * UNIT, 1))
    twice = stored(UNIT, (2 * UNIT, UNIT, 1))
    assert first_overlap({"far": far, "inside": inside, "twice": twice}) == ("inside", "twice")


def test_meta_is_deeply_copied_json():
    value = {"t": (1, 2), "d": {"x": [None, True, 1.5]}}
    copy = json_data(value)
    assert copy == {"t": [1, 2], "d": {"x": [None, True, 1.5]}}
    assert copy["d"] is not value["d"]
    for bad in ({"x": {1}}, {"x": float("inf")}, {"x": [{2: 3}]}):
        with pytest.raises(ValueError, match="JSON"):
            json_data(bad)
