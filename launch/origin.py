"""The commit that a run goes on from, as all of its ranks agree on it.

Rank 0 lists the commits, newest first; every rank tells which parts of one it can read. The first
commit of which every part is read by somebody is taken, and what was passed over is told with the
reason. A rank whose own part is where it was left, in the form it would have now, goes on in place;
otherwise all ranks read what they need from all parts (`launch/restore.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.config import RunConfig
from moe.checkpoint import SavedRun, saved_run
from moe.memory import layouts_of
from moe.mesh import Mesh
from offload.blocks import UnitLayout
from offload.checkpoint.catalog import Checkpoint, find_checkpoints, look_at_parts
from offload.rank_commits import RankCommit
from ops.comm.base import World
from ops.errors import ConfigError, HeadraceError, StorageError

LATEST = "latest"
_KINDS: dict[str, type[HeadraceError]] = {"ConfigError": ConfigError}


@dataclass(frozen=True)
class Origin:
    """A commit of `len(stores)` ranks under `paths`: rank r's part is `generations[r]`.

    `record` are the commits of the record from this one on, newest first (empty for the commit of
    one rank). `meta` is what a part says. `is_own`: it lies in this run's own store; `in_place`:
    every rank also goes on with its own part as it is. `readers[r]` is the rank that reads part r
    for those who cannot, `mine` the parts that this rank reads. `own_bytes`: what this rank's
    directory keeps of it. `skipped`: what was not taken, and why.
    """

    paths: tuple[str, ...]
    generations: tuple[int, ...]
    stores: tuple[str, ...]
    record: tuple[RankCommit, ...]
    meta: Mapping[str, Any]
    is_own: bool
    in_place: bool
    readers: Mapping[int, int]
    mine: frozenset[int]
    own_bytes: int
    skipped: tuple[str, ...]

    @property
    def label(self) -> str:
        """What to call it."""
        return _label(self.record, self.generations)

    def run(self) -> SavedRun:
        """The run that made it; StorageError when it does not tell."""
        return saved_run(self.meta)


def _label(record: Sequence[RankCommit], generations: Sequence[int]) -> str:
    if record:
        return f"commit {record[0].epoch} of {len(generations)} ranks"
    return f"commit {generations[0]}"


def find_origin(config: RunConfig, resume: str | None, world: World) -> Origin | None:
    """The commit to go on from; entered by all ranks. None: there is none, or none was asked for.

    `resume` is `latest` or paths as `--resume` takes them. Raises ConfigError on every rank when
    parts cannot be read by anybody, StorageError when they are damaged. Blocks for other ranks.
    """
    if resume is None:
        return None
    paths = resume_paths(config, resume)
    is_own = goes_on_in_own_store(config, resume)
    found, nothing = _listed(paths, is_own, world)
    skipped: list[str] = []
    for candidate in found:
        told = (*skipped, *candidate.notes)
        origin, why = _agreed(config, candidate, paths, is_own, told, world)
        if origin is not None:
            return origin
        skipped.append(why)
    if not found and is_own:
        return None
    reasons = skipped or [nothing]
    advice = (
        "; give every rank the path that it wrote to, or bring the parts together with "
        "`headrace checkpoint copy` (or `export`) on the machines that have them"
    )
    # What is not there may be elsewhere; what is there and cannot be used is a fault.
    missing = not found or any("no directory" in reason for reason in reasons)
    kind = ConfigError if missing else StorageError
    raise kind(f"--resume {resume}: {'; '.join(reasons)}" + (advice if found else ""))


def resume_paths(config: RunConfig, resume: str) -> tuple[str, ...]:
    """The paths that `--resume` names: those of the run's own store, or its argument's."""
    if resume == LATEST:
        return tuple(config.offload.nvme.paths)
    return tuple(path for path in resume.split(os.pathsep) if path)


def goes_on_in_own_store(config: RunConfig, resume: str) -> bool:
    """Whether `--resume` names the run's own store, by `latest` or by its paths."""
    return _same_paths(resume_paths(config, resume), config.offload.nvme.paths)


def _same_paths(one: Sequence[str], other: Sequence[str]) -> bool:
    return [os.path.realpath(x) for x in one] == [os.path.realpath(x) for x in other]


@dataclass(frozen=True)
class _Candidate:
    """A commit that rank 0 has found; `record` as `Origin.record`."""

    generations: tuple[int, ...]
    stores: tuple[str, ...]
    record: tuple[RankCommit, ...]
    notes: tuple[str, ...]  # what rank 0 could not read beside it

    def to_json(self) -> list[Any]:
        record = [commit.to_json() for commit in self.record]
        return [self.generations, self.stores, record, self.notes]

    @staticmethod
    def from_json(saved: Any) -> _Candidate:
        generations, stores, record, notes = saved
        commits = tuple(map(RankCommit.from_json, record))
        return _Candidate(tuple(generations), tuple(stores), commits, tuple(notes))


