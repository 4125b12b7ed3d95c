"""Building blocks inside jit: matmuls by transpose flag, RMS norm and its gradient by hand.

`.T` before a matmul is materialised by MindSpore's CPU backend (three times slower), so products
are written with the primitive's transpose flags. Long sums are products with a row of
ones: `ops.sum` over the last axis takes 4 ns an element, ten times a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.graph.api import _pynative_executor

if TYPE_CHECKING:
    Tensor = Any  # MindSpore's annotations are not usable by a checker
else:
    Tensor = ms.Tensor

nn = ops.MatMul()  # a[m,k] b[k,n]
nt = ops.MatMul(transpose_b=True)  # a[m,k] b[n,k]
tn = ops.MatMul(transpose_a=True)  # a[k,m] b[k,n]
bmm_nn = ops.BatchMatMul()
bmm_nt = ops.BatchMatMul(transpose_b=True)
bmm_tn = ops.BatchMatMul(transpose_a=True)

_KINDS = {"float16": ms.float16, "float32": ms.float32, "float64": ms.float64}
_NUMPY_KINDS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def ms_dtype(name: str) -> Any:
    """Return MindSpore's dtype of `float16`, `float32` or `float64`."""
    return _KINDS[name]


def np_dtype(name: str) -> Any:
    """Return NumPy's dtype of `float16`, `float32` or `float64`."""
    return _NUMPY_KINDS[name]


def stream_dtype(compute_dtype: str) -> str:
    """Return the dtype of the residual stream, norms and router: fp32, or fp64 in fp64."""
    return "float64" if compute_dtype == "float64" else "float32"


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `fn` once per input shape; weights must be arguments (jit keeps captured ones)."""
    compiled: Callable[..., Any] = ms.jit(fn)
    return compiled


def wait() -> None:
    """Block until everything launched so far has been computed.

    A jit call with one output blocks by itself, one with several outputs does not (measured).
    `mindspore.runtime.synchronize` does the same but logs an error on CPU each time.
    """
    _pynative_executor.sync()


def rms_scale(x_TD: Tensor, eps: float) -> Tensor:
    """Return 1 / rms of each row, [..., 1]."""
    return ops.rsqrt(ops.mean(x_TD * x_TD, -1, True) + eps)


def rms_norm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """Return w * x / rms(x) over the last axis (Zhang and Sennrich 2019, eq. 4)."""
    return x_TD * rms_scale(x_TD, eps) * w_D


def rms_norm_dx(x_TD: Tensor, w_D: Tensor, dy_TD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (dx, dy * x/rms): the second, summed over rows, is the weight's gradient."""
    r = rms_scale(x_TD, eps)
    xhat = x_TD * r
    dyw = dy_TD * w_D
    dx = (dyw - xhat * ops.mean(dyw * xhat, -1, True)) * r
    return dx, dy_TD * xhat


def sum_last(x_TD: Tensor) -> Tensor:
    """Return the sum over the last axis of a matrix, [T, 1], as a product with ones."""
    return nn(x_TD, ops.ones((x_TD.shape[1], 1), x_TD.dtype))


def sum_rows(x_TD: Tensor) -> Tensor:
    """Return the sum over the first axis as a product with ones, [D]."""
    ones = ops.ones((1, x_TD.shape[0]), x_TD.dtype)
    return nn(ones, x_TD).reshape((x_TD.shape[1],))
