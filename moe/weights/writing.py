"""Safetensors files written as they come: constant memory, large sequential writes.

The library's writer wants all of a shard in memory. The format needs only that the header is known
before the data, and it is, because names, dtypes and shapes are. A header is padded with spaces
to a page, so that the data begins aligned.

Tensors may grow side by side (packed experts do): what is appended continues the *stream* that ends
at that place in the file, or begins one. A stream fills buffers of `BUFFER_BYTES`, which threads
write, past the page cache where the file system allows it; the odd bytes at the ends of a stream go
through the page cache, because a page may belong to two streams.

Files have names with `.partial` until `publish`. What was written is durable then.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.nvme.aligned import AccessMode, aligned_buffer, choose_access
from offload.nvme.files import OsFile, describe_os_error, write_fully
from offload.unit_values import Produce
from ops.errors import StorageError
from ops.units import round_up

BUFFER_BYTES = 8 << 20
BUFFERS_MAX = 12
"""Two streams in each of three sets, and as many buffers again under way to the disk."""

PARTIAL_SUFFIX = ".partial"
_WRITERS = 4
_HEADER_ALIGN_BYTES = 4096
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: `dtype` F32 or BF16 (whose bits are u16 in NumPy)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


def plan_shards(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Whole tensors in order, shard by shard, each of at most `shard_bytes` or of one tensor."""
    shards: list[list[Entry]] = []
    filled = 0
    for entry in entries:
        if not shards or filled + entry.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def shard_names(stem: str, count: int) -> list[str]:
    """`STEM-00001-of-0000N.safetensors` and so on."""
    return [f"{stem}-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]


def header_of(entries: Sequence[Entry]) -> bytes:
    """Length and header of a file with these tensors, a multiple of a page."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    length = round_up(8 + len(text), _HEADER_ALIGN_BYTES) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


class _File:
    """One file under way: `remaining` bytes are still to come."""

    def __init__(self, path: str, nbytes: int, access: AccessMode) -> None:
        """Create it anew; raises OSError."""
        self.path = path
        self.remaining = nbytes
        self._align = access.io_alignment_bytes
        self._files: list[OsFile] = []
        # Readable as the user's other files are, unlike a store's.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666))
        try:
            self._files.append(OsFile(path, direct=False))
            self._files.append(OsFile(path, direct=access.direct))
            with contextlib.suppress(OSError):  # where it cannot be, writing will tell
                self._files[0].allocate(0, nbytes)
            self._files[0].truncate(nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Write `data`, aligned in memory as in the file; blocks. Raises StorageError."""
        buffered, direct = self._files
        end = offset + data.size
        lo = min(round_up(offset, self._align), end)
        hi = max(end // self._align * self._align, lo)
        for file, begin, stop, align in (
            (buffered, offset, lo, 1),
            (direct, lo, hi, self._align),
            (buffered, hi, end, 1),
        ):
            if begin < stop:
                piece = data[begin - offset : stop - offset].data
                write_fully(file, [piece], begin, io_alignment_bytes=align)

    def sync(self) -> None:
        """Make it durable; raises OSError."""
        self._files[0].sync()

    def close(self) -> None:
        """Close it. Again: nothing."""
        while self._files:
            self._files.pop().close()


class _Stream:
    """Bytes of `file` that come one after another; `buffer[0]` belongs at `base` of the file."""

    def __init__(self, file: _File, position: int, buffer: npt.NDArray[np.uint8]) -> None:
        self.file = file
        self.position = position  # where the next byte goes
        self.buffer = buffer
        self.base = position // _HEADER_ALIGN_BYTES * _HEADER_ALIGN_BYTES
        self.start = position  # the first byte of the buffer that is not yet on its way

    @property
    def room(self) -> int:
        """Bytes that the buffer still takes."""
        return self.base + BUFFER_BYTES - self.position


class ShardWriter:
    """Writes sets of files into one directory. Used by one thread; other threads write.

    Memory: at most `BUFFERS_MAX` buffers. The first error of any thread is raised at the next
    call, as StorageError.
    """

    def __init__(self, directory: str) -> None:
        """Find out how files there are written; raises StorageError when none can be."""
        self.directory = directory
        try:
            self.access = choose_access(directory)
        except OSError as error:
            text = f"nothing can be written there: {describe_os_error(error)}"
            raise StorageError(text, path=error.filename or directory) from error
        self.bytes_written = 0
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="export")
        self._room = threading.Semaphore(BUFFERS_MAX)
        self._free: list[npt.NDArray[np.uint8]] = []
        self._pending: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._sets: list[FileSet] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the threads and close all files, finished or not."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for files in self._sets:
            files.abandon()

    def new_set(self, stem: str, entries: Sequence[Entry], shard_bytes: int) -> FileSet:
        """Files `STEM-...` for `entries`, which are appended to in about this order."""
        files = FileSet(self, stem, entries, shard_bytes)
        self._sets.append(files)
        return files

    def check(self) -> None:
        """Raise the first failure of any thread, if there is one."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until nothing is under way; raises the first failure."""
        while True:
            with self._lock:
                pending = list(self._pending)
            if not pending:
                break
            for future in pending:
                future.exception()
        self.check()

    def take_buffer(self) -> npt.NDArray[np.uint8]:
        """A buffer, u8 [BUFFER_BYTES]; waits for writes under way when all are in use."""
        self._room.acquire()
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = aligned_buffer(BUFFER_BYTES, self.access.alignment_bytes)
        self.check()
        return buffer

    def submit(self, stream: _Stream, done: Callable[[], None]) -> None:
        """Write what is in the stream's buffer and take the buffer back; then call `done`."""
        file, buffer, offset = stream.file, stream.buffer, stream.start
        data = buffer[stream.start - stream.base : stream.position - stream.base]

        def work() -> None:
            try:
                if self._failure is None:
                    file.write(data, offset)
                    done()
            except BaseException as error:
                self._fail(error, file.path)
            finally:
                with self._lock:
                    self._free.append(buffer)
                self._room.release()

        self.bytes_written += data.size
        future = self._pool.submit(work)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _fail(self, error: BaseException, path: str) -> None:
        if isinstance(error, OSError):
            error = StorageError(describe_os_error(error), path=path)
        with self._lock:
            self._failure = self._failure or error


class FileSet:
    """The files of one stem. `total_bytes` counts the data of all tensors."""

    def __init__(
        self, writer: ShardWriter, stem: str, entries: Sequence[Entry], shard_bytes: int
    ) -> None:
        self._writer = writer
        self.stem = stem
        self.total_bytes = sum(entry.nbytes for entry in entries)
        self._shards = plan_shards(entries, shard_bytes)
        self.names = shard_names(stem, len(self._shards))
        self._entries = {entry.name: entry for entry in entries}
        self._places: dict[str, tuple[int, int]] = {}  # shard, place in its file
        self._next: dict[str, int] = {}  # bytes of each tensor that have come
        self._headers: list[bytes] = []
        self._ends: list[int] = []  # bytes of each file
        for index, shard in enumerate(self._shards):
            header = header_of(shard)
            offset = len(header)
            self._headers.append(header)
            for entry in shard:
                self._places[entry.name] = index, offset
                offset += entry.nbytes
            self._ends.append(offset)
        self._files: dict[int, _File] = {}
        self._streams: dict[tuple[int, int], _Stream] = {}  # by shard and the place they reached
        self._starts: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self.num_done = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def nbytes(self) -> int:
        """Bytes of all files, headers included."""
        return sum(self._ends)

    def append(self, name: str, count: int, produce: Produce) -> None:
        """The next `count` elements of a tensor; `produce` makes them, in order, part by part.

        May block for writes under way. Raises StorageError when one has failed.
        """
        entry = self._entries[name]
        dtype = _DTYPES[entry.dtype]
        shard, first = self._places[name]
        done, at = 0, self._next.get(name, 0)
        assert at + count * dtype.itemsize <= entry.nbytes, f"{name} is larger than was said"
        while done < count:
            stream = self._stream(shard, first + at)
            part = min(count - done, stream.room // dtype.itemsize)
            begin = stream.position - stream.base
            out = stream.buffer[begin : begin + part * dtype.itemsize].view(dtype)
            produce(done, done + part, out)
            done += part
            at += part * dtype.itemsize
            self._advance(shard, stream, part * dtype.itemsize)
        self._next[name] = at

    def _stream(self, shard: int, position: int) -> _Stream:
        """The stream that has reached `position` of a shard, or a new one that begins there."""
        stream = self._streams.pop((shard, position), None)
        if stream is not None:
            return stream
        file = self._files.get(shard) or self._new_file(shard)
        header = np.frombuffer(self._headers[shard], np.uint8)
        if position > header.size:
            self._starts.add((shard, position))
            return self._begin(file, position)
        stream = self._begin(file, 0)  # what begins a file begins with its header
        for lo in range(0, header.size, BUFFER_BYTES):
            piece = header[lo : lo + BUFFER_BYTES]
            stream.buffer[: piece.size] = piece
            stream.position += piece.size
            stream = self._with_room(stream)
        return stream

    def _begin(self, file: _File, position: int) -> _Stream:
        return _Stream(file, position, self._writer.take_buffer())

    def _new_file(self, shard: int) -> _File:
        path = os.path.join(self._writer.directory, self.names[shard] + PARTIAL_SUFFIX)
        try:
            self._files[shard] = _File(path, self._ends[shard], self._writer.access)
        except OSError as error:
            raise StorageError(describe_os_error(error), path=path) from error
        return self._files[shard]

    def _advance(self, shard: int, stream: _Stream, nbytes: int) -> None:
        """Note that `nbytes` more are in the buffer; send it off when it is full or at its end."""
        stream.position += nbytes
        end = shard, stream.position
        if end in self._starts or stream.position == self._ends[shard]:
            self._send(stream)
        else:
            self._streams[end] = self._with_room(stream)

    def _with_room(self, stream: _Stream) -> _Stream:
        """`stream`, or its continuation when its buffer is full."""
        if stream.room:
            return stream
        self._send(stream)
        return self._begin(stream.file, stream.position)

    def _send(self, stream: _Stream) -> None:
        file, nbytes = stream.file, stream.position - stream.start

        def written() -> None:
            with self._lock:
                file.remaining -= nbytes
                is_whole = not file.remaining
            if is_whole:
                file.sync()
                file.close()
                with self._lock:
                    self.num_done += 1

        self._writer.submit(stream, written)

    def finish(self) -> None:
        """Wait until every file is whole and durable; raises StorageError."""
        self._writer.drain()
        assert self.num_done == len(self.names), "some tensors were not appended as a whole"

    def publish(self) -> None:
        """Give the files their names; they are whole. Raises StorageError."""
        for name in self.names:
            path = os.path.join(self._writer.directory, name)
            try:
                os.rename(path + PARTIAL_SUFFIX, path)
            except OSError as error:
                raise StorageError(describe_os_error(error), path=path) from error

    def abandon(self) -> None:
        """Close what is open."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # what failed before is told, or nothing was lost
                file.close()

    def index(self) -> dict[str, Any]:
        """The index of the set, as `STEM.safetensors.index.json` has it."""
        return {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {
                name: self.names[shard] for name, (shard, _) in sorted(self._places.items())
            },
        }
