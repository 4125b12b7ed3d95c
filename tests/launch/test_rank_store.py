"""The stores of all ranks are opened together, or none is; ranks are threads, stores are real."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offload.nvme.opening
from launch.build import make_plan
from launch.config import RunConfig
from launch.origin import find_origin
from launch.rank_store import RankStore, open_rank_store
from launch.resume import save_plan, starting_point
from moe.data.stream import Cursor
from offload.checkpoint.catalog import find_checkpoints
from offload.nvme.directory import rank_directory, ranks_under
from offload.nvme.lock import OwnerLock
from offload.nvme.manifest import decode_manifest
from offload.rank_commits import RankCommit, RecordFile
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import ConfigError, HeadraceError, StorageError
from tests.launch.helpers import ENGINE_META
from tests.launch.mesh_ranks import Case, make_config
from tests.mpirun import run_ranks


def configured(path: Path, ranks: int = 2) -> RunConfig:
    return make_config(Case("stores", {"data_parallel": ranks}), path)


def open_one(world: World, config: RunConfig, resume: bool) -> RankStore:
    origin = find_origin(config, "latest" if resume else None, world)
    return open_rank_store(config, make_plan(config, rank=world.rank), origin, world)


def on_ranks(config: RunConfig, work: Any, resume: bool = False) -> list[Any]:
    """`work(world, opened)` on every rank of the mesh, each with its store; the results."""

    def rank(world: World) -> Any:
        opened = open_one(world, config, resume)
        try:
            return work(world, opened)
        finally:
            opened.store.close()

    ranks = config.parallel.num_ranks
    return [rank(SingleRank())] if ranks == 1 else run_local(ranks, rank)


def commit(config: RunConfig, opened: RankStore, step: int, *, until: str = "published") -> None:
    """Commit `step`; with `until` = "prepared" this rank gets no further than its own part."""
    cursor = Cursor(seed=1).to_json()
    run = {"step": step, "cursor": cursor, **save_plan(config).facts}
    cut = opened.store.cut({"step": step, "engine": ENGINE_META, "run": run})
    if until == "published":
        opened.store.publish(cut, opened.agree)
        return

    def killed(generation: int) -> None:
        raise InterruptedError("killed")

    with pytest.raises(StorageError, match="was not published by all ranks"):
        opened.store.publish(cut, killed)


def step_found(world: World, opened: RankStore) -> int | None:
    found = opened.store.recovered
    return None if found is None else found.meta["step"]


def make_commits(config: RunConfig, steps: Sequence[int]) -> None:
    on_ranks(config, lambda world, opened: [commit(config, opened, step) for step in steps])


def refusals(config: RunConfig, resume: bool) -> list[HeadraceError]:
    """Opening fails on every rank; the errors."""

    def rank(world: World) -> HeadraceError:
        with pytest.raises(HeadraceError) as caught:
            open_one(world, config, resume)
        return caught.value

    ranks = config.parallel.num_ranks
    return [rank(SingleRank())] if ranks == 1 else run_local(ranks, rank)


def record_of(path: Path) -> tuple[RankCommit, ...]:
    return RecordFile(str(path)).read()


def test_all_ranks_are_opened_at_the_commit_they_published(tmp_path):
    config = configured(tmp_path)
    make_commits(config, (0, 1, 2))
    assert on_ranks(config, step_found, resume=True) == [2, 2]
    assert on_ranks(config, step_found, resume=False) == [None, None]
    assert record_of(tmp_path) == ()
    assert on_ranks(config, step_found, resume=True) == [None, None]


def test_many_ranks_share_a_path_that_a_slow_server_makes(tmp_path, monkeypatch):
    """C67: a server that takes long, and fails when it is asked while it makes the same directory.

    What was written for that case was called by nobody; the order in which stores are opened is
    what keeps ranks from asking together, and a drive of each machine's own has to work as well.
    """
    shared = tmp_path / "slow" / "store"
    makedirs, server, missing = os.makedirs, threading.Lock(), []

    def slow(path, *arguments, **options):
        if Path(path) != shared or shared.is_dir():
            return makedirs(path, *arguments, **options)
        if not server.acquire(blocking=False):
            raise OSError(errno.EIO, "the server is busy")
        with server_released(server):
            missing.append(path)
            threading.Event().wait(0.3)
            return makedirs(path, *arguments, **options)

    monkeypatch.setattr("launch.build.os.makedirs", slow)
    ranks = on_ranks(configured(shared, 8), lambda world, opened: opened.store.directory)
    assert len(missing) == 1 and len(set(ranks)) == 8
    assert ranks_under(str(shared)) == list(range(8))


def test_real_ranks_begin_together_where_there_is_no_directory(tmp_path):
    """C67: on a slow file system, in a path of which nothing is there, again and again."""
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    result = run_ranks(8, "tests.launch.directory_ranks", str(tmp_path), "5", seconds_max=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("is done") == 8
    for number in range(5):
        store = tmp_path / f"{number}" / "deep" / "store"
        assert ranks_under(str(store)) == list(range(8))
        assert [x.epoch for x in record_of(store)] == [1]


@contextmanager
def server_released(server: threading.Lock) -> Iterator[None]:
    try:
        yield
    finally:
        server.release()


@pytest.mark.parametrize("before", [(), (1,)])
@pytest.mark.parametrize("prepared", [(0,), (1,), (0, 1)])
def test_what_was_only_prepared_is_discarded(tmp_path, before, prepared):
    """C62: also when there is no record yet, and on every rank."""
    config = configured(tmp_path)

    def work(world: World, opened: RankStore) -> None:
        for step in before:
            commit(config, opened, step)
        if world.rank in prepared:
            commit(config, opened, 9, until="prepared")

    on_ranks(config, work)
    wanted = before[-1] if before else None
    assert on_ranks(config, step_found, resume=True) == [wanted, wanted]


@pytest.mark.parametrize(("was", "now"), [(2, 1), (2, 4), (1, 2), (4, 2), (4, 1)])
def test_another_mesh_keeps_the_commit_until_it_has_published_its_own(tmp_path, was, now):
    """Nothing is lost by a crash before that; afterwards the mesh before is no checkpoint."""
    before, after = configured(tmp_path, was), configured(tmp_path, now)
    make_commits(before, (3,))
    assert on_ranks(after, step_found, resume=True) == [3 if r < was else None for r in range(now)]

    def prepare(world: World, opened: RankStore) -> None:
        assert not opened.store.blocks()
        commit(after, opened, 9, until="prepared")

    on_ranks(after, prepare, resume=True)
    if now > 1:
        assert on_ranks(before, step_found, resume=True) == [3] * was
    else:  # the manifest of one rank is its commit, whatever the record still says
        assert on_ranks(after, step_found, resume=True) == [9]
    on_ranks(after, lambda world, opened: commit(after, opened, 7), resume=True)
    assert on_ranks(after, step_found, resume=True) == [7] * now
    assert ranks_under(str(tmp_path)) == list(range(now)), "free space really returns"
    assert len(record_of(tmp_path)) == (now > 1)
    assert {x.step for x in find_checkpoints([str(tmp_path)])} == {7}


def test_one_rank_does_not_take_what_several_only_prepared(tmp_path):
    several, one = configured(tmp_path), configured(tmp_path, 1)
    on_ranks(several, lambda _, opened: commit(several, opened, 5, until="prepared"))
    assert on_ranks(one, step_found, resume=True) == [None]


def test_a_part_that_nobody_can_read_is_named_on_all_with_the_way_out(tmp_path):
    config = configured(tmp_path)
    make_commits(config, (3,))
    directory = Path(rank_directory(str(tmp_path), 1))
    directory.rename(tmp_path / "elsewhere")
    for error in refusals(config, resume=True):
        assert isinstance(error, ConfigError)
        message = str(error)
        assert "no rank can read the part of rank 1 (rank 1: no directory" in message
        assert "`headrace checkpoint copy`" in message
    (tmp_path / "elsewhere").rename(directory)
    assert on_ranks(config, step_found, resume=True) == [3, 3]


def test_a_part_that_is_there_and_cannot_be_used_is_a_storage_fault(tmp_path):
    """It ended as a refused configuration, with exit status 2."""
    config = configured(tmp_path)
    make_commits(config, (3,))
    data = Path(rank_directory(str(tmp_path), 1)) / "data.bin"
    data.rename(tmp_path / "data.bin")
    for error in refusals(config, resume=True):
        assert isinstance(error, StorageError)
        assert "no rank can read the part of rank 1" in str(error) and str(data) in str(error)
    (tmp_path / "data.bin").rename(data)
    assert on_ranks(config, step_found, resume=True) == [3, 3]


def test_a_damaged_part_of_the_newest_commit_leads_to_the_one_before(tmp_path):
    """Two commits are kept; only rank 1's part of the newer one is damaged. Both go back."""
    config = configured(tmp_path)
    config = replace(config, offload=replace(config.offload, keep_in_store=2))
    make_commits(config, (3, 4))
    (newest,) = [
        path
        for path in Path(rank_directory(str(tmp_path), 1)).glob("manifest.*")
        if decode_manifest(path.read_bytes()).generation == record_of(tmp_path)[0].generations[1]
    ]
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")

    def told(world: World) -> str:
        origin = find_origin(config, "latest", world)
        assert origin is not None
        return starting_point(config, origin, True).message

    (message,) = set(run_local(2, told))
    assert message.startswith("resuming after step 3 (commit 1 of 2 ranks); it is the newest")
    assert "commit 2 of 2 ranks is not usable: no rank can read the part of rank 1" in message
    assert on_ranks(config, step_found, resume=True) == [3, 3]


