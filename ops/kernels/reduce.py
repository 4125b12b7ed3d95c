"""Sums over gradients in one fixed order: squared norm, finite check, accumulation.

The sum of squares is a function of the data and its length only. Blocks of 4096 elements (the
last one as if padded with zeros) are each summed in float64 over 64 lanes, element i into lane
i mod 64, and the lanes by halving; the block sums are then added in a binary tree by block number.
Threads and chunks that start at multiples of 4096 therefore cannot change a bit.

All functions take flat arrays; bfloat16 is given as its bits in `uint16`. They release the GIL
while they run and raise ValueError for a wrong shape, dtype or length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ops.kernels.arrays import F32, F64, U16, check_flat
from ops.kernels.intrinsics import kernel, overflow_mark, to_f64, widen
from ops.kernels.pool import BLOCK, KernelPool, run_chunks

_LANES = 64


@dataclass(frozen=True)
class SquareSum:
    """Sum of squares `total` (float64) and whether every x and every x * x is a finite float32."""

    total: float
    finite: bool


def sum_squares(x: U16 | F32, *, pool: KernelPool | None = None) -> SquareSum:
    """Sum of squares of `x`, within 1e-6 relative of an exact sum (in practice 1e-15).

    `finite` is false when an element, or its square in float32, is infinite or NaN; `total` is
    then whatever float64 gives (possibly still finite) and should not be used.
    """
    sums = np.empty(-(-x.size // BLOCK), np.float64)
    finite = block_square_sums(x, sums, pool=pool)
    return SquareSum(tree_sum(sums), finite)


def block_square_sums(x: U16 | F32, sums: F64, *, pool: KernelPool | None = None) -> bool:
    """Write each block's sum of squares into `sums` [ceil(size / 4096)]; return `finite`.

    A caller that holds a longer vector in pieces cut at multiples of 4096 fills the matching parts
    of one `sums` and adds them with `tree_sum`: the result is the same as in one piece.
    """
    num_blocks = -(-x.size // BLOCK)
    check_flat("x", x, np.uint16, np.float32, size=x.size)
    check_flat("sums", sums, np.float64, size=num_blocks, writes=True)
    marks = np.empty(num_blocks, np.int32)
    run_chunks(pool, _square_sums, x.size, x, sums, marks)
    return bool(marks.min(initial=0) >= 0)


def tree_sum(sums: F64) -> float:
    """Sum of block sums in a binary tree by position: neighbours first, an odd last one carried."""
    level = np.asarray(sums, np.float64)
    if level.size == 0:
        return 0.0
    while level.size > 1:
        paired = level[:-1:2] + level[1::2]
        level = np.concatenate((paired, level[-1:])) if level.size % 2 else paired
    return float(level[0])


def all_finite(x: U16 | F32, *, pool: KernelPool | None = None) -> bool:
    """Whether no element of `x` (float32, or bfloat16 bits) is infinite or NaN."""
    check_flat("x", x, np.uint16, np.float32, size=x.size)
    marks = np.zeros(-(-x.size // BLOCK), np.int32)
    run_chunks(pool, _finite_marks, x.size, x, marks)
    return bool(marks.min(initial=0) >= 0)


def accumulate(total: F32, x: U16 | F32, *, pool: KernelPool | None = None) -> None:
    """total += x in place, in float32, one rounding per element; `x` float32 or bfloat16 bits."""
    check_flat("total", total, np.float32, size=x.size, writes=True)
    check_flat("x", x, np.uint16, np.float32, size=x.size)
    run_chunks(pool, _accumulate, x.size, total, x)


@kernel
def _square_sums(x, sums, marks, lo, hi):  # type: ignore[no-untyped-def]
    lanes = np.empty(_LANES, np.float64)
    for start in range(lo, hi, BLOCK):
        block = x[start : min(start + BLOCK, hi)]
        mark = np.int32(0)
        for i in range(block.size):
            value = widen(block[i])
            mark = overflow_mark(value * value, mark)
        lanes[:] = 0.0
        full = block.size // _LANES
        for row in range(full):
            part = block[row * _LANES : (row + 1) * _LANES]
            for j in range(_LANES):
                value64 = to_f64(widen(part[j]))
                lanes[j] += value64 * value64
        rest = block[full * _LANES :]
        for j in range(rest.size):
            value64 = to_f64(widen(rest[j]))
            lanes[j] += value64 * value64
        half = _LANES // 2
        while half > 0:
            for j in range(half):
                lanes[j] += lanes[j + half]
            half //= 2
        sums[start // BLOCK] = lanes[0]
        marks[start // BLOCK] = mark


@kernel
def _finite_marks(x, marks, lo, hi):  # type: ignore[no-untyped-def]
    for start in range(lo, hi, BLOCK):
        block = x[start : min(start + BLOCK, hi)]
        mark = np.int32(0)
        for i in range(block.size):
            mark = overflow_mark(widen(block[i]), mark)
        marks[start // BLOCK] = mark


@kernel
def _accumulate(total, x, lo, hi):  # type: ignore[no-untyped-def]
    total, x = total[lo:hi], x[lo:hi]
    for i in range(hi - lo):
        total[i] = total[i] + widen(x[i])
