"""Which checkpoints there are under the paths of a store or of a copy, and whether each is whole.

A checkpoint is a commit of all ranks. Where several ranks made it, the record of commits names its
parts (`offload/rank_commits.py`), and nothing else does: a newer manifest may only have been
prepared. Where one rank made it, its manifest is the commit; it is newer than the record if its
generation is, because then a run of one rank went on after what the record names.

Whole means: every part's manifest is there and decodes, and its data files are as long as it needs.
Blocks are verified when they are read.

Invariants: reads manifests only, writes nothing; keeps no block of any manifest. No file outside of
the ranks' directories under the paths, and of the record, is looked at.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.checkpoint.read_ahead import ReadAhead
from offload.checkpoint.source import CommitPart
from offload.nvme.directory import DATA_FILE_NAME, link_problem, rank_directory
from offload.nvme.files import OsDirectoryFiles, describe_os_error
from offload.nvme.inspect import find_stores, num_ranks_of
from offload.nvme.manifest import Manifest
from offload.nvme.recovery import read_slots, slot_name
from offload.rank_commits import RECORD_NAME, RankCommit, RecordFile
from ops.errors import ConfigError, StorageError

UNFINISHED_NAME = "commits.json.unfinished"
"""What will be `commits.json`, where a copy has been begun and is not finished."""


@dataclass(frozen=True)
class Checkpoint:
    """A commit of all ranks under `paths`, complete if `missing` is empty.

    `generations` and `stores` say for each rank what its part is (empty when no record tells).
    `facts` are the record's, {} for one rank. `meta` is that of rank 0's manifest, or of the first
    that can be read; `step` is its step. `written_s`: when it was published, seconds since 1970, 0
    if that is not known. `missing`: a clause for each thing that is not there. `notes`: what was
    passed over because it is damaged. `present`: the ranks whose parts are here. `epoch`: the
    record's number of the commit, 0 for one rank; `record` its entry there, None for one rank.
    """

    paths: tuple[str, ...]
    num_ranks: int
    generations: tuple[int, ...]
    stores: tuple[str, ...]
    step: int | None
    facts: Mapping[str, Any]
    meta: Mapping[str, Any]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()
    written_s: float = 0.0
    present: tuple[int, ...] = ()
    epoch: int = 0
    record: RankCommit | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all parts are there."""
        return not self.missing

    def directories(self, rank: int) -> list[str]:
        """Where the part of `rank` lies: its directory under each path."""
        return [rank_directory(path, rank) for path in self.paths]


@dataclass(frozen=True)
class _Part:
    """A commit in one rank's directory: its manifest without the blocks.

    `ends`: how long each data file has to be; `nbytes`: what its extents take.
    """

    store_id: str
    generation: int
    retained: tuple[int, ...]
    meta: Mapping[str, Any]
    ends: tuple[int, ...]
    nbytes: int
    written_s: float


@dataclass(frozen=True)
class _Rank:
    """What one rank's directories hold: `parts` by generation, and a clause for each bad slot."""

    directories: list[str]
    parts: Mapping[int, _Part]
    problems: tuple[str, ...]

    def problem_with(self, store_id: str, generation: int) -> str | None:
        """Why the part of this generation is not whole, as a clause; None if it is."""
        part = self.parts.get(generation)
        if part is None:
            why = f" ({'; '.join(self.problems)})" if self.problems else ""
            return f"{self.directories[0]} holds no commit {generation}{why}"
        if part.store_id != store_id:
            return f"{self.directories[0]} holds another store ({part.store_id}, not {store_id})"
        if len(part.ends) != len(self.directories):
            return f"its store lies on {len(part.ends)} paths, {len(self.directories)} were named"
        for directory, end in zip(self.directories, part.ends):
            path = os.path.join(directory, DATA_FILE_NAME)
            try:
                status = os.lstat(path)
            except OSError as error:
                return f"{path}: {describe_os_error(error)}"
            if not stat.S_ISREG(status.st_mode):
                return f"{path} is no plain file"
            if status.st_size < end:
                return f"{path} has {status.st_size} bytes, commit {generation} needs {end}"
        return None


def find_checkpoints(paths: Sequence[str]) -> list[Checkpoint]:
    """The checkpoints under `paths` (those of the store, in its order), newest first.

    Reads every manifest once; may block for that. Raises ConfigError when there is none,
    StorageError when the record of commits is damaged.
    """
    ranks = _look_at_all(paths)
    record = RecordFile(paths[0]).read()
    found = _of_one_rank(paths, ranks, record)
    recorded = [_recorded(paths, ranks, commit) for commit in record]
    if recorded:
        # What cannot be read may have been newer, and what it kept no longer what is here.
        told = recorded[0].present
        notes = [f"rank {rank}: {x}" for rank in told for x in ranks[rank].problems]
        recorded[0] = replace(recorded[0], notes=tuple(notes))
    found += recorded
    unfinished = None if found else unfinished_copy(paths[0])
    if unfinished is not None:
        found = [_recorded(paths, ranks, unfinished, is_published=False)]
    if not found:
        found = _unrecorded(paths, ranks)
    if not found:
        raise ConfigError(f"{paths[0]} holds no checkpoint: nothing has been committed there")
    return found


