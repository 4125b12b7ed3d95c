"""A part of a commit read from outside: right bytes, and nothing that does not verify."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from offload.checkpoint.read_ahead import ReadAhead
from offload.checkpoint.source import CommitPart, requests_of
from offload.nvme.codec_policy import DriveSpeed
from offload.nvme.store import NvmeStore
from offload.runs import Run
from offload.testing_storage import BUFFERED, filled_buffer, moments
from ops.checksum import CHUNK_BYTES
from ops.errors import ConfigError, StorageError

MIB = CHUNK_BYTES
SIZES = {"empty": 0, "one": 1, "odd": 11 * MIB + 5, "even": 9 * MIB, "tiny": 4097}


def make(path, *, sizes=SIZES, commits=1, keep=1, **options):
    """A closed store with `commits` commits; block `name` of commit k is filled with seed k."""
    options.setdefault("workers", 2)
    with NvmeStore(path, 128 * MIB, keep_commits=keep, **options) as store:
        for step in range(1, commits + 1):
            for name, nbytes in sizes.items():
                store.write(name, filled_buffer(nbytes, seed=step), "update", version=step)
            store.publish(store.cut({"step": step}))


def directories(*paths):
    return [os.path.join(str(path), "rank-00000") for path in paths]


def whole(part, block):
    chunks = range(-(-part.blocks[block].nbytes // MIB))
    return b"".join(bytes(data) for _, data in part.read_chunks(block, chunks))


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("commits", [0, 1])
def test_a_commit_that_a_new_run_discards_is_not_said_to_have_made_room(tmp_path, commits):
    """Its reader was told to raise offload.nvme.capacity, of which there was enough. The new run
    may have no commit yet, or one of the same generation."""
    make(str(tmp_path))
    with CommitPart(directories(tmp_path), hold=True) as part:
        make(str(tmp_path), sizes={"other": 40 * MIB}, commits=commits)
        with pytest.raises(StorageError) as caught:
            whole(part, "odd")
    assert "commit 1 was discarded while it was read: a new run has begun on" in str(caught.value)
    assert "capacity" not in str(caught.value)


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
@pytest.mark.parametrize("num_paths", [1, 2])
def test_every_block_is_read_whole_and_chunk_by_chunk(tmp_path, access, num_paths):
    paths = [str(tmp_path / str(index)) for index in range(num_paths)]
    make(paths, access=access, commits=2)
    with CommitPart(directories(*paths)) as part:
        assert (part.generation, part.meta) == (2, {"step": 2})
        assert {name: x.nbytes for name, x in part.blocks.items()} == SIZES
        for name, nbytes in SIZES.items():
            expected = filled_buffer(nbytes, seed=2).tobytes()
            assert whole(part, name) == expected, name
            for chunk in range(-(-nbytes // MIB)):
                found = part.read_chunk(name, chunk)
                assert found == expected[chunk * MIB : (chunk + 1) * MIB]
        assert part.bytes_read == 2 * sum(SIZES.values())
        assert part.chunks_read == 2 * (12 + 9 + 1 + 1)


def test_only_the_chunks_that_were_asked_for_are_read(tmp_path):
    make(str(tmp_path))
    data = filled_buffer(SIZES["odd"], seed=1).tobytes()
    with CommitPart(directories(tmp_path)) as part:
        wanted = [0, 3, 4, 5, 6, 7, 9, 11]
        found = [(chunk, bytes(x)) for chunk, x in part.read_chunks("odd", wanted)]
        assert found == [(x, data[x * MIB : (x + 1) * MIB]) for x in wanted]
        assert part.bytes_read == 7 * MIB + 5 and part.chunks_read == 8
        assert list(part.read_chunks("odd", [])) == []


def test_neighbours_go_into_one_request_of_4_mib_at_most():
    assert requests_of([]) == []
    assert requests_of([2]) == [(2, 1)]
    assert requests_of([0, 1, 2, 3, 4, 6, 7]) == [(0, 4), (4, 1), (6, 2)]
    assert requests_of(range(9)) == [(0, 4), (4, 4), (8, 1)]


@pytest.mark.parametrize("chunks", [[12], [-1], [3, 3], [4, 2]])
def test_chunks_that_are_not_there_or_do_not_ascend_are_refused(tmp_path, chunks):
    make(str(tmp_path))
    with CommitPart(directories(tmp_path)) as part:
        with pytest.raises(ValueError, match="chunk"):
            part.read_chunks("odd", chunks)
        with pytest.raises(StorageError, match="no such block"):
            part.read_chunks("nothing", [0])


def test_frames_are_decoded(tmp_path):
    nbytes = 6 * MIB + 999
    data = moments(nbytes, seed=3)
    with NvmeStore(
        str(tmp_path), 64 * MIB, codec="lz4", drive_speed=lambda: DriveSpeed(1e6, 1e6)
    ) as store:
        runs = [Run("exp_avg_sq", 4, 0, nbytes)]
        store.write("packed", data, "update", runs=runs).wait()
        store.write("raw", filled_buffer(nbytes), "update", runs=runs).wait()
        store.publish(store.cut({}))
    with CommitPart(directories(tmp_path)) as part:
        stored = part.blocks["packed"]
        assert stored.encoded_bytes is not None and any(stored.encoded_bytes)
        assert not all(stored.encoded_bytes), "its tail is raw"
        assert whole(part, "packed") == data.tobytes()
        assert part.bytes_read == sum(map(stored.stored_bytes, range(7))) < nbytes
        assert part.read_chunk("packed", 6) == data[6 * MIB :].tobytes()
        assert whole(part, "raw") == filled_buffer(nbytes).tobytes()


def test_a_flipped_bit_is_named_and_what_comes_before_it_is_served(tmp_path):
    # C05
    make(str(tmp_path))
    with CommitPart(directories(tmp_path)) as part:
        path = os.path.join(part.directories[0], "data.bin")
        start = part.blocks["odd"].extents[0].offset
        flip(path, start + 5 * MIB + 1)
        seen = []
        with pytest.raises(StorageError, match="checksum mismatch") as caught:
            for chunk, _ in part.read_chunks("odd", range(12)):
                seen.append(chunk)
        assert seen == [0, 1, 2, 3, 4]
        error = caught.value
        assert (error.path, error.offset, error.block) == (path, start + 5 * MIB, "odd")
        with pytest.raises(StorageError, match="checksum mismatch"):
            part.read_chunk("odd", 5)
        assert bytes(part.read_chunk("odd", 6)), "the others can be read"
        assert list(part.read_chunks("odd", [7]))


def test_a_data_file_that_ends_too_early_is_named_at_the_chunk_it_lacks(tmp_path):
    # C05
    make(str(tmp_path))
    with CommitPart(directories(tmp_path)) as part:
        start = part.blocks["odd"].extents[0].offset
        os.truncate(os.path.join(part.directories[0], "data.bin"), start + 6 * MIB)
        assert len(list(part.read_chunks("odd", range(6)))) == 6
        with pytest.raises(StorageError, match=f"too early.*offset={start + 6 * MIB}"):
            list(part.read_chunks("odd", range(12)))


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_plain_file_in_the_place_of_a_data_file_is_refused(tmp_path, kind):
    # C68
    make(str(tmp_path / "store"))
    path = tmp_path / "store/rank-00000/data.bin"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(StorageError, match=r"data\.bin"):
        CommitPart(directories(tmp_path / "store"))


def test_memory_is_bounded_however_many_parts_read(tmp_path):
    sizes = {"block": 40 * MIB}
    make(str(tmp_path), sizes=sizes)
    ahead = ReadAhead()
    parts = [CommitPart(directories(tmp_path), read_ahead=ahead) for _ in range(3)]
    buffers = set()
    for part in parts:
        for _, data in part.read_chunks("block", range(40)):
            buffers.add(np.frombuffer(data, np.uint8).ctypes.data)
    assert len(buffers) <= 28, "7 buffers of 4 chunks for all of them"
    # Two that read at once get on; the second has what the first left it, or one of its own.
    first, second = (part.read_chunks("block", range(40)) for part in parts[:2])
    pairs = [(bytes(a) == bytes(b), i == j) for (i, a), (j, b) in zip(first, second)]
    assert pairs == [(True, True)] * 40
    for part in parts:
        part.close()
        part.close()


def test_an_iterator_that_is_left_gives_its_buffers_back(tmp_path):
    make(str(tmp_path), sizes={"block": 40 * MIB})
    with CommitPart(directories(tmp_path)) as part:
        for _ in range(20):
            chunks = part.read_chunks("block", range(40))
            next(chunks)
            chunks.close()
        expected = filled_buffer(40 * MIB, seed=1).tobytes()
        assert whole(part, "block") == expected


def test_an_older_retained_commit_can_be_opened_and_a_superseded_one_not(tmp_path):
    make(str(tmp_path), commits=3, keep=2)
    with CommitPart(directories(tmp_path), 2) as part:
        assert whole(part, "even") == filled_buffer(9 * MIB, seed=2).tobytes()
    for generation in (1, 4):
        with pytest.raises(StorageError, match=f"commit {generation} is not in this store"):
            CommitPart(directories(tmp_path), generation)


def test_a_store_without_commits_and_no_store_are_refused(tmp_path):
    NvmeStore(str(tmp_path), MIB, workers=1).close()
    with pytest.raises(StorageError, match="no commit"):
        CommitPart(directories(tmp_path))
    make([str(tmp_path / name) for name in "ab"])
    with pytest.raises(ConfigError, match="1 of the 2"):
        CommitPart(directories(tmp_path / "b", tmp_path / "a"))


def test_a_store_that_trains_is_read_and_what_it_replaced_meanwhile_is_told(tmp_path):
    with NvmeStore(str(tmp_path), 24 * MIB, workers=2) as store:
        for step in (1, 2):
            store.write("block", filled_buffer(8 * MIB, seed=step), "update").wait()
            store.publish(store.cut({"step": step}))
        with CommitPart(directories(tmp_path)) as part:
            assert whole(part, "block") == filled_buffer(8 * MIB, seed=2).tobytes()
            for step in (3, 4, 5):
                store.write("block", filled_buffer(8 * MIB, seed=step), "update").wait()
                store.publish(store.cut({"step": step}))
            with pytest.raises(StorageError, match="commit 2 is not in this store any more"):
                whole(part, "block")


def test_reading_needs_neither_mindspore_nor_mpi(tmp_path):
    code = (
        "import sys, offload.checkpoint.catalog\n"
        "bad = {'mindspore', 'mpi4py'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
