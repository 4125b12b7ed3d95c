"""A checkpoint copied as it is: the same commit in the form of a store, elsewhere.

A copy keeps each rank's store id and generation, so its record and its parts belong together as in
the source, and whatever reads a store reads a copy. In this order:

1. what the record will be goes into the directory under another name, `commits.json.unfinished`;
2. the parts of all ranks that are here are copied (`offload/checkpoint/part_copy.py`);
3. when the parts of all ranks are there, the record gets its name, durably (with one rank, whose
   manifest is the commit, the unfinished one is removed).

A crash before 3 leaves a copy that says itself that it is not finished. The same call then goes on:
it keeps every chunk that verifies and copies the others. Ranks whose directories are on another
machine are copied by the same call there, into the same directory.

Invariants: a directory that is in use, is the source or holds anything else is refused before
anything is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.checkpoint.catalog import (
    UNFINISHED_NAME,
    Checkpoint,
    find_checkpoints,
    open_parts,
    parts_here,
    unfinished_copy,
)
from offload.checkpoint.part_copy import PartCopy, Progress
from offload.checkpoint.source import CommitPart
from offload.nvme.directory import rank_directory, sync_directory
from offload.nvme.files import OpenFile, OsDirectoryFiles, describe_os_error, open_os_file
from offload.nvme.members import TEMPORARY_SUFFIX
from offload.nvme.recovery import read_slots
from offload.rank_commits import RECORD_NAME, RankCommit, RecordFile
from ops.checksum import num_chunks
from ops.errors import ConfigError, StorageError


@dataclass(frozen=True)
class Copied:
    """What a copy has done: stored bytes written, and those that were there and verified.

    `missing`: the ranks whose parts are still to come; empty when the copy is whole.
    """

    written_bytes: int
    kept_bytes: int
    missing: tuple[int, ...]


def choose_source(paths: Sequence[str], out: str, step: int | None = None) -> Checkpoint:
    """Which checkpoint under `paths` a copy into `out` is of: `present` says which parts are here.

    The one that `out` was begun with, if it was; else the newest complete one (of `step`), else the
    newest of which parts are here. Raises ConfigError when there is none.
    """
    begun = unfinished_copy(out) if os.path.isdir(out) else None
    if begun is not None:
        found = find_checkpoints(paths)
        recorded = [x for x in found if x.generations]
        same = [x for x in recorded if commit_of(x) == begun]
        if recorded and not same:
            raise ConfigError(
                f"--out {out}: it was begun as a copy of commit {begun.generations[0]}, which is "
                f"not in {paths[0]} any more; delete it (headrace checkpoint delete) and copy again"
            )
        return same[0] if same else parts_here(paths, begun)
    found = [x for x in find_checkpoints(paths) if step is None or x.step == step]
    if not found:
        raise ConfigError(f"--step {step}: {paths[0]} has no checkpoint of this step")
    usable = [x for x in found if x.present]
    whole = [x for x in usable if x.is_complete]
    if not usable:
        raise ConfigError(f"nothing can be copied: {'; '.join(found[0].missing)}")
    return (whole or usable)[0]


def commit_of(checkpoint: Checkpoint) -> RankCommit:
    """What a record says of `checkpoint`."""
    epoch = checkpoint.epoch or checkpoint.generations[0]
    return RankCommit(epoch, checkpoint.generations, checkpoint.stores, checkpoint.facts)


def copy_checkpoint(
    checkpoint: Checkpoint,
    out: str,
    begin: Callable[[int], Progress] = lambda total_bytes: lambda nbytes: None,
    open_file: OpenFile = open_os_file,
) -> Copied:
    """Copy the parts of `checkpoint` that are here into `out`; blocks until they are durable.

    `begin` is told how many bytes there are, and gives what is told of those that are done. Raises
    ConfigError when `out` is the source, is in use or holds something else, StorageError when a
    chunk does not verify or the disk is full: the same call can go on later.
    """
    commit = commit_of(checkpoint)
    _check_target(checkpoint, out, commit)
    written_bytes = kept_bytes = 0
    parts = open_parts(checkpoint, checkpoint.present, hold=True)
    try:
        _begin(out, commit)
        tell = begin(sum(map(_stored_bytes, parts)))
        for rank, part in zip(checkpoint.present, parts):
            with PartCopy(part, rank_directory(out, rank), open_file) as copy:
                copy.run(tell)
            written_bytes += copy.written_bytes
            kept_bytes += copy.kept_bytes
    finally:
        for part in parts:
            part.close()
    return Copied(written_bytes, kept_bytes, _finish(out, commit))


def _stored_bytes(part: CommitPart) -> int:
    return sum(
        stored.stored_bytes(chunk)
        for stored in part.blocks.values()
        for chunk in range(num_chunks(stored.nbytes))
    )


def _check_target(checkpoint: Checkpoint, out: str, commit: RankCommit) -> None:
    """Raise ConfigError unless `out` is free, or holds this very copy."""
    if any(os.path.realpath(out) == os.path.realpath(path) for path in checkpoint.paths):
        raise ConfigError(f"--out {out}: this is the checkpoint itself; choose another directory")
    try:
        names = _names_in(out)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--out {out}: {describe_os_error(error)}") from error
    if not names:
        return
    unfinished, record = unfinished_copy(out), RecordFile(out).read()
    if unfinished is None and not record:
        is_same = len(commit.stores) == 1 and _holds_part(out, 0, commit)
    else:
        is_same = (unfinished or record[0]) == commit and len(record) <= 1
    if not is_same:
        raise ConfigError(
            f"--out {out}: it holds something else ({', '.join(names[:3])}); choose an empty "
            "directory, or delete what is there (headrace checkpoint delete)"
        )


def _names_in(out: str) -> list[str]:
    """What lies in `out`, but for what a crash in step 1 leaves."""
    leftover = UNFINISHED_NAME + TEMPORARY_SUFFIX
    return sorted(name for name in os.listdir(out) if name != leftover)


def _holds_part(out: str, rank: int, commit: RankCommit) -> bool:
    """Whether the manifest of this rank's part, and no other, is in the copy."""
    directory = rank_directory(out, rank)
    if not os.path.isdir(directory):
        return False
    manifests = [slot.manifest for slot in read_slots(directory, OsDirectoryFiles())]
    part = (commit.stores[rank], commit.generations[rank])
    return [(x.store_id, x.generation) for x in manifests if x is not None] == [part]


