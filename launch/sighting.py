"""What all ranks see of commits, and which of it the run may go on from, newest first.

A machine may have a drive of its own, and ranks may have been on other machines before. So every
rank tells the records of commits (or copies of them) and the commits of one rank that it sees. Of
runs that went on from each other the newest record counts, whoever sees it. What is not of one line
of runs is not chosen from: which came later nobody can tell, and going on from one discards the
other.

Invariants: the same on every rank; nothing is changed; parts of commits that were once published
are never taken for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.checkpoint.catalog import Checkpoint, Sight, is_newer, look_around
from offload.rank_commits import RankCommit
from ops.comm.base import World
from ops.errors import ConfigError, HeadraceError, StorageError

_KINDS: dict[str, type[HeadraceError]] = {"ConfigError": ConfigError}


@dataclass(frozen=True)
class Candidate:
    """A commit that some rank has found: rank r's part is generation `generations[r]` of its store.

    `record` are the commits of the record from this one on, newest first (empty for the commit of
    one rank). `notes`: what could not be read beside it.
    """

    generations: tuple[int, ...]
    stores: tuple[str, ...]
    record: tuple[RankCommit, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What to call it."""
        if self.record:
            return f"commit {self.record[0].epoch} of {len(self.stores)} ranks"
        return f"commit {self.generations[0]}"


@dataclass(frozen=True)
class Candidates:
    """What there is to go on from, newest first. `line` names the runs that made it, and `epoch` is
    the largest number of a commit of theirs that anybody saw (0: none of several ranks).

    `nothing`: why there is none, if so.
    """

    found: tuple[Candidate, ...]
    line: str = ""
    epoch: int = 0
    nothing: str = ""


@dataclass(frozen=True)
class _Told:
    """What one rank tells of `path`, the first of its paths."""

    rank: int
    path: str
    is_own: bool
    sight: Sight

    @staticmethod
    def from_json(rank: int, saved: Any) -> _Told:
        path, is_own, records, alone, notes, nothing, is_published, problem = saved
        sight = Sight(
            records=tuple(tuple(map(RankCommit.from_json, record)) for record in records),
            alone=tuple(_alone(*row) for row in alone),
            notes=tuple(notes),
            nothing=nothing,
            is_published=is_published,
            problem=problem,
        )
        return _Told(rank, path, is_own, sight)

    @staticmethod
    def to_json(path: str, is_own: bool, sight: Sight) -> list[Any]:
        records = [[commit.to_json() for commit in record] for record in sight.records]
        alone = [[x.generations[0], x.stores[0], x.notes] for x in sight.alone]
        found = [records, alone, sight.notes, sight.nothing, sight.is_published, sight.problem]
        return [path, is_own, *found]


def _alone(generation: int, store_id: str, notes: Sequence[str]) -> Checkpoint:
    return Checkpoint(("",), 1, (generation,), (store_id,), None, {}, {}, (), tuple(notes))


def see_candidates(
    paths: Sequence[str], is_own: bool, resume: str, world: World
) -> tuple[Candidates, bool]:
    """What there is to go on from, and whether it is in this run's own store; entered by all.

    `is_own` is what this rank thinks; `resume` is shown. Raises on every rank: ConfigError when
    ranks differ about `is_own`, when commits are not of one line of runs, and when there is none
    although parts of one are there; StorageError when a record is damaged, or all there is.
    """
    sight, error = Sight(), None
    try:
        sight = look_around(paths)
    except HeadraceError as caught:
        error = caught
    fail_together(error, world, "")
    rows = world.all_gather_object(_Told.to_json(paths[0], is_own, sight))
    told = [_Told.from_json(rank, row) for rank, row in enumerate(rows)]
    _require_one_answer(told, resume)
    records = _newest_records(told)
    strangers = _strangers(told, records)
    if len(records) + len(strangers) > 1:
        seen = [f"rank {x.rank}: {_name(record)} in {x.path}" for x, record in records]
        seen += [f"rank {x.rank}: commit {y.generations[0]} in {x.path}" for x, y in strangers]
        raise ConfigError(
            f"--resume {resume}: what the ranks see are not of one run ({'; '.join(seen)}); name "
            "the path of one alone, or remove the others with `headrace checkpoint delete`"
            + discarding(told[0].is_own)
        )
    return _ordered(told, records, resume), told[0].is_own


