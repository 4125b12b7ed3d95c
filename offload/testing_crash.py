"""A simulated disk behind both storage seams, and the images that a crash would leave of it.

`SimulatedDisk` is an `OpenFile` (through `open_file`) and a `DirectoryFiles`. It keeps everything
in memory and logs every operation, so one run gives as many crashes as wanted, afterwards: an image
at operation N has what was synced before N for certain, and of everything else, N itself included,
a seeded random part.

What a crash may do here: apply any of the 512-byte sectors of writes that no `sync` has covered,
torn or out of order; forget or apply names (made, renamed, removed) that no `sync_directory` has
covered, in order or not; leave any of the lengths a file had since its last sync. Sectors
themselves are never torn. A real directory must exist for the store's lock, which stays real.

    disk = SimulatedDisk()
    store = NvmeStore(path, capacity, access=BUFFERED, open_file=disk.open_file,
                      directory_files=disk, required_bytes=0)
    ...; store.publish(cut); disk.mark(generation); ...; store.close()
    for crash in disk.crashes(range(0, disk.num_operations, 7), seed=1):
        NvmeStore(path, ..., open_file=crash.disk.open_file, directory_files=crash.disk,
                  resume=True)
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from offload.nvme.files import Buffers, StorageFile

SECTOR_BYTES = 512

Kind = Literal["write", "truncate", "sync", "name", "rename", "unlink", "sync_directory", "mark"]


@dataclass(frozen=True)
class Operation:
    """One logged operation: `kind`, the path it was on, and what to replay."""

    kind: Kind
    path: str
    inode: int = -1
    offset: int = 0  # of a write; the new length for a truncate
    data: bytes = b""
    source: str = ""  # of a rename
    value: Any = None  # of a mark


@dataclass
class _Inode:
    """A file: its length, and its bytes up to the last one written."""

    nbytes: int = 0
    content: bytearray = field(default_factory=bytearray)

    def copy(self) -> _Inode:
        return _Inode(self.nbytes, bytearray(self.content))

    def read(self, offset: int, nbytes: int) -> bytes:
        nbytes = max(0, min(nbytes, self.nbytes - offset))
        return bytes(self.content[offset : offset + nbytes]).ljust(nbytes, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self._reach(end)
        self.content[offset:end] = data
        self.nbytes = max(self.nbytes, end)

    def write_some(
        self, offset: int, data: bytes, random: np.random.Generator, share: float
    ) -> None:
        """Apply each sector of `data` with probability `share`; the length stays."""
        end = offset + len(data)
        self._reach(end)
        first = offset // SECTOR_BYTES
        chosen = random.random(-(-end // SECTOR_BYTES) - first) < share
        skip = offset - first * SECTOR_BYTES
        mask = np.repeat(chosen, SECTOR_BYTES)[skip : skip + len(data)]
        # A view, not a copy: it has to go before the bytes may be resized again.
        view = np.frombuffer(self.content, np.uint8)
        view[offset:end][mask] = np.frombuffer(data, np.uint8)[mask]

    def truncate(self, nbytes: int) -> None:
        del self.content[nbytes:]
        self.nbytes = nbytes

    def _reach(self, end: int) -> None:
        if len(self.content) < end:
            self.content.extend(bytes(end - len(self.content)))


class SimulatedDisk:
    """Files and names in memory, with a log. Thread-safe; nothing blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[str, int] = {}
        self._start: tuple[dict[int, _Inode], dict[str, int]] = ({}, {})  # durable from the start
        self._log: list[Operation] = []

    @property
    def num_operations(self) -> int:
        """How many operations the log has; marks count."""
        return len(self._log)

    def points(self, *kinds: Kind) -> list[int]:
        """The numbers of all operations of these kinds (of any, without kinds)."""
        return [at for at, op in enumerate(self._log) if not kinds or op.kind in kinds]

    def mark(self, value: Any) -> None:
        """Note `value` in the log: crashes behind this point have it as their `mark`."""
        with self._lock:
            self._log.append(Operation("mark", "", value=value))

    def open_file(self, path: str, direct: bool) -> StorageFile:
        """An `OpenFile`: makes the file if needed."""
        with self._lock:
            return _SimulatedFile(self, path, self._make(path))

    def write_file(self, path: str, data: bytes) -> None:
        with self._lock:
            inode = self._make(path)
            self._do(Operation("truncate", path, inode))
            self._do(Operation("write", path, inode, 0, bytes(data)))

    def sync_file(self, path: str) -> None:
        with self._lock:
            self._do(Operation("sync", path, self._find(path)))

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._do(Operation("rename", new, self._find(old), source=old))

    def sync_directory(self, directory: str) -> None:
        with self._lock:
            self._do(Operation("sync_directory", directory))

    def unlink(self, path: str) -> None:
        with self._lock:
            self._do(Operation("unlink", path, self._find(path)))

    def list(self, directory: str) -> dict[str, int]:
        with self._lock:
            return {
                os.path.basename(path): self._inodes[inode].nbytes
                for path, inode in self._names.items()
                if os.path.dirname(path) == directory
            }

    def names(self, directory: str) -> Sequence[str]:
        return [*self.list(directory)]

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        with self._lock:
            return self._inodes[self._find(path)].read(0, nbytes_max)

    def corrupt(self, path: str, offset: int, data: bytes) -> None:
        """Replace bytes of `path` behind everybody's back."""
        with self._lock:
            self._inodes[self._find(path)].write(offset, data)

    def crashes(self, at: Iterable[int], seed: int) -> Iterator[Crash]:
        """The images of crashes at these operations, in ascending order, each with its own disk.

        `num_operations` is one behind the last: nothing is in flight then.
        The log must not grow meanwhile. Deterministic in (log, number, seed).
        """
        replay = _Replay(*self._start)
        mark, done = None, 0
        for number in sorted(at):
            for operation in self._log[done:number]:
                replay.apply(operation)
                mark = operation.value if operation.kind == "mark" else mark
            done = number
            random = np.random.default_rng([seed, number])
            operation = self._log[number] if number < len(self._log) else Operation("mark", "")
            yield Crash(
                number, operation.kind, operation.path, mark, replay.image(operation, random)
            )

    def _make(self, path: str) -> int:
        inode = self._names.get(path)
        if inode is None:
            inode = max(self._inodes, default=-1) + 1
            self._do(Operation("name", path, inode))
        return inode

    def _find(self, path: str) -> int:
        inode = self._names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def _do(self, operation: Operation) -> None:
        self._log.append(operation)
        if operation.kind in ("write", "truncate"):
            _change(self._inodes[operation.inode], operation)
        else:
            if operation.kind == "name":
                self._inodes[operation.inode] = _Inode()
            _change_names(self._names, operation)


