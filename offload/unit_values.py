"""The numbers of a tensor inside the blocks of its unit: fp32 masters and moments, in and out.

Blocks are uint8 arrays as `offload/blocks.py` lays them out. How masters are stored there (split,
kept, beside a float16 weight, without a state when frozen) is known here and to the kernels alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.blocks import TensorPlace, UnitLayout
from ops.dtypes import storage_dtype
from ops.kernels.pool import KernelPool
from ops.kernels.split import expand_bf16, join_master, narrow_f16, round_bf16, split_master

Block = npt.NDArray[np.uint8]
MOMENTS = ("exp_avg", "exp_avg_sq")
Produce = Callable[[int, int, npt.NDArray[Any]], None]
"""Writes elements [lo, hi) of a tensor into an array of that many."""


def field_of(layout: UnitLayout, part: str, component: str, block: Block) -> npt.NDArray[Any]:
    """The flat array of a field of a block."""
    item = layout.field(part, component)
    dtype = np.dtype(np.int16) if item.dtype == "int16" else storage_dtype(item.dtype)
    return block[item.offset : item.offset + item.nbytes].view(dtype)


class UnitValues:
    """A unit's blocks, read and written as numbers; `state` is None for a frozen unit."""

    def __init__(
        self, layout: UnitLayout, weight: Block, state: Block | None, pool: KernelPool | None = None
    ) -> None:
        self.layout = layout
        self._weight = weight
        self._state = state
        self._pool = pool

    def masters(self, place: TensorPlace, as_bfloat16: bool = False) -> Produce:
        """What writes the masters of a tensor: fp32, or the bits of bfloat16 (half up)."""
        lo, hi = place.start, place.start + place.spec.size
        layout = self.layout
        if place.kept:
            first = layout.num_split
            master = field_of(layout, "weight", "master", self._weight)[lo - first : hi - first]
            return self._of_fp32(master, as_bfloat16)
        weight = field_of(layout, "weight", "weight", self._weight)[lo:hi]
        if layout.weight_dtype == "float16":
            if self._state is None:
                return self._of_fp32(weight.astype(np.float32), as_bfloat16)
            master = field_of(layout, "state", "master_split", self._state)[lo:hi]
            return self._of_fp32(master, as_bfloat16)
        if as_bfloat16:
            return lambda a, b, out: np.copyto(out, weight[a:b])
        if self._state is None:
            return lambda a, b, out: expand_bf16(weight[a:b], out, pool=self._pool)
        residual = field_of(layout, "state", "residual", self._state)[lo:hi]
        return lambda a, b, out: join_master(weight[a:b], residual[a:b], out, pool=self._pool)

    def _of_fp32(self, values: npt.NDArray[np.float32], as_bfloat16: bool) -> Produce:
        if as_bfloat16:
            return lambda a, b, out: round_bf16(values[a:b], out, pool=self._pool)
        return lambda a, b, out: np.copyto(out, values[a:b])

    def moments(self, place: TensorPlace, component: str) -> Produce:
        """What writes a moment (one of `MOMENTS`) of a tensor; zeros for a frozen unit."""
        if self._state is None:
            return lambda a, b, out: out.fill(0)
        lo, hi = place.start, place.start + place.spec.size
        values = field_of(self.layout, "state", component, self._state)[lo:hi]
        return lambda a, b, out: np.copyto(out, values[a:b])

    def put_masters(self, place: TensorPlace, values: npt.NDArray[np.float32]) -> None:
        """Store the masters of a tensor (flat fp32), in whatever form its unit has."""
        lo, hi = place.start, place.start + place.spec.size
        layout = self.layout
        if place.kept:
            first = layout.num_split
            field_of(layout, "weight", "master", self._weight)[lo - first : hi - first] = values
            return
        weight = field_of(layout, "weight", "weight", self._weight)[lo:hi]
        if layout.weight_dtype == "float16":
            if self._state is not None:
                field_of(layout, "state", "master_split", self._state)[lo:hi] = values
            narrow_f16(values, weight, pool=self._pool)
            return
        residual = np.empty(place.spec.size, np.int16)  # a frozen unit's is dropped
        if self._state is not None:
            residual = field_of(layout, "state", "residual", self._state)[lo:hi]
        split_master(values, weight, residual, pool=self._pool)

    def put_moments(
        self, place: TensorPlace, component: str, values: npt.NDArray[np.float32]
    ) -> None:
        """Store a moment of a tensor of a unit that is trained."""
        assert self._state is not None
        lo, hi = place.start, place.start + place.spec.size
        field_of(self.layout, "state", component, self._state)[lo:hi] = values
