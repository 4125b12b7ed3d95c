"""Experts on several ranks: rows travel to the owners of their experts, results travel back.

Rank i of the group `ep` owns the i-th run of equally many experts. A rank's rows of a micro-batch
are in slot order, hence sorted by expert, hence by owner: what goes to one owner is contiguous and
nothing is permuted before sending. An owner receives, for each micro-batch, the rows of source 0,
then of source 1, ...; the rows of one expert are taken from these in the order (source, slot).
Experts start after the rows of all micro-batches have arrived, so their weights move once a pass.
The order of rows is a function of the routing and the mesh alone, and so are all bits.

Shapes: the rows of an expert in a micro-batch, over all sources, are computed in pieces of at most
T rows, each padded to its bucket (`ops/nn/routing.bucket`). That is never more shapes and never
more device memory than without expert parallelism: one bucket for all ep * T rows would compile
about 4 * log2(ep) more shapes and take ep times the workspace; a bucket for each source would pad
ep times as often.

Backward sends x a second time. Keeping what forward received would take ep * T * min(K, E / ep)
rows in the worst case for every layer and micro-batch, although about T * K arrive; "xn", from
which the rows are taken, is kept (or recomputed) anyway. For the same reason the experts'
projections g, u are never kept here: `recompute: none` recomputes them.

The exchange is synchronous: overlapping it did not pay where it was measured (two ranks on two busy
cores). 1.5 MiB take 0.8 ms, 6 MiB 1.7 ms, and beside matrix products of 120 ms a second thread
won nothing outside the noise. A step of `tiny-moe` (four micro-batches a rank) exchanges 50 MB in
92 calls, at these rates about 60 ms of 7 s; what `all_to_all` waits for besides is the slower
rank, and that no overlap hides. All micro-batches of a layer are exchanged in one go, so ranks
wait for each other once a layer, not once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.context import StepContext
from moe.experts import Experts, LocalExperts
from moe.schedule import chunk_micro_batches
from ops.nn.routing import bucket

_CAST_ROWS = 1024


def make_experts(context: StepContext) -> Experts:
    """The experts of this mesh."""
    if context.groups.ep.size > 1:
        return ExchangedExperts(context)
    return LocalExperts(context)


@dataclass(frozen=True)
class Incoming:
    """The rows of one micro-batch at the owner of `counts_SX.shape[1]` experts.

    `counts_SX` i64: rows from source s for the owner's x-th expert. They lie source by source,
    within a source expert by expert.
    """

    counts_SX: NDArray[np.int64]

    @property
    def of_source(self) -> list[int]:
        """Rows from each source."""
        return [int(count) for count in self.counts_SX.sum(axis=1)]

    @property
    def total(self) -> int:
        """All rows."""
        return int(self.counts_SX.sum())

    def rows(self, expert: int) -> NDArray[np.int64]:
        """Return the rows of the owner's `expert`-th expert, by source, then in slot order."""
        flat = self.counts_SX.reshape(-1)
        starts_SX = (np.cumsum(flat) - flat).reshape(self.counts_SX.shape)
        places = zip(starts_SX[:, expert], self.counts_SX[:, expert])
        return np.concatenate([np.arange(start, start + count) for start, count in places])

    def pieces(self, expert: int, rows_max: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of an expert in pieces of at most `rows_max`; nothing without rows."""
        rows = self.rows(expert)
        for first in range(0, len(rows), rows_max):
            yield rows[first : first + rows_max]


def outgoing_counts(counts_E: NDArray[np.int64], owners: int) -> NDArray[np.int64]:
    """Return counts [owners, E / owners] of the rows that each owner's experts get."""
    return counts_E.reshape(owners, -1)


class ExchangedExperts(Experts):
    """Each rank of `ep` owns some experts and computes them for the tokens of the whole group.

    All ranks of the group run the same number of exchanges, one a micro-batch that any of them
    may have; a rank without that micro-batch sends no rows.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._ep = context.groups.ep
        self._owned = context.groups.share.experts
        self._rounds = chunk_micro_batches(context.train)
        self._incoming: dict[tuple[int, int], list[Incoming]] = {}
        self._sent: dict[tuple[int, int], NDArray[np.int64]] = {}

    def agree(self, layer: int) -> None:
        """Fix which experts are needed, and tell their owners how many rows will come."""
        super().agree(layer)
        c, owners = self._c, self._ep.size
        send = np.zeros((owners, self._rounds, len(self._owned)), np.int64)
        for m in range(c.micro):
            send[:, m] = outgoing_counts(c.routing[layer, m].plan.counts_E, owners)
        recv = np.empty_like(send)
        counts = [send[0].size] * owners
        self._ep.all_to_all(send, counts, recv, counts)
        key = layer, c.lane
        self._sent[key] = send.sum(axis=2)
        self._incoming[key] = [Incoming(recv[:, m]) for m in range(self._rounds)]

    # ---- rows on their way

    def _begin_forward(self, layer: int) -> None:
        for m in range(self._rounds):
            self._to_owners(layer, m, self._gather(layer, m, "xn", "y"), "recv_x")

    def _end_forward(self, layer: int) -> None:
        for m in range(self._rounds):
            self._to_sources(layer, m, "recv_x", self._slots(layer, m, "y"))

    def _begin_backward(self, layer: int) -> None:
        c = self._c
        for m in range(self._rounds):
            self._to_owners(layer, m, self._gather(layer, m, "xn", "dx"), "recv_x")
            self._to_owners(layer, m, self._gather(layer, m, "dh", "y"), "recv_dout")
            weights = np.empty((0, 1), self._host("recv_w", m).dtype)
            if m < c.micro:
                routing = c.routing[layer, m]
                weights = routing.w_TK.reshape(-1, 1)[routing.plan.choice_P]
            self._to_owners(layer, m, weights, "recv_w")

    def _end_backward(self, layer: int, dw: list[np.ndarray]) -> None:
        nothing = np.empty(0, self._host("recv_w", 0).dtype)
        for m in range(self._rounds):
            self._to_sources(layer, m, "recv_x", self._slots(layer, m, "dx"))
            self._to_sources(layer, m, "recv_w", dw[m] if m < len(dw) else nothing)

    def _host(self, name: str, m: int) -> np.ndarray:
        return self._c.engine.activations.host(name, m)

    def _slots(self, layer: int, m: int, name: str) -> np.ndarray:
        """The slots of `name`: all of a micro-batch this rank has, none of another."""
        return self._host(name, m)[: self._sent[layer, self._c.lane][:, m].sum()]

    def _gather(self, layer: int, m: int, source: str, target: str) -> np.ndarray:
        """Rows of a [T, D] array in slot order, in `target` [P, D], which is free at this time."""
        c, out = self._c, self._slots(layer, m, target)
        if m < c.micro:
            index = m if source == "dh" else c.slot(layer, m)
            _take(self._host(source, index), c.routing[layer, m].plan.token_of_slot_P, out)
        return out

    def _to_owners(self, layer: int, m: int, rows: np.ndarray, name: str) -> None:
        incoming = self._incoming[layer, self._c.lane][m]
        target = self._host(name, m)
        width = target.shape[1]
        sent = [int(count) * width for count in self._sent[layer, self._c.lane][:, m]]
        received = [count * width for count in incoming.of_source]
        self._ep.all_to_all(rows, sent, target[: incoming.total], received)

    def _to_sources(self, layer: int, m: int, name: str, out: np.ndarray) -> None:
        incoming = self._incoming[layer, self._c.lane][m]
        source = self._host(name, m)
        width = source.shape[1]
        sent = [count * width for count in incoming.of_source]
        received = [int(count) * width for count in self._sent[layer, self._c.lane][:, m]]
        self._ep.all_to_all(source[: incoming.total], sent, out, received)

    # ---- rows at their expert

    def _num_rounds(self) -> int:
        return self._rounds

    def _pieces(self, layer: int, expert: int, m: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Rows and bucket of each piece of an expert's rows."""
        tokens = self._c.train.micro_batch_tokens
        for rows in self._incoming[layer, self._c.lane][m].pieces(
            expert - self._owned.start, tokens
        ):
            yield rows, bucket(len(rows), tokens)

    def _expert_forward(self, layer: int, expert: int, m: int, ffn: Sequence[Any]) -> None:
        c = self._c
        for rows, padded in self._pieces(layer, expert, m):
            y, _, _ = c.stages.expert_fwd(c.rows("recv_x", m, rows, padded), *ffn)
            c.put_rows("recv_x", m, rows, y)  # in place of x, which forward needs no more

    def _expert_backward(
        self, layer: int, expert: int, m: int, ffn: Sequence[Any], dw: list[np.ndarray]
    ) -> Iterator[Sequence[Any]]:
        c = self._c
        activations = c.engine.activations
        for rows, padded in self._pieces(layer, expert, m):
            x = c.rows("recv_x", m, rows, padded)
            _, g, u = c.stages.expert_fwd(x, *ffn)
            weights = activations.get_rows("recv_w", m, rows, padded)
            dout = activations.get_rows("recv_dout", m, rows, padded)
            dx, dw_N, *grads = c.stages.expert_bwd(
                x,
                g,
                u,
                c.backend.wrap(weights.reshape(-1)),
                # The expert computes in the dtype that was sent; this only restores the type.
                c.backend.wrap(dout.astype(weights.dtype, copy=False)),
                *ffn,
            )
            c.put_rows("recv_x", m, rows, dx)
            dw_N1 = c.backend.to_numpy(dw_N).reshape(-1, 1)[: len(rows)]
            activations.put_rows("recv_w", m, rows, dw_N1)
            yield grads


def _take(source: np.ndarray, rows: NDArray[np.int32], out: np.ndarray) -> None:
    """Copy rows into `out`, cast to its dtype, without a temporary of its size."""
    if source.dtype == out.dtype:
        np.take(source, rows, axis=0, out=out, mode="clip")  # "raise" would buffer `out`
        return
    for first in range(0, len(rows), _CAST_ROWS):
        out[first : first + _CAST_ROWS] = source[rows[first : first + _CAST_ROWS]]
