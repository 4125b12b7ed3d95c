"""One rank's part of a commit, read only: named blocks, verified chunk by chunk.

A chunk is 1 MiB of a block (`ops/checksum.py`). Whoever asks gets its decoded bytes, and never any
that did not verify: so what is read is right even while a run goes on and replaces it.

Invariants: nothing of the store is written but a hold (`offload/nvme/hold.py`); memory is bounded
by the buffers of a `ReadAhead`, which parts may share; a request reads at most 4 MiB. Knows blocks,
not units.

Threads: one part is used by one thread at a time; requests are made on the threads of `ReadAhead`.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from offload.checkpoint.read_ahead import ReadAhead, Request
from offload.nvme.aligned import aligned_buffer
from offload.nvme.files import OsDirectoryFiles, describe_os_error
from offload.nvme.hold import Hold
from offload.nvme.inspect import REQUEST_BYTES, InspectedStore
from offload.nvme.recovery import read_slots
from offload.nvme.table import StoredBlock
from offload.nvme.verify import BlockReader, Damage
from ops.checksum import CHUNK_BYTES, num_chunks
from ops.codec import CorruptFrame, decode_frame
from ops.errors import StorageError

log = logging.getLogger(__name__)

REQUEST_CHUNKS = REQUEST_BYTES // CHUNK_BYTES
_ATTEMPTS_MAX = 16


@dataclass(frozen=True)
class _Expected:
    """A call of `read_chunks` that is to come, and what was announced for it."""

    block: str
    chunks: Sequence[int]
    requests: list[tuple[int, Request]]

    def is_for(self, block: str, chunks: Sequence[int]) -> bool:
        """Whether this is the call."""
        return self.block == block and list(self.chunks) == list(chunks)


class CommitPart:
    """One rank's part of a commit. `bytes_read` and `chunks_read` count what the drive was asked
    for: stored bytes, padding not included.
    """

    def __init__(
        self,
        directories: Sequence[str],
        generation: int | None = None,
        *,
        hold: bool = False,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        """Open generation `generation` (None: the newest) of the store in `directories`: this
        rank's directory under each of the store's paths, in their order.

        With `hold` a run that owns the store, now or later, keeps the commit while it has room. If
        nobody owns it and there is no `hold`, nobody can until `close`. Small I/O. Raises
        ConfigError when these are not the directories of one store, StorageError when the commit is
        not there or has been superseded.
        """
        self._hold: Hold | None = None
        self._store, commit = self._open(list(directories), generation, hold)
        self.store_id = self._store.store_id
        self.generation = commit.generation
        self.meta: Mapping[str, Any] = commit.meta
        self.blocks: Mapping[str, StoredBlock] = MappingProxyType(commit.blocks)
        self.bytes_read = 0
        self.chunks_read = 0
        try:
            self._access, self._files = self._store.open_data()
        except BaseException:
            self._leave()
            raise
        if self._hold is not None:
            self._store.close()  # owners may come: they will see the hold
        self._read_ahead = read_ahead or ReadAhead()
        self._read_ahead.join()
        self._expected: deque[_Expected] = deque()
        self._single = BlockReader(self._files, self._access)
        self._decoded = aligned_buffer(CHUNK_BYTES, 1).data
        self._closed = False

    @property
    def directories(self) -> list[str]:
        """Where the part lies."""
        return list(self._store.directories)

    @property
    def is_held(self) -> bool:
        """Whether a hold keeps the commit and has not been broken."""
        return self._hold is not None and not self._hold.is_broken

    def read_chunk(self, block: str, chunk: int) -> memoryview:
        """The bytes of one chunk (the last one of a block is shorter), valid until the next call.

        Blocks for one request. Raises StorageError naming path, offset and block when it does not
        verify; ValueError for a chunk that the block does not have.
        """
        stored = self._stored(block)
        self._check_chunks(block, stored, [chunk])
        (found,) = self._single.read(block, stored, chunk, 1)
        return self._content(block, stored, chunk, found)

    def expect(self, block: str, chunks: Sequence[int]) -> None:
        """Read these chunks ahead, because `read_chunks` will be called with them.

        Calls of it are expected in the order of calls of this; one that was not expected drops all
        that is. Raises as `read_chunks` does when it is called.
        """
        stored = self._stored(block)
        self._check_chunks(block, stored, chunks)
        self._expected.append(_Expected(block, chunks, self._announce(block, stored, chunks)))

    def read_chunks(self, block: str, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """(number, bytes) of each of `chunks`, which ascend; bytes are valid until the next step.

        Neighbours are read together and ahead of the caller. Blocks while a request is in flight.
        Raises as `read_chunk`, here or when the chunk's turn comes.
        """
        stored = self._stored(block)
        self._check_chunks(block, stored, chunks)
        return self._read_in_order(block, stored, chunks)

    def stored_chunks(
        self, block: str, first: int, num: int, buffer: memoryview
    ) -> list[memoryview]:
        """Chunks `[first, first + num)` of `block` as they are stored, verified, not decoded.

        They lie in `buffer`: aligned memory of at least `num` MiB. Any thread may call. Raises as
        `read_chunk`.
        """
        stored = self._stored(block)
        reader = BlockReader(self._files, self._access, buffer)
        found = reader.read(block, stored, first, num)
        return [self._verified(stored, item) for item in found]

    def close(self) -> None:
        """Give up the hold and close the files; again: nothing. No iterator may be in use."""
        if self._closed:
            return
        self._closed = True
        self._expect_nothing()
        self._read_ahead.leave()
        for file in self._files:
            file.close()
        self._leave()

    def __enter__(self) -> CommitPart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(
        self, directories: list[str], generation: int | None, hold: bool
    ) -> tuple[InspectedStore, Any]:
        """The store and the commit; with `hold`, held before the manifests were last read."""
        for _ in range(_ATTEMPTS_MAX):
            store = InspectedStore(directories, generation)
            try:
                if not store.commits:
                    raise StorageError("the store has no commit", path=store.directory)
                commit = store.commits[0]
                if generation not in (None, commit.generation):
                    raise _superseded(store, generation)
                if hold:
                    self._hold = _place(store.directory, commit.generation)
                is_sure = generation is None and self._hold is None
                if is_sure or store.is_retained(commit.generation):
                    return store, commit
                if generation is not None:
                    raise _superseded(store, generation)
            except BaseException:
                store.close()
                self._release()
                raise
            # A newer commit was published between reading the manifests and the hold.
            store.close()
            self._release()
        raise StorageError("commits are published faster than one can be held", path=directories[0])

    def _announce(
        self, block: str, stored: StoredBlock, chunks: Sequence[int]
    ) -> list[tuple[int, Request]]:
        """(first chunk, request) of what brings these chunks."""

        def read(first: int, num: int, buffer: memoryview) -> list[memoryview | Damage]:
            return BlockReader(self._files, self._access, buffer).read(block, stored, first, num)

        return [
            (first, self._read_ahead.announce(partial(read, first, num)))
            for first, num in requests_of(chunks)
        ]

    def _read_in_order(
        self, block: str, stored: StoredBlock, chunks: Sequence[int]
    ) -> Iterator[tuple[int, memoryview]]:
        if self._expected and self._expected[0].is_for(block, chunks):
            requests = self._expected.popleft().requests
        else:
            self._expect_nothing()
            requests = self._announce(block, stored, chunks)
        try:
            for first, request in requests:
                for chunk, found in enumerate(self._read_ahead.result(request), first):
                    yield chunk, self._content(block, stored, chunk, found)
                self._read_ahead.give_back(request)
        finally:
            for _, request in requests:
                self._read_ahead.give_back(request)

    def _expect_nothing(self) -> None:
        while self._expected:
            for _, request in self._expected.popleft().requests:
                self._read_ahead.give_back(request)

    def _content(
        self, block: str, stored: StoredBlock, chunk: int, found: memoryview | Damage
    ) -> memoryview:
        """The decoded bytes of a chunk that was read."""
        data = self._verified(stored, found)
        self.bytes_read += data.nbytes
        self.chunks_read += 1
        if stored.encoded_bytes is None or not stored.encoded_bytes[chunk]:
            return data
        place = self._decoded[: min(CHUNK_BYTES, stored.nbytes - chunk * CHUNK_BYTES)]
        try:
            decode_frame(data, place)
        except CorruptFrame as error:  # written so: its checksum is right
            drive, offset, _ = stored.locate(chunk * CHUNK_BYTES)
            path = self._files[drive].path
            raise StorageError(
                f"encoded frame: {error}", path=path, offset=offset, block=block
            ) from error
        return place

    def _verified(self, stored: StoredBlock, found: memoryview | Damage) -> memoryview:
        if isinstance(found, memoryview):
            return found
        where: dict[str, Any] = {"path": found.path, "offset": found.offset, "block": found.block}
        is_broken = self._hold is not None and self._hold.is_broken
        is_replaced = self._hold is None and not self._store.is_retained(self.generation)
        if (is_broken or is_replaced) and self._is_discarded():
            raise StorageError(
                f"commit {self.generation} was discarded while it was read: a new run has begun on "
                "this path without --resume, or the store was deleted",
                **where,
            )
        if is_broken:
            raise StorageError(
                f"commit {self.generation} was given up while it was read: the run that owns the "
                "store needed its room; raise offload.nvme.capacity or offload.keep_in_store, or "
                "read a newer commit",
                **where,
            )
        if is_replaced:
            raise _superseded(self._store, self.generation)
        raise StorageError(found.reason, **where)

    def _is_discarded(self) -> bool:
        """Whether no manifest of this store is left: a run that goes on always has one."""
        try:
            slots = read_slots(self._store.directory, OsDirectoryFiles())
        except OSError:
            return not os.path.isdir(self._store.directory)
        return not any(x.manifest and x.manifest.store_id == self.store_id for x in slots)

    def _stored(self, block: str) -> StoredBlock:
        stored = self.blocks.get(block)
        if stored is None:
            raise StorageError(
                f"commit {self.generation} has no such block",
                path=self._store.directory,
                block=block,
            )
        return stored

    def _check_chunks(self, block: str, stored: StoredBlock, chunks: Sequence[int]) -> None:
        total, before = num_chunks(stored.nbytes), -1
        for chunk in chunks:
            if not before < chunk < total:
                raise ValueError(
                    f"chunk {chunk} of block {block!r} behind {before}; there are {total}"
                )
            before = chunk

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def _leave(self) -> None:
        self._release()
        self._store.close()


def requests_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs (first, number) of neighbours among ascending `chunks`, each at most a request long."""
    requests: list[tuple[int, int]] = []
    for chunk in chunks:
        if requests and chunk == sum(requests[-1]) and requests[-1][1] < REQUEST_CHUNKS:
            requests[-1] = (requests[-1][0], requests[-1][1] + 1)
        else:
            requests.append((chunk, 1))
    return requests


def _place(directory: str, generation: int) -> Hold | None:
    """A hold, or None (and a warning) where there can be none."""
    try:
        return Hold.place(directory, generation)
    except OSError as error:
        log.warning(
            "%s: commit %d is read without a hold (%s): a run that goes on may replace it",
            directory,
            generation,
            describe_os_error(error),
        )
        return None


def _superseded(store: InspectedStore, generation: int | None) -> StorageError:
    return StorageError(
        f"commit {generation} is not in this store any more: a newer one has superseded it",
        path=store.directory,
    )
