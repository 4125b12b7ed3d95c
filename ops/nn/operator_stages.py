"""The stage functions of a model whose operators are split over ranks, sums between them included.

The same calls as `Stages`, entered by all ranks of the group in the same order. Each rank holds
whole heads of attention, columns of the gate and up projections with the same rows of the down
projection, and rows of each vocabulary slice; norms and router are whole on every rank. What only
the sum over ranks gives is summed once a token:

    attention's output, and the gradient of its input        attn_fwd, attn_bwd
    the experts' rows y, weighed and added up by token       combine
    the gradients dxn and dw of their input and weights      router_bwd (uncombine gives parts)
    the embedding, over all slices                           complete_embedding
    the gradient dxn of the head's input, over all slices    final_norm_bwd

Stream, logits, routing and gradients of whole tensors are the same bits on every rank.

With `sequence_parallel` rank i keeps the stream and computes the norms of tokens i*T/n to
(i+1)*T/n only: h, h_mid and what is added to them have T/n rows. Everything else has all tokens:
xn, logits, y, dx, and the gradient of the layers' outputs, which experts and attention take whole.
Normed rows are gathered, sums scattered, in the place of sums on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ops.backend import tensor_on
from ops.comm.base import Communicator
from ops.nn.dims import StageDims
from ops.nn.operator_parallel import build_operator_parallel
from ops.nn.primitives import Tensor
from ops.nn.stages import AttnSaved, AttnWeights, LossSlice, Stages


@cache
def _compiled(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of (dims, dtype), kept for the process: jit caches by function."""
    return build_operator_parallel(dims, dtype)


def make_stages(
    dims: StageDims,
    compute_dtype: str,
    ranks: Communicator,
    *,
    sequence_parallel: bool = False,
) -> Stages:
    """Return the stages of this rank of `ranks`, whose numbers of heads `dims` has."""
    if ranks.size == 1:
        return Stages(dims, compute_dtype)
    return OperatorStages(dims, compute_dtype, ranks, sequence_parallel=sequence_parallel)


