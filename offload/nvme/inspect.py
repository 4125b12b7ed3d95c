"""Looking into a store from outside: its commits, their blocks, and whether every byte verifies.

Invariants: nothing is written, and nobody's directory is taken. While a store has no owner, none
can come (`Watch`). Where it has one, commits may be superseded while they are read; what does not
verify then counts only if its commit is still retained afterwards.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from offload.nvme.aligned import AccessMode, aligned_buffer
from offload.nvme.directory import DATA_FILE_NAME, link_problem
from offload.nvme.files import (
    OsDirectoryFiles,
    OsFile,
    StorageFile,
    describe_os_error,
    open_plain,
)
from offload.nvme.lock import LOCK_FILE_NAME, Owner, Watch
from offload.nvme.manifest import Manifest
from offload.nvme.members import MEMBER_FILE_NAME, read_member
from offload.nvme.recovery import FoundCommit, choose_commits, read_slots
from offload.nvme.table import StoredBlock
from offload.nvme.verify import BlockReader, Damage
from ops.errors import ConfigError, StorageError

REQUEST_BYTES = 4 << 20
_READERS = 4
_RANK_NAME = re.compile(r"rank-[0-9]{5}")


def num_ranks_of(meta: Mapping[str, Any]) -> int:
    """How many ranks made the commit with this `meta`; 1 where it does not say."""
    run = meta.get("run")
    ranks = run.get("ranks") if isinstance(run, Mapping) else None
    return ranks if type(ranks) is int and ranks > 0 else 1


def find_stores(paths: Sequence[str]) -> list[list[str]]:
    """The directories of each rank's store under `paths`, in the order of the ranks.

    `paths` are those the store was made with, in the same order, or one rank's own directories.
    Raises ConfigError when the first holds no store, or when the directory of a rank is a link;
    `paths` may be links.
    """
    first = paths[0]
    try:
        names = os.listdir(first)
    except OSError as error:
        raise ConfigError(f"{first} is no store: {describe_os_error(error)}") from error
    if _is_store(first):
        return [list(paths)]
    ranks = [name for name in sorted(names) if _RANK_NAME.fullmatch(name)]
    for directory in (os.path.join(path, name) for name in ranks for path in paths):
        problem = link_problem(directory)
        if problem is not None:
            raise ConfigError(f"{problem}: only the paths that are named may be links")
    ranks = [name for name in ranks if _is_store(os.path.join(first, name))]
    if not ranks:
        raise ConfigError(
            f"{first} is no store: it has no directory rank-00000; "
            "name the path that offload.nvme.path named"
        )
    return [[os.path.join(path, name) for path in paths] for name in ranks]


def _is_store(directory: str) -> bool:
    names = (LOCK_FILE_NAME, MEMBER_FILE_NAME)
    return any(os.path.lexists(os.path.join(directory, name)) for name in names)


class InspectedStore:
    """One rank's store, looked at: `commits` newest first, all retained ones.

    `owner` is the live owner, if there is one (None with `is_owned`: its name is not known).
    `notes` says what else is there, `damaged` whether a manifest is damaged or gone.
    """

    def __init__(self, directories: Sequence[str], newest: int | None = None) -> None:
        """Read the manifests; may block for reading them.

        With `newest` only commits up to that generation are looked at: what other ranks have not
        published, or a run that went on has added.
        Raises ConfigError when `directories` are not those of one store, StorageError when there
        are manifests, but none can be used.
        """
        self.directories = list(directories)
        self._newest = newest
        self.store_id = ""
        self.commits: tuple[FoundCommit, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.damaged = False
        self._alignment_bytes = 0
        self._files = OsDirectoryFiles()
        try:
            self._watch = Watch(self.directory)
        except OSError as error:
            raise StorageError(describe_os_error(error), path=error.filename) from error
        try:
            self._read()
        except BaseException:
            self._watch.close()
            raise

    @property
    def directory(self) -> str:
        """The directory that holds the commits."""
        return self.directories[0]

    @property
    def owner(self) -> Owner | None:
        """Who owns the store now, if anybody does and says so."""
        return self._watch.owner

    @property
    def is_owned(self) -> bool:
        """Whether somebody owns the store now."""
        return self._watch.is_owned

    @property
    def versions(self) -> list[tuple[str, StoredBlock]]:
        """Every stored version of every block in a retained commit, once."""
        seen: dict[int, tuple[str, StoredBlock]] = {}
        for commit in self.commits:
            for name, stored in commit.blocks.items():
                seen.setdefault(id(stored), (name, stored))
        return list(seen.values())

    def close(self) -> None:
        """Let owners in again."""
        self._watch.close()

    def verify(self) -> Iterator[tuple[str, int, list[Damage]]]:
        """Read every block: (name, bytes read, what is damaged), as each is done.

        Blocks are read by several threads, past the page cache where that works. Raises
        StorageError when a data file cannot be opened.
        """
        if not self.commits:
            return
        access, files = self.open_data()
        local = threading.local()

        def read(item: tuple[str, StoredBlock]) -> tuple[str, int, list[Damage]]:
            if not hasattr(local, "reader"):
                memory = aligned_buffer(REQUEST_BYTES, access.alignment_bytes).data
                local.reader = BlockReader(files, access, memory)
            steps = list(local.reader.chunks(*item))
            damage = [x for _, x in steps if x is not None]
            return item[0], sum(nbytes for nbytes, _ in steps), damage

        try:
            with ThreadPoolExecutor(_READERS) as pool:
                try:
                    for item, found in zip(self.versions, pool.map(read, self.versions)):
                        yield found if self._still_counts(item, found[2]) else (*found[:2], [])
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
        finally:
            for file in files:
                file.close()

    def open_data(self) -> tuple[AccessMode, list[StorageFile]]:
        """The data files, read only, and how to read them; the caller closes them.

        Raises StorageError when one cannot be opened, is a link or no plain file.
        """
        access = self._access()
        files: list[StorageFile] = []
        try:
            for directory in self.directories:
                path = os.path.join(directory, DATA_FILE_NAME)
                files.append(_open_read_only(path, access.direct))
        except BaseException:
            for file in files:
                file.close()
            raise
        return access, files

    def is_retained(self, generation: int) -> bool:
        """Whether the manifests that are there now keep the extents of `generation`.

        What came after it counts only if it could have been published: with several ranks a
        manifest may be newer than the record of commits, which is not looked at here.
        """
        try:
            slots = read_slots(self.directory, self._files)
        except OSError:
            return False
        manifests = [
            x.manifest for x in slots if x.manifest and x.manifest.store_id == self.store_id
        ]
        if generation not in {manifest.generation for manifest in manifests}:
            return False
        newest = max(manifests, key=lambda manifest: manifest.generation)
        is_listed = generation == newest.generation or generation in newest.retained
        return is_listed or num_ranks_of(newest.meta) > 1

    def _read(self) -> None:
        member = read_member(self.directory, self._files)
        if member is not None and (member.index, member.count) != (0, len(self.directories)):
            raise ConfigError(
                f"{self.directory} is directory {member.index} of the {member.count} of its store; "
                "name all of them, in the order in which the store was made"
            )
        try:
            slots = read_slots(self.directory, self._files)
            store_id = member.store_id if member else None
            found = choose_commits(slots, store_id, self._check, lambda blocks: None, self._newest)
        except StorageError as error:
            raise StorageError(str(error), path=self.directory) from error
        if found is not None:
            self.store_id, self.damaged = found.store_id, found.doubt
            self.commits = tuple(reversed(found.commits))
            self.notes = found.skipped

    def _check(self, manifest: Manifest) -> None:
        self._alignment_bytes = manifest.alignment_bytes
        if len(manifest.file_bytes) != len(self.directories):
            raise ConfigError(
                f"the store in {self.directory} lies on {len(manifest.file_bytes)} paths and "
                f"{len(self.directories)} were named; name all of them, in the same order"
            )

    def _access(self) -> AccessMode:
        """Direct where one aligned unit can be read so: what is read then comes from the medium."""
        unit = aligned_buffer(self._alignment_bytes, self._alignment_bytes).data
        direct = True
        for directory in self.directories:
            file = None
            try:
                file = _ReadOnlyFile(os.path.join(directory, DATA_FILE_NAME), True)
                file.readv_into([unit], 0)
            except OSError as error:
                direct = direct and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP)
            finally:
                if file is not None:
                    file.close()
        return AccessMode(direct, self._alignment_bytes, "inspection")

    def _still_counts(self, item: tuple[str, StoredBlock], damage: list[Damage]) -> bool:
        """Whether damage found in a live store is in a commit that is retained even now."""
        if not damage or not self.is_owned:
            return True
        holders = {x.generation for x in self.commits if x.blocks.get(item[0]) is item[1]}
        manifests = [x.manifest for x in read_slots(self.directory, self._files) if x.manifest]
        newest = max(manifests, key=lambda manifest: manifest.generation, default=None)
        return newest is None or bool(holders & {newest.generation, *newest.retained})


class _ReadOnlyFile(OsFile):
    """An `OsFile` that cannot be changed; it must exist."""

    def __init__(self, path: str, direct: bool) -> None:
        self._path = path
        self._fd = open_plain(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))


def _open_read_only(path: str, direct: bool) -> _ReadOnlyFile:
    try:
        return _ReadOnlyFile(path, direct)
    except OSError as error:
        raise StorageError(f"cannot be opened: {describe_os_error(error)}", path=path) from error
