"""Stage functions of one model shape: pure, jit-compiled, weights always arguments.

Every function returns new tensors and blocks until they are computed. Weights are in Hugging Face
layout [out, in]. Dtypes: `ct` is the compute dtype (projections and experts: their weights, and
the tensors saved for backward); `st` is fp32 (fp64 when computing in fp64): the residual stream h,
norms, router, losses and every weight gradient. Shape suffixes: see `ops/nn/dims.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from ops.errors import ConfigError
from ops.nn.attention import build_attention, causal_bias, rope_tables
from ops.nn.dims import StageDims
from ops.nn.experts import build_experts
from ops.nn.head import build_head
from ops.nn.primitives import Tensor, np_dtype, stream_dtype, wait
from ops.nn.router import build_router

COMPUTE_DTYPES = ("float32", "float16", "float64")

LossSlice = tuple[np.ndarray, ...]
"""(max_T, sumexp_T, target_logit_T) st of the rows of a vocabulary slice."""


class AttnWeights(NamedTuple):
    """Dense weights of a layer's attention: ln_D st; wq, wk, wv, wo ct; qn_C, kn_C st or None."""

    ln: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    qn: Tensor | None = None
    kn: Tensor | None = None


class AttnSaved(NamedTuple):
    """Tensors attention's backward needs: projections q [T,H*C], k, v [T,G*C], core o [T,H*C]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor


@cache
def _compiled(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of (dims, dtype), kept for the process: jit caches by function."""
    return {
        **build_attention(dims, dtype),
        **build_router(dims, dtype),
        **build_experts(dims, dtype),
        **build_head(dims, dtype),
    }


