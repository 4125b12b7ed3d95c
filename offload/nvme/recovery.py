"""Which commits a directory holds, and which of them may be trusted.

The newest manifest that decodes is taken, and with it the older commits that it says were retained.
A slot that is damaged, foreign or gone may have held a newer commit, whose blocks may lie where an
older one's were: then a commit is accepted only after every block of it has been verified.

Invariants: slots that exist but cannot be used are never taken for an empty store; each refused
slot has its sentence. What commits share is one `StoredBlock`. No locks, no threads; reads through
the seam only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.nvme.extents import Extent
from offload.nvme.files import DirectoryFiles, describe_os_error
from offload.nvme.manifest import (
    MANIFEST_BYTES_MAX,
    Manifest,
    ManifestError,
    decode_manifest,
    first_overlap,
)
from offload.nvme.table import StoredBlock
from ops.errors import StorageError

_SLOT_NAME = re.compile(r"manifest\.(0|[1-9][0-9]{0,5})")

Check = Callable[[Manifest], None]
"""Raises ConfigError or StorageError when a whole manifest does not fit what was opened."""

Verify = Callable[[Mapping[str, StoredBlock]], str | None]
"""Reads all of these blocks; why they are not whole, as a clause, or None."""


def slot_name(index: int) -> str:
    """The file name of slot `index`."""
    return f"manifest.{index}"


def slot_index(name: str) -> int | None:
    """The slot that the file `name` is, or None."""
    match = _SLOT_NAME.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class Slot:
    """One manifest file: what it holds, or the problem with it."""

    index: int
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class FoundCommit:
    """A commit that was accepted, and the slot it lies in."""

    generation: int
    slot: int
    meta: Mapping[str, Any]
    blocks: dict[str, StoredBlock]


@dataclass(frozen=True)
class FoundCommits:
    """What opening a store found. `commits`: oldest first, the last one is to be opened.

    `skipped`: one sentence for each slot that was not taken. `generation_max`: the largest one
    seen in any slot. `slots`: all that exist. `doubt`: whether one is damaged, foreign or gone.
    """

    store_id: str
    commits: tuple[FoundCommit, ...]
    skipped: tuple[str, ...]
    generation_max: int
    slots: frozenset[int]
    doubt: bool


def read_slots(directory: str, files: DirectoryFiles) -> list[Slot]:
    """All manifest slots of `directory`, by index; raises OSError when it cannot be listed.

    A slot is whatever has the name of one: a link or a pipe hides what was there, and is a problem.
    """
    indices = sorted(x for x in map(slot_index, files.names(directory)) if x is not None)
    return [_read_slot(directory, files, index) for index in indices]


def _read_slot(directory: str, files: DirectoryFiles, index: int) -> Slot:
    try:
        data = files.read_file(os.path.join(directory, slot_name(index)), MANIFEST_BYTES_MAX)
        return Slot(index, decode_manifest(data))
    except OSError as error:
        return Slot(index, None, f"cannot be read: {describe_os_error(error)}")
    except ManifestError as error:
        return Slot(index, None, str(error))


@dataclass
class _Choice:
    """The state of `choose_commits`."""

    present: set[int]
    doubt: bool  # whether something may have been newer than what is left
    verify: Verify
    taken: list[FoundCommit] = field(default_factory=list)  # newest first
    refused: dict[int, str] = field(default_factory=dict)
    known: dict[tuple[str, tuple[Extent, ...]], StoredBlock] = field(default_factory=dict)

    def consider(self, index: int, manifest: Manifest) -> None:
        blocks, problem = self._shared(manifest.blocks)
        if self.doubt and not problem:
            problem = self.verify(blocks) or ""
        if problem:
            self.refused[index] = f"generation {manifest.generation}: {problem}"
            return
        self.known |= {(name, tuple(x.extents)): x for name, x in blocks.items()}
        found = FoundCommit(manifest.generation, index, manifest.meta, blocks)
        self.taken.append(found)

    def _shared(self, blocks: dict[str, StoredBlock]) -> tuple[dict[str, StoredBlock], str]:
        """`blocks` with the objects that newer commits hold already; the problem, if any."""
        if not self.known:
            return blocks, ""
        shared = {}
        for name, stored in blocks.items():
            newer = self.known.get((name, tuple(stored.extents)), stored)
            if _content(newer) != _content(stored):
                return blocks, f"block {name!r} lies where a newer commit has it with other content"
            shared[name] = newer
        versions = {id(x): x for x in (*self.known.values(), *shared.values())}
        if first_overlap({str(key): stored for key, stored in versions.items()}) is not None:
            return blocks, "its blocks overlap with those of a newer commit"
        return shared, ""


def choose_commits(
    slots: Sequence[Slot],
    store_id: str | None,
    check: Check,
    verify: Verify,
    newest: int | None = None,
) -> FoundCommits | None:
    """The newest commit that can be opened and the older ones it retains; None without slots.

    With `newest` no commit of a later generation is taken: other ranks never agreed on it.
    `store_id` is what the directory says (None: nothing readable). Blocks for reading when a commit
    has to be verified. Raises what `check` raises for the newest manifest, and StorageError when
    there are slots but no commit can be opened.
    """
    if not slots:
        return None
    whole = sorted(
        ((slot.manifest.generation, slot.index, slot.manifest) for slot in slots if slot.manifest),
        key=lambda row: row[:2],
        reverse=True,
    )
    if store_id is None and whole:
        store_id = whole[0][2].store_id
    refused = {slot.index: slot.problem for slot in slots if slot.manifest is None}
    own: list[tuple[int, Manifest]] = []
    for _, index, manifest in whole:
        if manifest.store_id != store_id:
            refused[index] = f"belongs to another store ({manifest.store_id})"
        elif own and own[-1][1].generation == manifest.generation:
            refused[index] = f"generation {manifest.generation} is in another slot, too"
        else:
            own.append((index, manifest))
    doubt = bool(refused)
    if newest is not None:
        unagreed = [(index, x) for index, x in own if x.generation > newest]
        refused |= {
            index: f"generation {x.generation} was not published by all ranks"
            for index, x in unagreed
        }
        own = own[len(unagreed) :]
    choice = _Choice({slot.index for slot in slots}, doubt, verify, refused=refused)
    for index, manifest in own:
        if not choice.taken:
            check(manifest)
            gone = sorted(set(manifest.slots) - choice.present)
            if gone:
                choice.doubt = True
                choice.refused |= dict.fromkeys(gone, "is missing")
            choice.consider(index, manifest)
            retained = manifest.retained if choice.taken else ()
        elif manifest.generation in retained:
            choice.consider(index, manifest)
        else:
            choice.refused[index] = f"generation {manifest.generation} has been superseded"
    skipped = tuple(f"{slot_name(index)}: {why}" for index, why in sorted(choice.refused.items()))
    if not choice.taken or store_id is None:
        raise StorageError(
            f"there are commits here, but none can be opened ({'; '.join(skipped)}); without "
            "resuming, the store would be emptied and started anew"
        )
    return FoundCommits(
        store_id=store_id,
        commits=tuple(reversed(choice.taken)),
        skipped=skipped,
        generation_max=max(row[0] for row in whole),
        slots=frozenset(choice.present),
        doubt=choice.doubt,
    )


def _content(stored: StoredBlock) -> tuple[object, ...]:
    return stored.nbytes, stored.version, stored.checksums, stored.encoded_bytes
