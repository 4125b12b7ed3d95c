"""What an engine is made of, and what it hands out: its parts, a step's outcome, a unit in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from offload.activations import ActivationSpec
from offload.blocks import UnitLayout
from offload.nvme.commit import Agree
from offload.nvme.store import NvmeStore
from offload.pipeline import Lease
from offload.placement import MemoryPlan
from offload.sharing import Sharing
from ops.comm.base import Communicator
from ops.comm.single import SingleRank
from ops.device import Backend
from ops.kernels.pool import KernelPool, copy_flat
from ops.kernels.reduce import accumulate
from ops.trace import NO_TRACE, Tracer


def _no_delay(lane: str) -> None:
    """The default of `EngineParts.delay`: lanes run at their own speed."""


def _always(layout: UnitLayout) -> bool:
    """The default of `EngineParts.is_told_here`: no other rank holds any unit."""
    return True


@dataclass
class EngineParts:
    """What an engine is made of besides its configuration.

    `store` may be None when the plan puts nothing on nvme. `gradient_uses` counts the gradient
    stages of each unit in a layer-major step. `delay` is called with the lane's name before each
    transfer; `verify_leases` checksums a device copy at lease and release. Both serve tests.
    `sharing` names the units that other ranks hold too, `everyone` all ranks, which agree on norm
    and loss scale; `agree` publishes the commit of all ranks (`offload/rank_commits.py`).
    `is_told_here`: whether this rank tells of a unit that several may hold, so that each is told
    of once.
    """

    layouts: Sequence[UnitLayout]
    plan: MemoryPlan
    backend: Backend
    pool: KernelPool
    store: NvmeStore | None
    activations: Sequence[ActivationSpec]
    gradient_uses: dict[str, int]
    batch_major: bool = False
    loss_scaling: bool = False
    delay: Callable[[str], None] = _no_delay
    verify_leases: bool = False
    trace: Tracer = NO_TRACE
    sharing: Mapping[str, Sharing] = field(default_factory=dict)
    everyone: Communicator = field(default_factory=SingleRank)
    agree: Agree | None = None
    is_told_here: Callable[[UnitLayout], bool] = _always


@dataclass(frozen=True)
class StepOutcome:
    """What `finish_step` found: norm before clipping, clip factor, whether the step was applied.

    `alarm` is set when training cannot go on: gradients are not finite and no loss scale is left
    to lower. `idle_units` are those of the whole model that got no gradient. `redone`: units had
    been updated speculatively and were updated anew.
    """

    grad_norm: float
    clip_factor: float
    applied: bool
    alarm: bool
    idle_units: int
    loss_scale: float
    redone: bool = False


@dataclass
class UnitUse:
    """A lease and, when it was asked for, the sum of the unit's gradients over micro-batches."""

    lease: Lease
    total: np.ndarray | None
    pool: KernelPool | None = None
    _filled: set[str] = field(default_factory=set)

    @property
    def weights(self) -> dict[str, object]:
        """Backend tensors by tensor name; valid until the use ends."""
        return self.lease.weights

    def add(self, name: str, gradient: np.ndarray) -> None:
        """Add the fp32 gradient of tensor `name` of one micro-batch; dropped for a frozen unit."""
        if self.total is None:
            return
        for place in self.lease.unit.layout.gathered.places:
            if place.spec.name == name:
                target = self.total[place.start : place.start + place.spec.size]
                source = np.ascontiguousarray(gradient, np.float32).reshape(-1)
                if name in self._filled:
                    accumulate(target, source, pool=self.pool)
                else:
                    copy_flat(target, source, pool=self.pool)
                    self._filled.add(name)
                return
        raise KeyError(f"{self.lease.unit.name} has no tensor {name}")

    def add_nothing(self) -> None:
        """Zeros for every tensor that got no gradient: this rank has no token for the unit.

        Other ranks have, and their sum takes this rank's part too.
        """
        if self.total is None:
            return
        for place in self.lease.unit.layout.gathered.places:
            if place.spec.name not in self._filled:
                self.total[place.start : place.start + place.spec.size] = 0.0
                self._filled.add(place.spec.name)

    @property
    def complete(self) -> bool:
        """Whether every tensor of the unit has had a gradient."""
        return len(self._filled) == len(self.lease.unit.layout.gathered.places)