def unfinished_copy(path: str) -> RankCommit | None:
    """The commit that a copy into `path`, begun and not finished, is to hold; None without any.

    Raises StorageError when that cannot be read.
    """
    commits = RecordFile(path, name=UNFINISHED_NAME).read()
    return commits[0] if commits else None


def parts_here(paths: Sequence[str], commit: RankCommit) -> Checkpoint:
    """What there is under `paths` of a commit whose record is elsewhere; ConfigError for none."""
    return _recorded(paths, _look_at_all(paths), commit)


@dataclass(frozen=True)
class SeenPart:
    """One rank's part as it is seen from here: `problem` (None: it can be read), what it says, and
    the bytes its extents take."""

    problem: str | None
    meta: Mapping[str, Any]
    nbytes: int


def look_at_parts(
    paths: Sequence[str], generations: Sequence[int], stores: Sequence[str]
) -> dict[int, SeenPart]:
    """Every part of a commit whose parts are known, by rank; reads manifests, raises nothing."""
    found = {}
    for rank, (generation, store_id) in enumerate(zip(generations, stores)):
        directories = [rank_directory(path, rank) for path in paths]
        problem = next(filter(None, map(link_problem, directories)), None)
        if problem is None and not os.path.isdir(directories[0]):
            problem = f"no directory {directories[0]}"
        if problem is not None:
            found[rank] = SeenPart(problem, {}, 0)
            continue
        seen = _look_at(directories)
        problem = seen.problem_with(store_id, generation)
        if problem is None and len(stores) > 1:
            problem = _given_up(seen, store_id, generation)
        part = seen.parts.get(generation)
        found[rank] = SeenPart(
            problem, {} if part is None else part.meta, 0 if part is None else part.nbytes
        )
    return found


def open_parts(
    checkpoint: Checkpoint, ranks: Sequence[int] | None = None, hold: bool = False
) -> list[CommitPart]:
    """The parts of `ranks` (default: all), which share one `ReadAhead`; the caller closes them.

    Raises ConfigError for an incomplete checkpoint if all are asked for, else as `CommitPart`.
    """
    if ranks is None and checkpoint.missing:
        raise ConfigError(
            f"the checkpoint in {', '.join(checkpoint.paths)} is incomplete: "
            + "; ".join(checkpoint.missing)
        )
    ahead = ReadAhead()
    parts: list[CommitPart] = []
    try:
        for rank in range(checkpoint.num_ranks) if ranks is None else ranks:
            generation = checkpoint.generations[rank]
            part = CommitPart(checkpoint.directories(rank), generation, hold=hold, read_ahead=ahead)
            parts.append(part)
            if part.store_id != checkpoint.stores[rank]:
                raise StorageError("another store is here now", path=part.directories[0])
        if hold:
            _require_recorded(checkpoint)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def _require_recorded(checkpoint: Checkpoint) -> None:
    """With several ranks: look at the record once more, now that all parts are held.

    No rank looks for holds before a newer record is durable, so what is recorded now is kept.
    """
    if checkpoint.num_ranks == 1:
        return
    path = checkpoint.paths[0]
    if os.path.lexists(os.path.join(path, RECORD_NAME)):
        if any(commit.generations == checkpoint.generations for commit in RecordFile(path).read()):
            return
    elif not os.path.isdir(rank_directory(path, 0)) or unfinished_copy(path) is not None:
        return  # the record is another machine's, or there is nobody who would supersede it
    raise StorageError("the checkpoint has been superseded while it was being opened", path=path)


def _rank_of(directory: str, path: str) -> int:
    if os.path.normpath(directory) == os.path.normpath(path):
        above = os.path.dirname(os.path.normpath(path)) or "."
        raise ConfigError(f"{path} is the directory of one rank; name the one above it, {above}")
    return int(os.path.basename(directory).removeprefix("rank-"))


def _look_at_all(paths: Sequence[str]) -> dict[int, _Rank]:
    return {_rank_of(found[0], paths[0]): _look_at(found) for found in find_stores(paths)}


def _look_at(directories: list[str]) -> _Rank:
    parts: dict[int, _Part] = {}
    problems = []
    try:
        slots = read_slots(directories[0], OsDirectoryFiles())
    except OSError as error:
        return _Rank(directories, {}, (describe_os_error(error),))
    newest: Manifest | None = None
    for slot in slots:
        name = slot_name(slot.index)
        if slot.manifest is not None and (
            newest is None or slot.manifest.generation > newest.generation
        ):
            newest = slot.manifest
        if slot.manifest is None:
            problems.append(f"{name}: {slot.problem}")
        elif slot.manifest.generation in parts:
            problems.append(f"{name}: generation {slot.manifest.generation} is there twice")
        else:
            path = os.path.join(directories[0], name)
            parts[slot.manifest.generation] = _part(slot.manifest, path)
    gone = set(newest.slots if newest else ()) - {slot.index for slot in slots}
    problems += [f"{slot_name(index)}: is missing" for index in sorted(gone)]
    return _Rank(directories, parts, tuple(problems))


