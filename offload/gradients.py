"""Gradients from compute to the host: summed over micro-batches, uses and ranks, rounded, spilled.

Every use of a parameter has its own fp32 accumulator, summed in micro-batch order; several uses
(a tied embedding) are added once, in schedule order, then over the ranks that share the unit, in
rank order, and rounded once to the gradient dtype. The
squared norm is taken over the rounded values in fixed blocks of 4096 elements. So the bits depend
on the order of micro-batches and uses, never on where a gradient waited.

Called by compute only, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from offload.arena import Arena, Buffer
from offload.blocks import UnitLayout
from offload.device_copy import field_view
from offload.host_memory import HostMemory
from offload.nvme.store import NvmeStore
from offload.residency import Shared, UnitState
from offload.runs import runs_of
from offload.sharing import Sharing, reduce
from offload.stats import Stats
from ops.clock import seconds
from ops.comm.base import Communicator
from ops.kernels.pool import KernelPool
from ops.kernels.reduce import accumulate, sum_squares
from ops.kernels.split import round_bf16
from ops.trace import Tracer


def accumulator_bytes(uses: dict[str, int], sizes: dict[str, int], batch_major: bool) -> int:
    """Host bytes of the fp32 accumulators: units of `sizes` bytes each with `uses` gradients.

    Layer-major, a single use is summed on the device and needs none. Batch-major, every use of
    every unit is kept between micro-batches.
    """
    return sum(sizes[unit] * count for unit, count in uses.items() if batch_major or count > 1)


class GradientStore:
    """Collects the gradients of one step."""

    def __init__(
        self,
        shared: Shared,
        host: HostMemory,
        arena: Arena,
        store: NvmeStore | None,
        pool: KernelPool,
        stats: Stats,
        uses: dict[str, int],
        batch_major: bool,
        delay: Callable[[str], None],
        trace: Tracer,
        sharing: Mapping[str, Sharing],
    ) -> None:
        self._shared = shared
        self._sharing = sharing
        self._host = host
        self._store = store
        self._pool = pool
        self._stats = stats
        self._delay = delay
        self._trace = trace
        self._kept: dict[tuple[str, int], Buffer] = {}
        for unit, count in uses.items():
            nbytes = shared.units[unit].layout.gathered.accumulator_nbytes
            if nbytes and (batch_major or count > 1):
                for use in range(count):
                    self._kept[unit, use] = arena.require(nbytes, f"accumulators of {unit}")
        self._filled: set[tuple[str, int]] = set()
        self.squares: dict[str, float] = {}
        self.finite = True
        self.scale = 1.0
        self.on_complete: Callable[[UnitState], None] = lambda unit: None

    def begin(self, loss_scale: float) -> None:
        """Start a step whose gradients arrive multiplied by `loss_scale` (a power of two)."""
        self._filled.clear()
        self.squares.clear()
        self.finite = True
        self.scale = loss_scale

    def deposit(self, unit: UnitState, total: np.ndarray, use: int) -> None:
        """Take the fp32 sum [size] of one use of a unit; `total` may be changed.

        Units without kept accumulators are finished at once, the others by `finish`.
        """
        kept = self._kept.get((unit.name, use))
        if kept is None:
            self._complete(unit, total)
            return
        target = kept.view("float32", 0, unit.layout.gathered.size)
        self._delay("d2h")
        self._stats.add(d2h_bytes=total.nbytes)
        if (unit.name, use) in self._filled:
            accumulate(target, total, pool=self._pool)
        else:
            np.copyto(target, total)
            self._filled.add((unit.name, use))

    def finish(self) -> None:
        """Complete the units with kept accumulators, in forward order."""
        for name in self._shared.order:
            uses = sorted(use for unit, use in self._filled if unit == name)
            if not uses:
                continue
            unit = self._shared.units[name]
            size = unit.layout.gathered.size
            arrays = [self._kept[name, use].view("float32", 0, size) for use in uses]
            for other in arrays[1:]:
                accumulate(arrays[0], other, pool=self._pool)
            self._complete(unit, arrays[0])

    def _complete(self, unit: UnitState, total: np.ndarray) -> None:
        sharing = self._sharing.get(unit.name)
        if sharing is not None:
            with self._trace.span("reduce", unit.name, bytes=total.nbytes):
                total = reduce(unit.layout, total, sharing.gradients)
        buffer = unit.host_grad if not unit.spills else self._grad_slot()
        assert buffer is not None
        if self.scale != 1.0:
            np.multiply(total, np.float32(1.0 / self.scale), out=total)
        grad = field_view(buffer, unit.layout.field("grad", "grad"))
        self._delay("d2h")
        with self._trace.span("device to host", unit.name, bytes=grad.nbytes):
            if unit.layout.grad_dtype == "bfloat16":
                round_bf16(total, grad, pool=self._pool)
            else:
                np.copyto(grad, total)
        self._stats.add(d2h_bytes=grad.nbytes)
        self.squares[unit.name] = self._square(unit.layout, grad)
        if unit.spills:
            self._spill(unit, buffer)
        self.on_complete(unit)

    def _square(self, layout: UnitLayout, grad: np.ndarray) -> float:
        """This rank's part of the unit's squared norm: what r ranks hold counts 1/r on each."""
        total = 0.0
        for lo, hi, replicas in layout.runs_by_replicas():
            square = sum_squares(grad[lo:hi], pool=self._pool)
            self.finite = self.finite and square.finite
            total += square.total / replicas
        return total

    def _grad_slot(self) -> Buffer:
        started = seconds()
        with self._shared.changed:
            while not self._host.grad_slots:
                self._shared.wait()
            slot = self._host.grad_slots.pop()
        self._stats.add(stall_seconds=seconds() - started)
        return slot

    def _spill(self, unit: UnitState, buffer: Buffer) -> None:
        assert self._store is not None

        done = self._shared.when_done(lambda: self._host.grad_slots.append(buffer))
        nbytes = unit.layout.nbytes("grad")
        array = buffer.slice(0, unit.grad_bytes).array
        try:
            handle = self._store.write(
                unit.block("grad"),
                array,
                "spill",
                nbytes=nbytes,
                transient=True,
                runs=runs_of(unit.layout, "grad"),
            )
        except BaseException as error:
            self._shared.fail(error)  # the slot is lost: nobody may wait for it
            raise
        handle.add_done_callback(done)

    def agree(self, everyone: Communicator, count: int = 0) -> tuple[float, int]:
        """2-norm of all ranks' gradients, before clipping, float64, and the sum of their `count`.

        `finite` is agreed as well.
        """
        squares = [self.squares[name] for name in self._shared.order if name in self.squares]
        agreed = np.array([sum(squares, 0.0), float(not self.finite), float(count)])
        everyone.all_reduce(agreed)
        self.finite = agreed[1] == 0.0
        return float(np.sqrt(agreed[0])), int(agreed[2])
