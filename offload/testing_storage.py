"""Faulty and watchful storage for tests, behind the seam of `offload/nvme/files.py`.

`FaultyFile` wraps a real file and fails, shortens, flips or delays chosen operations;
`AlignmentFile` refuses what a drive with large sectors would; `SparseFile` keeps no data, so that
offsets beyond 4 GiB cost nothing. Deterministic: no clock, no random numbers, no sleeping.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from offload.nvme.aligned import ALIGNMENT_BYTES_MIN, AccessMode, address_of, aligned_buffer
from offload.nvme.files import (
    Buffers,
    OpenFile,
    OsDirectoryFiles,
    StorageFile,
    open_os_file,
    slice_buffers,
)

BUFFERED = AccessMode(direct=False, alignment_bytes=ALIGNMENT_BYTES_MIN, reason="test")
"""Access through the page cache, so that faults strike at exact bytes."""

_GATE_S_MAX = 20.0

Kind = Literal["error", "short", "flip", "gate"]
Verb = Literal["read", "write", "sync", "allocate"]


@dataclass
class Fault:
    """One fault, at the `at_op`-th call of `verb` (from 0), or at the call that reaches `at_byte`.

    `at_byte` counts the bytes moved by `verb` so far. What happens there:
    `error`: raises OSError(`code`); with `at_byte`, the bytes before it are moved first by a short
    transfer and the next call raises. From then on every call of `verb` raises (a disk stays full).
    `short`: moves only half of the call, or the bytes before `at_byte`; later calls are whole.
    `flip`: inverts one bit of the byte at `at_byte` (or the first of the call), read or written.
    `gate`: calls `gate` (see `Gate`) before the call goes through.
    All but `error` strike once.
    """

    kind: Kind
    verb: Verb
    at_op: int | None = None
    at_byte: int | None = None
    code: int = errno.EIO
    gate: Callable[[], object] | None = None
    num_hits: int = 0


class FaultyFile:
    """A `StorageFile` with faults; also counts the calls and bytes of each verb. Thread-safe."""

    def __init__(self, inner: StorageFile, faults: list[Fault], unit_bytes: int = 1) -> None:
        """Faults at byte k take effect at the last multiple of `unit_bytes` before it."""
        self.inner = inner
        self._unit_bytes = unit_bytes
        self.faults = faults
        self.num_calls: dict[str, int] = dict.fromkeys(("read", "write", "sync", "allocate"), 0)
        self.num_bytes: dict[str, int] = dict.fromkeys(self.num_calls, 0)
        self.ranges: list[tuple[str, int, int]] = []  # (verb, offset, bytes moved), in call order
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        return self.inner.path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        wanted_bytes, flip_at = self._before("read", _nbytes(buffers), offset)
        moved_bytes = self.inner.readv_into(slice_buffers(buffers, 0, wanted_bytes), offset)
        if flip_at is not None and flip_at < moved_bytes:
            _flip(buffers, flip_at)
        return moved_bytes

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        wanted_bytes, flip_at = self._before("write", _nbytes(buffers), offset)
        wanted = slice_buffers(buffers, 0, wanted_bytes)
        if flip_at is None:
            return self.inner.writev_from(wanted, offset)
        # In a copy: compute may be reading what is being written.
        copies = []
        for buffer in wanted:
            copy = aligned_buffer(buffer.nbytes, ALIGNMENT_BYTES_MIN)
            copy[:] = np.frombuffer(buffer, np.uint8)
            copies.append(copy.data)
        _flip(copies, flip_at)
        return self.inner.writev_from(copies, offset)

    def sync(self) -> None:
        self._before("sync", 0, 0)
        self.inner.sync()

    def truncate(self, nbytes: int) -> None:
        self.inner.truncate(nbytes)

    def allocate(self, offset: int, nbytes: int) -> None:
        self._before("allocate", nbytes, offset)
        self.inner.allocate(offset, nbytes)

    def close(self) -> None:
        self.inner.close()

    def _before(self, verb: Verb, nbytes: int, offset: int) -> tuple[int, int | None]:
        """How many bytes of the call may go through, and which of them to flip."""
        gates: list[Callable[[], object]] = []
        flip_at = None
        with self._lock:
            op, start = self.num_calls[verb], self.num_bytes[verb]
            self.num_calls[verb] += 1
            for fault in self.faults:
                if fault.verb != verb or not _hits(fault, op, start, nbytes):
                    continue
                before = 0 if fault.at_byte is None else max(0, fault.at_byte - start)
                if fault.kind == "gate" and fault.gate is not None:
                    gates.append(fault.gate)
                elif fault.kind == "flip":
                    flip_at = before
                elif fault.kind == "short":
                    nbytes = self._down(nbytes // 2 if fault.at_byte is None else before)
                elif self._down(before) == 0:
                    fault.num_hits += 1
                    raise OSError(fault.code, os.strerror(fault.code), self.path)
                else:
                    nbytes = self._down(before)
                fault.num_hits += 1
            self.num_bytes[verb] += nbytes
            self.ranges.append((verb, offset, nbytes))
        for gate in gates:
            gate()
        return nbytes, flip_at

    def _down(self, nbytes: int) -> int:
        return nbytes - nbytes % self._unit_bytes


def _nbytes(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _flip(buffers: Buffers, at_byte: int) -> None:
    (byte,) = slice_buffers(buffers, at_byte, at_byte + 1)
    byte[0] ^= 1


def _hits(fault: Fault, op: int, start: int, nbytes: int) -> bool:
    if fault.kind == "error":  # sticky
        if fault.at_byte is not None:
            return start + nbytes > fault.at_byte
        return op >= (fault.at_op or 0)
    if fault.num_hits:
        return False
    if fault.at_byte is not None:
        return start <= fault.at_byte < start + nbytes
    return op == (fault.at_op or 0)


class Gate:
    """A `fault` that stops the `at_op`-th call of `verb` until `open` is called.

    `entered` is set once somebody stands before it. Gives up (AssertionError) after 20 s.
    """

    def __init__(self, verb: Verb, at_op: int = 0) -> None:
        self.entered = threading.Event()
        self.fault = Fault("gate", verb, at_op=at_op, gate=self._pass)
        self._open = threading.Event()

    def open(self) -> None:
        """Let the stopped call, and any later one, go on."""
        self._open.set()

    def wait_entered(self) -> None:
        """Block until a call stands before the gate (20 s at most)."""
        passed = self.entered.wait(_GATE_S_MAX)
        assert passed, "nobody came to the gate"

    def _pass(self) -> None:
        self.entered.set()
        passed = self._open.wait(_GATE_S_MAX)
        assert passed, "nobody opened the gate"


class AlignmentFile:
    """A `StorageFile` on sectors of `alignment_bytes`: EINVAL for all else, as a drive does.

    Checks offset, and length and memory address of every buffer, of every transfer.
    """

    def __init__(self, inner: StorageFile, alignment_bytes: int) -> None:
        self.inner = inner
        self.alignment_bytes = alignment_bytes
        self.num_checked = 0

    @property
    def path(self) -> str:
        return self.inner.path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        self._check(buffers, offset)
        return self.inner.readv_into(buffers, offset)

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        self._check(buffers, offset)
        return self.inner.writev_from(buffers, offset)

    def sync(self) -> None:
        self.inner.sync()

    def truncate(self, nbytes: int) -> None:
        self.inner.truncate(nbytes)

    def allocate(self, offset: int, nbytes: int) -> None:
        self.inner.allocate(offset, nbytes)

    def close(self) -> None:
        self.inner.close()

    def _check(self, buffers: Buffers, offset: int) -> None:
        self.num_checked += 1
        for buffer in buffers:
            self._check_values(offset, buffer.nbytes, address_of(buffer))

    def _check_values(self, *values: int) -> None:
        for value in values:
            if value % self.alignment_bytes:
                raise OSError(errno.EINVAL, f"{value} is not aligned to {self.alignment_bytes}")


class SparseFile:
    """A `StorageFile` that remembers ranges and forgets data; reads give zeros.

    With `touch` off a read leaves the buffer as it is, so that huge zeroed buffers stay unmapped.
    """

    def __init__(self, path: str, touch: bool = True) -> None:
        self._path = path
        self._touch = touch
        self._lock = threading.Lock()
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def path(self) -> str:
        return self._path

    def readv_into(self, buffers: Buffers, offset: int) -> int:
        nbytes = _nbytes(buffers)
        with self._lock:
            self.ranges.append(("read", offset, nbytes))
        for buffer in buffers if self._touch else ():
            np.frombuffer(buffer, np.uint8)[:] = 0
        return nbytes

    def writev_from(self, buffers: Buffers, offset: int) -> int:
        nbytes = _nbytes(buffers)
        with self._lock:
            self.ranges.append(("write", offset, nbytes))
        return nbytes

    def sync(self) -> None:
        pass

    def truncate(self, nbytes: int) -> None:
        pass

    def allocate(self, offset: int, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class FaultyStorage:
    """An `OpenFile` that puts `faults` over the real file; `file` is the one it opened last."""

    def __init__(self, *faults: Fault, open_file: OpenFile = open_os_file) -> None:
        self.faults = list(faults)
        self.file: FaultyFile
        self._open_file = open_file

    def __call__(self, path: str, direct: bool) -> StorageFile:
        unit_bytes = ALIGNMENT_BYTES_MIN if direct else 1
        self.file = FaultyFile(self._open_file(path, direct), self.faults, unit_bytes)
        return self.file


class FaultyDirectoryFiles(OsDirectoryFiles):
    """Real `DirectoryFiles` that fail from the `at_op`-th call (from 0) of `verb` on.

    `verb` is a method's name. A failing `write_file` leaves half of the content behind.
    """

    def __init__(self, verb: str = "", code: int = errno.EIO, at_op: int = 0) -> None:
        self.verb = verb
        self.at_op = at_op
        self._code = code

    def write_file(self, path: str, data: bytes) -> None:
        failing = self._fails("write_file")
        super().write_file(path, data[: len(data) // 2] if failing else data)
        self._raise_if(failing, path)

    def sync_file(self, path: str) -> None:
        self._raise_if(self._fails("sync_file"), path)
        super().sync_file(path)

    def rename(self, old: str, new: str) -> None:
        self._raise_if(self._fails("rename"), new)
        super().rename(old, new)

    def sync_directory(self, directory: str) -> None:
        self._raise_if(self._fails("sync_directory"), directory)
        super().sync_directory(directory)

    def _fails(self, verb: str) -> bool:
        if verb != self.verb:
            return False
        self.at_op -= 1
        return self.at_op < 0

    def _raise_if(self, failing: bool, path: str) -> None:
        if failing:
            raise OSError(self._code, os.strerror(self._code), path)


def filled_buffer(
    nbytes: int, seed: int = 0, *, padded_bytes: int | None = None, skew_bytes: int = 0
) -> npt.NDArray[np.uint8]:
    """Random bytes, uint8 [padded_bytes or nbytes], at an aligned address plus `skew_bytes`."""
    length_bytes = nbytes if padded_bytes is None else padded_bytes
    buffer = aligned_buffer(length_bytes + skew_bytes, ALIGNMENT_BYTES_MIN)[skew_bytes:]
    generator = np.random.default_rng([seed, nbytes])
    buffer[:nbytes] = np.frombuffer(generator.bytes(nbytes), np.uint8)
    return buffer


def moments(nbytes: int, seed: int = 0, *, skew_bytes: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes of squared float32 noise (one in four compresses), placed as `filled_buffer` does."""
    buffer = aligned_buffer(nbytes + skew_bytes, ALIGNMENT_BYTES_MIN)[skew_bytes:]
    values = np.random.default_rng([seed, nbytes]).standard_normal(nbytes // 4 + 1, np.float32)
    buffer[:] = (values * values).view(np.uint8)[:nbytes]
    return buffer
