"""Safetensors files of unknown origin: what is read, and what is refused."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest

from moe.weights import reading
from moe.weights.names import Place
from moe.weights.reading import WeightFiles
from ops.errors import ConfigError, StorageError
from tests.moe.weights.weight_files import NUMPY, save, save_shards


def matrix(rows=40, columns=24, dtype="F32", seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(NUMPY[dtype])


def read(files, place, rows, columns):
    out = np.full((rows.stop - rows.start, columns.stop - columns.start), np.nan, np.float32)
    files.read(place, rows, columns, out)
    return out


def refused(folder, **options):
    with pytest.raises(ConfigError) as caught:
        WeightFiles(str(folder), "train.init_from", **options)
    text = str(caught.value)
    assert text.startswith(f"train.init_from = {folder}: ") and text.endswith(".")
    return text


@pytest.mark.parametrize("scratch", [64, 1 << 10, 8 << 20])
@pytest.mark.parametrize("dtype", list(NUMPY))
def test_any_rectangle_is_read_whatever_the_scratch(tmp_path, monkeypatch, scratch, dtype):
    monkeypatch.setattr(reading, "SCRATCH_BYTES", scratch)
    whole = matrix(dtype=dtype)
    save(tmp_path / "model.safetensors", {"first": matrix(3, 5), "a": whole, "b": whole.T.copy()})
    wanted = whole.astype(np.float32)
    with WeightFiles(str(tmp_path), "it") as files:
        for rows, columns in [((0, 40), (0, 24)), ((7, 8), (3, 24)), ((5, 33), (11, 13))]:
            rows, columns = slice(*rows), slice(*columns)
            assert np.array_equal(
                read(files, Place("a", 0, 24, 1), rows, columns), wanted[rows, columns]
            )
            assert np.array_equal(  # the same matrix, stored transposed
                read(files, Place("b", 0, 1, 40), rows, columns), wanted[rows, columns]
            )


def test_columns_far_apart_are_read_without_what_lies_between(tmp_path):
    whole = matrix(64, 4096)
    save(tmp_path / "model.safetensors", {"a": whole})
    with WeightFiles(str(tmp_path), "it") as files:
        columns = slice(1024, 2048)
        found = read(files, Place("a", 0, 4096, 1), slice(0, 64), columns)
        assert np.array_equal(found, whole[:, columns])
        assert files.bytes_read == found.nbytes


def test_shards_are_found_through_their_index(tmp_path):
    tensors = {f"t{index}": matrix(seed=index) for index in range(20)}
    save_shards(tmp_path, tensors, 18)  # more files than are kept open
    with WeightFiles(str(tmp_path), "it") as files:
        assert set(files.tensors) == set(tensors)
        for name in [*tensors, *tensors]:
            found = read(files, Place(name, 0, 24, 1), slice(0, 40), slice(0, 24))
            assert np.array_equal(found, tensors[name])
        assert len(os.listdir("/proc/self/fd")) < 200


@pytest.mark.parametrize(
    "file", ["../model-1.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "model.bin"]
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, file):
    """C68."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save(tmp_path / "model-1.safetensors", {"a": matrix()})
    index = json.dumps({"weight_map": {"a": file}})
    (folder / "model.safetensors.index.json").write_text(index)
    assert f"names the file {file!r}" in refused(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_a_bad_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path)


def test_an_index_that_is_wrong_about_a_file_is_refused(tmp_path):
    save_shards(tmp_path, {"a": matrix(), "b": matrix()}, 2)
    index = tmp_path / "model.safetensors.index.json"
    saved = json.loads(index.read_text())
    saved["weight_map"]["a"] = saved["weight_map"]["b"]
    index.write_text(json.dumps(saved))
    assert "says that a is in model-00002-of-00002.safetensors, where it is not" in refused(
        tmp_path
    )
    saved["weight_map"]["a"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(saved))
    assert "ENOENT" in refused(tmp_path)


@pytest.mark.parametrize("cut", [1, 4 * 24 * 40, 4 * 24 * 40 + 10])
def test_a_file_shorter_than_its_header_claims_is_refused(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save(path, {"a": matrix()})
    os.truncate(path, path.stat().st_size - cut)
    text = refused(tmp_path)
    assert "it is truncated" in text and "claims" in text


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "header",
    [
        b"{}x",
        b"[1]",
        b"[" * 100_000,
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},  # a hole
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": 1},
    ],
)
def test_a_bad_header_is_refused_before_anything_is_allocated(tmp_path, header):
    """C68."""
    with_header(tmp_path / "model.safetensors", header, bytes(8))
    refused(tmp_path)


def test_a_header_that_claims_to_be_huge_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert "claims to take 1,099,511,627,776" in refused(tmp_path)


def test_a_directory_without_weights_and_one_that_is_not_there_are_refused(tmp_path):
    assert "neither model.safetensors nor" in refused(tmp_path)
    assert "neither" in refused(tmp_path / "nowhere")


def test_an_unfinished_export_is_refused(tmp_path):
    save(tmp_path / "model.safetensors", {"a": matrix()})
    (tmp_path / "model.safetensors.index.json.unfinished").write_text("")
    assert "interrupted" in refused(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_tensor(tmp_path, value):
    bad = matrix()
    bad[17, 5] = value
    save(tmp_path / "model.safetensors", {"layer.w": bad})
    refused = pytest.raises(ConfigError, match=r"layer\.w has values that are not finite")
    with WeightFiles(str(tmp_path), "it") as files, refused:
        read(files, Place("layer.w", 0, 24, 1), slice(0, 40), slice(0, 24))


def test_a_file_that_becomes_shorter_meanwhile_is_a_storage_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, {"a": matrix()})
    with WeightFiles(str(tmp_path), "it") as files:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(StorageError, match="shorter"):
            read(files, Place("a", 0, 24, 1), slice(0, 40), slice(0, 24))


def test_equal_compares_numbers_not_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "SCRATCH_BYTES", 256)
    half = matrix(dtype="BF16")
    other = half.astype(np.float32)
    changed = other.copy()
    changed[39, 23] += 1
    tensors = {"a": half, "b": other, "c": changed, "d": matrix(2, 3)}
    save(tmp_path / "model.safetensors", tensors)
    with WeightFiles(str(tmp_path), "it") as files:
        assert files.equal("a", "b")
        assert not files.equal("a", "c") and not files.equal("a", "d")
