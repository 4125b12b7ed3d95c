"""AdamW fused into one pass over memory, for each way a master weight is stored.

One element, one step, everything in float32 unless said otherwise (Loshchilov & Hutter 2019,
"Decoupled Weight Decay Regularization", algorithm 2, in the form torch.optim.AdamW computes):

    g  = grad * grad_scale                      clip factor / loss scale
    m  = beta1 * m + (1 - beta1) * g            with factors of twice the precision, see below
    v  = beta2 * v + ((1 - beta2) * g) * g      likewise; one fma adds the second term
    p  = p - (lr * wd) * p                      one fma
    p  = p - (lr * sqrt(bc2) / bc1) * (m / (sqrt(v) + eps * sqrt(bc2)))

with bc = 1 - beta^step; the last line is torch's lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps) with
both sides of the fraction multiplied by sqrt(bc2) (Kingma & Ba 2015, end of section 2): a square
root, an addition, a division and one fma. The order is deliberate. Scalars are computed once in
float64 and rounded once. Decay multiplies by lr * wd, not by 1 - lr * wd, whose rounding near 1
would lose half the digits of a small decay. (1 - beta2) * g comes before the second g so that
g * g cannot overflow. Where a gradient opposes its average the two products of m cancel, and
their rounding would be divided by a small sqrt(v) (a hundred ulp of p have been seen), so the error
of one product and the lower halves of beta1, 1 - beta1 and 1 - beta2 are carried along; this costs
no time, hidden behind the division. m and v are within 2 ulp of float64, and so is p whenever its
update is at most a quarter of it.

m and v below 1e-38 are set to +0, so that a decaying moment never reaches the denormals,
which some CPUs compute a hundred times slower; nothing visible is lost, as sqrt(v) would then be
1e-19 beside eps. p is limited to +-CLAMP (`ops/kernels/split.py`) in every storage form, so
all forms give the same master bits for the same gradient.

`replay_*` applies several steps whose gradient is zero: the same instructions on the same element,
so the same bits as calling the update once per step with a gradient of +0, but memory is read and
written once.

All functions work in place on flat arrays that do not overlap (slices, for a parameter inside a
bucket), give the same bits for any chunking and any number of threads of `pool`, release the GIL,
and raise ValueError for a wrong shape, dtype or length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numba
import numpy as np

from ops.errors import ConfigError
from ops.kernels.arrays import F16, F32, I16, U16, Array, check_flat
from ops.kernels.intrinsics import (
    clamp,
    f16_of,
    flush,
    fma,
    kernel,
    master_of,
    residual_of,
    sqrt,
    weight_of,
    widen,
)
from ops.kernels.pool import KernelPool, run_chunks

NUM_SCALARS = 10
_REPLAY_BLOCK = 1024
_EPS_MIN = 1e-30


@dataclass(frozen=True)
class AdamW:
    """Decay rates and eps of AdamW; makes the per-step scalars the kernels take.

    Raises ConfigError unless 0 <= beta < 1 and 1e-30 <= eps < inf (zero would give 0 / 0 for a
    parameter that never had a gradient).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for key in ("beta1", "beta2"):
            value = getattr(self, key)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{key} is {value}, it must be at least 0 and below 1")
        if not _EPS_MIN <= self.eps < math.inf:
            raise ConfigError(f"eps is {self.eps}, it must be at least {_EPS_MIN} and finite")

    def scalars(self, step: int, lr: float, weight_decay: float) -> F32:
        """Row [10] of float32 for step number `step` (the first is 1), computed in float64.

        Order: lr * weight_decay, lr * sqrt(1 - beta2^step) / (1 - beta1^step),
        eps * sqrt(1 - beta2^step), beta2, then 1 - beta2, beta1 and 1 - beta1, each followed by
        what its rounding to float32 lost. Raises ValueError for step < 1, or lr or weight_decay
        negative or not finite.
        """
        if step < 1:
            raise ValueError(f"step is {step}, the first is 1")
        for key, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{key} is {value}, it must be finite and not negative")
        root = math.sqrt(1.0 - self.beta2**step)
        step_size = lr * root / (1.0 - self.beta1**step)
        row = [lr * weight_decay, step_size, self.eps * root, self.beta2]
        for value in (1.0 - self.beta2, self.beta1, 1.0 - self.beta1):
            row += [value, value - float(np.float32(value))]
        return np.array(row, np.float32)

    def table(self, steps: Iterable[tuple[int, float, float]]) -> F32:
        """Rows [num_steps, 10] of `scalars` for each (step, lr, weight_decay), for `replay_*`."""
        rows = [self.scalars(step, lr, weight_decay) for step, lr, weight_decay in steps]
        return np.stack(rows) if rows else np.empty((0, NUM_SCALARS), np.float32)