@dataclass(frozen=True)
class Crash:
    """A crash at operation `number`: what that was, the last mark before it, and what is left."""

    number: int
    kind: Kind
    path: str
    mark: Any
    disk: SimulatedDisk


def _change(inode: _Inode, operation: Operation) -> None:
    if operation.kind == "write":
        inode.write(operation.offset, operation.data)
    else:
        inode.truncate(operation.offset)


def _change_names(names: dict[str, int], operation: Operation) -> None:
    if operation.kind == "unlink":
        names.pop(operation.path, None)
    elif operation.kind in ("name", "rename"):
        if operation.source:
            names.pop(operation.source, None)
        names[operation.path] = operation.inode


class _Replay:
    """What is durable after a prefix of a log, and what is not yet."""

    def __init__(self, inodes: dict[int, _Inode], names: dict[str, int]) -> None:
        self.inodes = {number: inode.copy() for number, inode in inodes.items()}
        self.names = dict(names)
        self.pending: dict[int, list[Operation]] = {}
        self.pending_names: list[Operation] = []

    def apply(self, operation: Operation) -> None:
        """Go on by one operation."""
        if operation.kind in ("write", "truncate"):
            self.pending.setdefault(operation.inode, []).append(operation)
        elif operation.kind == "sync":
            for change in self.pending.pop(operation.inode, ()):
                _change(self.inodes[operation.inode], change)
        elif operation.kind == "sync_directory":
            later = []
            for change in self.pending_names:
                if os.path.dirname(change.path) == operation.path:
                    _change_names(self.names, change)
                else:
                    later.append(change)
            self.pending_names = later
        elif operation.kind != "mark":
            if operation.kind == "name":
                self.inodes[operation.inode] = _Inode()
            self.pending_names.append(operation)

    def image(self, operation: Operation, random: np.random.Generator) -> SimulatedDisk:
        """The disk after a crash in the middle of `operation`."""
        inodes = {number: inode.copy() for number, inode in self.inodes.items()}
        share = float(random.choice([0.0, 0.2, 0.8, 1.0]))
        for number, inode in inodes.items():
            pending = self.pending.get(number, [])
            if operation.inode == number and operation.kind in ("write", "truncate"):
                pending = [*pending, operation]
            _apply_some(inode, pending, random, share)
        names, changes = dict(self.names), list(self.pending_names)
        if operation.kind in ("name", "rename", "unlink"):
            inodes.setdefault(operation.inode, _Inode())
            changes.append(operation)
        if random.random() < 0.5:  # a journal keeps the order, others may not
            changes = changes[: random.integers(len(changes) + 1)]
        else:
            changes = [change for change in changes if random.random() < 0.5]
        for change in changes:
            _change_names(names, change)
        disk = SimulatedDisk()
        disk._inodes, disk._names = inodes, names
        disk._start = ({number: inode.copy() for number, inode in inodes.items()}, dict(names))
        return disk


def _apply_some(
    inode: _Inode, pending: list[Operation], random: np.random.Generator, share: float
) -> None:
    lengths = [inode.nbytes]
    for change in pending:
        if change.kind == "truncate":
            lengths.append(change.offset)
            if random.random() < share:
                inode.truncate(change.offset)
        else:
            lengths.append(max(lengths[-1], change.offset + len(change.data)))
            inode.write_some(change.offset, change.data, random, share)
    length = lengths[random.integers(len(lengths))] if share not in (0, 1) else lengths[-int(share)]
    del inode.content[length:]
    inode.nbytes = length


class _SimulatedFile:
    """One open file of a `SimulatedDisk`."""

    def __init__(self, disk: SimulatedDisk, path: str, inode: int) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode

    @property
    def path(self) -> str:
        return self._path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        done_bytes = 0
        with self._disk._lock:
            inode = self._disk._inodes[self._inode]
            for buffer in buffers:
                data = inode.read(offset + done_bytes, buffer.nbytes)
                buffer[: len(data)] = data
                done_bytes += len(data)
        return done_bytes

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        data = b"".join(buffers)
        with self._disk._lock:
            self._disk._do(Operation("write", self._path, self._inode, offset, data))
        return len(data)

    def sync(self) -> None:
        with self._disk._lock:
            self._disk._do(Operation("sync", self._path, self._inode))

    def truncate(self, nbytes: int) -> None:
        with self._disk._lock:
            self._disk._do(Operation("truncate", self._path, self._inode, nbytes))

    def allocate(self, offset: int, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass
