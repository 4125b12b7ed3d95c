"""Experts, and the sums that bring their rows back to tokens.

An expert is SwiGLU (Shazeer 2020, eq. 6): y = (silu(x Wg^T) * (x Wu^T)) Wd^T. The caller gathers
its rows; rows that pad the bucket have combine weight 0 and so contribute exact zeros to every
gradient. The gradient of a row's combine weight is rowsum(dout * y) = rowsum((dout Wd) * a), so
backward needs no y. Shape suffixes: see `ops/nn/dims.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops

from ops.nn.dims import StageDims
from ops.nn.primitives import Tensor, jit, ms_dtype, nn, nt, spread, stream_dtype, sum_last, tn


def weighted_rows(y: Tensor, pos: Tensor, w: Tensor, k: int, st: Any) -> Tensor:
    """Return w[t,k] * y[pos[t,k]] of every token t, in st; for use inside jit."""
    rows = ops.gather(y, pos[:, k], 0).astype(st)
    return rows * spread(w[:, k : k + 1], rows.shape[1])


def build_experts(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return jit-compiled expert, combine and uncombine functions (see `Stages`)."""
    ct, st = ms_dtype(dtype), ms_dtype(stream_dtype(dtype))
    K = dims.num_experts_per_tok

    def expert_fwd(x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> tuple[Tensor, ...]:
        g, u = nt(x, wg), nt(x, wu)
        return nt(ops.sigmoid(g) * g * u, wd), g, u

    def expert_bwd(
        x: Tensor,
        g: Tensor,
        u: Tensor,
        w: Tensor,
        dout: Tensor,
        wg: Tensor,
        wu: Tensor,
        wd: Tensor,
    ) -> tuple[Tensor, ...]:
        dy = dout.astype(ct)
        da = nn(dy, wd)  # before the combine weight
        s = ops.sigmoid(g)
        sg = s * g
        a = sg * u
        w_NF = spread(w.astype(ct).reshape((-1, 1)), a.shape[1])
        dw = sum_last((da * a).astype(st)).reshape((-1,))
        dwd = tn(dy, a * w_NF)
        da = da * w_NF
        du = da * sg
        dg = da * u * (s + sg * (1.0 - s))
        dx = nn(dg, wg) + nn(du, wu)
        return dx, dw, tn(dg, x).astype(st), tn(du, x).astype(st), dwd.astype(st)

    def shared_fwd(xn: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> tuple[Tensor, ...]:
        g, u = nt(xn, wg), nt(xn, wu)
        return nt(ops.sigmoid(g) * g * u, wd), g, u

    def shared_bwd(
        xn: Tensor, g: Tensor, u: Tensor, dout: Tensor, wg: Tensor, wu: Tensor, wd: Tensor
    ) -> tuple[Tensor, ...]:
        dy = dout.astype(ct)
        da = nn(dy, wd)
        s = ops.sigmoid(g)
        sg = s * g
        dwd = tn(dy, sg * u)
        du = da * sg
        dg = da * u * (s + sg * (1.0 - s))
        dx = nn(dg, wg) + nn(du, wu)
        return dx, tn(dg, xn).astype(st), tn(du, xn).astype(st), dwd.astype(st)

    def weighted_sum(out: Tensor, y: Tensor, pos: Tensor, w: Tensor) -> Tensor:
        for k in range(K):
            out = out + weighted_rows(y, pos, w, k, st)
        return out

    def combine(h_mid: Tensor, y: Tensor, pos: Tensor, w: Tensor) -> Tensor:
        return weighted_sum(h_mid, y, pos, w)

    def combine_shared(h_mid: Tensor, y: Tensor, pos: Tensor, w: Tensor, shared: Tensor) -> Tensor:
        return weighted_sum(h_mid + shared.astype(st), y, pos, w)

    def uncombine(dx: Tensor, pos: Tensor) -> Tensor:
        out = ops.gather(dx, pos[:, 0], 0).astype(st)
        for k in range(1, K):
            out = out + ops.gather(dx, pos[:, k], 0).astype(st)
        return out

    def uncombine_shared(dx: Tensor, pos: Tensor, dx_shared: Tensor) -> Tensor:
        return uncombine(dx, pos) + dx_shared.astype(st)

    functions = (expert_fwd, expert_bwd, shared_fwd, shared_bwd)
    sums = (combine, combine_shared, uncombine, uncombine_shared)
    return {fn.__name__: jit(fn) for fn in (*functions, *sums)}