def update_split(
    weight: U16,
    residual: I16,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: U16 | F32,
    grad_scale: float,
    scalars: F32,
    *,
    pool: KernelPool | None = None,
) -> None:
    """One step of parameters kept as bfloat16 `weight` (bits, uint16) + int16 `residual`.

    `grad` is bfloat16 bits or float32; `scalars` a row of `AdamW.scalars`.
    """
    size = weight.size
    check_flat("weight", weight, np.uint16, size=size, writes=True)
    check_flat("residual", residual, np.int16, size=size, writes=True)
    scale = _check_step(exp_avg, exp_avg_sq, grad, grad_scale, scalars, size)
    run_chunks(pool, _split, size, weight, residual, exp_avg, exp_avg_sq, grad, scale, scalars)


def update_master(
    master: F32,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: U16 | F32,
    grad_scale: float,
    scalars: F32,
    *,
    pool: KernelPool | None = None,
) -> None:
    """One step of parameters kept as float32 `master`; other arguments as in `update_split`."""
    size = master.size
    check_flat("master", master, np.float32, size=size, writes=True)
    scale = _check_step(exp_avg, exp_avg_sq, grad, grad_scale, scalars, size)
    run_chunks(pool, _master, size, master, exp_avg, exp_avg_sq, grad, scale, scalars)


def update_master_f16(
    master: F32,
    weight: F16,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: U16 | F32,
    grad_scale: float,
    scalars: F32,
    *,
    pool: KernelPool | None = None,
) -> None:
    """One step of float32 `master`, and `weight` = `narrow_f16(master)` written beside it."""
    size = master.size
    check_flat("master", master, np.float32, size=size, writes=True)
    check_flat("weight", weight, np.float16, size=size, writes=True)
    scale = _check_step(exp_avg, exp_avg_sq, grad, grad_scale, scalars, size)
    bits = weight.view(np.uint16)
    run_chunks(pool, _master_f16, size, master, bits, exp_avg, exp_avg_sq, grad, scale, scalars)


def replay_split(
    weight: U16,
    residual: I16,
    exp_avg: F32,
    exp_avg_sq: F32,
    table: F32,
    *,
    pool: KernelPool | None = None,
) -> None:
    """The steps of `table` (`AdamW.table`) with zero gradient, as that many `update_split`."""
    size = weight.size
    check_flat("weight", weight, np.uint16, size=size, writes=True)
    check_flat("residual", residual, np.int16, size=size, writes=True)
    size = _check_replay(exp_avg, exp_avg_sq, table, size)
    run_chunks(pool, _replay_split, size, weight, residual, exp_avg, exp_avg_sq, table)


def replay_master(
    master: F32, exp_avg: F32, exp_avg_sq: F32, table: F32, *, pool: KernelPool | None = None
) -> None:
    """The steps of `table` (`AdamW.table`) with zero gradient, as that many `update_master`."""
    size = master.size
    check_flat("master", master, np.float32, size=size, writes=True)
    size = _check_replay(exp_avg, exp_avg_sq, table, size)
    run_chunks(pool, _replay_master, size, master, exp_avg, exp_avg_sq, table)


def replay_master_f16(
    master: F32,
    weight: F16,
    exp_avg: F32,
    exp_avg_sq: F32,
    table: F32,
    *,
    pool: KernelPool | None = None,
) -> None:
    """The steps of `table` with zero gradient, as that many `update_master_f16`."""
    size = master.size
    check_flat("master", master, np.float32, size=size, writes=True)
    check_flat("weight", weight, np.float16, size=size, writes=True)
    size = _check_replay(exp_avg, exp_avg_sq, table, size)
    bits = weight.view(np.uint16)
    run_chunks(pool, _replay_master_f16, size, master, bits, exp_avg, exp_avg_sq, table)


def _check_step(
    exp_avg: F32, exp_avg_sq: F32, grad: Array, grad_scale: float, scalars: F32, size: int
) -> np.float32:
    check_flat("exp_avg", exp_avg, np.float32, size=size, writes=True)
    check_flat("exp_avg_sq", exp_avg_sq, np.float32, size=size, writes=True)
    check_flat("grad", grad, np.uint16, np.float32, size=size)
    check_flat("scalars", scalars, np.float32, size=NUM_SCALARS)
    scale = np.float32(grad_scale)
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"grad_scale is {grad_scale}, it must be positive and finite in float32")
    return scale


def _check_replay(exp_avg: F32, exp_avg_sq: F32, table: F32, size: int) -> int:
    """The number of elements to visit: none when there is no step."""
    check_flat("exp_avg", exp_avg, np.float32, size=size, writes=True)
    check_flat("exp_avg_sq", exp_avg_sq, np.float32, size=size, writes=True)
    if table.ndim != 2 or table.shape[1] != NUM_SCALARS:
        raise ValueError(f"table has shape {table.shape}, (steps, {NUM_SCALARS}) is needed")
    check_flat("table", table.reshape(-1), np.float32, size=table.size)
    if not table.flags.c_contiguous:
        raise ValueError("table is not contiguous")
    return size if len(table) else 0


