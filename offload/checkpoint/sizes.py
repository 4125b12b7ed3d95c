"""How much room checkpoints of one store take, and how much of it they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.checkpoint.catalog import Checkpoint
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.manifest import Manifest
from offload.nvme.recovery import read_slots


@dataclass(frozen=True)
class Size:
    """Bytes on the drives of a checkpoint's parts that are here: in all, and shared ones.

    Shared bytes are those of the newest checkpoint, too: they are there once, and giving one of the
    two up does not free them.
    """

    nbytes: int
    shared_bytes: int


def sizes_of(checkpoints: Sequence[Checkpoint]) -> list[Size]:
    """The size of each of `checkpoints`: of one store, newest first. Reads every manifest."""
    totals = [[0, 0] for _ in checkpoints]
    for rank in sorted({rank for checkpoint in checkpoints for rank in checkpoint.present}):
        slots = read_slots(checkpoints[0].directories(rank)[0], OsDirectoryFiles())
        found = {slot.manifest.generation: slot.manifest for slot in slots if slot.manifest}
        newest: dict[tuple[int, int], int] | None = None
        for checkpoint, total in zip(checkpoints, totals):
            if rank not in checkpoint.present:
                continue
            manifest = found.get(checkpoint.generations[rank])
            if manifest is None:  # superseded since it was found
                continue
            places = _places(manifest)
            newest = places if newest is None else newest
            total[0] += sum(places.values())
            total[1] += sum(nbytes for place, nbytes in places.items() if place in newest)
    return [Size(*total) for total in totals]


def _places(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Where its extents begin (drive, offset), and their lengths."""
    return {
        (extent.drive, extent.offset): extent.nbytes
        for stored in manifest.blocks.values()
        for extent in stored.extents
        if extent.nbytes
    }