def _begin(out: str, commit: RankCommit) -> None:
    """Step 1, unless the copy has been begun."""
    try:
        os.makedirs(out, exist_ok=True)
        sync_directory(os.path.dirname(os.path.abspath(out)))
        if _names_in(out):
            return
    except OSError as error:
        raise StorageError(f"cannot be made: {describe_os_error(error)}", path=out) from error
    try:
        RecordFile(out, name=UNFINISHED_NAME).write([commit])
    except StorageError:
        # Another machine begins the same copy: both wrote the same, one of them renamed it.
        if unfinished_copy(out) != commit:
            raise


def _finish(out: str, commit: RankCommit) -> tuple[int, ...]:
    """Step 3, if all parts are there; the ranks whose parts are not."""
    ranks = range(len(commit.stores))
    missing = tuple(rank for rank in ranks if not _holds_part(out, rank, commit))
    unfinished = os.path.join(out, UNFINISHED_NAME)
    if missing or not os.path.lexists(unfinished):
        return missing
    try:
        with contextlib.suppress(FileNotFoundError):  # another machine has finished it just now
            if len(ranks) == 1:
                os.unlink(unfinished)
            else:
                os.rename(unfinished, os.path.join(out, RECORD_NAME))
        sync_directory(out)
    except OSError as error:
        raise StorageError(
            f"the copy cannot be finished: {describe_os_error(error)}", path=out
        ) from error
    return ()
