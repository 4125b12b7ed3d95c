"""Who may touch which buffer of a unit now: one record per unit, guarded by one lock.

The rules, all checked under `Shared.changed`'s lock:

- `host_weight` may be read while `host_ready`; it may be freed only when the weight's home is nvme
  and nobody holds it (`host_holds == 0`). An update holds it until its write has finished.
- `device` may be read by compute while `pins > 0` and its state is READY; it may be freed only
  when `pins == 0` and it is not LOADING.
- A unit with a `job` (an update or replay not applied yet) may be neither leased nor prefetched;
  applying the job makes its device copy stale, so that copy is dropped.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from offload.arena import Buffer
from offload.blocks import UnitLayout
from offload.commit_stall import CommitStall
from offload.nvme.handle import Handle
from offload.placement import MemoryPlan, block_bytes

if TYPE_CHECKING:
    from offload.update_job import UpdateJob


class DeviceState(enum.Enum):
    """State of a unit's device copy."""

    NONE = 0
    LOADING = 1
    READY = 2


class UnitState:
    """Everything that changes about one unit during a run."""

    def __init__(self, layout: UnitLayout, plan: MemoryPlan) -> None:
        self.layout = layout
        self.name = layout.name
        self.gathers = layout.gathered is not layout  # a lease is a collective
        self.device_nbytes = layout.gathered.device_nbytes
        self.weight_on_nvme = plan.homes[layout.name, "weight"] == "nvme"
        self.state_on_nvme = plan.homes[layout.name, "state"] == "nvme"
        self.spills = layout.name in plan.spilled
        self.weight_bytes = block_bytes(layout, "weight")
        self.state_bytes = block_bytes(layout, "state")
        self.grad_bytes = block_bytes(layout, "grad")
        # Host copies. Homed on host: permanent. Homed on nvme: a cache or None.
        self.host_weight: Buffer | None = None
        self.host_ready = False
        self.host_reading = False
        self.host_holds = 0
        self.host_state: Buffer | None = None
        self.host_grad: Buffer | None = None
        self.host_undo: Buffer | None = None  # the weights before a speculative update
        self.weight_handle: Handle | None = None  # of the read while `host_reading`
        self.state_dirty = False
        # Device copy.
        self.device: Buffer | None = None
        self.device_state = DeviceState.NONE
        self.device_tensors: dict[str, Any] = {}
        self.pins = 0
        self.prefetched = False
        self.is_ahead = False  # `device` lies in the memory for gathers ahead of compute
        # Optimizer. `job` is an update or replay that may run now; `coming` the update of the
        # step in progress, whose reads may run ahead. `synced_step` is the optimizer step the unit
        # has reached, `version` the step whose content it has (they differ for what is never
        # replayed: frozen units, and idle ones under `skip`); `stored_step` is the version of
        # both blocks in the store while `state_dirty`.
        self.job: UpdateJob | None = None
        self.coming: UpdateJob | None = None
        self.synced_step = 0
        self.version = 0
        self.stored_step = 0

    def block(self, part: str) -> str:
        """Name of a block in the store."""
        return f"{self.name}/{part}"

    def evictable_host_weight(self) -> bool:
        """Whether the host copy of the weights is a clean cache nobody holds."""
        return (
            self.weight_on_nvme
            and self.host_weight is not None
            and self.host_ready
            and not self.host_reading
            and self.host_holds == 0
            and not self.state_dirty
            # Under `speculative` the update follows the lease and wants these bytes.
            and not (self.pins and self.coming is not None and self.coming.speculative)
        )

    def evictable_device(self) -> bool:
        """Whether the device copy may be dropped."""
        return self.device_state is DeviceState.READY and self.pins == 0


class Shared:
    """What all parts of the engine share: the units, one lock with its condition, the first error.

    A worker that fails calls `fail`; whoever waits next calls `check` and raises that error. After
    a failure nothing is promised but that no wait hangs: the engine can only be closed.
    """

    def __init__(self, units: Iterable[UnitState]) -> None:
        self.units = {unit.name: unit for unit in units}
        self.order = list(self.units)
        self.changed = threading.Condition(threading.RLock())
        self.closing = False
        self.optimizer_step = 0
        self.commit_stall = CommitStall()
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Latch the first failure and wake everybody."""
        with self.changed:
            if self._failure is None:
                self._failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the latched failure, if any; RuntimeError once the engine is being closed."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self.closing:
            raise RuntimeError("the engine is closed")

    @property
    def failed(self) -> bool:
        """Whether a failure is latched."""
        return self._failure is not None

    def when_done(self, action: Callable[[], None]) -> Callable[[Handle], None]:
        """A callback for a transfer: fail with its error, or do `action` (lock held) and notify.

        The store only logs what a callback raises, so an error of `action` is latched here: it
        must not become a wait that never ends.
        """

        def done(handle: Handle) -> None:
            error = handle.error()
            with self.changed:
                try:
                    if error is None:
                        action()
                except BaseException as caught:
                    error = caught
                if error is not None:
                    self.fail(error)
                self.changed.notify_all()

        return done

    def wait(self) -> None:
        """Wait for any change (lock held); raises as `check`, before and after."""
        self.check()
        self.changed.wait()
        self.check()

    def wait_as_compute(self) -> None:
        """`wait`, for compute: it counts as stall of a commit while one holds the updates up."""
        with self.commit_stall.waiting():
            self.wait()
