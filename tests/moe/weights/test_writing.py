"""Safetensors files that are written as they come, read back with the library."""

from __future__ import annotations

import json
import os
import struct
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from moe.weights import writing
from moe.weights.writing import Entry, ShardWriter, header_of, plan_shards
from offload.nvme.aligned import AccessMode
from ops.errors import StorageError


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(writing, "BUFFER_BYTES", 8192)


def numbers(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def copying(values):
    """A `produce` that hands out these values, and checks how it is asked."""
    reached = 0

    def produce(lo, hi, out):
        nonlocal reached
        assert lo == reached and out.size == hi - lo
        reached = hi
        out[:] = values[lo:hi]

    return produce


def entries_of(tensors):
    return [Entry(name, "F32", array.shape) for name, array in tensors.items()]


def write_all(folder, tensors, shard_bytes, order=None):
    """Every tensor of `tensors` in the pieces that `order` names: (name, first, end)."""
    with ShardWriter(str(folder)) as writer:
        files = writer.new_set("model", entries_of(tensors), shard_bytes)
        for name, lo, hi in order or [(name, 0, x.size) for name, x in tensors.items()]:
            files.append(name, hi - lo, copying(tensors[name].ravel()[lo:hi]))
        files.finish()
        files.publish()
        assert writer.bytes_written == files.nbytes
    return files


def loaded(folder, files):
    found = {}
    for name in files.names:
        found |= load_file(folder / name)
    return found


SIZES = [1, 5, 1000, 2048, 2047, 3, 5000, 4096, 12_345, 1]


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
def test_what_is_written_is_what_the_library_reads(tmp_path, small_buffers, shard_bytes):
    tensors = {f"t{i}": numbers(n, i).reshape(n, 1) for i, n in enumerate(SIZES)}
    files = write_all(tmp_path, tensors, shard_bytes)
    found = loaded(tmp_path, files)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    index = files.index()
    assert index["metadata"]["total_size"] == 4 * sum(SIZES)
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert sorted(os.listdir(tmp_path)) == sorted(files.names)
    assert len(files.names) == {1: 10, 20_000: 6, 1 << 30: 1}[shard_bytes]


@pytest.mark.parametrize("shard_bytes", [40_000, 1 << 30])
def test_tensors_may_grow_side_by_side(tmp_path, small_buffers, shard_bytes):
    tensors = {name: numbers(7 * 1111, i) for i, name in enumerate(["up", "down"])}
    tensors = {"first": numbers(77), **tensors, "last": numbers(4444, 9)}
    order = [("first", 0, 77)]
    for k in range(7):
        order += [(name, 1111 * k, 1111 * (k + 1)) for name in ("up", "down")]
    order += [("last", 0, 4444)]
    files = write_all(tmp_path, tensors, shard_bytes, order)
    found = loaded(tmp_path, files)
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def test_the_same_without_direct_access(tmp_path, small_buffers, monkeypatch):
    monkeypatch.setattr(writing, "choose_access", lambda path: AccessMode(False, 4096, "test"))
    tensors = {"a": numbers(10_001), "b": numbers(3)}
    files = write_all(tmp_path, tensors, 1 << 30)
    assert all(np.array_equal(loaded(tmp_path, files)[name], tensors[name]) for name in tensors)


def test_bits_of_bfloat16_are_written_as_such(tmp_path):
    bits = np.arange(1000, dtype=np.uint16)
    with ShardWriter(str(tmp_path)) as writer:
        files = writer.new_set("model", [Entry("a", "BF16", (10, 100))], 1 << 30)
        files.append("a", 1000, copying(bits))
        files.finish()
        files.publish()
    data = (tmp_path / files.names[0]).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["a"]
    assert entry == {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}
    assert data[8 + length :] == bits.tobytes()


def test_data_begin_at_a_page(tmp_path):
    for count in (1, 30, 300):
        header = header_of([Entry(f"tensor{i}", "F32", (i,)) for i in range(count)])
        assert len(header) % 4096 == 0
        assert struct.unpack("<Q", header[:8])[0] == len(header) - 8


def test_a_header_as_large_as_several_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "BUFFER_BYTES", 4096)
    tensors = {f"tensor.{i}": numbers(1, i) for i in range(200)}
    files = write_all(tmp_path, tensors, 1 << 30)
    assert len(files._headers[0]) > 2 * 4096
    assert all(np.array_equal(loaded(tmp_path, files)[name], tensors[name]) for name in tensors)


def test_shards_hold_whole_tensors_up_to_their_size():
    entries = [Entry(str(i), "F32", (n,)) for i, n in enumerate([10, 10, 30, 5, 5])]
    sizes = [[x.nbytes for x in shard] for shard in plan_shards(entries, 80)]
    assert sizes == [[40, 40], [120], [20, 20]]


def test_no_more_buffers_than_promised_are_ever_made(tmp_path, small_buffers, monkeypatch):
    made = []
    real = writing.aligned_buffer
    monkeypatch.setattr(
        writing, "aligned_buffer", lambda size, align: made.append(size) or real(size, align)
    )
    write_all(tmp_path, {"a": numbers(400_000)}, 1 << 30)
    assert 0 < len(made) <= writing.BUFFERS_MAX and set(made) == {8192}


def test_a_slow_disk_makes_the_writer_wait_not_grow(tmp_path, small_buffers, monkeypatch):
    started, go_on = threading.Semaphore(0), threading.Event()
    real = writing._File.write

    def slow(self, data, offset):
        started.release()
        assert go_on.wait(60)
        real(self, data, offset)

    monkeypatch.setattr(writing._File, "write", slow)
    values = numbers(100_000)
    thread = threading.Thread(target=write_all, args=(tmp_path, {"a": values}, 1 << 30))
    thread.start()
    for _ in range(writing._WRITERS):
        assert started.acquire(timeout=60)
    assert not started.acquire(timeout=0)  # no more threads than that
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert np.array_equal(load_file(tmp_path / "model-00001-of-00001.safetensors")["a"], values)


def test_the_first_failure_reaches_the_caller_with_its_file(tmp_path, small_buffers, monkeypatch):
    def broken(self, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing._File, "write", broken)
    with pytest.raises(StorageError, match=r"ENOSPC.*model-00001-of-00001\.safetensors\.partial"):
        write_all(tmp_path, {"a": numbers(100_000)}, 1 << 30)
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".partial")]


def test_a_tensor_that_did_not_come_as_a_whole_is_noticed(tmp_path):
    with ShardWriter(str(tmp_path)) as writer:
        files = writer.new_set("model", [Entry("a", "F32", (10,))], 1 << 30)
        files.append("a", 9, copying(numbers(9)))
        with pytest.raises(AssertionError):
            files.finish()
