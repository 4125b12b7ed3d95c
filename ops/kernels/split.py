"""Conversions between float32 and the formats weights and gradients are kept in.

A bfloat16 parameter's float32 master is stored as `weight` + `residual`, nothing twice:

    weight   = (bits + 0x8000) >> 16            (uint16, the bfloat16 compute weight)
    residual = bits - (weight << 16)            (int16)
    bits     = (weight << 16) + residual

which is invertible for every master in [-CLAMP, CLAMP] (float32 bits 0x7F7F7FFF, about 3.39e38);
larger magnitudes, infinity and NaN are stored as +-CLAMP, so the weight is always finite.
Rounding to nearest even would not be invertible: a tie's residual would be +0x8000, which int16
lacks.

All functions take flat arrays, write in place into arrays given by the caller, give the same bits
on any number of threads of `pool`, release the GIL while they run, and raise ValueError for a
wrong shape, dtype or length. Source and destination must not overlap.
"""

from __future__ import annotations

import numpy as np

from ops.kernels.arrays import F16, F32, F64, I16, U16, check_flat
from ops.kernels.intrinsics import (
    bf16_of,
    clamp,
    f16_of,
    kernel,
    master_of,
    residual_of,
    to_f64,
    weight_of,
    widen,
)
from ops.kernels.pool import KernelPool, run_chunks


def split_master(
    master: F32, weight: U16, residual: I16, *, pool: KernelPool | None = None
) -> None:
    """Write `weight` (bfloat16 bits) and `residual` of each float32 `master`, clamped."""
    size = master.size
    check_flat("master", master, np.float32, size=size)
    check_flat("weight", weight, np.uint16, size=size, writes=True)
    check_flat("residual", residual, np.int16, size=size, writes=True)
    run_chunks(pool, _split, size, master, weight, residual)


def join_master(weight: U16, residual: I16, master: F32, *, pool: KernelPool | None = None) -> None:
    """Write the float32 `master` that `weight` (bfloat16 bits) and `residual` were split from."""
    size = weight.size
    check_flat("weight", weight, np.uint16, size=size)
    check_flat("residual", residual, np.int16, size=size)
    check_flat("master", master, np.float32, size=size, writes=True)
    run_chunks(pool, _join, size, weight, residual, master)


def expand_bf16(source: U16, target: F32, *, pool: KernelPool | None = None) -> None:
    """Write the float32 values of bfloat16 bits `source` (weights or gradients), exactly."""
    check_flat("source", source, np.uint16, size=source.size)
    check_flat("target", target, np.float32, size=source.size, writes=True)
    run_chunks(pool, _expand, source.size, source, target)


def expand_bf16_f64(source: U16, target: F64, *, pool: KernelPool | None = None) -> None:
    """Write the float64 values of bfloat16 bits `source`, exactly."""
    check_flat("source", source, np.uint16, size=source.size)
    check_flat("target", target, np.float64, size=source.size, writes=True)
    run_chunks(pool, _expand_f64, source.size, source, target)


def round_bf16(source: F32, target: U16, *, pool: KernelPool | None = None) -> None:
    """Write bfloat16 bits of float32 `source`, for gradients: half up in magnitude, no clamp.

    NaN stays NaN (quiet), infinity stays infinity, and a finite value beyond the largest
    bfloat16 becomes infinity, so that the finite check sees an overflow.
    """
    check_flat("source", source, np.float32, size=source.size)
    check_flat("target", target, np.uint16, size=source.size, writes=True)
    run_chunks(pool, _round, source.size, source, target)


def narrow_f16(source: F32, target: F16, *, pool: KernelPool | None = None) -> None:
    """Write `source` rounded to float16, to nearest even as IEEE 754 and NumPy do."""
    check_flat("source", source, np.float32, size=source.size)
    check_flat("target", target, np.float16, size=source.size, writes=True)
    run_chunks(pool, _narrow, source.size, source, target.view(np.uint16))


# Kernels slice their arrays first: a loop from zero lets the compiler see that no index is
# negative, without which it would not vectorise.


@kernel
def _split(master, weight, residual, lo, hi):  # type: ignore[no-untyped-def]
    master, weight, residual = master[lo:hi], weight[lo:hi], residual[lo:hi]
    for i in range(hi - lo):
        x = clamp(master[i])
        weight[i] = weight_of(x)
        residual[i] = residual_of(x)


@kernel
def _join(weight, residual, master, lo, hi):  # type: ignore[no-untyped-def]
    weight, residual, master = weight[lo:hi], residual[lo:hi], master[lo:hi]
    for i in range(hi - lo):
        master[i] = master_of(weight[i], residual[i])


@kernel
def _expand(source, target, lo, hi):  # type: ignore[no-untyped-def]
    source, target = source[lo:hi], target[lo:hi]
    for i in range(hi - lo):
        target[i] = widen(source[i])


@kernel
def _expand_f64(source, target, lo, hi):  # type: ignore[no-untyped-def]
    source, target = source[lo:hi], target[lo:hi]
    for i in range(hi - lo):
        target[i] = to_f64(widen(source[i]))


@kernel
def _round(source, target, lo, hi):  # type: ignore[no-untyped-def]
    source, target = source[lo:hi], target[lo:hi]
    for i in range(hi - lo):
        target[i] = bf16_of(source[i])


@kernel
def _narrow(source, target, lo, hi):  # type: ignore[no-untyped-def]
    source, target = source[lo:hi], target[lo:hi]
    for i in range(hi - lo):
        target[i] = f16_of(source[i])
