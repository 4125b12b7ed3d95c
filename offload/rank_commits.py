"""Commits of several ranks: the published record is the only commit point.

Every rank makes its own part durable (`offload/nvme/commit.py`); that is a *prepared* commit. Then

1. all ranks tell each other which generation of their store they have prepared;
2. rank 0 writes the record of all of them beside its store, durably and at once;
3. all ranks learn that it is there, and each writes a copy of it into its own directory;
4. only then each lets go of the commit before.

A rank that could not prepare its part does not come to 1: its run fails, which ends all ranks
(`launch/world.py`), and those that wait in 1 with them; what bounds every wait in a collective
bounds this one, too.

A crash before 2 leaves some prepared parts that nobody takes: resuming asks the record for the
generation of every rank, and a later one is discarded. A crash after 2 leaves the new commit whole
on every rank. Nobody frees anything of the last commit before 3, so there is always one.

The copies tell what has been published where rank 0's drive is not, and when its record is lost.
One may be older than the record, by the commit during which a crash came, and never newer.

The record is JSON, `commits.json` under the first path of rank 0 (`docs/formats/nvme_store.md`);
one xxh3-64 covers it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.nvme.directory import PUBLISHED_FILE_NAME, remove_files
from offload.nvme.files import DirectoryFiles, OsDirectoryFiles, describe_os_error
from offload.nvme.manifest import is_store_id
from offload.nvme.members import replace_file
from ops.checksum import checksum
from ops.comm.base import Communicator
from ops.errors import StorageError

RECORD_NAME = "commits.json"
_LINE = "line"
_FORMAT = "headrace commits 1"
_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class RankCommit:
    """One commit of all ranks: rank r's part is generation `generations[r]` of store `stores[r]`.

    `facts` are the run's: its mesh, and its line where that is not the store of rank 0.
    """

    epoch: int
    generations: tuple[int, ...]
    stores: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def line(self) -> str:
        """Names the runs that went on from each other, this one among them; epochs count in it."""
        line = self.facts.get(_LINE)
        return str(line) if is_store_id(line) else self.stores[0]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "epoch": self.epoch,
            "generations": list(self.generations),
            "stores": list(self.stores),
            "facts": dict(self.facts),
        }

    @staticmethod
    def from_json(saved: Any) -> RankCommit:
        """What `to_json` made; ValueError when it is something else."""
        names = ("epoch", "generations", "stores", "facts")
        if not isinstance(saved, dict) or tuple(saved) != names:
            raise ValueError("a commit has other fields")
        epoch, generations, stores, facts = (saved[name] for name in names)
        if not isinstance(generations, list) or not isinstance(stores, list):
            raise ValueError("a commit has no list of its parts")
        if len(generations) != len(stores) or not stores:
            raise ValueError("a commit has a part without a store")
        sound = all(type(x) is int and x > 0 for x in (epoch, *generations))
        if not sound or not all(map(is_store_id, stores)) or not isinstance(facts, dict):
            raise ValueError("a commit has fields of other types")
        return RankCommit(epoch, tuple(generations), tuple(stores), facts)


class RecordFile:
    """The record under `path`, newest commit first; one process writes it, rank 0.

    Under another `name` it is what a copy that is not finished will have as its record, or a rank's
    copy of the record (`published_copy`).
    """

    def __init__(
        self, path: str, files: DirectoryFiles | None = None, name: str = RECORD_NAME
    ) -> None:
        self.path = os.path.join(path, name)
        self._files = files or OsDirectoryFiles()

    def read(self) -> tuple[RankCommit, ...]:
        """The commits, newest first; empty when there is no record. StorageError if damaged."""
        try:
            data = self._files.read_file(self.path, _BYTES_MAX)
        except FileNotFoundError:
            return ()
        except OSError as error:
            why = describe_os_error(error)
            raise StorageError(
                f"the record of commits cannot be read: {why}", path=self.path
            ) from (error)
        try:
            return _decode(data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageError(
                f"the record of commits is damaged ({error}): without it no commit of several "
                "ranks can be trusted",
                path=self.path,
            ) from None

    def remove(self) -> None:
        """Durably forget all commits, before the stores are begun anew; StorageError."""
        directory = os.path.dirname(self.path)
        try:
            name = os.path.basename(self.path)
            if name in self._files.list(directory):
                remove_files(directory, [name], self._files)
                self._files.sync_directory(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            why = describe_os_error(error)
            raise StorageError(
                f"the record of commits cannot be removed: {why}", path=self.path
            ) from error

    def write(self, commits: Sequence[RankCommit]) -> None:
        """Replace the record, durably and at once; StorageError names the step that failed."""
        replace_file(self._files, self.path, _encode(commits))


def published_copy(directory: str, files: DirectoryFiles | None = None) -> RecordFile:
    """The copy of the record in the directory of a rank."""
    return RecordFile(directory, files, PUBLISHED_FILE_NAME)


def _encode(commits: Sequence[RankCommit]) -> bytes:
    fields = {"format": _FORMAT, "commits": [commit.to_json() for commit in commits]}
    text = json.dumps(fields)
    return json.dumps(fields | {"checksum": _sum(text)}).encode()


def _decode(data: bytes) -> tuple[RankCommit, ...]:
    fields = json.loads(data)
    if not isinstance(fields, dict) or not isinstance(fields.get("commits"), list):
        raise ValueError("it has no list of commits")
    found = fields.pop("checksum")
    if fields.get("format") != _FORMAT or set(fields) != {"format", "commits"}:
        raise ValueError(f"its format is not {_FORMAT!r}")
    if found != _sum(json.dumps(fields)):
        raise ValueError("checksum mismatch")
    return tuple(RankCommit.from_json(row) for row in fields["commits"])


def _sum(text: str) -> str:
    return f"{checksum(memoryview(text.encode())):016x}"


class RankCommits:
    """What a rank does with its prepared commits: an `Agree` for its store.

    `ranks` is a communicator of all ranks for the publisher thread alone. `record` is rank 0's,
    None elsewhere; `store_id` is this rank's. `commits` are those the run was resumed at, newest
    first; `keep` are retained. `copy` is this rank's. `epoch`: the largest number of a commit that
    is known of the `line` that the run goes on with ("": it begins one).
    """

    def __init__(
        self,
        ranks: Communicator,
        record: RecordFile | None,
        store_id: str,
        facts: Mapping[str, Any],
        keep: int,
        commits: Sequence[RankCommit] = (),
        *,
        copy: RecordFile | None = None,
        epoch: int = 0,
        line: str = "",
    ) -> None:
        assert (record is not None) == (ranks.rank == 0)
        self._ranks = ranks
        self._record = record
        self._store_id = store_id
        self._facts = facts
        self._keep = keep
        self._commits = tuple(commits)
        self._copy = copy
        self._epoch = max(epoch, commits[0].epoch if commits else 0)
        self._line = line

    def __call__(self, generation: int) -> None:
        """Publish the commit of which this rank has prepared `generation`; blocks for all ranks.

        Raises StorageError when any rank cannot go on; then the commit before stays.
        """
        parts = self._ranks.all_gather_object([generation, self._store_id])
        error: BaseException | None = None
        generations, stores = zip(*parts)
        is_told = self._line in ("", stores[0])
        facts = self._facts if is_told else {**self._facts, _LINE: self._line}
        commit = RankCommit(self._epoch + 1, generations, stores, facts)
        kept = (commit, *self._commits)[: self._keep]
        if self._record is not None:
            try:
                self._record.write(kept)
            except BaseException as caught:
                error = caught
        done = np.array([error is None], np.uint8)
        self._ranks.broadcast(done, 0)
        if error is not None:
            raise error
        if not done[0]:
            raise StorageError("rank 0 could not write the record of commits")
        self._commits, self._epoch = kept, commit.epoch
        if self._copy is not None:
            self._copy.write(kept)
