"""The commit that a run goes on from, as all of its ranks agree on it.

All ranks tell what they see, which gives the commits, newest first (`launch/sighting.py`); every
rank tells which parts of one it can read. The first commit of which every part is read by somebody
is taken, and what was passed over is told with the reason. A rank whose own part is where it was
left, in the form it would have now, goes on in place; otherwise all ranks read what they need from
all parts (`launch/restore.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.config import RunConfig
from launch.sighting import Candidate, discarding, fail_together, see_candidates
from moe.checkpoint import SavedRun, saved_run
from moe.memory import layouts_of
from moe.mesh import Mesh
from offload.blocks import UnitLayout
from offload.checkpoint.rank_parts import look_at_parts
from offload.rank_commits import RankCommit
from ops.comm.base import World
from ops.errors import ConfigError, HeadraceError, StorageError

LATEST = "latest"


@dataclass(frozen=True)
class Origin:
    """A commit of `len(stores)` ranks under `paths`: rank r's part is `generations[r]`.

    `record` are the commits of the record from this one on, newest first (empty for the commit of
    one rank). `meta` is what a part says. `is_own`: it lies in this run's own store; `in_place`:
    every rank also goes on with its own part as it is. `readers[r]` is the rank that reads part r
    for those who cannot, `mine` the parts that this rank reads. `own_bytes`: what this rank's
    directory keeps of it. `line` and `epoch` are of the runs that made it (`Candidates`).
    `skipped`: what was not taken, and why.
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
    line: str
    epoch: int
    skipped: tuple[str, ...]

    @property
    def label(self) -> str:
        """What to call it."""
        return Candidate(self.generations, self.stores, self.record).label

    def run(self) -> SavedRun:
        """The run that made it; StorageError when it does not tell."""
        return saved_run(self.meta)


def find_origin(config: RunConfig, resume: str | None, world: World) -> Origin | None:
    """The commit to go on from; entered by all ranks. None: there is none, or none was asked for.

    `resume` is `latest` or paths as `--resume` takes them. Raises ConfigError on every rank when
    parts are not there for anybody, or what is there is not of one run; StorageError when they are
    damaged. Where this raises nothing is discarded. Blocks for other ranks.
    """
    if resume is None:
        return None
    paths = resume_paths(config, resume)
    is_own = goes_on_in_own_store(config, resume)
    seen, is_own = see_candidates(paths, is_own, resume, world)
    skipped: list[str] = []
    # What is not there may be elsewhere; what is there and cannot be used is a fault.
    is_fault = True
    for candidate in seen.found:
        told = (*skipped, *candidate.notes)
        origin, why, is_absent = _agreed(config, candidate, paths, is_own, told, world)
        if origin is not None:
            return replace(origin, line=seen.line, epoch=seen.epoch)
        skipped.append(why)
        is_fault = is_fault and not is_absent
        if is_absent and is_own:  # going on from an older commit would discard this one
            break
    if not seen.found:
        if is_own:
            return None
        raise ConfigError(f"--resume {resume}: {seen.nothing}")
    raise (StorageError if is_fault else ConfigError)(
        f"--resume {resume}: {'; '.join(skipped)}; give every rank the path that it wrote to, or "
        "bring the parts together with `headrace checkpoint copy` (or `export`) on the machines "
        f"that have them{discarding(is_own)}"
    )


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


def _agreed(
    config: RunConfig,
    candidate: Candidate,
    paths: tuple[str, ...],
    is_own: bool,
    skipped: tuple[str, ...],
    world: World,
) -> tuple[Origin | None, str, bool]:
    """The origin that this candidate is; or None, and why some part of it cannot be read.

    The last is whether that part is nowhere, rather than damaged.
    """
    seen = look_at_parts(paths, candidate.generations, candidate.stores)
    mine = frozenset(rank for rank, part in seen.items() if part.problem is None)
    first = min(mine, default=-1)
    problems = [(x.is_absent, rank, x.problem) for rank, x in seen.items() if x.problem is not None]
    told = world.all_gather_object(
        [sorted(mine), first, seen[first].meta if mine else {}, problems]
    )
    readers: dict[int, int] = {}
    for rank in reversed(range(world.size)):
        readers.update((saved, rank) for saved in told[rank][0])
    missing = sorted(set(range(len(candidate.stores))) - readers.keys())
    if missing:
        why, is_absent = _who_misses(missing, told)
        return None, f"{candidate.label} is not usable: {why}", is_absent
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
        line="",
        epoch=0,
        skipped=skipped,
    )
    return origin, "", False


def _who_misses(missing: Sequence[int], told: Sequence[Any]) -> tuple[str, bool]:
    """Which parts nobody can read, and why; and whether one of them is nowhere."""
    # Where one rank sees what is wrong with a part and others see none, the first knows more.
    reasons: dict[int, tuple[bool, str]] = {}
    for row in told:
        for is_absent, rank, why in row[3]:
            if rank not in reasons or (reasons[rank][0] and not is_absent):
                reasons[rank] = is_absent, why
    shown = "; ".join(f"rank {rank}: {reasons[rank][1]}" for rank in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    plural = "s" if len(missing) > 1 else ""
    why = f"no rank can read the part{plural} of rank{plural} {names} ({shown}{more})"
    return why, any(reasons[rank][0] for rank in missing)


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
