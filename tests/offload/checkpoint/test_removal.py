"""Deleting checkpoints: whole stores and copies, commits first, and nothing that is not theirs."""

from __future__ import annotations

import errno
import os

import pytest

from offload.checkpoint.catalog import find_checkpoints
from offload.checkpoint.copy import choose_source, copy_checkpoint
from offload.checkpoint.removal import delete_checkpoint
from offload.checkpoint.source import CommitPart
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
from ops.checksum import CHUNK_BYTES
from ops.errors import ConfigError, StorageError
from tests.offload.checkpoint.test_catalog import Ranks

MIB = CHUNK_BYTES


@pytest.fixture
def source(tmp_path):
    path = str(tmp_path / "source")
    with NvmeStore(path, 64 * MIB, workers=2, keep_commits=2) as store:
        for step in (1, 2):
            store.write("a", filled_buffer(MIB, seed=step), "update", version=step)
            store.publish(store.cut({"step": step}))
    return path


@pytest.fixture
def ranks(tmp_path):
    three = Ranks(tmp_path / "ranks", 3, keep=2, copies=True)
    for step in (10, 20):
        three.publish(step)
    three.close()
    return str(tmp_path / "ranks")


def test_deleting_takes_everything_that_stores_made_and_nothing_else(ranks, source, tmp_path):
    out = str(tmp_path / "out")
    copy_checkpoint(choose_source([ranks], out), out)
    (checkpoint,) = find_checkpoints([out])
    delete_checkpoint([out])
    assert not os.path.exists(out)
    with open(os.path.join(ranks, "notes.txt"), "w") as file:
        file.write("mine")
    with open(os.path.join(ranks, "rank-00001", "mine"), "w") as file:
        file.write("mine")
    delete_checkpoint([ranks])
    assert sorted(os.listdir(ranks)) == ["notes.txt", "rank-00001"]
    assert os.listdir(os.path.join(ranks, "rank-00001")) == ["mine"]
    delete_checkpoint([source])
    assert not os.path.exists(source)
    assert checkpoint.is_complete


def test_what_is_in_use_is_read_or_is_no_checkpoint_is_not_deleted(source, tmp_path):
    with (
        NvmeStore(source, 64 * MIB, workers=1, keep_commits=2, resume=True),
        pytest.raises(ConfigError, match="in use by process"),
    ):
        delete_checkpoint([source])
    with (
        CommitPart([os.path.join(source, "rank-00000")], hold=True),
        pytest.raises(ConfigError, match="commit 2 is being read"),
    ):
        delete_checkpoint([source])
    with pytest.raises(ConfigError, match="name the one above"):
        delete_checkpoint([os.path.join(source, "rank-00000")])
    with pytest.raises(ConfigError, match="is no store"):
        delete_checkpoint([str(tmp_path)])
    paths = [str(tmp_path / name) for name in "ab"]
    with NvmeStore(paths, 32 * MIB, workers=1) as store:
        store.publish(store.cut({"step": 1}))
    with pytest.raises(ConfigError, match=r"directory 0 of the 2 .* name all"):
        delete_checkpoint(paths[:1])
    (tmp_path / "links").mkdir()
    os.symlink(os.path.join(source, "rank-00000"), tmp_path / "links/rank-00000")
    with pytest.raises(ConfigError, match="is a link, which is not followed"):
        delete_checkpoint([str(tmp_path / "links")])
    assert find_checkpoints(paths)[0].is_complete and find_checkpoints([source])[0].is_complete
    delete_checkpoint(paths)
    assert not any(map(os.path.exists, paths))


@pytest.mark.parametrize("num_removed", range(1, 16))
def test_what_is_half_deleted_is_never_read_as_live(ranks, num_removed, monkeypatch):
    unlink, left = os.unlink, [num_removed]

    def until(path, **options):
        if not left[0]:
            raise OSError(errno.EIO, "Input/output error", path)
        left[0] -= 1
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", until)
    with pytest.raises(StorageError, match="EIO"):
        delete_checkpoint([ranks])
    monkeypatch.undo()
    try:
        # Copies of the record come first, of each of the three ranks; nothing is lost with them.
        found = {x.is_complete for x in find_checkpoints([ranks])}
        assert found == {num_removed < 4}
    except ConfigError as error:
        assert "nothing has been committed" in str(error)
    delete_checkpoint([ranks])
    assert not os.path.exists(ranks)