def _part(manifest: Manifest, path: str) -> _Part:
    ends, nbytes = [0] * len(manifest.file_bytes), 0
    for stored in manifest.blocks.values():
        for extent in stored.extents:
            nbytes += extent.nbytes
            ends[extent.drive] = max(ends[extent.drive], extent.offset + extent.nbytes)
    return _Part(
        store_id=manifest.store_id,
        generation=manifest.generation,
        retained=manifest.retained,
        meta=manifest.meta,
        ends=tuple(ends),
        nbytes=nbytes,
        written_s=_mtime_s(path),
    )


def _of_one_rank(
    paths: Sequence[str], ranks: Mapping[int, _Rank], record: Sequence[RankCommit]
) -> list[Checkpoint]:
    """The commits that a run of one rank made, newest first, where they are the newest or kept."""
    rank = ranks.get(0)
    alone = [x for x in rank.parts.values() if num_ranks_of(x.meta) == 1] if rank else []
    if rank is None or not alone:
        return []
    newest = max(alone, key=lambda part: part.generation)
    if record and record[0].stores[0] == newest.store_id:
        published = rank.parts.get(record[0].generations[0])
        if published is not None and published.generation > newest.generation:
            newest = published  # all ranks went on after it
    found: list[Checkpoint] = []
    for part in sorted(alone, key=lambda part: part.generation, reverse=True):
        if part.generation in (newest.generation, *newest.retained):
            problem = rank.problem_with(newest.store_id, part.generation)
            found.append(
                Checkpoint(
                    paths=tuple(paths),
                    num_ranks=1,
                    generations=(part.generation,),
                    stores=(part.store_id,),
                    step=_step(part.meta),
                    facts={},
                    meta=part.meta,
                    missing=() if problem is None else (f"rank 0: {problem}",),
                    notes=rank.problems if not found else (),
                    written_s=part.written_s,
                    present=() if problem else (0,),
                )
            )
    return found


def _recorded(
    paths: Sequence[str],
    ranks: Mapping[int, _Rank],
    commit: RankCommit,
    is_published: bool = True,
) -> Checkpoint:
    missing, present, meta = [], [], None
    if not is_published:
        missing.append("the copy is not finished: run the same copy again")
    for number, (store_id, generation) in enumerate(zip(commit.stores, commit.generations)):
        rank = ranks.get(number)
        if rank is None:
            missing.append(f"rank {number}: no directory {rank_directory(paths[0], number)}")
            continue
        problem = rank.problem_with(store_id, generation) or _given_up(rank, store_id, generation)
        if problem is not None:
            missing.append(f"rank {number}: {problem}")
            continue
        present.append(number)
        if meta is None:
            meta = rank.parts[generation].meta
    first = ranks.get(0)
    part = None if first is None else first.parts.get(commit.generations[0])
    return Checkpoint(
        paths=tuple(paths),
        num_ranks=len(commit.stores),
        generations=commit.generations,
        stores=commit.stores,
        step=_step(meta or {}),
        facts=commit.facts,
        meta=meta or {},
        missing=tuple(missing),
        written_s=0.0 if part is None else part.written_s,
        present=tuple(present),
        epoch=commit.epoch,
        record=commit,
    )


def _given_up(rank: _Rank, store_id: str, generation: int) -> str | None:
    """Why a part is not kept any more although its manifest is there: one rank alone went on."""
    later = [
        part
        for part in rank.parts.values()
        if part.generation > generation
        and part.store_id == store_id
        and num_ranks_of(part.meta) == 1
    ]
    newest = max(later, key=lambda part: part.generation, default=None)
    if newest is None or generation in newest.retained:
        return None
    return (
        f"commit {generation} was given up by a run of one rank that went on after it "
        f"(commit {newest.generation})"
    )


def _unrecorded(paths: Sequence[str], ranks: Mapping[int, _Rank]) -> list[Checkpoint]:
    """What ranks have prepared where no record says what belongs together: incomplete."""
    parts = {
        number: max(rank.parts.values(), key=lambda part: part.generation)
        for number, rank in ranks.items()
        if rank.parts
    }
    problems = [f"rank {number}: {x}" for number, rank in ranks.items() for x in rank.problems]
    if not parts:
        if problems:
            raise StorageError(f"no commit can be read ({'; '.join(problems)})", path=paths[0])
        return []
    part = parts[min(parts)]
    record = os.path.join(paths[0], RECORD_NAME)
    where = "" if 0 in ranks else "; it lies where the directory of rank 0 is"
    found = ", ".join(str(number) for number in sorted(parts))
    reason = f"no record {record} says which commits of the ranks belong together{where}"
    return [
        Checkpoint(
            paths=tuple(paths),
            num_ranks=max(num_ranks_of(part.meta), max(ranks) + 1),
            generations=(),
            stores=(),
            step=_step(part.meta),
            facts={},
            meta=part.meta,
            missing=(f"{reason} (found: ranks {found})", *problems),
            written_s=part.written_s,
        )
    ]


def _step(meta: Mapping[str, Any]) -> int | None:
    step = meta.get("step")
    return step if type(step) is int else None


def _mtime_s(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
