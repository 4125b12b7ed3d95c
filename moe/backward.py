"""The backward pass, stage by stage, in reverse; gradients leave with the lease that made them.

Under `recompute: full` the dense stages (and, inside a segment, the experts) of a segment run again
first, with the same functions, so the saved values and all later bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from moe.context import StepContext
from moe.forward import Forward
from moe.params import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORM_UNIT,
    embedding_units,
    head_units,
)
from moe.pipeline_parallel import TiedUse
from offload.parts import UnitUse


class Backward:
    """Runs backward stages. `scale` multiplies every gradient (the loss scale)."""

    def __init__(self, context: StepContext, forward: Forward) -> None:
        self._c = context
        self._forward = forward
        self._dw: list[np.ndarray] = []

    def run(
        self,
        tokens: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        scale: float,
        batch_tokens: int,
        batch_sequences: int,
    ) -> None:
        """Backward of mean token loss + balance and z losses, means over the whole batch."""
        c = self._c
        share, stream = c.groups.share, self._forward.stream
        if share.has_head:
            self._head(targets, scale / batch_tokens)
        d_balance = scale * c.model.moe_aux_loss_coeff / batch_sequences
        d_z = scale * c.model.moe_z_loss_coeff / batch_sequences
        for segment in reversed(c.segments()):
            if c.train.recompute == "full":
                for layer in segment:
                    self._forward.dense(layer, "redo", None)
                    if layer != segment[-1]:
                        self._forward.experts(layer, "redo")
            for layer in reversed(segment):
                stream.receive_gradients(layer + 1)
                self._dw = self._forward.expert_rows.backward(layer)
                self._dense(layer, d_balance, d_z)
        if share.has_embedding:
            self._embed(tokens)
        self._forward.tied.send_gradients()

    @contextmanager
    def _lease(self, unit: str, use: int = 0) -> Iterator[UnitUse]:
        """Lease a dense unit for its gradients, which are zeros without a micro-batch."""
        c = self._c
        with c.engine.use(unit, gradient=c.trains(unit), use=use) as held:
            if not c.micro:
                held.add_nothing()
            yield held

    def _head(self, targets: Sequence[np.ndarray], dscale: float) -> None:
        c = self._c
        name = EMBEDDING if c.model.tie_word_embeddings else HEAD
        units = zip(c.slice_rows(), head_units(c.model))
        for number, ((row0, _), unit) in enumerate(units):
            with self._head_slice(number, unit) as use:
                for m, targets_T in enumerate(targets):
                    lse_T = c.lse[m]
                    dxn, dw = c.stages.head_slice_bwd(
                        c.get("xn_out", m),
                        use.weights[name],
                        c.backend.wrap(targets_T),
                        row0,
                        c.backend.wrap(lse_T),
                        c.backend.wrap(np.full_like(lse_T, dscale)),
                    )
                    if number:
                        dxn = c.add(c.get("dxn_out", m), dxn)
                    c.put("dxn_out", m, dxn)
                    use.add(name, c.backend.to_numpy(dw))
        c.enter("bwd", NORM_UNIT)
        with self._lease(NORM_UNIT) as use:
            for m in range(c.micro):
                dh, dln = c.stages.final_norm_bwd(
                    c.get("h_out", m), use.weights[FINAL_NORM], c.get("dxn_out", m)
                )
                c.put("dh", m, dh)
                use.add(FINAL_NORM, c.backend.to_numpy(dln))

    @contextmanager
    def _head_slice(self, number: int, unit: str) -> Iterator[UnitUse | TiedUse]:
        """Weights and gradient of a head slice: a lease, or the copy of a tied one."""
        c = self._c
        if self._forward.tied.is_copied:
            with self._forward.tied.use(number) as copy:
                yield copy
        else:
            c.enter("bwd head", unit)
            with self._lease(unit) as use:
                yield use

    def _dense(self, layer: int, d_balance: float, d_z: float) -> None:
        c = self._c
        unit, prefix = c.layer_unit(layer), f"model.layers.{layer}"
        router = (f"{prefix}.post_attention_layernorm.weight", f"{prefix}.mlp.gate.weight")
        c.enter("bwd", unit)
        with self._lease(unit) as use:
            weights = c.attention(layer, use)
            for m in range(c.micro):
                routing, slot = c.routing[layer, m], c.slot(layer, m)
                dh, pos = c.get("dh", m), c.backend.wrap(routing.plan.pos_TK)
                dx_shared = self._shared(layer, m, use, dh)
                dxn = c.stages.uncombine(c.get("dx", m), pos, dx_shared)
                dmid, *grads = c.stages.router_bwd(
                    c.get("h_mid", slot),
                    use.weights[router[0]],
                    use.weights[router[1]],
                    c.get("logits", slot),
                    c.backend.wrap(routing.idx_TK),
                    dxn,
                    c.backend.wrap(routing.plan.by_token(self._dw[m])),
                    d_balance,
                    d_z,
                )
                for name, grad in zip(router, grads):
                    use.add(name, c.backend.to_numpy(grad))
                self._attention(layer, m, use, weights, c.add(c.stages.own_tokens(dh), dmid))

    def _attention(self, layer: int, m: int, use: Any, weights: Any, dh_mid: Any) -> None:
        c = self._c
        slot, prefix = c.slot(layer, m), f"model.layers.{layer}"
        saved = c.attention_saved(slot)
        dh, grads = c.stages.attn_bwd(c.get(*c.stream_in(layer, m)), weights, saved, dh_mid)
        self._forward.stream.put_gradient(layer, m, dh)
        use.add(f"{prefix}.input_layernorm.weight", c.backend.to_numpy(grads.ln))
        for name, grad in zip("qkvo", (grads.wq, grads.wk, grads.wv, grads.wo)):
            use.add(f"{prefix}.self_attn.{name}_proj.weight", c.backend.to_numpy(grad))
        if c.model.qk_norm:
            use.add(f"{prefix}.self_attn.q_norm.weight", c.backend.to_numpy(grads.qn))
            use.add(f"{prefix}.self_attn.k_norm.weight", c.backend.to_numpy(grads.kn))

    def _shared(self, layer: int, m: int, use: Any, dout: Any) -> Any:
        c = self._c
        if not c.model.n_shared_experts:
            return None
        slot, prefix = c.slot(layer, m), f"model.layers.{layer}.mlp.shared_experts"
        xn, ffn = c.get("xn", slot), c.ffn(prefix, use)
        if c.saves("sg"):
            g, u = c.get("sg", slot), c.get("su", slot)
        else:
            _, g, u = c.stages.shared_fwd(xn, *ffn)
        dx, *grads = c.stages.shared_bwd(xn, g, u, dout, *ffn)
        for name, grad in zip(("gate", "up", "down"), grads):
            use.add(f"{prefix}.{name}_proj.weight", c.backend.to_numpy(grad))
        return dx

    def _embed(self, tokens: Sequence[np.ndarray]) -> None:
        c = self._c
        tied_here = c.model.tie_word_embeddings and c.groups.share.has_head
        use_number = 1 if tied_here else 0
        slices = zip(c.slice_rows(), embedding_units(c.model))
        for number, ((row0, rows), unit) in enumerate(slices):
            c.enter("bwd", unit)
            with self._lease(unit, use_number) as use:
                for m, tokens_T in enumerate(tokens):
                    dw = c.stages.embed_bwd(c.backend.wrap(tokens_T), c.get("dh", m), row0, rows)
                    use.add(EMBEDDING, c.backend.to_numpy(dw))
                self._forward.tied.add_gradient(number, use)
