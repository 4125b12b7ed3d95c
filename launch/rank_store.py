"""The stores of all ranks, opened together: at the commit they published together, or empty.

What one rank finds may differ from what the others find, so every rank tells what became of its
own store before anybody goes on; an error of one is an error of all, with the ranks named.

A run that starts anew forgets the record of commits as late as it can: when rank 0 owns its store
and nothing can be refused any more, before any rank's store is emptied. So a start that is refused,
because another run is alive or the disk too full, costs no commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.build import open_store
from launch.config import RunConfig
from launch.resume import RANKS_FACT
from moe.mesh import Mesh
from offload.nvme.directory import rank_directory
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.recovery import read_slots
from offload.nvme.store import NvmeStore
from offload.placement import MemoryPlan
from offload.rank_commits import RankCommit, RankCommits, RecordFile
from ops.comm.base import World
from ops.errors import ConfigError, HeadraceError, StorageError
from ops.trace import NO_TRACE, Tracer

_AGREED_KINDS: dict[str, type[HeadraceError]] = {"ConfigError": ConfigError}


@dataclass(frozen=True)
class RankStore:
    """This rank's store, and what publishes its commits (None for the only rank of a run)."""

    store: NvmeStore
    agree: RankCommits | None


def open_rank_store(
    config: RunConfig, plan: MemoryPlan, resume: bool, world: World, trace: Tracer = NO_TRACE
) -> RankStore:
    """The store of this rank; entered by all of them. Errors as `open_store`, on every rank.

    Raises ConfigError to resume what another number of ranks, or another mesh, has committed.
    Blocks for the other ranks.
    """
    record = RecordFile(config.offload.nvme.paths[0])
    if world.size == 1:
        if resume:
            _refuse_other_mesh(config, record.read())
            # What several ranks have prepared and not published is no commit.
            resume = _ranks_of_newest(config) in (0, 1)
        return RankStore(
            open_store(config, plan, resume, trace, before_discard=record.remove), None
        )
    commits = _published(config, resume, record, world)
    store, error = None, None
    # Rank 0 is the first to begin anew, because it forgets the record.
    turns = (True,) if commits else (world.rank == 0, world.rank != 0)
    try:
        for is_mine in turns:
            if is_mine:
                store, error = _try_to_open(config, plan, commits, record, world.rank, trace)
            _fail_together(error, world, "rank {} has no store: ")
        _require_parts(store, commits, world)
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
    found: list[dict[str, Any]] = []
    error: HeadraceError | None = None
    if world.rank == 0 and resume:
        try:
            found = [commit.to_json() for commit in record.read()]
            if not found and _ranks_of_newest(config) == 1:
                raise _other_mesh(config, 1, "parallel of one rank")
        except HeadraceError as caught:
            error = caught
    _fail_together(error, world, "")
    commits = tuple(map(RankCommit.from_json, world.all_gather_object(found)[0]))
    _refuse_other_mesh(config, commits)
    return commits


def _ranks_of_newest(config: RunConfig) -> int:
    """How many ranks made the newest manifest in rank 0's directory; 0 without any."""
    directory = rank_directory(config.offload.nvme.paths[0], 0)
    try:
        slots = read_slots(directory, OsDirectoryFiles())
    except OSError:  # opening the store will tell
        return 0
    manifests = [slot.manifest for slot in slots if slot.manifest is not None]
    if not manifests:
        return 0
    run = max(manifests, key=lambda manifest: manifest.generation).meta.get("run")
    made = run.get(RANKS_FACT) if isinstance(run, dict) else None
    return made if isinstance(made, int) else 1


def _refuse_other_mesh(config: RunConfig, commits: Sequence[RankCommit]) -> None:
    if not commits:
        return
    made = commits[0].facts.get("parallel")
    if made != config.to_dict()["parallel"]:
        raise _other_mesh(config, len(commits[0].stores), f"parallel = {made}")


def _other_mesh(config: RunConfig, num_ranks: int, made: str) -> ConfigError:
    return ConfigError(
        f"--resume: the commit was made by {num_ranks} rank{'s' if num_ranks > 1 else ''} with "
        f"{made}, but now there are {Mesh(config.parallel).num_ranks} with "
        f"parallel = {config.to_dict()['parallel']}: allowed is the same mesh."
    )


def _try_to_open(
    config: RunConfig,
    plan: MemoryPlan,
    commits: Sequence[RankCommit],
    record: RecordFile,
    rank: int,
    trace: Tracer,
) -> tuple[NvmeStore | None, HeadraceError | None]:
    """This rank's part of the newest of `commits`, or an empty store; or why not."""
    newest = commits[0].generations[rank] if commits else None
    forget = record.remove if rank == 0 else None
    try:
        return open_store(config, plan, bool(commits), trace, rank, newest, forget), None
    except HeadraceError as error:
        return None, error


def _fail_together(error: HeadraceError | None, world: World, lead: str) -> None:
    """Raise on every rank when `error` is not None on any.

    Elsewhere `lead` comes before what it says, formatted with the number of the rank.
    """
    mine = None if error is None else [type(error).__name__, str(error)]
    told = world.all_gather_object(mine)
    if error is not None:
        raise error
    for rank, other in enumerate(told):
        if other is not None:
            kind, why = other
            raise _AGREED_KINDS.get(kind, StorageError)(lead.format(rank) + why)


def _require_parts(store: NvmeStore | None, commits: Sequence[RankCommit], world: World) -> None:
    """Raise on every rank unless each has its part of the newest of `commits`, if there are any."""
    if not commits:
        return
    assert store is not None
    at = store.recovered
    told = world.all_gather_object([0 if at is None else at.generation, store.store_id])
    wanted = zip(commits[0].generations, commits[0].stores)
    missing = [str(rank) for rank, part in enumerate(wanted) if tuple(told[rank]) != part]
    if missing:
        raise StorageError(
            f"commit {commits[0].epoch} of all ranks cannot be resumed: the part of "
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} is not in "
            f"offload.nvme.path, directory {rank_directory('', int(missing[0]))}; "
            "give every rank the path it wrote to"
        )
