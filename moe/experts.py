"""The experts of a layer, one after another over all micro-batches of a chunk.

Forward turns the normed stream "xn" [T, D] and the routing of each micro-batch into the rows "y"
[P, D]; backward turns the gradient "dh" [T, D] of the layer's output into the rows "dx" [P, D] and
the gradient of each slot's combine weight. A row belongs to a slot (`ops/nn/routing.SlotPlan`) on
the rank of its token. Weighing the rows and adding them up by token is the caller's part
(`combine`, `uncombine`). With operator parallelism y, dx and the gradients of combine weights are
this rank's part of a sum over `op`, which is the caller's too. Each expert's weights move once a
pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe.context import StepContext
from moe.params import expert_unit
from moe.schedule import expert_group

_PROJECTIONS = ("gate", "up", "down")


class Experts(ABC):
    """Runs the experts that this rank owns. Called by compute only; collectives may block."""

    def __init__(self, context: StepContext) -> None:
        self._c = context

    def agree(self, layer: int) -> None:
        """Fix which experts are needed, once the layer's routers have run over a chunk.

        An expert is needed when any rank of the stage has a token for it: a lease may gather its
        weights from several ranks, so all of them have to enter it, or none.
        """
        c = self._c
        counts_E = np.zeros(c.model.num_experts, np.int64)
        for m in range(c.micro):
            counts_E += c.routing[layer, m].plan.counts_E
        c.groups.stage.all_reduce(counts_E)
        needed = [expert for expert in c.groups.share.experts if counts_E[expert]]
        c.needed[layer] = needed
        units = [expert_unit(layer, expert) for expert in needed]
        c.engine.resolve(expert_group(layer, c.chunk), units)

    def forward(self, layer: int, kind: str) -> None:
        """From "xn" to "y" of each micro-batch, in slot order; the stage is named after `kind`."""
        c = self._c
        c.enter(kind, f"experts.{layer}")
        self._begin_forward(layer)
        for expert in c.needed[layer]:
            with c.engine.use(expert_unit(layer, expert)) as use:
                ffn = c.ffn(f"model.layers.{layer}.mlp.experts.{expert}", use)
                for m in range(self._num_rounds()):
                    self._expert_forward(layer, expert, m, ffn)
        self._end_forward(layer)

    def backward(self, layer: int) -> list[np.ndarray]:
        """From "dh" to "dx" of each micro-batch, in slot order.

        Returns dw_P of each micro-batch, the gradients of the combine weights in slot order, in
        the dtype of the weights.
        """
        c = self._c
        c.enter("bwd", f"experts.{layer}")
        slots = c.train.micro_batch_tokens * c.model.num_experts_per_tok
        dw = [np.zeros(slots, c.routing[layer, m].w_TK.dtype) for m in range(c.micro)]
        self._begin_backward(layer)
        for expert in c.needed[layer]:
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            unit = expert_unit(layer, expert)
            with c.engine.use(unit, gradient=c.trains(unit)) as use:
                ffn, has_rows = c.ffn(prefix, use), False
                for m in range(self._num_rounds()):
                    for grads in self._expert_backward(layer, expert, m, ffn, dw):
                        has_rows = True
                        for name, grad in zip(_PROJECTIONS, grads):
                            use.add(f"{prefix}.{name}_proj.weight", c.backend.to_numpy(grad))
                if not has_rows:
                    use.add_nothing()
        self._end_backward(layer, dw)
        return dw

    @abstractmethod
    def _num_rounds(self) -> int:
        """How many micro-batches may hold rows for this rank's experts."""

    @abstractmethod
    def _expert_forward(self, layer: int, expert: int, m: int, ffn: Sequence[Any]) -> None:
        """Compute the rows of one expert in micro-batch m, if there are any."""

    @abstractmethod
    def _expert_backward(
        self, layer: int, expert: int, m: int, ffn: Sequence[Any], dw: list[np.ndarray]
    ) -> Iterator[Sequence[Any]]:
        """The same, backward: yields gradients of gate, up and down; none without rows."""

    # Not abstract: without an exchange there is nothing to do.

    def _begin_forward(self, layer: int) -> None:  # noqa: B027
        """Bring the rows of all micro-batches to their experts."""

    def _end_forward(self, layer: int) -> None:  # noqa: B027
        """Bring the results back as "y"."""

    def _begin_backward(self, layer: int) -> None:  # noqa: B027
        """Bring the rows, the gradients of their sums and their weights to their experts."""

    def _end_backward(self, layer: int, dw: list[np.ndarray]) -> None:  # noqa: B027
        """Bring the results back as "dx" and `dw`."""


class LocalExperts(Experts):
    """Every rank owns all experts and computes those of its own tokens."""

    def _num_rounds(self) -> int:
        return self._c.micro

    def _expert_forward(self, layer: int, expert: int, m: int, ffn: Sequence[Any]) -> None:
        c = self._c
        plan, slot = c.routing[layer, m].plan, c.slot(layer, m)
        rows = plan.slots(expert)
        if rows.stop == rows.start:
            return
        x = c.rows("xn", slot, plan.token_of_slot_P[rows], plan.bucket_of(expert))
        y, g, u = c.stages.expert_fwd(x, *ffn)
        c.put_rows("y", m, rows, y)
        if c.saves("g"):
            c.put_rows("g", slot, rows, g)
            c.put_rows("u", slot, rows, u)

    def _expert_backward(
        self, layer: int, expert: int, m: int, ffn: Sequence[Any], dw: list[np.ndarray]
    ) -> Iterator[Sequence[Any]]:
        c = self._c
        routing, slot = c.routing[layer, m], c.slot(layer, m)
        plan = routing.plan
        rows = plan.slots(expert)
        if rows.stop == rows.start:
            return
        padded, chosen = plan.bucket_of(expert), plan.token_of_slot_P[rows]
        x = c.rows("xn", slot, chosen, padded)
        if c.saves("g"):
            g, u = c.rows("g", slot, rows, padded), c.rows("u", slot, rows, padded)
        else:
            _, g, u = c.stages.expert_fwd(x, *ffn)
        w_N = c.backend.wrap(plan.weights(expert, routing.w_TK))
        dout = c.rows("dh", m, chosen, padded)
        dx, dw_N, *grads = c.stages.expert_bwd(x, g, u, w_N, dout, *ffn)
        c.put_rows("dx", m, rows, dx)
        dw[m][rows] = c.backend.to_numpy(dw_N)[: rows.stop - rows.start]
        yield grads
