"""Parts that only another rank can read travel to those who need them; ranks are threads."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

import numpy as np
import pytest

from offload.checkpoint.spool import Spool, exchange, tell_blocks
from offload.checkpoint.units import UnitReader
from offload.ledger import Ledger
from ops.comm.base import World
from ops.comm.local import run_local
from ops.errors import StorageError
from ops.kernels.adamw import AdamW
from ops.kernels.pool import KernelPool
from tests.offload.checkpoint.saved_units import Whole, blocks_of, mesh_layouts, part_of

KINDS = ("bfloat16", "bfloat16", "float32")
TENSORS = [Whole(1024, 512, False, True, "rows"), Whole(64, 64, True, False, "none")]


def test_every_rank_gets_what_only_others_can_read(tmp_path):
    """Of 4 parts ranks 0, 1, 2 can read {0}, {1, 2}, {3}; they shard the unit over 3."""
    sources = mesh_layouts(TENSORS, 2, 2, KINDS)
    targets = mesh_layouts(TENSORS, 1, 3, KINDS)
    layouts = {rank: {"u": layout} for rank, layout in enumerate(sources)}
    readable, readers = [[0], [1, 2], [3]], {0: 0, 1: 1, 2: 1, 3: 2}

    def rank(world: World) -> list[int]:
        parts = {saved: part_of(sources[saved]) for saved in readable[world.rank]}
        ledger = Ledger(AdamW(0.9, 0.95, 1e-8))
        ledger.restore({"step": 3, "rates": []})
        target = targets[world.rank]
        told = tell_blocks(world, parts)
        assert sorted(told) == [0, 1, 2, 3]
        with KernelPool(1) as pool, ExitStack() as stack:
            known = {saved: parts.get(saved, told[saved]) for saved in range(4)}
            needed = UnitReader(known, layouts, ledger, 0.1, pool).needed(target)
            missing = {key: chunks for key, chunks in needed.items() if key[0] not in parts}
            came = exchange(world, parts, readers, told, missing, str(tmp_path), stack.callback)
            read = {saved: parts.get(saved) or came[saved] for saved in range(4)}
            weight = np.zeros(target.nbytes("weight"), np.uint8)
            state = np.zeros(target.nbytes("state"), np.uint8)
            assert UnitReader(read, layouts, ledger, 0.1, pool).fill(target, weight, state) == 3
        expected = blocks_of(target)
        np.testing.assert_array_equal(weight, expected["weight"])
        np.testing.assert_array_equal(state, expected["state"])
        return sorted({saved for saved, _ in missing})

    travelled = run_local(3, rank)
    assert travelled[0] and travelled[2], travelled
    assert not list(tmp_path.iterdir()), "the spool has no name"


def test_faults_of_the_disk_name_directory_and_bytes(tmp_path, monkeypatch):
    """Only a write was told as a storage fault; making and reading it ended in a traceback."""
    with pytest.raises(StorageError, match=r"no file can be made.*ENOENT.*path="):
        Spool(str(tmp_path / "nowhere"))
    spool = Spool(str(tmp_path))
    place = spool.append(np.arange(100, dtype=np.uint8))

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StorageError, match=r"cannot be read: EIO.*offset=0, block=u/weight"):
        spool.read(*place, "u/weight")
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StorageError, match=r"cannot be kept: EIO.*wanted_bytes=100, done_bytes=0"):
        spool.append(np.arange(100, dtype=np.uint8))
    spool.close()


def test_what_is_spooled_is_verified(tmp_path):
    spool = Spool(str(tmp_path))
    place = spool.append(np.arange(100, dtype=np.uint8))
    assert bytes(spool.read(*place, "b")) == bytes(range(100))
    with pytest.raises(StorageError, match="was not kept whole"):
        spool.read(place[0], place[1], place[2] ^ 1, "b")
    spool.close()
