"""Encoded frames in commits: opened with any codec, verified from outside, never trusted."""

from __future__ import annotations

import json
import os
import struct
from array import array

import pytest
import xxhash

from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.extents import Extent
from offload.nvme.manifest import (
    HEADER_BYTES,
    Manifest,
    ManifestError,
    decode_manifest,
    encode_manifest,
)
from offload.nvme.store import NvmeStore
from offload.nvme.table import StoredBlock
from offload.nvme.verify import BlockReader
from offload.runs import Run
from offload.testing_crash import SimulatedDisk
from offload.testing_storage import BUFFERED, filled_buffer, moments
from ops.errors import StorageError

MIB = 1 << 20
UNIT = 4096
CRAWLING = DriveSpeed(1.0, 1.0)


def write(store, block, data):
    store.write(block, data, "update", runs=(Run("exp_avg_sq", 4, 0, data.nbytes),)).wait()


def read(store, block, nbytes):
    buffer = filled_buffer(nbytes, seed=7)
    store.read(block, buffer, "update").wait()
    return buffer


@pytest.fixture
def committed(tmp_path):
    """The path of a store with a commit of encoded frames, and what is in it."""
    path = str(tmp_path / "kept")
    options = {"required_bytes": 0, "codec": "lz4", "drive_speed": lambda: CRAWLING}
    with NvmeStore(path, 64 * MIB, workers=2, **options) as store:
        write(store, "moments", moments(3 * MIB + 13))
        write(store, "noise", filled_buffer(2 * MIB))
        write(store, "empty", moments(0))
        assert all(store._table.get("moments").encoded_bytes[:3])
        assert store._table.get("noise").encoded_bytes is None
        store.publish(store.cut({"step": 1}))
    return path


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_commit_of_encoded_frames_opens_with_any_codec(committed, codec):
    with NvmeStore(committed, 64 * MIB, required_bytes=0, resume=True, codec=codec) as store:
        assert store.recovered.meta == {"step": 1}
        assert (read(store, "moments", 3 * MIB + 13) == moments(3 * MIB + 13)).all()
        assert (read(store, "noise", 2 * MIB) == filled_buffer(2 * MIB)).all()
        store.publish(store.cut({"step": 2}))
    with NvmeStore(committed, 64 * MIB, required_bytes=0, resume=True) as store:
        assert (read(store, "moments", 3 * MIB + 13) == moments(3 * MIB + 13)).all()


def test_verifying_from_outside_reads_encoded_frames(committed):
    with NvmeStore(committed, 64 * MIB, required_bytes=0, resume=True) as store:
        stored = store._table.get("moments")
        reader = BlockReader(store._opened.files, store.access)
        chunks = list(reader.chunks("moments", stored))
        assert [nbytes for nbytes, _ in chunks] == [*stored.encoded_bytes[:3], 13]
        assert not any(damage for _, damage in chunks)
        drive, offset, _ = stored.locate(MIB)
        assert drive == 0
        with open(store._file.path, "r+b") as file:
            file.seek(offset + stored.encoded_bytes[1] - 1)
            last = file.read(1)[0]
            file.seek(offset + stored.encoded_bytes[1] - 1)
            file.write(bytes([last ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        damage = reader.first_damage("moments", stored)
        assert (damage.block, damage.chunk, damage.offset) == ("moments", 1, offset)
        with pytest.raises(StorageError, match="checksum mismatch"):
            read(store, "moments", 3 * MIB + 13)


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        (["zstd", [0, 5]], "unknown codec"),
        ("lz4", "unknown codec"),
        (["lz4", [5]], "bad encoded lengths"),
        (["lz4", [5, 5, 5]], "bad encoded lengths"),
        (["lz4", [MIB, 5]], "bad encoded lengths"),
        (["lz4", [0, 13]], "bad encoded lengths"),
        (["lz4", [-1, 0]], "bad encoded lengths"),
        (["lz4", [1.0, 0]], "bad encoded lengths"),
    ],
)
def test_a_manifest_with_impossible_encoded_lengths_is_refused(codec, problem):
    # C68
    stored = StoredBlock([Extent(0, MIB + UNIT)], MIB + 13, array("Q", [1, 2]))
    manifest = Manifest(
        store_id="0" * 32,
        generation=1,
        alignment_bytes=UNIT,
        file_bytes=(2 * MIB,),
        retained=(),
        slots=(0,),
        blocks={"b": stored},
        meta={},
    )
    stored.encoded_bytes = array("I", [77, 12])
    data = encode_manifest(manifest)
    assert decode_manifest(data).blocks["b"].encoded_bytes == stored.encoded_bytes
    plain, wanted = b'["lz4",[77,12]]', json.dumps(codec, separators=(",", ":")).encode()
    assert data.count(plain) == 1
    with pytest.raises(ManifestError, match=problem):
        decode_manifest(resealed(data, data[HEADER_BYTES:].replace(plain, wanted)))


def resealed(data, body):
    """A manifest with another body and a header that fits it."""
    head = bytearray(data[: HEADER_BYTES - 16])
    text_bytes = struct.unpack_from("<Q", head, 24)[0] + len(body) - len(data) + HEADER_BYTES
    struct.pack_into("<Q", head, 24, text_bytes)
    return bytes(head) + xxhash.xxh3_128(bytes(head) + body).digest() + body


def stamped(nbytes, stamp):
    """Compressible bytes that nothing else has."""
    buffer = moments(nbytes, seed=stamp)
    buffer[: nbytes // 2] = stamp % 251
    return buffer


def test_every_crash_leaves_a_commit_whose_frames_decode(tmp_path):
    # C62
    path, disk, committed_at = str(tmp_path), SimulatedDisk(), {}
    options = {"required_bytes": 0, "access": BUFFERED, "workers": 2, "directory_files": disk}
    with NvmeStore(
        path,
        2 * MIB,
        codec="lz4",
        drive_speed=lambda: CRAWLING,
        open_file=disk.open_file,
        **options,
    ) as store:
        for step in range(8):
            block, nbytes = f"b{step % 3}", 5 * UNIT + 1000 * step
            store.write(block, stamped(nbytes, step), "update", version=step)
            record = store.publish(store.cut({"step": step}))
            committed_at[record.generation] = store.blocks()
            disk.mark(record.generation)
        assert store.stats().codec.components["bytes"].frames_encoded == 8
    points = disk.points("sync", "rename", "sync_directory", "unlink", "name")
    for crash in disk.crashes(points, 3):
        reopened = {**options, "directory_files": crash.disk, "open_file": crash.disk.open_file}
        with NvmeStore(path, 2 * MIB, resume=True, **reopened) as store:
            held = store.blocks()
            if store.recovered is None:
                assert crash.mark is None and not held
                continue
            assert store.recovered.generation >= (crash.mark or 0)
            assert held == committed_at[store.recovered.generation]
            for block, (nbytes, step) in held.items():
                assert (read(store, block, nbytes) == stamped(nbytes, step)).all()
