"""Parts of a commit that only other ranks can read: what is needed of them, sent and kept on disk.

Every rank says which chunks it needs; then all go through the same list of messages in the same
order, and whoever receives one appends it to a file without a name. So memory stays that of one
chunk, and reading units (`offload/checkpoint/units.py`) is the same as from a directory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.checkpoint.units import SavedPart
from offload.nvme.files import describe_os_error
from ops.checksum import CHUNK_BYTES, checksum
from ops.comm.base import World
from ops.errors import StorageError

_TAG = 11
Needed = Mapping[tuple[int, str], Sequence[int]]
"""Chunks by (saved rank, block)."""


@dataclass(frozen=True)
class ToldBlock:
    """What a rank that can read a block tells of it."""

    nbytes: int
    version: int


class ToldPart:
    """A part of which only the blocks are known."""

    def __init__(self, blocks: Mapping[str, ToldBlock]) -> None:
        self.blocks = blocks

    def expect(self, block: str, chunks: Sequence[int]) -> None:
        """Nothing is read ahead."""

    def read_chunks(self, block: str, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Nothing can be read yet."""
        raise AssertionError(f"{block} lies with another rank")


class SpooledPart(ToldPart):
    """A part whose needed chunks have come."""

    def __init__(self, blocks: Mapping[str, ToldBlock], spool: Spool) -> None:
        super().__init__(blocks)
        self._spool = spool
        self._places: dict[tuple[str, int], tuple[int, int, int]] = {}

    def add(self, block: str, chunk: int, data: np.ndarray) -> None:
        """Keep a chunk."""
        self._places[block, chunk] = self._spool.append(data)

    def read_chunks(self, block: str, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """As `CommitPart.read_chunks`, of the chunks that were asked for."""
        for chunk in chunks:
            yield chunk, self._spool.read(*self._places[block, chunk], block)


class Spool:
    """A file without a name in `directory`, which the closing of it removes."""

    def __init__(self, directory: str) -> None:
        """Raises StorageError when there can be none."""
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise StorageError(
                "no file can be made for what another rank sends of the commit: "
                f"{describe_os_error(error)}",
                path=directory,
            ) from error
        self._directory = directory
        self._end = 0

    def append(self, data: np.ndarray) -> tuple[int, int, int]:
        """Keep these bytes (u8); where they are. StorageError when the disk does not take them."""
        view, start = data.data.cast("B"), self._end
        done = 0
        try:
            while done < view.nbytes:
                done += os.pwrite(self._file.fileno(), view[done:], start + done)
        except OSError as error:
            raise StorageError(
                f"what another rank sent of the commit cannot be kept: {describe_os_error(error)}",
                path=self._directory,
                wanted_bytes=view.nbytes,
                done_bytes=done,
            ) from error
        self._end += view.nbytes
        return start, view.nbytes, checksum(view)

    def read(self, offset: int, nbytes: int, digest: int, block: str) -> memoryview:
        """The bytes that were kept there; StorageError when they cannot be read or are others."""
        try:
            data = os.pread(self._file.fileno(), nbytes, offset)
        except OSError as error:
            raise StorageError(
                f"what another rank sent of the commit cannot be read: {describe_os_error(error)}",
                path=self._directory,
                offset=offset,
                block=block,
            ) from error
        if len(data) != nbytes or checksum(memoryview(data)) != digest:
            raise StorageError(
                "what another rank sent of the commit was not kept whole",
                path=self._directory,
                offset=offset,
                block=block,
            )
        return memoryview(data)

    def close(self) -> None:
        """Give the room back."""
        self._file.close()


def tell_blocks(world: World, parts: Mapping[int, SavedPart]) -> dict[int, ToldPart]:
    """The blocks of parts that some rank reads and tells of: `parts` are those this one tells.

    Entered by all ranks; the lowest rank that tells of a part is believed.
    """
    mine: list[list[Any]] = [
        [saved, [[name, x.nbytes, x.version] for name, x in part.blocks.items()]]
        for saved, part in parts.items()
    ]
    told: dict[int, ToldPart] = {}
    for rows in world.all_gather_object(mine):
        for saved, blocks in rows:
            if saved not in told:
                told[saved] = ToldPart({n: ToldBlock(size, version) for n, size, version in blocks})
    return told


def exchange(
    world: World,
    parts: Mapping[int, SavedPart],
    readers: Mapping[int, int],
    told: Mapping[int, ToldPart],
    needed: Needed,
    directory: str,
    on_close: Callable[[Callable[[], None]], Any],
) -> dict[int, SpooledPart]:
    """Get the chunks `needed` of parts that this rank cannot read; entered by all ranks.

    `readers[s]` is the rank that sends what others need of saved rank s, out of its `parts`. They
    are kept in `directory` until what `on_close` was given is called. Raises StorageError.
    """
    asked = [[saved, block, list(chunks)] for (saved, block), chunks in needed.items()]
    wanted: list[list[list[Any]]] = world.all_gather_object(asked)
    spool, found = None, {}
    if asked:
        spool = Spool(directory)
        on_close(spool.close)
        found = {saved: SpooledPart(part.blocks, spool) for saved, part in told.items()}
    memory = np.empty(CHUNK_BYTES, np.uint8)
    for target, rows in enumerate(wanted):
        for saved, block, chunks in rows:
            reader, size = readers[saved], told[saved].blocks[block].nbytes
            if reader == world.rank:
                for _, data in parts[saved].read_chunks(block, chunks):
                    world.send(np.frombuffer(data, np.uint8), target, _TAG)
            elif target == world.rank:
                for chunk in chunks:
                    nbytes = min(CHUNK_BYTES, size - chunk * CHUNK_BYTES)
                    world.recv(memory[:nbytes], reader, _TAG)
                    found[saved].add(block, chunk, memory[:nbytes])
    return found
