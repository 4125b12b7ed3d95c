"""The stores of all ranks, opened together: at the commit they go on from, or empty.

What one rank finds may differ from what the others find, so every rank tells what became of its
own store before anybody goes on; an error of one is an error of all, with the ranks named.

A run that starts anew forgets the record of commits as late as it can: when rank 0 owns its store
and nothing can be refused any more, before any rank's store is emptied. So a start that is refused,
because another run is alive or the disk too full, costs no commit.

A run that goes on from a commit of another mesh, in the same store, keeps that commit until its own
first one is published: its blocks are new versions, written out of place. Where ranks have changed
their machines, each with a drive of its own, the parts and the record stay where they were so long.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from launch.build import open_store
from launch.config import RunConfig
from launch.origin import Origin
from launch.sighting import fail_together
from offload.nvme.commit import Agree
from offload.nvme.directory import rank_directory, ranks_under
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.members import read_member
from offload.nvme.opening import discard_store
from offload.nvme.store import NvmeStore
from offload.placement import MemoryPlan
from offload.rank_commits import RankCommits, RecordFile, published_copy
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
    stores = tuple(world.all_gather_object(store.store_id))
    own = origin if origin is not None and origin.is_own else None
    before = [own.stores, *(commit.stores for commit in own.record)] if own else []
    more = any(x != stores for x in before)
    keep = config.offload.keep_in_store
    # As many commits as are kept may be of the stores before.
    surplus = _Surplus(config, world.rank, stores, keep if more else 0)
    copy = published_copy(store.directory)
    if world.size == 1:
        if own is None:
            return None

        def forget(generation: int) -> None:
            # From now on the commit of one rank is the newest (`catalog.find_checkpoints`).
            record.remove()
            copy.remove()

        return _Then(forget, surplus)
    agree = RankCommits(
        world.split([list(range(world.size))], "commits"),
        record if world.rank == 0 else None,
        store.store_id,
        {"parallel": config.to_dict()["parallel"]},
        keep,
        own.record if own else (),
        copy=copy,
        epoch=own.epoch if own else 0,
        line=own.line if own else "",
    )
    return _Then(agree, surplus) if more else agree


class _Then:
    """Publishes commits; what earlier runs have beside their stores is given up in time."""

    def __init__(self, agree: Agree, surplus: _Surplus) -> None:
        self._agree = agree
        self._surplus = surplus

    def __call__(self, generation: int) -> None:
        self._agree(generation)
        self._surplus.count_commit()


class _Surplus:
    """What lies under this rank's paths and is of none of the `stores` that the ranks have opened:
    an earlier run's directories and record, or those of the commit that this run goes on from,
    which keeps them until `commits` are published."""

    def __init__(self, config: RunConfig, rank: int, stores: Sequence[str], commits: int) -> None:
        self._paths = config.offload.nvme.paths
        self._rank = rank
        self._stores = stores
        self._commits_left = commits
        if commits == 0:
            self._give_up()

    def count_commit(self) -> None:
        """One more commit of this mesh is published."""
        self._commits_left -= 1
        if self._commits_left == 0:
            self._give_up()

    def _give_up(self) -> None:
        """Whatever is in use after all has a live owner, and stays."""
        for rank in ranks_under(self._paths[0]):
            directories = [rank_directory(path, rank) for path in self._paths]
            if not self._is_open(rank, directories[0]) and all(map(os.path.isdir, directories)):
                try:
                    discard_store(directories)
                except (OSError, HeadraceError) as error:  # another rank was faster, or owns it
                    log.debug("%s: not removed: %s", directories[0], error)
        if self._rank != 0 and not os.path.lexists(rank_directory(self._paths[0], 0)):
            # The drive is not rank 0's, so neither is the record.
            try:
                RecordFile(self._paths[0]).remove()
            except StorageError as error:
                log.debug("%s", error)

    def _is_open(self, rank: int, directory: str) -> bool:
        """Whether this is the directory that `rank` has opened."""
        if rank >= len(self._stores):
            return False
        member = read_member(directory, OsDirectoryFiles())
        return rank == self._rank or (member and member.store_id) == self._stores[rank]


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
    # Ranks with a drive of their own may have a record from when they were rank 0.
    forget = None if is_own else record.remove
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
