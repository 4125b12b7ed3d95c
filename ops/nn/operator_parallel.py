"""Stages of a rank that holds a part of every operator: some heads, some columns of each FFN.

Between two sums over the ranks a rank computes without norm or residual: attention of its heads
takes the normed stream and gives a part of what is added to the stream. Parts are fp32 (fp64), so
that they can be summed. Gradients of whole tensors (the norms of heads, q_norm and k_norm) are
parts too. `ops/nn/operator_stages.py` puts the sums between these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops.nn.attention import build_attention_parts
from ops.nn.dims import StageDims
from ops.nn.experts import weighted_rows
from ops.nn.primitives import (
    Tensor,
    jit,
    ms_dtype,
    nn,
    nt,
    rms_norm,
    rms_norm_dx,
    stream_dtype,
    sum_rows,
    tn,
)
from ops.nn.router import build_router_parts


def build_operator_parallel(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return jit-compiled functions of a rank with the heads of `dims` (see `OperatorStages`)."""
    return {**_attention(dims, dtype), **_sums(dims, dtype), **_router(dims, dtype)}


def _attention(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    ct, st = ms_dtype(dtype), ms_dtype(stream_dtype(dtype))
    attend, attend_dx, weights_dw = build_attention_parts(dims, dtype)

    def attn_heads_fwd(
        xn: Tensor,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
        wo: Tensor,
        qn: Tensor,
        kn: Tensor,
        cos_q: Tensor,
        sin_q: Tensor,
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        o, q, k, v = attend(xn, wq, wk, wv, qn, kn, cos_q, sin_q, cos, sin, bias)
        return nt(o, wo).astype(st), q, k, v, o

    def attn_heads_bwd(
        xn: Tensor,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
        wo: Tensor,
        qn: Tensor,
        kn: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dout: Tensor,
        cos_q: Tensor,
        sin_q: Tensor,
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        dy = dout.astype(ct)
        dxn, dq, dk, dv, dwo, dqn, dkn = attend_dx(
            wq, wk, wv, wo, qn, kn, q, k, v, o, dy, cos_q, sin_q, cos, sin, bias
        )
        dwq, dwk, dwv = weights_dw(dq, dk, dv, xn)
        grads = (dwq.astype(st), dwk.astype(st), dwv.astype(st), dwo.astype(st))
        return dxn.astype(st), *grads, dqn, dkn

    return {"attn_heads_fwd": jit(attn_heads_fwd), "attn_heads_bwd": jit(attn_heads_bwd)}


def _sums(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    st, K = ms_dtype(stream_dtype(dtype)), dims.num_experts_per_tok

    def combine_partial(y: Tensor, pos: Tensor, w: Tensor) -> Tensor:
        out = weighted_rows(y, pos, w, 0, st)
        for k in range(1, K):
            out = out + weighted_rows(y, pos, w, k, st)
        return out

    def combine_partial_shared(y: Tensor, pos: Tensor, w: Tensor, shared: Tensor) -> Tensor:
        return combine_partial(y, pos, w) + shared.astype(st)

    return {
        "combine_partial": jit(combine_partial),
        "combine_partial_shared": jit(combine_partial_shared),
    }


def _router(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    eps = dims.rms_norm_eps
    _, logits_dx = build_router_parts(dims, dtype)

    def router_logits_bwd(
        logits: Tensor, idx: Tensor, dw: Tensor, d_balance: Tensor, d_z: Tensor
    ) -> Tensor:
        return logits_dx(logits, idx, dw, d_balance, d_z)

    def router_norm_bwd(
        h: Tensor, ln: Tensor, wr: Tensor, dlogits: Tensor, dxn: Tensor
    ) -> tuple[Tensor, ...]:
        xn = rms_norm(h, ln, eps)
        dh, dln = rms_norm_dx(h, ln, dxn + nn(dlogits, wr), eps)
        return dh, sum_rows(dln), tn(dlogits, xn)

    return {
        "router_logits_bwd": jit(router_logits_bwd),
        "router_norm_bwd": jit(router_norm_bwd),
    }
