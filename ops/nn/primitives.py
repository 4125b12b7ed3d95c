"""Building blocks inside jit: matmuls by transpose flag, RMS norm and its gradient by hand.

What MindSpore's CPU backend dislikes (measured, 2.10):
- `.T` before a matmul is materialised, three times slower: use the primitives' transpose flags.
- Elementwise operands of different shapes: the kernel keeps 16 B of index tables an element for
  as long as the compiled function lives, and is slower than `tile` and an equal-shape kernel.
- Reductions over more than two axes, or over the first: reshape, or multiply with ones.
- Strided slices of large tensors: 2-30 ns an element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import ops

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


def wait(outputs: Any) -> None:
    """Block until `outputs` (tensors of one jit call) have been computed.

    A jit call with one output blocks by itself, one with several outputs does not (measured).
    `asnumpy` sleeps until the value is there, while `_pynative_executor.sync` spins and takes a
    core from the kernels: 12.9 against 7.7 ms for a matmul on two cores. A tensor's launch may
    still be under way when its value is not asked for, so every output is.
    """
    for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        tensor.asnumpy()


def spread(r_T1: Tensor, width: int) -> Tensor:
    """Return [T, width]: the column repeated; see the module's text on broadcasting."""
    return ops.tile(r_T1, (1, width))


def repeat(w_D: Tensor, count: int) -> Tensor:
    """Return [count, D]: the row repeated; see the module's text on broadcasting."""
    return ops.tile(w_D.reshape((1, -1)), (count, 1))


def sum_last(x_TD: Tensor) -> Tensor:
    """Return the sum over the last axis of a matrix, [T, 1]; with more axes it is slow."""
    return ops.sum(x_TD, -1, True)


def sum_rows(x_TD: Tensor) -> Tensor:
    """Return the sum over the first axis as a product with ones, [D]: 20 times faster."""
    ones = ops.ones((1, x_TD.shape[0]), x_TD.dtype)
    return nn(ones, x_TD).reshape((x_TD.shape[1],))


def rms_scale(x_TD: Tensor, eps: float) -> Tensor:
    """Return 1 / rms of each row, [T, 1]."""
    return ops.rsqrt(ops.mean(x_TD * x_TD, -1, True) + eps)


def rms_norm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """Return w * x / rms(x) of each row (Zhang and Sennrich 2019, eq. 4)."""
    T, D = x_TD.shape
    return x_TD * spread(rms_scale(x_TD, eps), D) * repeat(w_D, T)


def rms_norm_dx(x_TD: Tensor, w_D: Tensor, dy_TD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (dx, dy * x/rms): the second, summed over rows, is the weight's gradient."""
    T, D = x_TD.shape
    r = spread(rms_scale(x_TD, eps), D)
    xhat = x_TD * r
    dyw = dy_TD * repeat(w_D, T)
    mean = ops.mean(dyw * xhat, -1, True)
    return (dyw - xhat * spread(mean, D)) * r, dy_TD * xhat
