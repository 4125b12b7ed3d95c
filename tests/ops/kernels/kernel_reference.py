"""What the kernels must compute, in NumPy alone: an independent reference, bit for bit.

Every function is elementwise over whole arrays, so it is the unchunked scalar loop by definition.
"""

from __future__ import annotations

import numpy as np

CLAMP_BITS = 0x7F7F7FFF


def bits_of(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def floats_of(bits):
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def fma(a, b, c):
    """float32 a * b + c rounded once: exact product in float64, sum rounded to odd, then float32.

    Rounding to odd keeps a sticky last bit, so rounding 53 bits to 24 cannot round twice
    (Boldo & Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = np.atleast_1d(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64).copy()
    even = (bits & 1) == 0
    away = (error > 0) == (total > 0)
    bits += np.where((error != 0) & even, np.where(away, 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


def clamp(master):
    bits = bits_of(master)
    magnitude = np.minimum(bits & 0x7FFFFFFF, CLAMP_BITS).astype(np.uint32)
    return floats_of((bits & np.uint32(0x80000000)) | magnitude)


def split(master):
    bits = bits_of(clamp(master)).astype(np.int64)
    weight = (bits + 0x8000) >> 16
    residual = bits - (weight << 16)
    assert residual.min() >= -0x8000 and residual.max() <= 0x7FFF
    return weight.astype(np.uint16), residual.astype(np.int16)


def join(weight, residual):
    bits = (weight.astype(np.int64) << 16) + residual.astype(np.int64)
    return floats_of((bits & 0xFFFFFFFF).astype(np.uint32))


def widen(grad):
    if grad.dtype == np.uint16:
        return floats_of(grad.astype(np.uint32) << 16)
    return grad


def flush(x):
    return np.where(np.abs(x) < np.float32(1e-38), np.float32(0), x)


def adamw(master, exp_avg, exp_avg_sq, grad, grad_scale, scalars):
    """The documented step, operation by operation: new (master, exp_avg, exp_avg_sq)."""
    decay, step_size, eps, beta2, rate2, rate2_low, beta1, beta1_low, rate1, rate1_low = scalars
    g = widen(grad) * np.float32(grad_scale)
    fresh = rate1 * g
    lost = fma(rate1_low, g, fma(beta1_low, exp_avg, fma(rate1, g, -fresh)))
    m = flush(fma(beta1, exp_avg, fresh) + lost)
    v = flush(fma(fma(rate2, g, rate2_low * g), g, beta2 * exp_avg_sq))
    p = fma(-decay, master, master)
    p = fma(-step_size, m / (np.sqrt(v) + eps), p)
    return clamp(p), m, v


def adamw_f64(master, exp_avg, exp_avg_sq, grad, hyper, step, lr, weight_decay):
    """The textbook step in float64 with scalars that were never rounded."""
    p, m, v, g = (np.asarray(x, np.float64) for x in (master, exp_avg, exp_avg_sq, grad))
    p = p * (1 - lr * weight_decay)
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    corrected1 = m / (1 - hyper.beta1**step)
    corrected2 = v / (1 - hyper.beta2**step)
    return p - lr * corrected1 / (np.sqrt(corrected2) + hyper.eps), m, v


def random_state(size, seed=0, spread=4.0):
    """master, exp_avg, exp_avg_sq, float32 gradient over many orders of magnitude, edges first."""
    rng = np.random.default_rng(seed)

    def values():
        return (rng.standard_normal(size) * 10.0 ** rng.uniform(-spread, 0, size)).astype(
            np.float32
        )

    master, exp_avg, grad = values(), values() * np.float32(1e-2), values()
    exp_avg_sq = np.square(values() * np.float32(1e-2))
    edges = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-38, 1.2e-38, 3e38, -3e38], np.float32)
    edges = edges[:size]
    master[: edges.size] = edges
    exp_avg[: edges.size] = np.where(np.abs(edges) > 1, 1, edges)
    exp_avg_sq[: edges.size] = np.abs(np.where(np.abs(edges) > 1, 1, edges))
    return master, exp_avg, exp_avg_sq, grad