class Stages:
    """The stage functions of a model of `dims`, computing in `compute_dtype`.

    Instances of equal arguments share compiled code. Not thread-safe: call from one thread.
    Raises `ConfigError` for an unknown dtype.
    """

    def __init__(self, dims: StageDims, compute_dtype: str = "float32") -> None:
        if compute_dtype not in COMPUTE_DTYPES:
            raise ConfigError(
                f"compute_dtype is {compute_dtype!r}; choose one of {', '.join(COMPUTE_DTYPES)}"
            )
        self.dims = dims
        self.compute_dtype = compute_dtype
        self.stream_dtype = stream_dtype(compute_dtype)
        self._functions = _compiled(dims, compute_dtype)
        tables = (*rope_tables(dims, compute_dtype), causal_bias(dims, compute_dtype))
        self._tables = tuple(ms.Tensor(table) for table in tables)
        self._no_norm = ms.Tensor(np.zeros(1, np_dtype(self.stream_dtype)))
        self._row0: dict[int, Tensor] = {}

    # ---- embedding

    def embed_fwd(self, tokens_T: Tensor, w_RD: Tensor, row0: int) -> Tensor:
        """Return x_TD st: rows of tokens in row0..row0+R, zeros for other tokens."""
        return self._run("embed_fwd", tokens_T, w_RD, self._int(row0))

    def embed_bwd(self, tokens_T: Tensor, dx_TD: Tensor, row0: int, num_rows: int) -> Tensor:
        """Return dw_RD st, tokens added in their order."""
        return self._run("embed_bwd", tokens_T, dx_TD, self._int(row0), num_rows)

    # ---- attention

    def attn_fwd(self, h_TD: Tensor, w: AttnWeights) -> tuple[Tensor, AttnSaved]:
        """Return h + attention(norm(h)), and the tensors saved for backward."""
        h_mid, q, k, v, o = self._run("attn_fwd", h_TD, *self._attn(w), *self._tables)
        return h_mid, AttnSaved(q, k, v, o)

    def attn_bwd(
        self, h_TD: Tensor, w: AttnWeights, saved: AttnSaved, dh_mid_TD: Tensor
    ) -> tuple[Tensor, AttnWeights]:
        """Return (dh_TD, gradients of each weight, st)."""
        dh, *grads = self._run("attn_bwd", h_TD, *self._attn(w), *saved, dh_mid_TD, *self._tables)
        if not self.dims.qk_norm:
            grads[-2:] = [None, None]
        return dh, AttnWeights(*grads)

    # ---- router

    def router_fwd(self, h_mid_TD: Tensor, ln_D: Tensor, wr_ED: Tensor) -> tuple[Tensor, Tensor]:
        """Return (xn_TD ct: the experts' input, logits_TE st)."""
        return self._run("router_fwd", h_mid_TD, ln_D, wr_ED)

    def router_weights(self, logits_TE: Tensor, idx_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (w_TK st, balance loss, z loss), losses summed over the sequences."""
        return self._run("router_weights", logits_TE, idx_TK)

    def router_bwd(
        self,
        h_mid_TD: Tensor,
        ln_D: Tensor,
        wr_ED: Tensor,
        logits_TE: Tensor,
        idx_TK: Tensor,
        dxn_TD: Tensor,
        dw_TK: Tensor,
        d_balance: float,
        d_z: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dh_mid_TD through the norm, dln_D, dwr_ED), all st.

        `dxn_TD` st is the experts' part, from `uncombine`; the router adds its own. `d_balance`
        and `d_z` are the gradients of the two summed losses.
        """
        return self._run(
            "router_bwd",
            h_mid_TD,
            ln_D,
            wr_ED,
            logits_TE,
            idx_TK,
            dxn_TD,
            dw_TK,
            self._scalar(d_balance),
            self._scalar(d_z),
        )

    # ---- experts

    def expert_fwd(
        self, x_ND: Tensor, wg_FD: Tensor, wu_FD: Tensor, wd_DF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y_ND, g_NF, u_NF) ct of the expert's rows x (of a bucket, zero-padded)."""
        return self._run("expert_fwd", x_ND, wg_FD, wu_FD, wd_DF)

    def expert_bwd(
        self,
        x_ND: Tensor,
        g_NF: Tensor,
        u_NF: Tensor,
        w_N: Tensor,
        dout_ND: Tensor,
        wg_FD: Tensor,
        wu_FD: Tensor,
        wd_DF: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return (dx_ND ct, dw_N st, dwg, dwu, dwd st); padded rows of dw_N mean nothing."""
        return self._run("expert_bwd", x_ND, g_NF, u_NF, w_N, dout_ND, wg_FD, wu_FD, wd_DF)

    def shared_fwd(
        self, xn_TD: Tensor, wg_FD: Tensor, wu_FD: Tensor, wd_DF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y_TD, g_TF, u_TF) ct of an expert that sees every token, weight 1."""
        return self._run("shared_fwd", xn_TD, wg_FD, wu_FD, wd_DF)

    def shared_bwd(
        self,
        xn_TD: Tensor,
        g_TF: Tensor,
        u_TF: Tensor,
        dout_TD: Tensor,
        wg_FD: Tensor,
        wu_FD: Tensor,
        wd_DF: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (dx_TD ct, dwg, dwu, dwd st)."""
        return self._run("shared_bwd", xn_TD, g_TF, u_TF, dout_TD, wg_FD, wu_FD, wd_DF)

    def combine(
        self,
        h_mid_TD: Tensor,
        y_PD: Tensor,
        pos_TK: Tensor,
        w_TK: Tensor,
        shared_TD: Tensor | None = None,
    ) -> Tensor:
        """Return h_mid + shared + sum over k, in order, of w[t,k] * y[pos[t,k]], st."""
        if shared_TD is None:
            return self._run("combine", h_mid_TD, y_PD, pos_TK, w_TK)
        return self._run("combine_shared", h_mid_TD, y_PD, pos_TK, w_TK, shared_TD)

    def uncombine(
        self, dx_PD: Tensor, pos_TK: Tensor, dx_shared_TD: Tensor | None = None
    ) -> Tensor:
        """Return dxn_TD st: the sum over k, in order, of dx[pos[t,k]], plus the shared part."""
        if dx_shared_TD is None:
            return self._run("uncombine", dx_PD, pos_TK)
        return self._run("uncombine_shared", dx_PD, pos_TK, dx_shared_TD)

    # ---- head

    def final_norm_fwd(self, h_TD: Tensor, ln_D: Tensor) -> Tensor:
        """Return xn_TD ct."""
        return self._run("final_norm_fwd", h_TD, ln_D)

    def final_norm_bwd(self, h_TD: Tensor, ln_D: Tensor, dxn_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dh_TD, dln_D) st."""
        return self._run("final_norm_bwd", h_TD, ln_D, dxn_TD)

    def head_slice_fwd(
        self, xn_TD: Tensor, w_RD: Tensor, targets_T: Tensor, row0: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (max_T, sumexp_T, target_logit_T) st of one slice; 0 for targets outside it."""
        return self._run("head_slice_fwd", xn_TD, w_RD, targets_T, self._int(row0))

    def head_slice_bwd(
        self,
        xn_TD: Tensor,
        w_RD: Tensor,
        targets_T: Tensor,
        row0: int,
        lse_T: Tensor,
        dscale_T: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (dxn_TD, dw_RD) st; dscale_T is the gradient of each token's loss."""
        return self._run("head_slice_bwd", xn_TD, w_RD, targets_T, self._int(row0), lse_T, dscale_T)

    # ---- where the ranks of operator parallelism meet: one rank has all there is

    def num_own_tokens(self, num_tokens: int) -> int:
        """Return how many rows the stream of this rank has, of a micro-batch of `num_tokens`."""
        return num_tokens

    def own_tokens(self, x_TD: Tensor) -> Tensor:
        """Return the rows of this rank's stream, of a tensor that has all tokens."""
        return x_TD

    def agree_choice(self, idx_TK: np.ndarray) -> np.ndarray:
        """Return the experts that all ranks use, chosen from equal logits."""
        return idx_TK

    def complete_embedding(self, x_TD: Tensor) -> Tensor:
        """Return the stream from the sum of `embed_fwd` over this rank's slices."""
        return x_TD

    def gather_slices(self, slices: Sequence[LossSlice]) -> list[LossSlice]:
        """Return what `merge_slices` needs, from the results of this rank's slices."""
        return list(slices)

    # ---- helpers

    def _run(self, name: str, *args: Any) -> Any:
        result = self._functions[name](*args)
        wait(result)  # a jit call that returns a tuple comes back before it ran
        return result

    def _attn(self, w: AttnWeights) -> Sequence[Tensor]:
        if (w.qn is not None) != self.dims.qk_norm:
            raise ConfigError(
                f"qk_norm is {self.dims.qk_norm}, but the layer's head norms are "
                f"{'missing' if w.qn is None else 'given'}"
            )
        return w if self.dims.qk_norm else (*w[:5], self._no_norm, self._no_norm)

    def _int(self, value: int) -> Tensor:
        if value not in self._row0:
            self._row0[value] = ms.Tensor(value, ms.int32)
        return self._row0[value]

    def _scalar(self, value: float) -> Tensor:
        return ms.Tensor(np.asarray(value, np_dtype(self.stream_dtype)))


def merge_slices(slices: Sequence[LossSlice]) -> tuple[np.ndarray, np.ndarray]:
    """Return (lse_T, loss_T) of (max, sumexp, target logit) of each slice, in the order given."""
    tops = np.stack([top for top, _, _ in slices])
    top_T = tops.max(axis=0)
    total_T = np.zeros_like(top_T)
    target_T = np.zeros_like(top_T)
    for top, total, target in slices:
        total_T += total * np.exp(top - top_T)
        target_T += target
    lse_T = top_T + np.log(total_T)
    return lse_T, lse_T - target_T