class OperatorStages(Stages):
    """`Stages` of one of several `ranks`; weights and `dims.num_heads` are this rank's.

    Calls block until the ranks have met. Raises `ConfigError` as `Stages` does, and `CommError`
    when a rank has failed.
    """

    def __init__(
        self,
        dims: StageDims,
        compute_dtype: str,
        ranks: Communicator,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(dims, compute_dtype)
        self._functions = {**self._functions, **_compiled(dims, compute_dtype)}
        self._ranks = ranks
        self._sequence_parallel = sequence_parallel

    # ---- this rank's part, no other rank involved

    def attn_heads_fwd(self, xn_TD: Tensor, w: AttnWeights) -> tuple[Tensor, AttnSaved]:
        """Return (this rank's part of attention's output [T, D] st, what backward needs)."""
        weights = self._attn(w)[1:]
        part, q, k, v, o = self._run("attn_heads_fwd", xn_TD, *weights, *self._tables)
        return part, AttnSaved(q, k, v, o)

    def attn_heads_bwd(
        self, xn_TD: Tensor, w: AttnWeights, saved: AttnSaved, dout_TD: Tensor
    ) -> tuple[Tensor, ...]:
        """Return (part of dxn_TD, dwq, dwk, dwv, dwo, parts of dqn and dkn), all st.

        `dout_TD` st is the gradient of attention's output. Without qk_norm the last two mean
        nothing.
        """
        weights = self._attn(w)[1:]
        result: tuple[Tensor, ...] = self._run(
            "attn_heads_bwd", xn_TD, *weights, *saved, dout_TD, *self._tables
        )
        return result

    def combine_partial(
        self, y_PD: Tensor, pos_TK: Tensor, w_TK: Tensor, shared_TD: Tensor | None = None
    ) -> Tensor:
        """Return the part of sum over k of w[t,k] * y[pos[t,k]], plus shared, [T, D] st."""
        if shared_TD is None:
            return self._run("combine_partial", y_PD, pos_TK, w_TK)
        return self._run("combine_partial_shared", y_PD, pos_TK, w_TK, shared_TD)

    # ---- attention

    def attn_fwd(self, h_TD: Tensor, w: AttnWeights) -> tuple[Tensor, AttnSaved]:
        """Return (h_mid_TD, what backward needs) as `Stages`; `saved` is of this rank's heads."""
        xn_TD = self._gather(self._norm(h_TD, w.ln))
        part_TD, saved = self.attn_heads_fwd(xn_TD, w)
        return self._add_sum(h_TD, part_TD), saved

    def attn_bwd(
        self, h_TD: Tensor, w: AttnWeights, saved: AttnSaved, dh_mid_TD: Tensor
    ) -> tuple[Tensor, AttnWeights]:
        """Return (dh_TD of all tokens, gradients of this rank's weights) as `Stages`."""
        dout_TD = self._gather(dh_mid_TD)
        xn_TD = self._gather(self._norm(h_TD, w.ln))
        dxn, *grads = self.attn_heads_bwd(xn_TD, w, saved, dout_TD)
        norms: Sequence[Tensor] = grads[4:] if self.dims.qk_norm else ()
        if self._sequence_parallel:
            dh, dln = self._norm_bwd(h_TD, w.ln, tensor_on(self._sum(dxn)))
            dln, *norms = self._sum_together(dln, *norms)
        else:
            dxn, *norms = self._sum_together(dxn, *norms)
            dh, dln = self._norm_bwd(h_TD, w.ln, dxn)
        dh_TD = self._gather(self._add(dh_mid_TD, dh.asnumpy()))
        return dh_TD, AttnWeights(dln, *grads[:4], *(norms or (None, None)))

    # ---- router and experts

    def router_fwd(self, h_mid_TD: Tensor, ln_D: Tensor, wr_ED: Tensor) -> tuple[Tensor, Tensor]:
        """Return (xn_TD, logits_TE) of all tokens, as `Stages`."""
        xn_TD, logits_TE = super().router_fwd(h_mid_TD, ln_D, wr_ED)
        return self._gather(xn_TD), self._gather(logits_TE)

    def agree_choice(self, idx_TK: np.ndarray) -> np.ndarray:
        """Return the choice of the group's first rank; `idx_TK` is overwritten."""
        self._ranks.broadcast(idx_TK, 0)
        return idx_TK

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
        """Return (dh_mid_TD, dln_D, dwr_ED) as `Stages`; `dxn_TD` and `dw_TK` are parts."""
        if not self._sequence_parallel:
            dxn_TD, dw_TK = self._sum_together(dxn_TD, dw_TK)
            return super().router_bwd(
                h_mid_TD, ln_D, wr_ED, logits_TE, idx_TK, dxn_TD, dw_TK, d_balance, d_z
            )
        own_dxn = tensor_on(self._sum(dxn_TD))
        (dw_TK,) = self._sum_together(dw_TK)
        scalars = self._scalar(d_balance), self._scalar(d_z)
        dlogits_TE = self._run("router_logits_bwd", logits_TE, idx_TK, dw_TK, *scalars)
        own_dlogits = self.own_tokens(dlogits_TE)
        dh, *grads = self._run("router_norm_bwd", h_mid_TD, ln_D, wr_ED, own_dlogits, own_dxn)
        dln, dwr = self._sum_together(*grads)
        return dh, dln, dwr

    def combine(
        self,
        h_mid_TD: Tensor,
        y_PD: Tensor,
        pos_TK: Tensor,
        w_TK: Tensor,
        shared_TD: Tensor | None = None,
    ) -> Tensor:
        """Return h_mid plus the sum over ranks of `combine_partial`."""
        return self._add_sum(h_mid_TD, self.combine_partial(y_PD, pos_TK, w_TK, shared_TD))

    # ---- the model's ends

    def complete_embedding(self, x_TD: Tensor) -> Tensor:
        """Return the sum over ranks of the rows that each of them has."""
        return tensor_on(self._sum(x_TD))

    def final_norm_fwd(self, h_TD: Tensor, ln_D: Tensor) -> Tensor:
        """Return xn_TD ct of all tokens."""
        return self._gather(self._norm(h_TD, ln_D))

    def final_norm_bwd(self, h_TD: Tensor, ln_D: Tensor, dxn_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dh_TD of all tokens, dln_D) st; `dxn_TD` is a part and is overwritten."""
        dh, dln = self._norm_bwd(h_TD, ln_D, tensor_on(self._sum(dxn_TD)))
        if self._sequence_parallel:
            (dln,) = self._sum_together(dln)
        return self._gather(dh), dln

    def gather_slices(self, slices: Sequence[LossSlice]) -> list[LossSlice]:
        """Return every rank's part of every slice, in the order of the vocabulary's rows."""
        mine = np.stack([np.stack(part) for part in slices])
        found = np.empty((self._ranks.size, *mine.shape), mine.dtype)
        self._ranks.all_gather(mine, found)
        return [tuple(parts[n]) for n in range(len(slices)) for parts in found]

    # ---- where the ranks meet

    def num_own_tokens(self, num_tokens: int) -> int:
        """How many rows the stream of this rank has, of a micro-batch of `num_tokens`."""
        return num_tokens // self._ranks.size if self._sequence_parallel else num_tokens

    def own_tokens(self, x_TD: Tensor) -> Tensor:
        """Return the rows of this rank's stream, of a tensor that has all tokens."""
        if not self._sequence_parallel:
            return x_TD
        return tensor_on(self._own(x_TD.asnumpy()))

    def _own(self, x_TD: np.ndarray) -> np.ndarray:
        rows = self.num_own_tokens(len(x_TD))
        return x_TD[self._ranks.rank * rows : (self._ranks.rank + 1) * rows]

    def _gather(self, own_TD: Tensor) -> Tensor:
        """The rows of all ranks' tokens, where each rank has those of its own."""
        if not self._sequence_parallel:
            return own_TD
        own = own_TD.asnumpy()
        rows = np.empty((len(own) * self._ranks.size, *own.shape[1:]), own.dtype)
        self._ranks.all_gather(own, rows)
        return tensor_on(rows)

    def _sum(self, part_TD: Tensor) -> np.ndarray:
        """The sum over ranks of this rank's tokens, in the memory of `part_TD`."""
        array = part_TD.asnumpy()
        if not self._sequence_parallel:
            self._ranks.all_reduce(array)
            return array
        own = self._own(array)
        self._ranks.reduce_scatter(array, own)
        return own

    def _sum_together(self, *parts: Tensor) -> list[Tensor]:
        """Sums over ranks of several tensors of one dtype, in one all-reduce."""
        arrays = [part.asnumpy() for part in parts]
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        self._ranks.all_reduce(flat)
        ends = np.cumsum([array.size for array in arrays])[:-1]
        return [
            tensor_on(piece.reshape(array.shape))
            for piece, array in zip(np.split(flat, ends), arrays)
        ]

    def _add_sum(self, h_TD: Tensor, part_TD: Tensor) -> Tensor:
        return self._add(h_TD, self._sum(part_TD))

    def _add(self, h_TD: Tensor, x_TD: np.ndarray) -> Tensor:
        """h + x, in the memory of x."""
        return tensor_on(np.add(h_TD.asnumpy(), x_TD, out=x_TD))

    def _norm(self, h_TD: Tensor, ln_D: Tensor) -> Tensor:
        return super().final_norm_fwd(h_TD, ln_D)  # attention's norm is the same function

    def _norm_bwd(self, h_TD: Tensor, ln_D: Tensor, dxn_TD: Tensor) -> tuple[Tensor, Tensor]:
        return super().final_norm_bwd(h_TD, ln_D, dxn_TD)
