"""Which checkpoints there are under the paths of a store or of a copy, and whether each is whole.

A checkpoint is a commit of all ranks. Where several ranks made it, the record of commits or a
rank's copy of it names its parts (`offload/rank_commits.py`), and nothing else does: a newer
manifest may only have been prepared. Where one rank made it, its manifest is the commit; it is
newer than the record if its generation is, because then a run of one rank went on after what the
record names. Whole means that every part is (`offload/checkpoint/rank_parts.py`).

Invariants: reads manifests only, writes nothing; keeps no block of any manifest. No file outside of
the ranks' directories under the paths, and of the record, is looked at.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.checkpoint.rank_parts import RankParts, look_at_ranks, why_given_up
from offload.checkpoint.read_ahead import ReadAhead
from offload.checkpoint.source import CommitPart
from offload.nvme.directory import link_problem, rank_directory, ranks_under
from offload.nvme.inspect import num_ranks_of
from offload.rank_commits import RECORD_NAME, RankCommit, RecordFile, published_copy
from ops.errors import ConfigError, StorageError

_ABSENT_TOLD = 16
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


def find_checkpoints(paths: Sequence[str]) -> list[Checkpoint]:
    """The checkpoints under `paths` (those of the store, in its order), newest first.

    Reads every manifest once; may block for that. Raises ConfigError when there is none,
    StorageError when the record of commits is damaged.
    """
    ranks = look_at_ranks(paths)
    records, notes = _read_records(paths[0])
    record = records[0] if records else ()
    alone = _of_one_rank(paths, ranks, record)
    older = [x for x in alone if record and is_newer(x, record[0]) is False]
    found = [x for x in alone if x not in older]
    recorded = [_recorded(paths, ranks, commit) for commit in record]
    if recorded:
        recorded[0] = replace(recorded[0], notes=_beside(recorded[0], ranks))
    found += recorded
    found += older
    unfinished = None if found else unfinished_copy(paths[0])
    if unfinished is not None:
        found = [_recorded(paths, ranks, unfinished, is_published=False)]
    if not found:
        if notes:
            raise StorageError("; ".join(notes), path=paths[0])
        found = _unrecorded(paths, ranks)
    if not found:
        raise _nothing(paths)
    if notes:
        found[0] = replace(found[0], notes=(*found[0].notes, *notes))
    return found


@dataclass(frozen=True)
class Sight:
    """What one rank sees of commits under its paths, for all ranks to choose from.

    `records`: one for each line of runs (`RankCommit.line`), the one that counts here first.
    `alone`: the commits of one rank, newest first. `notes`: what could not be read beside the
    newest of the records. `nothing`: where there are neither commits nor records, why, and
    `is_published`: whether something is here nevertheless that was once part of a commit.
    `problem`: what is here and cannot be read, "" for nothing.
    """

    records: tuple[tuple[RankCommit, ...], ...] = ()
    alone: tuple[Checkpoint, ...] = ()
    notes: tuple[str, ...] = ()
    nothing: str = ""
    is_published: bool = False
    problem: str = ""


def look_around(paths: Sequence[str]) -> Sight:
    """What is under `paths`; reads every manifest once. StorageError when the record is damaged."""
    records, notes = _read_records(paths[0])
    try:
        ranks = look_at_ranks(paths)
    except ConfigError as error:
        return Sight(tuple(records), nothing=str(error))
    alone = tuple(_of_one_rank(paths, ranks, records[0] if records else ()))
    if not records and not alone:
        unfinished = unfinished_copy(paths[0])
        records = [] if unfinished is None else [(unfinished,)]
    if records or alone:
        beside = _beside(_recorded(paths, ranks, records[0][0]), ranks) if records else ()
        return Sight(tuple(records), alone, (*beside, *notes))
    try:
        missing = [clause for x in _unrecorded(paths, ranks) for clause in x.missing]
    except StorageError as error:
        return Sight(nothing=str(error), problem=str(error))
    # The first commit of a store may only have been prepared; before a later one it was published.
    parts = [part for rank in ranks.values() for part in rank.parts.values()]
    return Sight(
        nothing="; ".join(missing) or str(_nothing(paths)),
        is_published=any(part.generation > 1 for part in parts),
        problem="; ".join(notes),
    )


def is_newer(alone: Checkpoint, head: RankCommit) -> bool | None:
    """Whether a commit of one rank came after `head` of a record; None: they are not of one line.

    A run of one rank goes on in the store of rank 0. One of several ranks has begun in another
    place, and what it began with is left there.
    """
    (generation,), (store_id,) = alone.generations, alone.stores
    if store_id == head.stores[0]:
        return generation > head.generations[0]
    return False if store_id == head.line else None


def _beside(recorded: Checkpoint, ranks: Mapping[int, RankParts]) -> tuple[str, ...]:
    """What cannot be read beside its parts: it may be newer, and keep no longer what is here."""
    return tuple(f"rank {x}: {why}" for x in recorded.present for why in ranks[x].problems)


def _nothing(paths: Sequence[str]) -> ConfigError:
    return ConfigError(f"{paths[0]} holds no checkpoint: nothing has been committed there")


def _read_records(path: str) -> tuple[list[tuple[RankCommit, ...]], list[str]]:
    """The records of commits under `path`, the one that counts first; and damaged copies.

    A copy counts beside `commits.json` when it is of the same line of runs and newer: then rank 0
    has been elsewhere since. Without `commits.json` the newest of each line counts. StorageError
    when `commits.json` is damaged.
    """
    found: dict[str, tuple[RankCommit, ...]] = {}
    notes: list[str] = []
    record = RecordFile(path).read() if os.path.isdir(path) else ()
    if record:
        found[record[0].line] = record
    for directory in (rank_directory(path, rank) for rank in ranks_under(path)):
        if link_problem(directory) is not None:
            continue
        try:
            copy = published_copy(directory).read()
        except StorageError as error:
            notes.append(str(error))
            continue
        if not copy or (record and copy[0].line != record[0].line):
            continue
        known = found.get(copy[0].line)
        if known is None or known[0].epoch < copy[0].epoch:
            found[copy[0].line] = copy
    return sorted(found.values(), key=lambda x: x[0].epoch, reverse=True), notes


def unfinished_copy(path: str) -> RankCommit | None:
    """The commit that a copy into `path`, begun and not finished, is to hold; None without any.

    Raises StorageError when that cannot be read.
    """
    commits = RecordFile(path, name=UNFINISHED_NAME).read()
    return commits[0] if commits else None


def parts_here(paths: Sequence[str], commit: RankCommit) -> Checkpoint:
    """What there is under `paths` of a commit whose record is elsewhere; ConfigError for none."""
    return _recorded(paths, look_at_ranks(paths), commit)


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
    records, _ = _read_records(path)
    if records:
        if any(commit.generations == checkpoint.generations for commit in records[0]):
            return
    elif not os.path.isdir(rank_directory(path, 0)) or unfinished_copy(path) is not None:
        return  # the record is another machine's, or there is nobody who would supersede it
    raise StorageError("the checkpoint has been superseded while it was being opened", path=path)


def _of_one_rank(
    paths: Sequence[str], ranks: Mapping[int, RankParts], record: Sequence[RankCommit]
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
    ranks: Mapping[int, RankParts],
    commit: RankCommit,
    is_published: bool = True,
) -> Checkpoint:
    missing, present, meta = [], [], None
    if not is_published:
        missing.append("the copy is not finished: run the same copy again")
    total = len(commit.stores)
    absent = (number for number in range(total) if number not in ranks)
    num_absent = total - sum(number < total for number in ranks)
    for number in itertools.islice(absent, _ABSENT_TOLD):
        missing.append(f"rank {number}: no directory {rank_directory(paths[0], number)}")
    if num_absent > _ABSENT_TOLD:
        missing.append(
            f"{num_absent - _ABSENT_TOLD} more of {total} ranks have no directory in {paths[0]}"
        )
    for number in sorted(number for number in ranks if number < total):
        rank, store_id = ranks[number], commit.stores[number]
        generation = commit.generations[number]
        problem = rank.problem_with(store_id, generation) or why_given_up(
            rank, store_id, generation
        )
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


def _unrecorded(paths: Sequence[str], ranks: Mapping[int, RankParts]) -> list[Checkpoint]:
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
