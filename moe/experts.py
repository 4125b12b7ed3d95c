"""The experts of a layer, one after another over all micro-batches of a chunk.

Forward turns the normed stream "xn" [T, D] and the routing of each micro-batch into the rows "y"
[P, D]; backward turns the gradient "dh" [T, D] of the layer's output into the rows "dx" [P, D] and
the gradient of each slot's combine weight. A row belongs to a slot (`ops/nn/routing.SlotPlan`) on
the rank of its token. Weighing the rows and adding them up by token is the caller's part
(`combine`, `uncombine`). Each expert's weights move once a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe.context import StepContext
from moe.params import expert_unit

PROJECTIONS = ("gate", "up", "down")


class LocalExperts:
    """Experts of the tokens of this rank, on this rank. Called by compute only."""

    def __init__(self, context: StepContext) -> None:
        self._c = context

    def forward(self, layer: int, kind: str) -> None:
        """From "xn" to "y" of each micro-batch, in slot order; the stage is named after `kind`."""
        c = self._c
        c.enter(kind, f"experts.{layer}")
        for expert in c.needed_experts(layer):
            with c.engine.use(expert_unit(layer, expert)) as use:
                ffn = c.ffn(f"model.layers.{layer}.mlp.experts.{expert}", use)
                for m in range(c.micro):
                    plan = c.routing[layer, m].plan
                    rows = plan.slots(expert)
                    if rows.stop == rows.start:
                        continue
                    slot = c.slot(layer, m)
                    x = c.rows("xn", slot, plan.token_of_slot_P[rows], plan.bucket_of(expert))
                    y, g, u = c.stages.expert_fwd(x, *ffn)
                    c.put_rows("y", m, rows, y)
                    if c.saves("g"):
                        c.put_rows("g", slot, rows, g)
                        c.put_rows("u", slot, rows, u)

    def backward(self, layer: int) -> list[np.ndarray]:
        """From "dh" to "dx" of each micro-batch, in slot order.

        Returns dw_P of each micro-batch, the gradients of the combine weights in slot order, in
        the dtype of the weights.
        """
        c = self._c
        c.enter("bwd", f"experts.{layer}")
        slots = c.train.micro_batch_tokens * c.model.num_experts_per_tok
        dw = [np.zeros(slots, c.routing[layer, m].w_TK.dtype) for m in range(c.micro)]
        for expert in c.needed_experts(layer):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            unit = expert_unit(layer, expert)
            with c.engine.use(unit, gradient=c.trains(unit)) as use:
                ffn = c.ffn(prefix, use)
                for m in range(c.micro):
                    rows = c.routing[layer, m].plan.slots(expert)
                    if rows.stop == rows.start:
                        continue
                    grads = self._rows_back(layer, expert, m, ffn, dw[m])
                    for name, grad in zip(PROJECTIONS, grads):
                        use.add(f"{prefix}.{name}_proj.weight", c.backend.to_numpy(grad))
        return dw

    def _rows_back(
        self, layer: int, expert: int, m: int, ffn: Sequence[Any], dw_P: np.ndarray
    ) -> Sequence[Any]:
        """Fill the rows of an expert in "dx" and `dw_P`; returns its weights' gradients."""
        c = self._c
        routing, slot = c.routing[layer, m], c.slot(layer, m)
        plan = routing.plan
        rows, padded = plan.slots(expert), plan.bucket_of(expert)
        chosen = plan.token_of_slot_P[rows]
        x = c.rows("xn", slot, chosen, padded)
        if c.saves("g"):
            g, u = c.rows("g", slot, rows, padded), c.rows("u", slot, rows, padded)
        else:
            _, g, u = c.stages.expert_fwd(x, *ffn)
        w_N = c.backend.wrap(plan.weights(expert, routing.w_TK))
        dx, dw_N, *grads = c.stages.expert_bwd(x, g, u, w_N, c.rows("dh", m, chosen, padded), *ffn)
        c.put_rows("dx", m, rows, dx)
        dw_P[rows] = c.backend.to_numpy(dw_N)[: rows.stop - rows.start]
        return grads
