"""Commits of several ranks: one record says what all of them may resume at.

Ranks are threads, each with a store of its own; a crash is a rank that gets no further.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offload.config import OptimizerConfig
from offload.rank_commits import (
    RECORD_NAME,
    RankCommit,
    RankCommits,
    RecordFile,
    published_copy,
)
from offload.testing import Toy, budgets, smallest_budgets, toy_run
from offload.testing_storage import FaultyDirectoryFiles
from ops.comm.base import World
from ops.comm.local import run_local
from ops.errors import CommError, StorageError

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)
STORES = ("a" * 32, "b" * 32)


def a_commit(epoch: int = 1) -> RankCommit:
    return RankCommit(epoch, (epoch, epoch + 4), STORES, {"parallel": {"data_parallel": 2}})


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = RecordFile(str(tmp_path))
    assert record.read() == ()
    record.write([a_commit(2), a_commit(1)])
    assert record.read() == (a_commit(2), a_commit(1))
    record.remove()
    assert record.read() == () and list(tmp_path.iterdir()) == []
    record.remove()
    RecordFile(str(tmp_path / "no" / "such")).remove()


@pytest.mark.parametrize("byte", range(0, 300, 7))
def test_a_flipped_bit_of_a_record_is_noticed(tmp_path, byte):
    record = RecordFile(str(tmp_path))
    record.write([a_commit()])
    data = bytearray((tmp_path / RECORD_NAME).read_bytes())
    data[byte % len(data)] ^= 1
    (tmp_path / RECORD_NAME).write_bytes(data)
    with pytest.raises(StorageError, match=RECORD_NAME):
        record.read()


@pytest.mark.parametrize(
    "saved",
    [
        [],
        {"epoch": 1},
        {"epoch": 0, "generations": [1], "stores": ["a" * 32], "facts": {}},
        {"epoch": 1, "generations": [True], "stores": ["a" * 32], "facts": {}},
        {"epoch": 1, "generations": [1, 2], "stores": ["a" * 32], "facts": {}},
        {"epoch": 1, "generations": [], "stores": [], "facts": {}},
        {"epoch": 1, "generations": [1], "stores": ["../../etc"], "facts": {}},
        {"epoch": 1, "generations": [1], "stores": ["a" * 32], "facts": []},
        {"epoch": 1, "generations": 1, "stores": ["a" * 32], "facts": {}},
        {"epoch": 1, "generations": [1], "stores": ["a" * 32], "facts": {}, "more": 1},
    ],
)
def test_what_is_no_commit_is_refused(saved):
    """C68: nothing of a record is believed before it was checked."""
    with pytest.raises(ValueError):
        RankCommit.from_json(saved)


def life(
    world: World,
    path: Path,
    steps: range,
    commit_at: int | None,
    fails: int | None,
    keep: int = 1,
    broken: bool = False,
) -> tuple[int, list[tuple[str, int, bytes]]]:
    """Train `steps`, from the published commit if there is one; (first step done, weights).

    Rank `fails` gets no further than its own part of the commit; if `broken`, not so far.
    """
    toy = replace(Toy(), ranks=2, rank=world.rank)
    folder = path / str(world.rank)
    folder.mkdir(parents=True, exist_ok=True)
    record = RecordFile(str(path))
    told = [commit.to_json() for commit in record.read()] if world.rank == 0 else None
    commits = [RankCommit.from_json(row) for row in world.all_gather_object(told)[0]]
    ranks = world.split([[0, 1]], "commits")
    publisher: list[RankCommits] = []

    def agree(generation: int) -> None:
        if world.rank == fails:
            raise RuntimeError("killed")
        publisher[0](generation)

    store: dict[str, object] = {"rank": world.rank, "resume": bool(commits)}
    if commits:
        store["newest"] = commits[0].generations[world.rank]
    if broken and world.rank == fails:  # the first fsync is that of `member.json`
        store["directory_files"] = FaultyDirectoryFiles("sync_file", at_op=1)
    config = smallest_budgets(toy, budgets(folder, durability="step", keep_in_store=keep))
    with toy_run(
        toy,
        config,
        OPTIMIZER,
        store_options=store,
        delete=False,
        sharing=toy.sharing(world),
        everyone=world,
        agree=agree,
    ) as run:
        assert run.store is not None
        mine = record if world.rank == 0 else None
        publisher.append(RankCommits(ranks, mine, run.store.store_id, {}, keep, commits))
        done = 0 if run.resumed is None else int(run.resumed["step"])
        for number in range(done + 1, steps.stop):
            run.step(number, 1e-2 / number, {"step": number} if number == commit_at else None)
        run.engine.drain()
        run.engine.commits.wait()
        return done, [
            (tensor.name, tensor.flat0, np.array(values).tobytes())
            for tensor, values in run.engine.masters()
        ]


def test_all_ranks_resume_at_the_commit_they_published(tmp_path):
    whole = run_local(2, life, tmp_path / "whole", range(1, 6), None, None)
    run_local(2, life, tmp_path / "cut", range(1, 5), 3, None)
    resumed = run_local(2, life, tmp_path / "cut", range(1, 6), None, None)
    assert [done for done, _ in resumed] == [3, 3]
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]


@pytest.mark.parametrize("fails", [0, 1])
def test_a_commit_that_one_rank_did_not_reach_is_resumed_by_none(tmp_path, fails):
    """C62: the part of the other rank is durable, but only the record makes a commit."""
    whole = run_local(2, life, tmp_path / "whole", range(1, 6), None, None)
    run_local(2, life, tmp_path / "cut", range(1, 3), 2, None)
    with pytest.raises((StorageError, CommError)):
        run_local(2, life, tmp_path / "cut", range(1, 5), 4, fails)
    record = RecordFile(str(tmp_path / "cut")).read()
    assert [commit.epoch for commit in record] == [1]
    resumed = run_local(2, life, tmp_path / "cut", range(1, 6), 5, None)
    assert [done for done, _ in resumed] == [2, 2]
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]
    # The next commit is taken, though the part that was given up had a generation of its own.
    again = run_local(2, life, tmp_path / "cut", range(1, 6), None, None)
    assert [done for done, _ in again] == [5, 5]


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_cannot_prepare_its_part_ends_those_that_wait_for_it(tmp_path, fails):
    """The others are in the collective to which it does not come."""
    with pytest.raises((StorageError, CommError)):
        run_local(2, life, tmp_path, range(1, 5), 2, fails, 1, True)
    assert RecordFile(str(tmp_path)).read() == ()
    prepared = [len(list((tmp_path / str(rank)).glob("*/manifest.?"))) for rank in (0, 1)]
    assert prepared[fails] == 0


def test_every_rank_has_a_copy_of_the_record_before_it_lets_go(tmp_path):
    def rank(world: World) -> None:
        record = RecordFile(str(tmp_path)) if world.rank == 0 else None
        (tmp_path / str(world.rank)).mkdir()
        copy = published_copy(str(tmp_path / str(world.rank)))
        commits = RankCommits(world, record, STORES[world.rank], {}, 1, copy=copy)
        for generation in (1, 2):
            commits(generation)
            assert [x.generations for x in copy.read()] == [(generation, generation)]

    run_local(2, rank)
    record = RecordFile(str(tmp_path)).read()
    assert all(published_copy(str(tmp_path / str(x))).read() == record for x in (0, 1))


def test_runs_that_go_on_from_each_other_are_one_line(tmp_path):
    """Rank 0 may have another store than the run had that it goes on from."""

    def going_on(line: str, epoch: int) -> RankCommit:
        def rank(world: World) -> None:
            record = RecordFile(str(tmp_path)) if world.rank == 0 else None
            RankCommits(world, record, STORES[world.rank], {}, 1, epoch=epoch, line=line)(1)

        run_local(2, rank)
        return RecordFile(str(tmp_path)).read()[0]

    begun = going_on("", 0)
    assert (begun.line, begun.epoch, begun.facts) == (STORES[0], 1, {})
    assert (going_on(STORES[0], 1).line, going_on(STORES[0], 1).facts) == (STORES[0], {})
    moved = going_on("c" * 32, 7)
    assert (moved.line, moved.epoch) == ("c" * 32, 8)
    assert replace(moved, facts={"line": "../../etc"}).line == STORES[0]


def test_a_record_that_cannot_be_written_fails_the_commit_on_all_ranks(tmp_path):
    def rank(world: World) -> str:
        record = RecordFile(str(tmp_path / "missing")) if world.rank == 0 else None
        commits = RankCommits(world, record, STORES[world.rank], {}, 1)
        with pytest.raises(StorageError) as caught:
            commits(1)
        return str(caught.value)

    first, second = run_local(2, rank)
    assert RECORD_NAME in first and "rank 0 could not write the record" in second


def test_the_record_keeps_as_many_commits_as_the_stores_do(tmp_path):
    def rank(world: World) -> list[list[int]]:
        record = RecordFile(str(tmp_path)) if world.rank == 0 else None
        commits = RankCommits(world, record, STORES[world.rank], {}, 2)
        kept = []
        for generation in (3, 4, 9):
            commits(generation + world.rank)
            world.barrier()
            kept.append([list(x.generations) for x in RecordFile(str(tmp_path)).read()])
            world.barrier()
        return kept

    found = run_local(2, rank)
    assert found[0] == [[[3, 4]], [[4, 5], [3, 4]], [[9, 10], [4, 5]]]
    assert json.loads((tmp_path / RECORD_NAME).read_text())["commits"][0]["epoch"] == 3
