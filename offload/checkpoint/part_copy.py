"""One rank's part of a commit, written into a directory of its own in the form of a store.

The store there has one commit: the same store id, generation, blocks, checksums and encoded frames,
the extents packed one behind the other in one data file. In this order: `member.json`; every chunk,
verified as it is read and written from the same memory; fdatasync; the manifest, durably and at
once, as in a commit. Where chunks are there already, those that verify stay.

Invariants: the directory is owned meanwhile; nothing but chunks of this very part is overwritten;
a few threads with two buffers each (32 MiB in all) do the work. A chunk that does not verify is
never written.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from offload.checkpoint.source import REQUEST_CHUNKS, CommitPart
from offload.nvme.aligned import AccessMode, aligned_buffer, choose_access
from offload.nvme.commit import sync_data
from offload.nvme.directory import DATA_FILE_NAME, free_bytes_at, lock_directory
from offload.nvme.extents import Extent
from offload.nvme.files import (
    OpenFile,
    OsDirectoryFiles,
    StorageFile,
    describe_os_error,
    write_fully,
)
from offload.nvme.inspect import REQUEST_BYTES
from offload.nvme.manifest import Manifest, encode_manifest
from offload.nvme.members import Member, read_member, replace_file, write_member
from offload.nvme.recovery import read_slots, slot_name
from offload.nvme.table import StoredBlock
from offload.nvme.verify import BlockReader, Damage
from ops.checksum import CHUNK_BYTES, num_chunks
from ops.errors import ConfigError, StorageError
from ops.units import format_bytes, round_up

_WORKERS = 4
_FILES = OsDirectoryFiles()

Progress = Callable[[int], object]
"""Called with a number of stored bytes that are done, by the thread that copies."""


class PartCopy:
    """A copy of `part` in `directory`: `written_bytes`, and `kept_bytes` that were there."""

    def __init__(self, part: CommitPart, directory: str, open_file: OpenFile) -> None:
        """Own `directory`, making it if needed, and see that the part fits.

        Raises ConfigError when it is in use or holds something else, StorageError when the disk has
        too little room.
        """
        self.written_bytes = 0
        self.kept_bytes = 0
        self._part = part
        self._directory = directory
        self._local = threading.local()
        try:
            self._lock = lock_directory(directory)
        except ConfigError as error:
            raise ConfigError(str(error).replace("offload.nvme.path:", "--out:", 1)) from None
        try:
            self._access = choose_access(directory)
            unit = self._access.alignment_bytes
            self._blocks, self._file_bytes = _packed(part.blocks, unit)
            self._has_manifest = self._look()
            self._check_room()
            self._file = self._open(open_file)
        except OSError as error:
            self._lock.release()
            raise StorageError(describe_os_error(error), path=directory) from error
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> PartCopy:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._lock.release()

    def run(self, tell: Progress) -> None:
        """Copy what is not there; returns when the part is durable. Raises StorageError."""
        doing: deque[Future[tuple[int, int]]] = deque()
        with ThreadPoolExecutor(_WORKERS, "checkpoint-copy") as pool:
            try:
                for request in self._requests():
                    doing.append(pool.submit(self._copy, *request))
                    if len(doing) > 2 * _WORKERS:
                        self._count(doing.popleft(), tell)
                while doing:
                    self._count(doing.popleft(), tell)
            finally:
                for future in doing:
                    future.cancel()
                wait(doing)
        sync_data(self._file)
        if not self._has_manifest:
            path = os.path.join(self._directory, slot_name(0))
            replace_file(_FILES, path, encode_manifest(self._manifest()))

    def _manifest(self) -> Manifest:
        return Manifest(
            store_id=self._part.store_id,
            generation=self._part.generation,
            alignment_bytes=self._access.alignment_bytes,
            file_bytes=(self._file_bytes,),
            retained=(),
            slots=(0,),
            blocks=dict(self._blocks),
            meta=self._part.meta,
        )

    def _look(self) -> bool:
        """Whether the manifest is there already; ConfigError when something else is."""
        member = read_member(self._directory, _FILES)
        slots = read_slots(self._directory, _FILES)
        is_own = member == Member(self._part.store_id, 0, 1)
        if not slots and (is_own or member is None):
            return False
        if is_own and [slot.index for slot in slots] == [0]:
            found = slots[0].manifest
            if found is None:  # damaged: it will be written anew
                return False
            if encode_manifest(found) == encode_manifest(self._manifest()):
                return True
        raise ConfigError(
            f"--out: {self._directory} holds another store, or another commit of it; choose an "
            "empty directory"
        )

    def _check_room(self) -> None:
        unit = self._access.alignment_bytes
        needed_bytes = sum(
            round_up(stored.stored_bytes(chunk), unit)
            for stored in self._blocks.values()
            for chunk in range(num_chunks(stored.nbytes))
        )
        free_bytes = free_bytes_at(self._directory)
        if free_bytes < needed_bytes:
            raise StorageError(
                f"--out: the copy needs {format_bytes(needed_bytes)} and the disk has "
                f"{format_bytes(free_bytes)} free; free space or choose another directory",
                path=self._directory,
            )

    def _open(self, open_file: OpenFile) -> StorageFile:
        path = os.path.join(self._directory, DATA_FILE_NAME)
        length = _FILES.list(self._directory).get(DATA_FILE_NAME, 0)
        self._had_bytes = length > 0
        file = open_file(path, self._access.direct)
        try:
            if length != self._file_bytes:
                file.truncate(self._file_bytes)
            # Its last step makes the name of the data file durable, too.
            write_member(self._directory, Member(self._part.store_id, 0, 1), _FILES)
        except BaseException:
            file.close()
            raise
        return file

    def _requests(self) -> Iterator[tuple[str, int, int]]:
        for block, stored in self._blocks.items():
            total = num_chunks(stored.nbytes)
            for first in range(0, total, REQUEST_CHUNKS):
                yield block, first, min(REQUEST_CHUNKS, total - first)

    def _count(self, done: Future[tuple[int, int]], tell: Progress) -> None:
        written_bytes, kept_bytes = done.result()
        self.written_bytes += written_bytes
        self.kept_bytes += kept_bytes
        tell(written_bytes + kept_bytes)

    def _copy(self, block: str, first: int, num: int) -> tuple[int, int]:
        """Bring these chunks in: (stored bytes written, stored bytes that were there)."""
        stored, memory = self._blocks[block], self._memory()
        low, stop = first, first + num
        if self._had_bytes:
            found = memory.reader.read(block, stored, first, num)
            bad = [chunk for chunk, x in enumerate(found, first) if isinstance(x, Damage)]
            low, stop = (bad[0], bad[-1] + 1) if bad else (stop, stop)
        sizes = [stored.stored_bytes(chunk) for chunk in range(first, first + num)]
        if low < stop:
            self._part.stored_chunks(block, low, stop - low, memory.buffer)
            self._write(block, stored, low, stop, memory.buffer)
        written_bytes = sum(sizes[low - first : stop - first])
        return written_bytes, sum(sizes) - written_bytes

    def _write(
        self, block: str, stored: StoredBlock, first: int, stop: int, buffer: memoryview
    ) -> None:
        """Write chunks `[first, stop)`, which lie in `buffer`, a MiB each."""
        unit = self._access.io_alignment_bytes
        whole = stored.encoded_bytes is None  # else there are gaps between the chunks
        step = stop - first if whole else 1
        for chunk in range(first, stop, step):
            nbytes = sum(stored.stored_bytes(x) for x in range(chunk, chunk + step))
            start, padded_bytes = (chunk - first) * CHUNK_BYTES, round_up(nbytes, unit)
            data = buffer[start : start + padded_bytes]
            data[nbytes:] = bytes(padded_bytes - nbytes)
            offset = stored.extents[0].offset + chunk * CHUNK_BYTES
            write_fully(self._file, [data], offset, block=block, io_alignment_bytes=unit)

    def _memory(self) -> _Memory:
        """The buffers of the calling thread."""
        if not hasattr(self._local, "memory"):
            self._local.memory = _Memory([self._file], self._access)
        found: _Memory = self._local.memory
        return found


class _Memory:
    """What one thread works in: a request that is copied, and one that is looked at."""

    def __init__(self, files: list[StorageFile], access: AccessMode) -> None:
        self.buffer = aligned_buffer(REQUEST_BYTES, CHUNK_BYTES).data
        self.reader = BlockReader(files, access, aligned_buffer(REQUEST_BYTES, CHUNK_BYTES).data)


def _packed(blocks: Mapping[str, StoredBlock], unit: int) -> tuple[dict[str, StoredBlock], int]:
    """The same blocks with one extent each, one behind the other, and where the last one ends."""
    packed, end = {}, 0
    for name, stored in blocks.items():
        nbytes = round_up(stored.nbytes, unit)
        packed[name] = replace(stored, extents=[Extent(end, nbytes)], pins=0)
        end += nbytes
    return packed, end
