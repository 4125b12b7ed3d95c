"""What the directories of ranks hold of commits: the part of each, by its manifest.

Whole means: the manifest is there and decodes, and the data files are as long as it needs. Blocks
are verified when they are read.

Invariants: reads manifests only, writes nothing; keeps no block of any manifest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.nvme.directory import DATA_FILE_NAME, link_problem, rank_directory
from offload.nvme.files import OsDirectoryFiles, describe_os_error
from offload.nvme.inspect import find_stores, num_ranks_of
from offload.nvme.manifest import Manifest
from offload.nvme.recovery import read_slots, slot_name
from ops.errors import ConfigError


@dataclass(frozen=True)
class StoredPart:
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
class RankParts:
    """What one rank's directories hold: `parts` by generation, and a clause for each bad slot."""

    directories: list[str]
    parts: Mapping[int, StoredPart]
    problems: tuple[str, ...]

    def is_without(self, store_id: str, generation: int) -> bool:
        """Whether nothing of this store is here, damaged or not: then it may be elsewhere."""
        here = any(part.store_id == store_id for part in self.parts.values())
        return not here and not (self.problems and generation not in self.parts)

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


@dataclass(frozen=True)
class SeenPart:
    """One rank's part as it is seen from here: `problem` (None: it can be read), what it says, the
    bytes its extents take, and `is_absent`: whether nothing of it is here."""

    problem: str | None
    meta: Mapping[str, Any]
    nbytes: int
    is_absent: bool = False


def look_at_parts(
    paths: Sequence[str], generations: Sequence[int], stores: Sequence[str]
) -> dict[int, SeenPart]:
    """Every part of a commit whose parts are known, by rank; reads manifests, raises nothing."""
    found = {}
    for rank, (generation, store_id) in enumerate(zip(generations, stores)):
        directories = [rank_directory(path, rank) for path in paths]
        problem = next(filter(None, map(link_problem, directories)), None)
        if problem is not None:
            found[rank] = SeenPart(problem, {}, 0)
            continue
        if not os.path.isdir(directories[0]):
            found[rank] = SeenPart(f"no directory {directories[0]}", {}, 0, is_absent=True)
            continue
        seen = _look_at(directories)
        problem = seen.problem_with(store_id, generation)
        if problem is None and len(stores) > 1:
            problem = why_given_up(seen, store_id, generation)
        part = seen.parts.get(generation)
        found[rank] = SeenPart(
            problem,
            {} if part is None else part.meta,
            0 if part is None else part.nbytes,
            problem is not None and seen.is_without(store_id, generation),
        )
    return found


def _rank_of(directory: str, path: str) -> int:
    if os.path.normpath(directory) == os.path.normpath(path):
        above = os.path.dirname(os.path.normpath(path)) or "."
        raise ConfigError(f"{path} is the directory of one rank; name the one above it, {above}")
    return int(os.path.basename(directory).removeprefix("rank-"))


def look_at_ranks(paths: Sequence[str]) -> dict[int, RankParts]:
    """What the directories of every rank under `paths` hold; ConfigError where there are none."""
    return {_rank_of(found[0], paths[0]): _look_at(found) for found in find_stores(paths)}


def _look_at(directories: list[str]) -> RankParts:
    parts: dict[int, StoredPart] = {}
    problems = []
    try:
        slots = read_slots(directories[0], OsDirectoryFiles())
    except OSError as error:
        return RankParts(directories, {}, (describe_os_error(error),))
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
    return RankParts(directories, parts, tuple(problems))


def _part(manifest: Manifest, path: str) -> StoredPart:
    ends, nbytes = [0] * len(manifest.file_bytes), 0
    for stored in manifest.blocks.values():
        for extent in stored.extents:
            nbytes += extent.nbytes
            ends[extent.drive] = max(ends[extent.drive], extent.offset + extent.nbytes)
    return StoredPart(
        store_id=manifest.store_id,
        generation=manifest.generation,
        retained=manifest.retained,
        meta=manifest.meta,
        ends=tuple(ends),
        nbytes=nbytes,
        written_s=_mtime_s(path),
    )


def why_given_up(rank: RankParts, store_id: str, generation: int) -> str | None:
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


def _mtime_s(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