@contextmanager
def owned(path: Path, rank: int) -> Iterator[None]:
    """Another run is alive in the directory of `rank`."""
    lock = OwnerLock.acquire(rank_directory(str(path), rank))
    try:
        yield
    finally:
        lock.release()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_beside_a_live_run_costs_it_no_commit(tmp_path, ranks):
    """C11. The record was removed before anybody looked who owns the stores."""
    config = configured(tmp_path)
    make_commits(config, (3,))
    with owned(tmp_path, 0):
        for error in refusals(configured(tmp_path, ranks), resume=False):
            assert isinstance(error, ConfigError) and "rank-00000" in str(error)
    assert on_ranks(config, step_found, resume=True) == [3, 3]


def test_a_start_that_is_refused_costs_no_commit(tmp_path, monkeypatch):
    config = configured(tmp_path)
    make_commits(config, (3,))

    def refuse(*_: object) -> None:
        raise ConfigError("too little free disk")

    with monkeypatch.context() as patch:
        patch.setattr(offload.nvme.opening, "check_free_space", refuse)
        for error in refusals(config, resume=False):
            assert "too little free disk" in str(error)
    assert on_ranks(config, step_found, resume=True) == [3, 3]


@pytest.mark.parametrize("resume", [False, True])
def test_a_refusal_of_one_rank_is_one_of_all_and_of_the_same_kind(tmp_path, resume):
    config = configured(tmp_path)
    make_commits(config, (3,))
    with owned(tmp_path, 1):
        first, second = refusals(config, resume)
    assert type(first) is type(second) is ConfigError
    assert str(first) == f"rank 1 has no store: {second}"
