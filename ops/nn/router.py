"""Router stage: norm, logits, combine weights, balance and z losses, and their gradient.

All of it is fp32 (fp64 in fp64), also when experts compute in fp16. The choice of experts is an
input (`ops/nn/routing.py`), a constant for the gradient. Losses are summed over the sequences of
the micro-batch; the caller divides by the sequences of the global batch, so they add up over any
split.

- balance, per sequence: E * sum_e f_e * p_e, f_e the share of the sequence's T*K assignments that
  went to e (no gradient), p_e its mean probability (Fedus et al. 2021, Switch Transformers,
  eq. 4-6, generalised from K=1; HF's `load_balancing_loss_func` is K times this).
- z, per sequence: mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, ST-MoE, eq. 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops

from ops.nn.dims import StageDims
from ops.nn.primitives import (
    Tensor,
    jit,
    ms_dtype,
    nn,
    nt,
    rms_norm,
    rms_norm_dx,
    spread,
    stream_dtype,
    sum_last,
    sum_rows,
    tn,
)


def build_router_parts(dims: StageDims, dtype: str) -> tuple[Callable[..., Any], ...]:
    """Return the router after its logits, for use inside jit: weigh, logits_dx."""
    st = ms_dtype(stream_dtype(dtype))
    S, E, K = dims.seq_len, dims.num_experts, dims.num_experts_per_tok
    renormalise = dims.norm_topk_prob

    def softmax_lse(logits: Tensor) -> tuple[Tensor, ...]:
        top = ops.max(logits, -1, True)[0]
        e = ops.exp(logits - spread(top, E))
        total = sum_last(e)
        return e / spread(total, E), top + ops.log(total)

    def chosen_share(idx: Tensor) -> Tensor:  # f_BE, no gradient
        ones = ops.ones(idx.shape, st)
        hits = ops.tensor_scatter_elements(ops.zeros((idx.shape[0], E), st), idx, ones, 1)
        return ops.mean(hits.reshape((-1, S, E)), 1) / K

    def weigh(logits: Tensor, idx: Tensor) -> tuple[Tensor, ...]:
        p, lse = softmax_lse(logits)
        w = ops.gather_elements(p, 1, idx)
        if renormalise:
            w = w / spread(sum_last(w), K)
        mean_p = ops.mean(p.reshape((-1, S, E)), 1)
        balance = ops.sum(chosen_share(idx) * mean_p) * E
        return w, balance, ops.sum(lse * lse) / S

    def logits_dx(
        logits: Tensor, idx: Tensor, dw: Tensor, d_balance: Tensor, d_z: Tensor
    ) -> Tensor:
        p, lse = softmax_lse(logits)
        if renormalise:
            raw = ops.gather_elements(p, 1, idx)
            total = spread(sum_last(raw), K)
            dw = (dw - spread(sum_last(dw * raw), K) / total) / total
        dp = ops.tensor_scatter_elements(ops.zeros_like(p), idx, dw, 1)
        share = chosen_share(idx) * (d_balance * (E / S))
        share = ops.tile(share.reshape((-1, 1, E)), (1, S, 1)).reshape(p.shape)
        dp = dp + share
        return (dp - spread(sum_last(dp * p) - lse * (d_z * (2.0 / S)), E)) * p

    return weigh, logits_dx


def build_router(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return jit-compiled `router_fwd`, `router_weights`, `router_bwd` (see `Stages`)."""
    ct, eps = ms_dtype(dtype), dims.rms_norm_eps
    weigh, logits_dx = build_router_parts(dims, dtype)

    def router_fwd(h: Tensor, ln: Tensor, wr: Tensor) -> tuple[Tensor, ...]:
        xn = rms_norm(h, ln, eps)
        return xn.astype(ct), nt(xn, wr)

    def router_weights(logits: Tensor, idx: Tensor) -> tuple[Tensor, ...]:
        return weigh(logits, idx)

    def router_bwd(
        h: Tensor,
        ln: Tensor,
        wr: Tensor,
        logits: Tensor,
        idx: Tensor,
        dxn: Tensor,
        dw: Tensor,
        d_balance: Tensor,
        d_z: Tensor,
    ) -> tuple[Tensor, ...]:
        dlogits = logits_dx(logits, idx, dw, d_balance, d_z)
        xn = rms_norm(h, ln, eps)
        dh, dln = rms_norm_dx(h, ln, dxn + nn(dlogits, wr), eps)
        return dh, sum_rows(dln), tn(dlogits, xn)

    return {
        "router_fwd": jit(router_fwd),
        "router_weights": jit(router_weights),
        "router_bwd": jit(router_bwd),
    }