def discarding(is_own: bool) -> str:
    """The way out that gives up what is there, as the end of a sentence."""
    return ", or start without --resume, which discards what is there" if is_own else ""


def _require_one_answer(told: Sequence[_Told], resume: str) -> None:
    """How a store is opened, and with how many collectives, depends on whose it is."""
    own = [str(x.rank) for x in told if x.is_own]
    if 0 < len(own) < len(told):
        raise ConfigError(
            f"--resume {resume}: this is the run's own store (offload.nvme.path) on rank "
            f"{', '.join(own[:16])}{', ...' if len(own) > 16 else ''} alone; a link leads "
            "elsewhere on other machines: name the path as in the configuration, or another store"
        )


def _newest_records(told: Sequence[_Told]) -> list[tuple[_Told, tuple[RankCommit, ...]]]:
    """The newest record of each line of runs, and the first rank that sees it."""
    newest: dict[str, tuple[_Told, tuple[RankCommit, ...]]] = {}
    for x in told:
        for record in x.sight.records:
            known = newest.get(record[0].line)
            if known is None or known[1][0].epoch < record[0].epoch:
                newest[record[0].line] = x, record
    return list(newest.values())


def _strangers(
    told: Sequence[_Told], records: Sequence[tuple[_Told, tuple[RankCommit, ...]]]
) -> list[tuple[_Told, Checkpoint]]:
    """The newest commits of one rank, of each store that no record is of the line of."""
    found: dict[str, tuple[_Told, Checkpoint]] = {}
    for x in told:
        for alone in x.sight.alone:
            if all(is_newer(alone, record[0]) is None for _, record in records):
                found.setdefault(alone.stores[0], (x, alone))
    return list(found.values())


def _ordered(
    told: Sequence[_Told],
    records: Sequence[tuple[_Told, tuple[RankCommit, ...]]],
    resume: str,
) -> Candidates:
    alone = {
        y.generations[0]: y
        for x in reversed(told)
        for y in x.sight.alone
        if not records or y.stores[0] == records[0][1][0].stores[0]
    }
    ones = [alone[generation] for generation in sorted(alone, reverse=True)]
    if not records and not ones:
        return Candidates((), nothing=_nothing(told, resume))
    record = records[0][1] if records else ()
    notes = dict.fromkeys(note for x in told for note in x.sight.notes)
    recorded = [
        Candidate(x.generations, x.stores, record[i:], () if i else tuple(notes))
        for i, x in enumerate(record)
    ]
    newer = [x for x in ones if not record or is_newer(x, record[0])]
    found = [
        *map(_of_one_rank, newer),
        *recorded,
        *(_of_one_rank(x) for x in ones if x not in newer),
    ]
    if record:
        return Candidates(tuple(found), record[0].line, record[0].epoch)
    return Candidates(tuple(found), ones[0].stores[0])


def _of_one_rank(alone: Checkpoint) -> Candidate:
    return Candidate(alone.generations, alone.stores, (), alone.notes)


def _name(record: Sequence[RankCommit]) -> str:
    return Candidate(record[0].generations, record[0].stores, tuple(record)).label


def _nothing(told: Sequence[_Told], resume: str) -> str:
    """Why nobody sees anything to go on from; raises unless there really is nothing."""
    problems = list(dict.fromkeys(x.sight.problem for x in told if x.sight.problem))
    if problems:
        raise StorageError(f"--resume {resume}: {'; '.join(problems)}")
    parts: dict[str, int] = {}
    for x in told:
        if x.sight.is_published:
            parts.setdefault(x.sight.nothing, x.rank)
    if parts:
        seen = "; ".join(f"rank {rank}: {why}" for why, rank in parts.items())
        raise ConfigError(
            f"--resume {resume}: there are parts of commits, and {seen}; bring the record or the "
            f"missing parts here{discarding(told[0].is_own)}"
        )
    return told[0].sight.nothing


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
