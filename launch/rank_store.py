"""The stores of all ranks, opened together: at the commit they published together, or empty.

What one rank finds may differ from what the others find, so every rank tells what became of its
own store before anybody goes on; an error of one is an error of all, with the ranks named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.build import open_store
from launch.config import RunConfig
from moe.mesh import Mesh
from offload.nvme.store import NvmeStore
from offload.placement import MemoryPlan
from offload.rank_commits import RankCommit, RankCommits, RecordFile
from ops.comm.base import World
from ops.errors import ConfigError, HeadraceError, StorageError
from ops.trace import NO_TRACE, Tracer


@dataclass(frozen=True)
class RankStore:
    """This rank's store, and what publishes its commits (None for the only rank of a run)."""

    store: NvmeStore
    agree: RankCommits | None


def open_rank_store(
    config: RunConfig, plan: MemoryPlan, resume: bool, world: World, trace: Tracer = NO_TRACE
) -> RankStore:
    """The store of this rank; entered by all of them. Errors as `open_store`, on every rank.

    Blocks for the other ranks.
    """
    record = RecordFile(config.offload.nvme.paths[0])
    if world.size == 1:
        if resume:
            _refuse_other_mesh(config, record.read())
        else:
            record.remove()
        return RankStore(open_store(config, plan, resume, trace), None)
    commits = _published(config, resume, record, world)
    store, error = None, None
    try:
        newest = commits[0].generations[world.rank] if commits else None
        store = open_store(config, plan, bool(commits), trace, world.rank, newest)
    except HeadraceError as caught:
        error = caught
    try:
        _agree(store, error, commits, world)
    except BaseException:
        if store is not None:
            store.close()
        raise
    assert store is not None
    own = record if world.rank == 0 else None
    ranks = world.split([list(range(world.size))], "commits")
    facts = {"parallel": config.to_dict()["parallel"]}
    return RankStore(
        store,
        RankCommits(ranks, own, store.store_id, facts, config.offload.keep_in_store, commits),
    )


def _published(
    config: RunConfig, resume: bool, record: RecordFile, world: World
) -> tuple[RankCommit, ...]:
    """The commits to resume at, newest first; rank 0 reads them, all check them."""
    told: list[Any] = [None, None]
    if world.rank == 0:
        try:
            if resume:
                told[0] = [commit.to_json() for commit in record.read()]
            else:
                record.remove()
                told[0] = []
        except HeadraceError as error:
            told[1] = str(error)
    told = world.all_gather_object(told)[0]
    if told[1] is not None:
        raise StorageError(told[1])
    commits = tuple(RankCommit.from_json(row) for row in told[0])
    _refuse_other_mesh(config, commits)
    return commits


def _refuse_other_mesh(config: RunConfig, commits: Sequence[RankCommit]) -> None:
    if not commits:
        return
    mesh, made = Mesh(config.parallel), commits[0].facts.get("parallel")
    if made != config.to_dict()["parallel"]:
        raise ConfigError(
            f"--resume: the commit was made by {len(commits[0].stores)} ranks with parallel = "
            f"{made}, but now there are {mesh.num_ranks} with {config.to_dict()['parallel']}: "
            "allowed is the same mesh."
        )


def _agree(
    store: NvmeStore | None,
    error: HeadraceError | None,
    commits: Sequence[RankCommit],
    world: World,
) -> None:
    """Raise on every rank unless all ranks have opened what the record says."""
    found: list[Any] = [str(error), 0, ""]
    if store is not None:
        at = store.recovered
        found = ["", 0 if at is None else at.generation, store.store_id]
    told = world.all_gather_object(found)
    if error is not None:
        raise error
    failed = [(rank, why) for rank, (why, _, _) in enumerate(told) if why]
    if failed:
        rank, why = failed[0]
        raise StorageError(f"rank {rank} could not open its store: {why}")
    if not commits:
        return
    wanted = list(zip(commits[0].generations, commits[0].stores))
    missing = [rank for rank, (_, *part) in enumerate(told) if tuple(part) != wanted[rank]]
    if missing:
        raise StorageError(
            f"commit {commits[0].epoch} of all ranks cannot be resumed: the part of ranks "
            f"{', '.join(map(str, missing))} is not in their directories; give every rank the path "
            "it wrote to"
        )
