"""Opening a store: afresh, or at its newest commit.

The commits are in the first path's directory. A store that is opened afresh first loses its
commits, durably, and only then its data, so that no crash leaves a commit whose blocks are gone.
One that is resumed is only read here, but for leftover temporary files and a lost `member.json`.

Everything here runs once, before the first transfer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from offload.nvme.aligned import AccessMode, choose_access
from offload.nvme.bandwidth import Measure
from offload.nvme.directory import (
    DATA_FILE_NAME,
    check_free_space,
    delete_store_files,
    free_bytes_at,
    is_commit,
    is_temporary,
    lock_directory,
    path_error,
    rank_directory,
    remove_files,
)
from offload.nvme.extents import ExtentAllocator
from offload.nvme.files import DirectoryFiles, OpenFile, OsDirectoryFiles, StorageFile
from offload.nvme.hold import remove_holds
from offload.nvme.lock import OwnerLock
from offload.nvme.manifest import Manifest
from offload.nvme.members import MEMBER_FILE_NAME, Member, read_member, write_member
from offload.nvme.recovery import FoundCommits, choose_commits, read_slots, slot_index
from offload.nvme.striping import BlockAllocator, StripedAllocator, split_capacity
from offload.nvme.table import StoredBlock
from offload.nvme.verify import BlockReader
from ops.errors import ConfigError, StorageError
from ops.units import format_bytes, round_up

log = logging.getLogger(__name__)


@dataclass
class OpenedStore:
    """What opening took: one entry for each path in the lists, the same order everywhere."""

    store_id: str
    directories: list[str]
    locks: list[OwnerLock]
    files: list[StorageFile]
    file_bytes: list[int]
    weights: list[float]
    capacities: list[int]
    access: AccessMode
    directory_files: DirectoryFiles
    found: FoundCommits | None = None

    def new_allocator(self, base_offset: int) -> BlockAllocator:
        """All room of the data files, free; several drives share the blocks by their weights."""
        if len(self.files) == 1:
            return ExtentAllocator(self.capacities[0], self.access.alignment_bytes, base_offset)
        unit = self.access.alignment_bytes
        return StripedAllocator(self.capacities, self.weights, unit, base_offset)

    def close(self, delete: bool = False) -> None:
        """Close the files and give up the directories; with `delete`, remove everything."""
        with ExitStack() as stack:
            for lock in self.locks:
                stack.callback(_leave, lock, delete)
            if delete:
                stack.callback(delete_store_files, self.directories, self.directory_files)
            for file in self.files:
                stack.callback(file.close)


def discard_store(directories: Sequence[str]) -> None:
    """Remove the store in these directories, and them, if nobody owns it.

    Commits go first, durably. Raises ConfigError for a live owner or what no store has made.
    """
    files = OsDirectoryFiles()
    with ExitStack() as stack:
        for directory in directories:
            stack.callback(_leave, lock_directory(directory), True)
        delete_store_files(directories, files)


def _leave(lock: OwnerLock, delete: bool) -> None:
    lock.release(delete)
    if delete:
        with contextlib.suppress(OSError):  # something else is in it
            os.rmdir(os.path.dirname(lock.path))


@dataclass(frozen=True)
class Opening:
    """How a store is to be opened; see `NvmeStore`."""

    paths: tuple[str, ...]
    rank: int
    capacity_bytes: int
    required_bytes: int
    base_offset: int
    access: AccessMode | None
    open_file: OpenFile
    directory_files: DirectoryFiles
    measure: Measure
    newest: int | None = None
    before_discard: Callable[[], None] | None = None

    def open(self, resume: bool) -> OpenedStore:
        """Lock the directories and open their data files: empty, or with commits for `resume`.

        Commits newer than generation `newest` are not taken.
        On failure everything is given up again. May block for reading every block of a commit.
        Raises ConfigError and StorageError as `NvmeStore`.
        """
        if not self.paths or len({os.path.realpath(path) for path in self.paths}) < len(self.paths):
            raise ConfigError(
                f"offload.nvme.path: {', '.join(self.paths) or 'no path'}; "
                "name at least one directory, and each only once"
            )
        directories = [rank_directory(path, self.rank) for path in self.paths]
        with ExitStack() as undo:
            locks = []
            for directory in directories:
                locks.append(lock_directory(directory))
                undo.callback(locks[-1].release)
            try:
                opened = self._open(directories, locks, resume, undo)
            except OSError as error:
                raise path_error(error.filename or directories[0], error) from error
            undo.pop_all()
            return opened

    def _open(
        self, directories: list[str], locks: list[OwnerLock], resume: bool, undo: ExitStack
    ) -> OpenedStore:
        access = self.access or _common_access([choose_access(x) for x in directories])
        unit = access.alignment_bytes
        if self.base_offset % unit:
            raise ValueError(f"base offset {self.base_offset} is not a multiple of {access}")
        check_free_space(directories, self.required_bytes)
        weights = self.measure(directories, access) if len(directories) > 1 else [1.0]
        capacities = self._split(directories, weights, unit, [0] * len(directories))
        assert capacities is not None  # nothing has to be kept
        opened = OpenedStore(
            store_id=secrets.token_hex(16),
            directories=directories,
            locks=locks,
            files=[],
            file_bytes=self._file_bytes(capacities, unit),
            weights=weights,
            capacities=capacities,
            access=access,
            directory_files=self.directory_files,
        )
        names = [self.directory_files.list(directory) for directory in directories]
        if resume and self._has_commits(directories, names):
            for directory, lengths in zip(directories, names):
                remove_files(directory, filter(is_temporary, lengths), self.directory_files)
                if DATA_FILE_NAME not in lengths:
                    raise StorageError(
                        "the data file of a store that has commits is missing",
                        path=os.path.join(directory, DATA_FILE_NAME),
                    )
            self._open_files(opened, undo)
            self._recover(opened, [lengths[DATA_FILE_NAME] for lengths in names])
        else:
            if self.before_discard is not None:
                self.before_discard()
            self._discard(directories, names)
            self._open_files(opened, undo)
            self._start(opened)
        return opened

    def _split(
        self, directories: list[str], weights: list[float], unit: int, floors: list[int]
    ) -> list[int] | None:
        """The capacity of each drive, at least its floor; None where the floors do not fit."""
        if len(directories) == 1:
            return [self.capacity_bytes] if floors[0] <= self.capacity_bytes else None
        limits = [free_bytes_at(directory) for directory in directories]
        # A capacity that nobody needs yet may be larger than the drives.
        missing = max(0, self.capacity_bytes - sum(limits) + len(limits) * unit)
        limits = [limit + missing for limit in limits]
        return split_capacity(
            self.capacity_bytes, weights, unit, limits_bytes=limits, floors_bytes=floors
        )

    def _file_bytes(self, capacities: list[int], unit: int) -> list[int]:
        return [round_up(self.base_offset + capacity, unit) for capacity in capacities]

    def _open_files(self, opened: OpenedStore, undo: ExitStack) -> None:
        for directory in opened.directories:
            path = os.path.join(directory, DATA_FILE_NAME)
            opened.files.append(self.open_file(path, opened.access.direct))
            undo.callback(opened.files[-1].close)

    def _discard(self, directories: list[str], names: list[dict[str, int]]) -> None:
        """Durably remove what an earlier store left, but for its data, and say what it was."""
        for directory, lengths in zip(directories, names):
            if any(slot_index(name) is not None for name in lengths):
                log.warning("%s: discarded %s", directory, self._newest_commit(directory))
            leftovers = [name for name in lengths if is_commit(name) or is_temporary(name)]
            remove_files(directory, leftovers, self.directory_files)
            remove_holds(directory, lengths, self.directory_files)
            if leftovers:
                self.directory_files.sync_directory(directory)

    def _newest_commit(self, directory: str) -> str:
        manifests = [slot.manifest for slot in read_slots(directory, self.directory_files)]
        newest = max((x for x in manifests if x), key=lambda x: x.generation, default=None)
        if newest is None:
            return "a damaged commit"
        return f"commit {describe_commit(newest.generation, newest.meta)}"

    def _start(self, opened: OpenedStore) -> None:
        for index, (directory, file) in enumerate(zip(opened.directories, opened.files)):
            file.truncate(0)
            file.truncate(opened.file_bytes[index])
            member = Member(opened.store_id, index, len(opened.files))
            # Its last step makes the name of the data file durable, too.
            write_member(directory, member, self.directory_files)

    def _has_commits(self, directories: list[str], names: list[dict[str, int]]) -> bool:
        """Whether the first directory has commits; refuses directories that do not go together."""
        members = [read_member(directory, self.directory_files) for directory in directories]
        has_slots = [any(slot_index(name) is not None for name in lengths) for lengths in names]
        for index, (directory, member) in enumerate(zip(directories, members)):
            at = member.index if member else 0
            if (index and has_slots[index]) or (index == 0 and at):
                raise ConfigError(
                    f"offload.nvme.path: {directory} is directory {at} of its store and was given "
                    f"as directory {index}; give the paths in the order they were first given in"
                )
        member = members[0]
        if has_slots[0] and member and member.count != len(directories):
            raise ConfigError(
                f"offload.nvme.path: {len(directories)} given, but the store in {directories[0]} "
                f"was made of {member.count}; give all of them, in the same order"
            )
        return has_slots[0]

    def _recover(self, opened: OpenedStore, lengths: list[int]) -> None:
        """Find the commits, check that they fit what was opened, and make the files long enough."""
        first = opened.directories[0]
        members = [read_member(x, self.directory_files) for x in opened.directories]
        reader = BlockReader(opened.files, opened.access)
        verified: dict[int, StoredBlock] = {}  # what commits share is read once

        def check(manifest: Manifest) -> None:
            self._check_members(manifest.store_id, opened.directories, members)
            self._check_fit(manifest, opened, lengths)

        def verify(blocks: Mapping[str, StoredBlock]) -> str | None:
            log.warning("%s: a slot is damaged or gone; verifying every block of a commit", first)
            for name, stored in blocks.items():
                if id(stored) not in verified:
                    damage = reader.first_damage(name, stored)
                    if damage is not None:
                        return str(damage)
                    verified[id(stored)] = stored
            return None

        member = members[0]
        slots = read_slots(first, self.directory_files)
        try:
            store_id = member.store_id if member else None
            found = choose_commits(slots, store_id, check, verify, self.newest)
        except StorageError as error:
            raise error if error.path else StorageError(str(error), path=first) from None
        assert found is not None
        opened.store_id, opened.found = found.store_id, found
        self._fit_capacities(opened, found)
        self._round_up_tails(opened, found)
        for index, file in enumerate(opened.files):
            if lengths[index] < opened.file_bytes[index]:
                file.truncate(opened.file_bytes[index])
            opened.file_bytes[index] = max(opened.file_bytes[index], lengths[index])
        if member is None:
            write_member(first, Member(found.store_id, 0, len(opened.files)), self.directory_files)

    def _round_up_tails(self, opened: OpenedStore, found: FoundCommits) -> None:
        """Let an extent that ended at an odd capacity fill its last unit of the file."""
        unit = opened.access.alignment_bytes
        for stored in (x for commit in found.commits for x in commit.blocks.values()):
            for index, extent in enumerate(stored.extents):
                if extent.nbytes % unit:
                    room_bytes = self.base_offset + opened.capacities[extent.drive] - extent.offset
                    nbytes = min(round_up(extent.nbytes, unit), room_bytes)
                    stored.extents[index] = replace(extent, nbytes=nbytes)

    def _check_members(
        self, store_id: str, directories: list[str], members: list[Member | None]
    ) -> None:
        for index, (directory, member) in enumerate(zip(directories, members)):
            if member == Member(store_id, index, len(directories)) or (
                index == 0 and (member is None or member.store_id != store_id)
            ):
                continue  # the first directory's own manifests say what it is
            raise StorageError(
                f"this is not directory {index} of store {store_id}, whose commits are in "
                f"{directories[0]}: "
                + ("it has no readable member.json" if member is None else f"it is {member}"),
                path=os.path.join(directory, MEMBER_FILE_NAME),
            )

    def _check_fit(self, manifest: Manifest, opened: OpenedStore, lengths: list[int]) -> None:
        commit = describe_commit(manifest.generation, manifest.meta)
        if len(manifest.file_bytes) != len(opened.files):
            raise ConfigError(
                f"offload.nvme.path: {len(opened.files)} given, but commit {commit} in "
                f"{opened.directories[0]} lies on {len(manifest.file_bytes)}; give the same paths"
            )
        unit = opened.access.alignment_bytes
        if manifest.alignment_bytes != unit:
            raise ConfigError(
                f"offload.nvme.path: commit {commit} in {opened.directories[0]} is aligned to "
                f"{manifest.alignment_bytes} bytes, but the file system now asks for {unit}; "
                "resume on the drive it was made on"
            )
        for index, end in enumerate(self._ends(manifest.blocks.values(), len(opened.files))):
            if lengths[index] < end:
                raise StorageError(
                    f"the data file has {lengths[index]} bytes, but commit {commit} needs {end}; "
                    "it was truncated",
                    path=opened.files[index].path,
                )

    def _fit_capacities(self, opened: OpenedStore, found: FoundCommits) -> None:
        """Share the capacity out anew, so that each drive keeps what the commits have on it."""
        blocks = (stored for commit in found.commits for stored in commit.blocks.values())
        ends = self._ends(blocks, len(opened.files))
        floors = [end - self.base_offset for end in ends]
        unit = opened.access.alignment_bytes
        capacities = self._split(opened.directories, opened.weights, unit, floors)
        if capacities is None:
            newest = found.commits[-1]
            uses = (f"{file.path} up to byte {end}" for file, end in zip(opened.files, ends))
            raise ConfigError(
                f"offload.nvme.capacity: {self.capacity_bytes} bytes, but commit "
                f"{describe_commit(newest.generation, newest.meta)} uses {' and '.join(uses)}; "
                f"set it to at least {sum(floors)} ({format_bytes(sum(floors))})"
            )
        opened.capacities = capacities
        opened.file_bytes = self._file_bytes(capacities, unit)

    def _ends(self, blocks: Iterable[StoredBlock], num_drives: int) -> list[int]:
        """Where the last byte of `blocks` ends on each drive."""
        ends = [self.base_offset] * num_drives
        for stored in blocks:
            for extent in stored.extents:
                ends[extent.drive] = max(ends[extent.drive], extent.offset + extent.nbytes)
        return ends


def describe_commit(generation: int, meta: Mapping[str, object]) -> str:
    """`7 (step 70)`, or `7` where the caller noted no step."""
    return f"{generation} (step {meta['step']})" if "step" in meta else str(generation)


def _common_access(modes: list[AccessMode]) -> AccessMode:
    """What serves all drives: the largest alignment, direct I/O only where all have it."""
    return AccessMode(
        direct=all(mode.direct for mode in modes),
        alignment_bytes=max(mode.alignment_bytes for mode in modes),
        reason="; ".join(mode.reason for mode in modes),
    )