def _listed(paths: Sequence[str], is_own: bool, world: World) -> tuple[list[_Candidate], str]:
    """What rank 0 finds under `paths`, newest first, and why there is nothing if so."""
    found: list[_Candidate] = []
    nothing, error = "", None
    if world.rank == 0:
        try:
            checkpoints = find_checkpoints(paths)
            found = [_candidate(checkpoints, at) for at, x in enumerate(checkpoints) if x.stores]
            nothing = "; ".join(x for checkpoint in checkpoints for x in checkpoint.missing)
        except ConfigError as caught:
            nothing = str(caught)
        except HeadraceError as caught:
            error = caught
    fail_together(error, world, "")
    told = world.all_gather_object([nothing, [x.to_json() for x in found]])[0]
    return [_Candidate.from_json(x) for x in told[1]], told[0]


def _candidate(checkpoints: Sequence[Checkpoint], at: int) -> _Candidate:
    """Checkpoint `at`, with those of the record behind it."""
    chosen = checkpoints[at]
    record: tuple[RankCommit, ...] = ()
    if chosen.record is not None:
        record = tuple(x.record for x in checkpoints[at:] if x.record is not None)
    return _Candidate(chosen.generations, chosen.stores, record, chosen.notes)


def _agreed(
    config: RunConfig,
    candidate: _Candidate,
    paths: tuple[str, ...],
    is_own: bool,
    skipped: tuple[str, ...],
    world: World,
) -> tuple[Origin | None, str]:
    """The origin that this candidate is; or None, and why some part of it cannot be read."""
    seen = look_at_parts(paths, candidate.generations, candidate.stores)
    mine = frozenset(rank for rank, part in seen.items() if part.problem is None)
    first = min(mine, default=-1)
    problems = {rank: part.problem for rank, part in seen.items() if part.problem is not None}
    told = world.all_gather_object(
        [sorted(mine), first, seen[first].meta if mine else {}, sorted(problems.items())]
    )
    readers: dict[int, int] = {}
    for rank in reversed(range(world.size)):
        readers.update((saved, rank) for saved in told[rank][0])
    missing = sorted(set(range(len(candidate.stores))) - readers.keys())
    if missing:
        name = _label(candidate.record, candidate.generations)
        return None, f"{name} is not usable: " + _who_misses(missing, told)
    meta = min((row[1:3] for row in told if row[0]), key=lambda row: row[0])[1]
    error, alike = None, False
    try:
        alike = world.size == len(candidate.stores) and _is_alike(config, meta, world.rank)
    except HeadraceError as caught:
        error = caught
    fail_together(error, world, "")
    goes_on = [is_own and alike and world.rank in mine]
    in_place = all(row[0] for row in world.all_gather_object(goes_on))
    own_bytes = seen[world.rank].nbytes if is_own and world.rank in mine else 0
    origin = Origin(
        paths=paths,
        generations=candidate.generations,
        stores=candidate.stores,
        record=candidate.record,
        meta=meta,
        is_own=is_own,
        in_place=in_place,
        readers=readers,
        mine=mine,
        own_bytes=own_bytes,
        skipped=skipped,
    )
    return origin, ""


def _who_misses(missing: Sequence[int], told: Sequence[Any]) -> str:
    reasons = {rank: why for row in reversed(told) for rank, why in row[3]}
    shown = "; ".join(f"rank {rank}: {reasons.get(rank, 'unknown')}" for rank in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    plural = "s" if len(missing) > 1 else ""
    return f"no rank can read the part{plural} of rank{plural} {names} ({shown}{more})"


def _is_alike(config: RunConfig, meta: Mapping[str, Any], rank: int) -> bool:
    """Whether this rank would store now what it stored then."""
    saved = saved_run(meta)
    share = Mesh(config.parallel).share(config.model, rank)
    now = layouts_of(config.model, config.train, config.optimizer.decay_norms, share)
    return _form(saved.layouts[rank].values()) == _form(now)


def _form(layouts: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for x in layouts:
        assert isinstance(x, UnitLayout)
        rows.append((x.name, x.weight_dtype, x.frozen, x.num_split, x.places))
    return rows


def fail_together(error: HeadraceError | None, world: World, lead: str) -> None:
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
            raise _KINDS.get(kind, StorageError)(lead.format(rank) + why)
