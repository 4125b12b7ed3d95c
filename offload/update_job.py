"""One unit's part of the optimizer step: the kernels over its weight, state and gradient blocks.

A job first replays the steps the unit missed (zero gradient), then applies this step's gradient, if
it has one. Tensors of one weight-decay group that are neighbours in flat order share one call; the
kernels are element-wise, so grouping cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from offload.arena import Buffer
from offload.blocks import UnitLayout
from offload.device_copy import field_view
from offload.ledger import Ledger
from offload.nvme.handle import Handle
from offload.residency import UnitState
from ops.kernels import adamw
from ops.kernels.arrays import F32, Array
from ops.kernels.pool import KernelPool


@dataclass(eq=False)
class UpdateJob:
    """A pending update: replay up to `replay_until`, then the gradient of `gradient_step`.

    While it is a unit's `coming` job only its state may be read ahead (`ahead`); once queued it is
    `prepared` when it has all its memory. `hurried`: somebody waits for it. `speculative`: queued
    before the norm is known, so what it overwrites must be kept. `commit`: host-homed blocks are
    written too.
    """

    unit: UnitState
    replay_until: int
    gradient_step: int | None
    grad_scale: float = 1.0
    speculative: bool = False
    commit: bool = False
    hurried: bool = False
    ahead: bool = False
    prepared: bool = False
    reads_left: int = 0
    ends_left: int = 0  # writes not done, and one for the publishing
    weight: Buffer | None = None
    state: Buffer | None = None
    grad: Buffer | None = None
    slot: Buffer | None = None
    owned: list[Buffer] = field(default_factory=list)
    heir: UpdateJob | None = None  # the queued job that took over what this one has read
    cancelled: bool = False
    handles: list[Handle] = field(default_factory=list)  # of its reads

    @property
    def target_step(self) -> int:
        """The optimizer step the unit has reached when the job is applied."""
        return self.replay_until if self.gradient_step is None else self.gradient_step

    def run(self, ledger: Ledger, weight_decay: float, pool: KernelPool) -> None:
        """Apply the job to its buffers, in place; releases the GIL, touches nothing else."""
        assert self.weight is not None and self.state is not None
        layout = self.unit.layout
        for lo, hi, kept, decay in groups(layout):
            rate = weight_decay if decay else 0.0
            missed = ledger.table(self.unit.synced_step, self.replay_until, rate)
            if len(missed):
                replay(layout, self.weight, self.state, (lo, hi, kept), missed, pool)
            if self.gradient_step is not None:
                step = self.gradient_step
                scalars = ledger.table(step - 1, step, rate)[0]
                assert self.grad is not None
                grad = field_view(self.grad, layout.field("grad", "grad"))[lo:hi]
                arrays = _arrays(layout, self.weight, self.state, lo, hi, kept)
                _update(layout.weight_dtype, kept, arrays, grad, self.grad_scale, scalars, pool)


def groups(layout: UnitLayout) -> Iterator[tuple[int, int, bool, bool]]:
    """(lo, hi, kept, decay) of each run of neighbouring tensors of one kind, in flat order."""
    run: tuple[int, int, bool, bool] | None = None
    for place in layout.places:
        lo, hi = place.start, place.start + place.spec.size
        if run is not None and run[2:] == (place.kept, place.spec.decay):
            run = (run[0], hi, *run[2:])
            continue
        if run is not None:
            yield run
        run = (lo, hi, place.kept, place.spec.decay)
    if run is not None:
        yield run


def replay(
    layout: UnitLayout,
    weight: Buffer,
    state: Buffer,
    run: tuple[int, int, bool],
    table: F32,
    pool: KernelPool,
) -> None:
    """Apply the steps of `table` with zero gradient to a run (lo, hi, kept) of one kind, in place.

    `table` is what `Ledger.table` makes, f32 [steps, 7], for the decay of these elements.
    """
    split: Callable[..., None] = adamw.replay_split
    half: Callable[..., None] = adamw.replay_master_f16
    master: Callable[..., None] = adamw.replay_master
    kernel = master if run[2] else half if layout.weight_dtype == "float16" else split
    kernel(*_arrays(layout, weight, state, *run), table, pool=pool)


def _arrays(
    layout: UnitLayout, weight: Buffer, state: Buffer, lo: int, hi: int, kept: bool
) -> list[Array]:
    """What the kernels take of a run, in their order."""
    moments = [
        field_view(state, layout.field("state", name))[lo:hi] for name in ("exp_avg", "exp_avg_sq")
    ]
    if kept:
        first = layout.num_split
        master = field_view(weight, layout.field("weight", "master"))
        return [master[lo - first : hi - first], *moments]
    compute = field_view(weight, layout.field("weight", "weight"))[lo:hi]
    if layout.weight_dtype == "float16":
        master = field_view(state, layout.field("state", "master_split"))[lo:hi]
        return [master, compute, *moments]
    residual = field_view(state, layout.field("state", "residual"))[lo:hi]
    return [compute, residual, *moments]


def _update(
    dtype: str,
    kept: bool,
    arrays: list[Array],
    grad: Array,
    scale: float,
    scalars: F32,
    pool: KernelPool,
) -> None:
    split: Callable[..., None] = adamw.update_split
    half: Callable[..., None] = adamw.update_master_f16
    master: Callable[..., None] = adamw.update_master
    kernel = master if kept else half if dtype == "float16" else split
    kernel(*arrays, grad, scale, scalars, pool=pool)
