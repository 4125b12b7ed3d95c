"""A store looked at from outside: whole, damaged, in use, or none at all."""

from __future__ import annotations

import os

import pytest

from offload.nvme.inspect import InspectedStore, find_stores
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
from ops.errors import ConfigError, StorageError

MIB = 1 << 20


def make(paths, *, steps=2, rank=0, close=True):
    store = NvmeStore(paths, 64 * MIB, rank=rank, workers=2, keep_commits=2)
    store.write("same", filled_buffer(MIB + 5), "update", version=9)
    for step in range(steps):
        store.write("new", filled_buffer(3 * MIB - 1, seed=step), "update", version=step)
        store.write("empty", filled_buffer(0), "update")
        store.publish(store.cut({"step": step}))
    if close:
        store.close()
    return store


def inspect(path, rank=0):
    return InspectedStore(find_stores([str(path)])[rank])


def damage_of(store):
    return [damage for _, _, found in store.verify() for damage in found]


def extents_of(store, block, commit=0):
    return store.commits[commit].blocks[block].extents


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_commits_and_their_blocks_are_listed_and_verified(tmp_path):
    make(str(tmp_path))
    store = inspect(tmp_path)
    assert [commit.generation for commit in store.commits] == [2, 1]
    assert store.commits[0].meta == {"step": 1} and not store.is_owned and not store.damaged
    assert set(store.commits[0].blocks) == {"same", "new", "empty"}
    read = dict.fromkeys(("same", "new", "empty"), 0)
    for name, nbytes, damage in store.verify():
        read[name] += nbytes
        assert damage == []
    assert read == {"same": MIB + 5, "new": 2 * (3 * MIB - 1), "empty": 0}, "shared ones once"


def test_damage_is_named_to_the_chunk_in_every_retained_commit(tmp_path):
    # C05
    make(str(tmp_path))
    store = inspect(tmp_path)
    path = os.path.join(store.directory, "data.bin")
    newest, older = extents_of(store, "new")[0].offset, extents_of(store, "new", 1)[0].offset
    flip(path, newest + 2 * MIB + 7)
    flip(path, older)
    found = {(x.path, x.offset, x.block, x.chunk) for x in damage_of(store)}
    assert found == {(path, newest + 2 * MIB, "new", 2), (path, older, "new", 0)}
    assert all("checksum mismatch" in x.reason for x in damage_of(store))


def test_a_truncated_data_file_is_damage_and_a_missing_one_an_error(tmp_path):
    # C05
    make(str(tmp_path))
    store = inspect(tmp_path)
    path = os.path.join(store.directory, "data.bin")
    os.truncate(path, MIB)
    assert damage_of(store)
    os.unlink(path)
    with pytest.raises(StorageError, match=r"ENOENT.*data\.bin"):
        damage_of(store)
    assert not os.path.exists(path), "looking makes nothing"


def test_a_damaged_manifest_is_told(tmp_path):
    make(str(tmp_path))
    flip(tmp_path / "rank-00000/manifest.1", 60)
    store = inspect(tmp_path)
    assert store.damaged and store.notes == ("manifest.1: checksum mismatch",)
    assert [commit.generation for commit in store.commits] == [2]
    flip(tmp_path / "rank-00000/manifest.2", 60)
    with pytest.raises(StorageError, match="none can be opened"):
        inspect(tmp_path)


def test_a_store_in_use_is_read_and_its_owner_named(tmp_path):
    # C11
    owner = make(str(tmp_path), close=False)
    store = inspect(tmp_path)
    assert store.is_owned and store.owner.pid == os.getpid()
    assert damage_of(store) == []
    owner.write("new", filled_buffer(10), "update").wait()
    owner.publish(owner.cut({}))
    owner.close()


def test_what_a_live_owner_has_superseded_meanwhile_is_no_damage(tmp_path):
    owner = make(str(tmp_path), close=False)
    store = inspect(tmp_path)
    path = os.path.join(store.directory, "data.bin")
    flip(path, extents_of(store, "new")[0].offset)
    assert damage_of(store), "still retained"
    for step in range(2):
        owner.write("new", filled_buffer(99, seed=step), "update")
        owner.publish(owner.cut({}))
    assert damage_of(store) == []
    owner.close()


def test_nobody_can_become_owner_while_a_store_is_looked_at(tmp_path):
    # C11
    make(str(tmp_path))
    store = inspect(tmp_path)
    with pytest.raises(ConfigError, match="is being read"):
        NvmeStore(str(tmp_path), 64 * MIB, resume=True)
    store.close()
    store.close()
    NvmeStore(str(tmp_path), 64 * MIB, resume=True).close()


def test_stores_of_all_ranks_and_paths_are_found(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for rank in (0, 3):
        make(paths, rank=rank)
    stores = [InspectedStore(found) for found in find_stores(paths)]
    assert [os.path.basename(store.directory) for store in stores] == ["rank-00000", "rank-00003"]
    assert all(damage_of(store) == [] for store in stores)
    (alone,) = find_stores([os.path.join(path, "rank-00003") for path in paths])
    assert damage_of(InspectedStore(alone)) == []
    with pytest.raises(ConfigError, match="directory 0 of the 2 of its store"):
        inspect(paths[0])
    with pytest.raises(ConfigError, match="directory 1 of the 2"):
        InspectedStore(find_stores(paths[::-1])[0])


def test_a_store_without_commits_is_a_store(tmp_path):
    NvmeStore(str(tmp_path), MIB, workers=1).close()
    store = inspect(tmp_path)
    assert store.commits == () and damage_of(store) == [] and not store.damaged


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_a_path_without_a_store_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=f"{name} is no store"):
        find_stores([str(tmp_path / name)])
