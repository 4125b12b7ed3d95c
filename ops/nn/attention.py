"""Attention stage: norm, projections, rotary causal attention, output projection, residual.

Backward repeats no projection: it takes the projections q, k, v (before head norm and rotation)
and the core's output o as saved tensors, and recomputes only probabilities from q and k (as
Dao et al. 2022, section 3.1, do, with rowsum(dO * O) in place of rowsum(dP * P)).

Queries go in blocks; a block multiplies only the keys up to its end, so the largest score tensor
is [B*G, H/G*block, S] and causal masking saves work. Shape suffixes: see `ops/nn/dims.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import ops

from ops.nn.dims import StageDims
from ops.nn.primitives import (
    Tensor,
    bmm_nn,
    bmm_nt,
    bmm_tn,
    jit,
    ms_dtype,
    nn,
    np_dtype,
    nt,
    repeat,
    rms_norm,
    rms_norm_dx,
    spread,
    stream_dtype,
    sum_last,
    sum_rows,
    tn,
)
from ops.nn.workspace import query_block

_MASKED = -1e30


def rope_tables(dims: StageDims, dtype: str) -> tuple[np.ndarray, ...]:
    """Return cos_SC, sin_SC for queries (times C**-0.5, the scores' scale), then for keys.

    Rotary embedding: Su et al. 2021, eq. 34, with the halves paired as in Hugging Face's Llama.
    """
    half = np.arange(0, dims.head_dim, 2, dtype=np.float64) / dims.head_dim
    angle = np.outer(np.arange(dims.seq_len), dims.rope_theta**-half)
    angle = np.concatenate([angle, angle], axis=1)
    kind = np_dtype(stream_dtype(dtype))
    cos, sin, scale = np.cos(angle), np.sin(angle), dims.head_dim**-0.5
    return tuple(table.astype(kind) for table in (cos * scale, sin * scale, cos, sin))


def causal_bias(dims: StageDims, dtype: str) -> np.ndarray:
    """Return the [block, block] bias of scores on the diagonal: 0, or very negative if unseen."""
    block = query_block(dims.seq_len)
    seen = np.tril(np.ones((block, block), bool))
    return np.where(seen, 0.0, _MASKED).astype(np_dtype(stream_dtype(dtype)))


def _rotate(x: Tensor, half: int) -> Tensor:
    return ops.concat((-x[..., half:], x[..., :half]), -1)


def _build_heads(dims: StageDims, dtype: str) -> tuple[Callable[..., Any], ...]:
    """Return functions between projections and rotated heads: heads, flat, prepare, prepare_dx."""
    ct, st = ms_dtype(dtype), ms_dtype(stream_dtype(dtype))
    S, C, eps, qk_norm = dims.seq_len, dims.head_dim, dims.rms_norm_eps, dims.qk_norm
    half = C // 2

    def heads(x: Tensor, n: int) -> Tensor:  # [T, n*C] -> [B, n, S, C]
        return ops.transpose(x.reshape((-1, S, n, C)), (0, 2, 1, 3))

    def flat(x: Tensor, n: int) -> Tensor:  # [B, n, S, C] -> [T, n*C]
        return ops.transpose(x, (0, 2, 1, 3)).reshape((-1, n * C))

    def heads_norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x.reshape((-1, C)), w, eps).reshape(x.shape)

    def per_position(table: Tensor, x: Tensor) -> Tensor:  # [S, C] -> [B, n, S, C]
        return repeat(table, x.shape[0] * x.shape[1]).reshape(x.shape)

    def prepare(x: Tensor, w: Tensor, n: int, cos: Tensor, sin: Tensor) -> Tensor:
        x = heads(x, n).astype(st)
        if qk_norm:
            x = heads_norm(x, w)
        return (x * per_position(cos, x) + _rotate(x, half) * per_position(sin, x)).astype(ct)

    def prepare_dx(
        x: Tensor, w: Tensor, n: int, cos: Tensor, sin: Tensor, dy: Tensor
    ) -> tuple[Tensor, ...]:  # dy [B, n, S, C]
        dy = dy.astype(st)
        dy = dy * per_position(cos, dy) - _rotate(dy * per_position(sin, dy), half)
        if not qk_norm:
            return flat(dy, n).astype(ct), w
        x = heads(x, n).astype(st)
        dx, dw = rms_norm_dx(x.reshape((-1, C)), w, dy.reshape((-1, C)), eps)
        return flat(dx.reshape(x.shape), n).astype(ct), sum_rows(dw)

    return heads, flat, prepare, prepare_dx


def _build_core(dims: StageDims, dtype: str) -> tuple[Callable[..., Any], ...]:
    """Return the core by blocks of queries: core_fwd, core_bwd."""
    ct, st = ms_dtype(dtype), ms_dtype(stream_dtype(dtype))
    S, C, M = dims.seq_len, dims.head_dim, dims.num_heads // dims.num_kv_heads
    step = query_block(S)
    starts = tuple(range(0, S, step))

    def probs(q5: Tensor, k3: Tensor, bias: Tensor, lo: int, hi: int) -> tuple[Tensor, ...]:
        # q5 [B*G, M, S, C], k3 [B*G, S, C]
        q = q5[:, :, lo:hi].reshape((-1, M * (hi - lo), C))
        s = bmm_nt(q, k3[:, :hi]).astype(st)
        mask = bias if hi - lo == step else bias[: hi - lo, : hi - lo]
        if lo > 0:
            mask = ops.concat((ops.zeros((hi - lo, lo), st), mask), 1)
        mask = ops.depend(mask, s)  # else every block's mask would be made at once
        s = s + repeat(mask, s.shape[0] * M).reshape(s.shape)
        return q, ops.softmax(s, -1).astype(ct)

    def core_fwd(q5: Tensor, k3: Tensor, v3: Tensor, bias: Tensor) -> Tensor:
        outs: list[Tensor] = []
        for lo in starts:
            hi = min(lo + step, S)
            if lo > 0:  # one block after the other: the scores of one block at a time
                q5 = ops.depend(q5, outs[-1])
            _, p = probs(q5, k3, bias, lo, hi)
            outs.append(bmm_nn(p, v3[:, :hi]).reshape((-1, M, hi - lo, C)))
        return outs[0] if len(outs) == 1 else ops.concat(outs, 2)

    def core_bwd(
        q5: Tensor, k3: Tensor, v3: Tensor, o5: Tensor, do5: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        dqs: list[Tensor] = []
        dk, dv = ops.zeros_like(k3), ops.zeros_like(v3)
        for lo in starts:
            hi = min(lo + step, S)
            if lo > 0:
                q5 = ops.depend(q5, (dk, dv, dqs[-1]))
            q, p = probs(q5, k3, bias, lo, hi)
            do = ops.depend(do5, p)[:, :, lo:hi].reshape((-1, M * (hi - lo), C))
            o = o5[:, :, lo:hi].reshape((-1, M * (hi - lo), C))
            dp = bmm_nt(do, v3[:, :hi]).astype(st)
            delta = sum_last((do * o).astype(st).reshape((-1, C)))
            delta = spread(ops.depend(delta, dp), hi).reshape(dp.shape)
            ds = ((dp - delta) * p.astype(st)).astype(ct)
            dqs.append(bmm_nn(ds, k3[:, :hi]).reshape((-1, M, hi - lo, C)))
            dk_part, dv_part = bmm_tn(ds, q), bmm_tn(p, do)
            if hi < S:
                rest = ops.zeros((k3.shape[0], S - hi, C), k3.dtype)
                dk_part = ops.concat((dk_part, rest), 1)
                dv_part = ops.concat((dv_part, rest), 1)
            dk, dv = dk + dk_part, dv + dv_part
        dq = dqs[0] if len(dqs) == 1 else ops.concat(dqs, 2)
        return dq, dk, dv

    return core_fwd, core_bwd


def build_attention_parts(dims: StageDims, dtype: str) -> tuple[Callable[..., Any], ...]:
    """Return attention between the norm and the output projection, for use inside jit.

    `attend` gives (o, q, k, v); `attend_dx` gives (dxn ct, dq, dk, dv, dwo, dqn, dkn);
    `weights_dw` gives dwq, dwk, dwv. All in ct but dqn, dkn.
    """
    S, H, G, C = dims.seq_len, dims.num_heads, dims.num_kv_heads, dims.head_dim
    M = H // G
    heads, flat, prepare, prepare_dx = _build_heads(dims, dtype)
    core_fwd, core_bwd = _build_core(dims, dtype)

    def attend(
        xn: Tensor,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
        qn: Tensor,
        kn: Tensor,
        cos_q: Tensor,
        sin_q: Tensor,
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        q, k, v = nt(xn, wq), nt(xn, wk), nt(xn, wv)
        q5 = prepare(q, qn, H, cos_q, sin_q).reshape((-1, M, S, C))
        k3 = prepare(k, kn, G, cos, sin).reshape((-1, S, C))
        v3 = heads(v, G).reshape((-1, S, C))
        o5 = core_fwd(q5, k3, v3, bias)
        return flat(o5.reshape((-1, H, S, C)), H), q, k, v

    def attend_dx(
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
        dy: Tensor,
        cos_q: Tensor,
        sin_q: Tensor,
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        do, dwo = nn(dy, wo), tn(dy, o)
        dq5, dk3, dv3 = core_bwd(
            prepare(q, qn, H, cos_q, sin_q).reshape((-1, M, S, C)),
            prepare(k, kn, G, cos, sin).reshape((-1, S, C)),
            heads(v, G).reshape((-1, S, C)),
            heads(o, H).reshape((-1, M, S, C)),
            heads(do, H).reshape((-1, M, S, C)),
            bias,
        )
        dq, dqn = prepare_dx(q, qn, H, cos_q, sin_q, dq5.reshape((-1, H, S, C)))
        dk, dkn = prepare_dx(k, kn, G, cos, sin, dk3.reshape((-1, G, S, C)))
        dv = flat(dv3.reshape((-1, G, S, C)), G)
        return nn(dq, wq) + nn(dk, wk) + nn(dv, wv), dq, dk, dv, dwo, dqn, dkn

    def weights_dw(dq: Tensor, dk: Tensor, dv: Tensor, xn: Tensor) -> tuple[Tensor, ...]:
        return tn(dq, xn), tn(dk, xn), tn(dv, xn)

    return attend, attend_dx, weights_dw


def build_attention(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return jit-compiled `attn_fwd`, `attn_bwd` for `dims` (see `Stages`)."""
    ct, st, eps = ms_dtype(dtype), ms_dtype(stream_dtype(dtype)), dims.rms_norm_eps
    attend, attend_dx, weights_dw = build_attention_parts(dims, dtype)

    def attn_fwd(
        h: Tensor,
        ln: Tensor,
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
        xn = rms_norm(h, ln, eps).astype(ct)
        o, q, k, v = attend(xn, wq, wk, wv, qn, kn, cos_q, sin_q, cos, sin, bias)
        return h + nt(o, wo).astype(st), q, k, v, o

    def attn_bwd(
        h: Tensor,
        ln: Tensor,
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
        dh_mid: Tensor,
        cos_q: Tensor,
        sin_q: Tensor,
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        dy = dh_mid.astype(ct)
        dxn, dq, dk, dv, dwo, dqn, dkn = attend_dx(
            wq, wk, wv, wo, qn, kn, q, k, v, o, dy, cos_q, sin_q, cos, sin, bias
        )
        dxn = dxn.astype(st)
        xn = rms_norm(h, ln, eps).astype(ct)
        dwq, dwk, dwv = weights_dw(dq, dk, dv, xn)
        dh, dln = rms_norm_dx(h, ln, dxn, eps)
        grads = (sum_rows(dln), dwq.astype(st), dwk.astype(st), dwv.astype(st), dwo.astype(st))
        return dh_mid + dh, *grads, dqn, dkn

    return {"attn_fwd": jit(attn_fwd), "attn_bwd": jit(attn_bwd)}