@numba.njit(error_model="numpy", fastmath=False)
def _element(p, m, v, g, row):  # type: ignore[no-untyped-def]
    """The step of the module's formula for one element: new (p, m, v)."""
    decay, step_size, eps, beta2, rate2, rate2_low, beta1, beta1_low, rate1, rate1_low = row
    fresh = rate1 * g
    lost = fma(rate1_low, g, fma(beta1_low, m, fma(rate1, g, -fresh)))
    m = flush(fma(beta1, m, fresh) + lost)
    v = flush(fma(fma(rate2, g, rate2_low * g), g, beta2 * v))
    p = fma(-decay, p, p)
    p = fma(-step_size, m / (sqrt(v) + eps), p)
    return clamp(p), m, v


@numba.njit(error_model="numpy", fastmath=False)
def _row(scalars):  # type: ignore[no-untyped-def]
    return (
        scalars[0],
        scalars[1],
        scalars[2],
        scalars[3],
        scalars[4],
        scalars[5],
        scalars[6],
        scalars[7],
        scalars[8],
        scalars[9],
    )


@kernel
def _split(weight, residual, exp_avg, exp_avg_sq, grad, scale, scalars, lo, hi):  # type: ignore[no-untyped-def]
    weight, residual, grad = weight[lo:hi], residual[lo:hi], grad[lo:hi]
    exp_avg, exp_avg_sq = exp_avg[lo:hi], exp_avg_sq[lo:hi]
    row = _row(scalars)
    for i in range(hi - lo):
        p = master_of(weight[i], residual[i])
        p, m, v = _element(p, exp_avg[i], exp_avg_sq[i], widen(grad[i]) * scale, row)
        weight[i] = weight_of(p)
        residual[i] = residual_of(p)
        exp_avg[i] = m
        exp_avg_sq[i] = v


@kernel
def _master(master, exp_avg, exp_avg_sq, grad, scale, scalars, lo, hi):  # type: ignore[no-untyped-def]
    master, grad = master[lo:hi], grad[lo:hi]
    exp_avg, exp_avg_sq = exp_avg[lo:hi], exp_avg_sq[lo:hi]
    row = _row(scalars)
    for i in range(hi - lo):
        g = widen(grad[i]) * scale
        p, m, v = _element(master[i], exp_avg[i], exp_avg_sq[i], g, row)
        master[i] = p
        exp_avg[i] = m
        exp_avg_sq[i] = v


@kernel
def _master_f16(master, weight, exp_avg, exp_avg_sq, grad, scale, scalars, lo, hi):  # type: ignore[no-untyped-def]
    master, weight, grad = master[lo:hi], weight[lo:hi], grad[lo:hi]
    exp_avg, exp_avg_sq = exp_avg[lo:hi], exp_avg_sq[lo:hi]
    row = _row(scalars)
    for i in range(hi - lo):
        g = widen(grad[i]) * scale
        p, m, v = _element(master[i], exp_avg[i], exp_avg_sq[i], g, row)
        master[i] = p
        weight[i] = f16_of(p)
        exp_avg[i] = m
        exp_avg_sq[i] = v


@numba.njit(error_model="numpy", fastmath=False)
def _replay_block(p, exp_avg, exp_avg_sq, table):  # type: ignore[no-untyped-def]
    """All steps of `table` over one block that stays in the first-level cache."""
    for step in range(table.shape[0]):
        row = _row(table[step])
        for i in range(p.size):
            p[i], exp_avg[i], exp_avg_sq[i] = _element(
                p[i], exp_avg[i], exp_avg_sq[i], np.float32(0.0), row
            )


@kernel
def _replay_split(weight, residual, exp_avg, exp_avg_sq, table, lo, hi):  # type: ignore[no-untyped-def]
    masters = np.empty(_REPLAY_BLOCK, np.float32)
    for start in range(lo, hi, _REPLAY_BLOCK):
        stop = min(start + _REPLAY_BLOCK, hi)
        w, r, p = weight[start:stop], residual[start:stop], masters[: stop - start]
        for i in range(p.size):
            p[i] = master_of(w[i], r[i])
        _replay_block(p, exp_avg[start:stop], exp_avg_sq[start:stop], table)
        for i in range(p.size):
            w[i] = weight_of(p[i])
            r[i] = residual_of(p[i])


@kernel
def _replay_master(master, exp_avg, exp_avg_sq, table, lo, hi):  # type: ignore[no-untyped-def]
    for start in range(lo, hi, _REPLAY_BLOCK):
        stop = min(start + _REPLAY_BLOCK, hi)
        _replay_block(master[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop], table)


@kernel
def _replay_master_f16(master, weight, exp_avg, exp_avg_sq, table, lo, hi):  # type: ignore[no-untyped-def]
    for start in range(lo, hi, _REPLAY_BLOCK):
        stop = min(start + _REPLAY_BLOCK, hi)
        p, w = master[start:stop], weight[start:stop]
        _replay_block(p, exp_avg[start:stop], exp_avg_sq[start:stop], table)
        for i in range(p.size):
            w[i] = f16_of(p[i])
