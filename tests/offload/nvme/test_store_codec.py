"""With a codec fewer bytes move; what is read back is what was written, or an error."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from offload.nvme.aligned import aligned_buffer
from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.store import NvmeStore
from offload.runs import Run
from offload.testing_storage import (
    BUFFERED,
    AlignmentFile,
    Fault,
    FaultyStorage,
    filled_buffer,
    moments,
)
from ops.checksum import checksum
from ops.errors import ConfigError, StorageError
from ops.units import round_up

MIB = 1 << 20
UNIT = 4096
# On a drive of one byte a second every byte saved is worth any computing, and on one of
# 10^18 none is, so that no test depends on how busy the machine is.
CRAWLING, FLYING = DriveSpeed(1.0, 1.0), DriveSpeed(1e18, 1e18)
LENGTHS = [0, 1, 511, UNIT, UNIT + 1, 3 * UNIT, MIB - 1, MIB, MIB + 1, 5 * MIB, 5 * MIB + 13]


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(capacity_bytes=64 * MIB, *, speed=CRAWLING, **options):
        defaults = {"workers": 2, "required_bytes": 0, "codec": "lz4"}
        if speed is not None:
            defaults["drive_speed"] = lambda: speed
        path = tmp_path / f"rank{len(stores)}"
        stores.append(NvmeStore(str(path), capacity_bytes, **defaults | options))
        return stores[-1]

    yield make
    for store in stores:
        store.close(delete=True)


def typed(nbytes):
    return (Run("exp_avg_sq", 4, 0, nbytes),)


def write(store, block, data):
    store.write(block, data, "update", runs=typed(data.nbytes)).wait()


def read(store, block, nbytes, **shape):
    buffer = filled_buffer(nbytes, seed=7, **shape)
    store.read(block, buffer, "update", nbytes=nbytes).wait()
    return buffer[:nbytes]


def encoded_bytes(store, block):
    """The lengths of the frames of `block` that are stored encoded."""
    return store._table.get(block).encoded_bytes


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
@pytest.mark.parametrize("skew_bytes", [0, 1])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_round_trip_is_exact_for_any_length_and_address(open_store, nbytes, skew_bytes, access):
    # C01
    store = open_store(access=access)
    data = moments(nbytes, skew_bytes=skew_bytes)
    write(store, "block", data)
    assert (read(store, "block", nbytes, skew_bytes=skew_bytes) == data).all()
    assert (read(store, "block", nbytes, padded_bytes=round_up(nbytes, UNIT)) == data).all()
    assert store.used_bytes == round_up(nbytes, store.alignment_bytes)  # saves no room
    saves_a_unit = nbytes == UNIT + 1 or nbytes >= MIB - 1
    assert bool(encoded_bytes(store, "block")) == saves_a_unit


def test_a_state_block_comes_back_whatever_shares_its_frames(open_store):
    # C03: residual, moments and the gaps between them straddle the frames' borders.
    store = open_store()
    count = 700_003
    ends = [2 * count]
    ends.append(round_up(ends[0], 64) + 4 * count)
    ends.append(round_up(ends[1], 64) + 4 * count)
    data = filled_buffer(round_up(ends[2], 64))
    runs = (
        Run("residual", 2, 0, ends[0]),
        Run("exp_avg", 4, round_up(ends[0], 64), ends[1]),
        Run("exp_avg_sq", 4, round_up(ends[1], 64), ends[2]),
    )
    data[runs[1].start : runs[1].stop] = 0
    data[runs[2].start : runs[2].stop] = moments(4 * count)
    store.write("state", data, "update", runs=runs).wait()
    assert (read(store, "state", data.nbytes) == data).all()
    known = store.stats().codec.components
    assert {name: codec.decision for name, codec in known.items()} == {
        "residual": "none",
        "exp_avg": "lz4",
        "exp_avg_sq": "lz4",
    }
    assert known["exp_avg"].saved_share > 0.98 > 0.5 > known["exp_avg_sq"].saved_share > 0.05
    assert 0 in encoded_bytes(store, "state")  # frames of residual alone are raw


def test_what_went_over_the_drive_is_what_is_counted(open_store):
    storage = FaultyStorage()
    store = open_store(open_file=storage, workers=1)
    write(store, "zeros", np.zeros(5 * MIB, np.uint8))
    write(store, "moments", moments(3 * MIB + 5))
    assert not read(store, "zeros", 5 * MIB).any()
    read(store, "moments", 3 * MIB + 5)
    stats = store.stats()
    for lane, verb in ((stats.written, "write"), (stats.read, "read")):
        assert lane.logical_bytes["update"] == 8 * MIB + 5
        assert lane.payload_bytes["update"] < 2.95 * MIB
        assert lane.total_bytes == storage.file.num_bytes[verb]
    assert stats.written.payload_bytes == stats.read.payload_bytes


def test_noise_costs_not_one_byte_more(open_store):
    plain, packed = open_store(codec="none", speed=None), open_store()
    for store in (plain, packed):
        data = filled_buffer(5 * MIB + 13)
        write(store, "noise", data)
        assert (read(store, "noise", data.nbytes) == data).all()
    assert plain.stats().written == packed.stats().written
    assert plain.stats().read.payload_bytes == packed.stats().read.payload_bytes
    assert encoded_bytes(packed, "noise") is None
    assert plain.stats().codec is None


def test_a_fast_drive_turns_the_codec_off_by_itself(open_store):
    store = open_store(speed=FLYING)
    for seed in range(3):
        write(store, "moments", moments(4 * MIB, seed))
    assert store.stats().codec.components["exp_avg_sq"].decision == "none"
    assert encoded_bytes(store, "moments") is None
    assert store.stats().written.payload_bytes == store.stats().written.logical_bytes
    assert (read(store, "moments", 4 * MIB) == moments(4 * MIB, 2)).all()


def test_the_drive_is_measured_by_the_stores_own_transfers(open_store):
    store = open_store(speed=None)
    assert store.stats().codec.drive.seconds_per_byte is None
    write(store, "noise", filled_buffer(8 * MIB))
    assert store.stats().codec.drive.write_bytes_per_s > 0
    assert store.stats().codec.drive.read_bytes_per_s == 0
    read(store, "noise", 8 * MIB)
    assert store.stats().codec.drive.read_bytes_per_s > 0


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
def test_encoded_frames_in_scattered_room(open_store, access):
    store = open_store(1400 * UNIT + 9, access=access)
    for index in range(200):
        store.write(f"small.{index}", filled_buffer(3 * UNIT, seed=index), "update").wait()
    for index in range(0, 200, 2):
        store.delete(f"small.{index}")
    data = moments(1100 * UNIT + 9)
    write(store, "large", data)
    assert store.used_bytes == store.capacity_bytes
    assert len(store._table.get("large").extents) > 50
    assert any(encoded_bytes(store, "large"))
    assert (read(store, "large", data.nbytes) == data).all()
    for index in range(1, 200, 2):
        assert (read(store, f"small.{index}", 3 * UNIT) == filled_buffer(3 * UNIT, index)).all()


def test_every_transfer_is_aligned(open_store):
    # C10
    files = []

    def open_file(path, direct):
        files.append(AlignmentFile(FaultyStorage()(path, direct), UNIT))
        return files[-1]

    store = open_store(open_file=open_file)
    if not store.access.direct:
        pytest.skip("no direct I/O here")
    data = moments(5 * MIB + 13, skew_bytes=1)
    write(store, "block", data)
    assert (read(store, "block", data.nbytes) == data).all()
    assert any(encoded_bytes(store, "block"))
    assert files[0].num_checked >= 12


def test_blocks_of_many_kinds_written_over_and_over(open_store):
    store = open_store(workers=4)
    rng = np.random.default_rng(5)
    contents, reads = {}, []
    for turn in range(150):
        block = f"b{rng.integers(12)}"
        if block in contents and rng.random() < 0.5:
            buffer = aligned_buffer(contents[block].nbytes, UNIT)
            handle = store.read(block, buffer, "update", deadline=int(rng.integers(3)))
            reads.append((handle, buffer, contents[block]))
            continue
        nbytes = int(rng.integers(1, 3 * MIB))
        make = (moments, filled_buffer, lambda n, seed: np.zeros(n, np.uint8))[rng.integers(3)]
        contents[block] = make(nbytes, seed=turn)
        store.write(block, contents[block], "update", runs=typed(nbytes))
    for handle, buffer, expected in reads:
        handle.wait()
        assert (buffer == expected).all()
    for block, expected in contents.items():
        assert (read(store, block, expected.nbytes) == expected).all()


def test_memory_is_bounded_and_taken_at_open(open_store):
    store = open_store(workers=3)
    before = store.stats().bounce_buffer_bytes
    write(store, "block", moments(5 * MIB))
    assert store.stats().bounce_buffer_bytes == before == 3 * 2 * MIB
    assert open_store(workers=3, codec="none").stats().bounce_buffer_bytes == 3 * MIB


@pytest.mark.parametrize("at_byte", [0, 12, 40, 5000, 900_000])
def test_a_flipped_bit_in_an_encoded_frame_is_named(open_store, at_byte):
    # C05
    storage = FaultyStorage(Fault("flip", "read", at_byte=at_byte))
    store = open_store(open_file=storage, access=BUFFERED)
    write(store, "layers.3.state", moments(MIB))
    with pytest.raises(StorageError, match="checksum mismatch") as caught:
        read(store, "layers.3.state", MIB)
    assert caught.value.block == "layers.3.state"
    assert caught.value.path.endswith("data.bin") and caught.value.offset == 0
    assert caught.value.done_bytes == encoded_bytes(store, "layers.3.state")[0]
    assert (read(store, "layers.3.state", MIB) == moments(MIB)).all()  # the medium was right


def test_two_encoded_blocks_swapped_are_both_noticed(open_store):
    # C05
    store = open_store(access=BUFFERED)
    for index in range(2):
        write(store, f"b{index}", moments(MIB, seed=index))
    path = store._file.path
    with open(path, "r+b") as file:
        both = file.read(2 * MIB)
        file.seek(0)
        file.write(both[MIB:] + both[:MIB])
    for index in range(2):
        with pytest.raises(StorageError, match="checksum mismatch"):
            read(store, f"b{index}", MIB)


def test_a_truncated_file_is_noticed(open_store):
    # C05
    store = open_store(access=BUFFERED)
    write(store, "block", moments(2 * MIB))
    os.truncate(store._file.path, MIB + 100)
    with pytest.raises(StorageError, match="short read"):
        read(store, "block", 2 * MIB)


def test_a_frame_that_verifies_but_does_not_decode_is_refused(open_store):
    # C68: a checksum says who wrote the bytes' sum, not that they make sense.
    store = open_store(access=BUFFERED)
    write(store, "block", moments(MIB))
    stored = store._table.get("block")
    junk = filled_buffer(stored.encoded_bytes[0])
    with open(store._file.path, "r+b") as file:
        file.write(junk)
    stored.checksums[0] = checksum(junk.data)
    with pytest.raises(StorageError, match="not the header of an encoded frame") as caught:
        read(store, "block", MIB)
    assert caught.value.block == "block"
    write(store, "block", moments(MIB))  # a corrupt block is not the end of the store
    assert (read(store, "block", MIB) == moments(MIB)).all()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_short_transfers_are_completed(open_store, verb):
    # C04
    storage = FaultyStorage(*(Fault("short", verb, at_op=op) for op in (0, 1, 3)))
    store = open_store(open_file=storage)
    data = moments(3 * MIB + 13)
    write(store, "block", data)
    assert (read(store, "block", data.nbytes) == data).all()


@pytest.mark.parametrize("at_byte", [0, 5000, 1_500_000])
def test_a_full_disk_in_an_encoded_frame_is_named_and_latched(open_store, at_byte):
    # C04
    storage = FaultyStorage(Fault("error", "write", at_byte=at_byte, code=errno.ENOSPC))
    store = open_store(open_file=storage, workers=1)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        write(store, "block", moments(2 * MIB))
    assert caught.value.block == "block" and caught.value.wanted_bytes < MIB
    assert "block" not in store.blocks()
    with pytest.raises(StorageError, match="ENOSPC"):
        store.write("other", moments(UNIT), "update")


def test_runs_that_do_not_fit_the_block_are_refused(open_store):
    store = open_store()
    with pytest.raises(ValueError, match="does not follow byte 0 of a block of 10 bytes"):
        store.write("block", filled_buffer(10), "update", runs=typed(11))
    assert store.stats().num_transfers == 0 and store.used_bytes == 0


def test_an_unknown_codec_is_refused(open_store):
    # C56
    with pytest.raises(ConfigError, match=r"offload\.codec: 'zstd'; must be one of none, lz4"):
        open_store(codec="zstd")
