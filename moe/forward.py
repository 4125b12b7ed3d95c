"""The forward pass, stage by stage, layer-major over the micro-batches of a chunk.

Shape suffixes as in `ops/nn/dims.py`. Every stage takes its inputs from the host, leases one unit,
computes all micro-batches, and saves what later stages need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from moe.context import LossSums, Routing, StepContext
from moe.dispatch import make_experts
from moe.params import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORM_UNIT,
    embedding_units,
    head_units,
)
from moe.pipeline_parallel import Mailbox, StreamLinks, TiedEmbedding, TiedUse
from offload.parts import UnitUse
from ops.nn.routing import SlotPlan, choose_experts
from ops.nn.stages import LossSlice, merge_slices

UNCOUNTED = -1
"""The target of a token whose loss does not count; in no vocabulary slice."""


class Forward:
    """Runs forward stages; `tokens` and `targets` are lists of flat i32 [T], one a micro-batch.

    Targets that are `UNCOUNTED` are for passes without a backward one.
    """

    def __init__(self, context: StepContext) -> None:
        self._c = context
        self.expert_rows = make_experts(context)
        self.mail = Mailbox(context)
        self.stream = StreamLinks(context, self.mail)
        self.tied = TiedEmbedding(context, self.mail)

    def run(self, tokens: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> LossSums:
        """Forward all that this rank has; returns its loss sums, saves what backward needs."""
        sums, share = LossSums(), self._c.groups.share
        self.tied.receive_weights()
        if share.has_embedding:
            self._embed(tokens)
        for layer in share.layers:
            self.dense(layer, "fwd", sums)
            self.experts(layer, "fwd")
        if share.has_head:
            self._head(targets, sums)
        return sums

    def _embed(self, tokens: Sequence[np.ndarray]) -> None:
        c = self._c
        units = embedding_units(c.model)
        for number, ((row0, _), unit) in enumerate(zip(c.slice_rows(), units)):
            c.enter("fwd", unit)
            with c.engine.use(unit) as use:
                self.tied.send_weights(number, use.weights[EMBEDDING])
                for m, tokens_T in enumerate(tokens):
                    weight = use.weights[EMBEDDING]
                    h = c.stages.embed_fwd(c.backend.wrap(tokens_T), weight, row0)
                    sum_so_far = ("embedded", m) if c.saves("embedded") else c.stream_in(0, m)
                    if number:
                        h = c.add(c.get(*sum_so_far), h)
                    if number < len(units) - 1:
                        c.put(*sum_so_far, h)
                    else:
                        c.put(*c.stream_in(0, m), c.stages.complete_embedding(h))

    def dense(self, layer: int, kind: str, sums: LossSums | None) -> None:
        """Attention, router and shared experts of a layer; `redo` repeats it before backward."""
        c = self._c
        unit = c.layer_unit(layer)
        prefix = f"model.layers.{layer}"
        c.enter(kind, unit)
        with c.engine.use(unit) as use:
            weights = c.attention(layer, use)
            for m in range(c.micro):
                if kind == "fwd":
                    self.stream.receive(layer, m)
                slot = c.slot(layer, m)
                h_mid, saved = c.stages.attn_fwd(c.get(*c.stream_in(layer, m)), weights)
                for name, tensor in zip(("q", "k", "v", "o", "h_mid"), (*saved, h_mid)):
                    c.put(name, slot, tensor)
                xn, logits = c.stages.router_fwd(
                    h_mid,
                    use.weights[f"{prefix}.post_attention_layernorm.weight"],
                    use.weights[f"{prefix}.mlp.gate.weight"],
                )
                c.put("xn", slot, xn)
                c.put("logits", slot, logits)
                self._route(layer, m, logits, sums)
                if c.model.n_shared_experts:
                    ffn = c.ffn(f"{prefix}.mlp.shared_experts", use)
                    y, g, u = c.stages.shared_fwd(xn, *ffn)
                    c.put("shared", m, y)
                    if c.saves("sg"):
                        c.put("sg", slot, g)
                        c.put("su", slot, u)
        if kind == "fwd":
            self.expert_rows.agree(layer)

    def _route(self, layer: int, m: int, logits: object, sums: LossSums | None) -> None:
        c = self._c
        idx = choose_experts(c.backend.to_numpy(logits), c.model.num_experts_per_tok)
        idx = c.stages.agree_choice(idx)
        w, balance, z = c.stages.router_weights(logits, c.backend.wrap(idx))
        plan = SlotPlan.of(idx, c.model.num_experts)
        c.routing[layer, m] = Routing(plan, idx, np.array(c.backend.to_numpy(w)))
        if sums is not None:
            sums.balance += float(c.backend.to_numpy(balance))
            sums.z += float(c.backend.to_numpy(z))

    def experts(self, layer: int, kind: str) -> None:
        """The needed experts one after another, then their weighted sum into the stream."""
        c = self._c
        self.expert_rows.forward(layer, kind)
        for m in range(c.micro):
            routing = c.routing[layer, m]
            out = c.stages.combine(
                c.get("h_mid", c.slot(layer, m)),
                c.get("y", m),
                c.backend.wrap(routing.plan.pos_TK),
                c.backend.wrap(routing.w_TK),
                c.get("shared", m) if c.model.n_shared_experts else None,
            )
            self.stream.put(layer + 1, m, out)

    def _head(self, targets: Sequence[np.ndarray], sums: LossSums) -> None:
        c = self._c
        c.enter("fwd", NORM_UNIT)
        with c.engine.use(NORM_UNIT) as use:
            for m in range(c.micro):
                xn = c.stages.final_norm_fwd(c.get("h_out", m), use.weights[FINAL_NORM])
                c.put("xn_out", m, xn)
        slices: list[list[LossSlice]] = [[] for _ in range(c.micro)]
        name = EMBEDDING if c.model.tie_word_embeddings else HEAD
        units = zip(c.slice_rows(), head_units(c.model))
        for number, ((row0, _), unit) in enumerate(units):
            with self._head_slice(number, unit) as use:
                for m, targets_T in enumerate(targets):
                    found = c.stages.head_slice_fwd(
                        c.get("xn_out", m), use.weights[name], c.backend.wrap(targets_T), row0
                    )
                    slices[m].append(tuple(np.array(c.backend.to_numpy(x)) for x in found))
        for m in range(c.micro):
            lse_T, loss_T = merge_slices(c.stages.gather_slices(slices[m]))
            c.lse[m] = lse_T
            counted_T = targets[m] != UNCOUNTED
            sums.token_loss += float(np.sum(loss_T[counted_T], dtype=np.float64))

    @contextmanager
    def _head_slice(self, number: int, unit: str) -> Iterator[UnitUse | TiedUse]:
        """The weights of a head slice: a lease, or the copy of a tied one."""
        if self.tied.is_copied:
            with self.tied.use(number) as copy:
                yield copy
        else:
            self._c.enter("fwd head", unit)
            with self._c.engine.use(unit) as use:
                yield use
