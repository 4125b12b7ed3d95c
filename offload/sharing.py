"""What ranks do together for a unit they share: gather its weights, reduce its gradients.

A unit that is *sharded* has a part on every rank (`offload/shards.py`). A lease gathers all parts
onto the device, and the sum of all ranks' gradients is scattered back, to each rank its part. A
unit that is only *replicated* is whole on every rank; its gradients are summed.

A gathering lease is a collective. These rules make every rank enter the same ones in one order:
the units a step leases, and their order, are agreed (`OffloadEngine.resolve` is given agreed
sets); a gathered copy serves exactly one use and is dropped when that ends, so no rank has what
another lacks; gathers run strictly in schedule order, ahead of compute or by it, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offload.arena import Buffer
from offload.blocks import UnitLayout
from offload.device_copy import field_view
from offload.nvme.extents import ExtentAllocator
from offload.residency import DeviceState, UnitState
from ops.comm.base import Communicator
from ops.kernels.pool import KernelPool
from ops.kernels.split import expand_bf16
from ops.units import round_up

_ALIGN_BYTES = 4096


@dataclass(frozen=True)
class Sharing:
    """The ranks that share a unit. `weights` gathers, `gradients` reduces; independent of each
    other, because different threads use them. Both have the same ranks in the same order."""

    weights: Communicator
    gradients: Communicator


def gather(
    layout: UnitLayout,
    source: Buffer,
    target: Buffer,
    staging: Buffer | None,
    ranks: Communicator,
    pool: KernelPool,
) -> None:
    """Fill the device buffer `target` with the whole unit; `source` is this rank's weight block.

    Blocks until all ranks have entered and given their part. 16-bit weights travel as stored.
    """
    for stored, placed in zip(layout.fields["weight"], layout.gathered.device_fields):
        if not stored.count:
            continue
        part, whole = field_view(source, stored), field_view(target, placed)
        if stored.dtype != "bfloat16":
            ranks.all_gather(part, whole)
            continue
        assert staging is not None
        bits = staging.view("uint16", 0, placed.count)
        ranks.all_gather(part, bits)
        expand_bf16(bits, whole, pool=pool)


def reduce(layout: UnitLayout, total: np.ndarray, ranks: Communicator) -> np.ndarray:
    """The sum of all ranks' fp32 gradients `total` [gathered size]: this rank's part of it [size].

    Replaces `total`; the part of a sharded unit is moved to its front. Blocks as a collective.
    """
    whole = layout.gathered
    if whole is layout:
        ranks.all_reduce(total)
        return total
    split, first = layout.num_split, whole.num_split
    rank = ranks.rank
    for lo, count, target in ((0, split, 0), (first, layout.num_kept, split)):
        if not count:
            continue
        part = total[lo + rank * count : lo + (rank + 1) * count]
        ranks.reduce_scatter(total[lo : lo + ranks.size * count], part)
        if target != lo + rank * count:
            total[target : target + count] = part
    return total[: layout.size]


def clear_padding(layout: UnitLayout, total: np.ndarray) -> None:
    """Zero what no tensor covers of fp32 gradients [size] in the flat order of `layout`."""
    reached = 0
    for place in layout.places:
        total[reached : place.start] = 0
        reached = place.start + place.spec.size
    total[reached:] = 0


class Gathers:
    """Gathers units onto the device, and says which one may be gathered ahead of compute.

    What is gathered ahead lies in memory of its own, because it cannot be evicted: what is gathered
    again on one rank only would be a collective nobody else enters. All other device memory
    can always be made free for compute. `agreed` is whether the current schedule is one that all
    ranks follow. The pipeline's lock guards everything but `gather`.
    """

    def __init__(
        self,
        sharing: Mapping[str, Sharing],
        pool: KernelPool,
        staging: Buffer | None = None,
        ahead: Buffer | None = None,
    ) -> None:
        self._sharing = sharing
        self._pool = pool
        self._staging = staging
        self.ahead = AheadMemory(ahead)
        self.agreed = False

    def gather(self, layout: UnitLayout, name: str, source: Buffer, target: Buffer) -> None:
        """See `gather`; the ranks are those that share the unit `name`."""
        gather(layout, source, target, self._staging, self._sharing[name].weights, self._pool)

    def in_order(self, unresolved: int, wanted: str | None) -> GatherOrder:
        """A walk over the uses to come. Stage `unresolved` and later ones are not agreed yet;
        compute itself is about to load `wanted`."""
        return GatherOrder(unresolved if self.agreed else -1, wanted)


class GatherOrder:
    """One walk over the coming uses of a schedule: only the first missing gather may be begun."""

    def __init__(self, unresolved: int, wanted: str | None) -> None:
        self._unresolved = unresolved
        self._wanted = wanted
        self._serve: set[str] = set()
        self._blocked = False

    def may_load(self, unit: UnitState, stage: int) -> bool:
        """Whether the gathered `unit`, used at `stage`, is the next that has to be gathered.

        To be asked for every use of a gathered unit, in order. A copy serves the nearest use only.
        """
        if self._blocked:
            return False
        there = unit.device_state is DeviceState.READY and unit.pins == 0
        if there and unit.name not in self._serve:
            self._serve.add(unit.name)
            return False
        self._blocked = True
        missing = unit.device_state is DeviceState.NONE and unit.name != self._wanted
        return missing and stage < self._unresolved


class AheadMemory:
    """Device memory for units gathered before compute asks for them; not thread-safe."""

    def __init__(self, memory: Buffer | None) -> None:
        self._memory = memory
        usable = 0 if memory is None else memory.nbytes // _ALIGN_BYTES * _ALIGN_BYTES
        self._allocator = ExtentAllocator(usable, _ALIGN_BYTES)

    def allocate(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes` bytes, or None."""
        if self._memory is None:
            return None
        extent = self._allocator.allocate(round_up(nbytes, _ALIGN_BYTES))
        if extent is None:
            return None
        part = self._memory.slice(extent.offset, extent.nbytes)
        return Buffer(extent, part.array)

    def free(self, buffer: Buffer) -> None:
        """Give a whole buffer back."""
        self._allocator.free(buffer.extent)
