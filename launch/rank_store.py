"""The stores of all ranks, opened together: at the commit they go on from, or empty.

What one rank finds may differ from what the others find, so every rank tells what became of its
own store before anybody goes on; an error of one is an error of all, with the ranks named.

A run that starts anew forgets the record of commits as late as it can: when rank 0 owns its store
and nothing can be refused any more, before any rank's store is emptied. So a start that is refused,
because another run is alive or the disk too full, costs no commit.

A run that goes on from a commit of another mesh, in the same store, keeps that commit until its own
first one is published: its blocks are new versions, written out of place.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from launch.build import open_store
from launch.config import RunConfig
from launch.origin import Origin, fail_together
from offload.nvme.commit import Agree
from offload.nvme.directory import rank_directory, ranks_under
from offload.nvme.opening import discard_store
from offload.nvme.store import NvmeStore
from offload.placement import MemoryPlan
from offload.rank_commits import RankCommits, RecordFile
from ops.comm.base import World
from ops.errors import HeadraceError, StorageError
from ops.trace import NO_TRACE, Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankStore:
    """This rank's store, and what publishes its commits (None: nobody else has to agree)."""

    store: NvmeStore
    agree: Agree | None


def open_rank_store(
    config: RunConfig,
    plan: MemoryPlan,
    origin: Origin | None,
    world: World,
    trace: Tracer = NO_TRACE,
) -> RankStore:
    """The store of this rank; entered by all of them. Errors as `open_store`, on every rank.

    It holds this rank's part of `origin` if that goes on in place; otherwise it is empty, and what
    it keeps of `origin` stays until the first commit. Blocks for the other ranks.
    """
    path = config.offload.nvme.paths[0]
    record = RecordFile(path)
    is_own = origin is not None and origin.is_own
    store, error = None, None
    # Rank 0 is the first to begin anew, because it forgets the record.
    turns = (True,) if is_own or world.size == 1 else (world.rank == 0, world.rank != 0)
    try:
        for is_mine in turns:
            if is_mine:
                store, error = _try_to_open(config, plan, origin, record, world.rank, trace)
            fail_together(error, world, "rank {} has no store: ")
        if origin is not None and origin.in_place:
            _require_parts(store, origin, world)
        assert store is not None
        if origin is not None and is_own and not origin.in_place:
            # The commit keeps them; what is written from here on is of this mesh.
            for block in store.blocks():
                store.delete(block)
        return RankStore(store, _publisher(config, store, origin, record, world))
    except BaseException:
        if store is not None:
            store.close()
        raise


def _publisher(
    config: RunConfig, store: NvmeStore, origin: Origin | None, record: RecordFile, world: World
) -> Agree | None:
    """What makes the commits of all ranks one; None for one rank that is alone in its store."""
    commits = origin.record if origin is not None and origin.is_own else ()
    more = any(len(commit.stores) > world.size for commit in commits)
    # As many commits as are kept may be of the mesh before.
    surplus = _Surplus(config, world.size, config.offload.keep_in_store if more else 0)
    if world.size == 1:
        if not commits:
            if origin is not None and origin.is_own:
                record.remove()  # a crash came before that
            return None
        # From its first commit on, that of one rank is the newest (`catalog.find_checkpoints`).
        return _Then(lambda generation: record.remove(), surplus)
    own = record if world.rank == 0 else None
    ranks = world.split([list(range(world.size))], "commits")
    facts = {"parallel": config.to_dict()["parallel"]}
    keep = config.offload.keep_in_store
    agree = RankCommits(ranks, own, store.store_id, facts, keep, commits)
    return _Then(agree, surplus) if more else agree


class _Then:
    """Publishes commits; what the mesh before had beyond this one is given up in time."""

    def __init__(self, agree: Agree, surplus: _Surplus) -> None:
        self._agree = agree
        self._surplus = surplus

    def __call__(self, generation: int) -> None:
        self._agree(generation)
        self._surplus.count_commit()


class _Surplus:
    """Directories of ranks that this mesh does not have: an earlier run's, or of the commit that
    this one goes on from, which keeps them until `commits` are published."""

    def __init__(self, config: RunConfig, size: int, commits: int) -> None:
        self._paths = config.offload.nvme.paths
        self._size = size
        self._commits_left = commits
        if commits == 0:
            self._give_up()

    def count_commit(self) -> None:
        """One more commit of this mesh is published."""
        self._commits_left -= 1
        if self._commits_left == 0:
            self._give_up()

    def _give_up(self) -> None:
        for rank in ranks_under(self._paths[0]):
            directories = [rank_directory(path, rank) for path in self._paths]
            if rank >= self._size and all(map(os.path.isdir, directories)):
                try:
                    discard_store(directories)
                except (OSError, HeadraceError) as error:  # another rank was faster, or owns it
                    log.debug("%s: not removed: %s", directories[0], error)


def _try_to_open(
    config: RunConfig,
    plan: MemoryPlan,
    origin: Origin | None,
    record: RecordFile,
    rank: int,
    trace: Tracer,
) -> tuple[NvmeStore | None, HeadraceError | None]:
    """This rank's store, at its part of `origin` or empty; or why not."""
    is_own = origin is not None and origin.is_own
    forget = record.remove if rank == 0 and not is_own else None
    newest = None
    if origin is not None and is_own and rank in origin.mine:
        newest = origin.generations[rank]
    try:
        return open_store(config, plan, newest is not None, trace, rank, newest, forget), None
    except HeadraceError as error:
        return None, error


def _require_parts(store: NvmeStore | None, origin: Origin, world: World) -> None:
    """Raise on every rank unless each has opened its part of `origin`."""
    assert store is not None
    at = store.recovered
    found = [0 if at is None else at.generation, store.store_id]
    told = world.all_gather_object(found)
    wanted = zip(origin.generations, origin.stores)
    missing = [str(rank) for rank, part in enumerate(wanted) if tuple(told[rank]) != part]
    if missing:
        raise StorageError(
            f"{origin.label} cannot be resumed: the part of rank{'s' if len(missing) > 1 else ''} "
            f"{', '.join(missing)} was there, but could not be opened"
        )
