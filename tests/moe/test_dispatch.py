"""The exchange of rows as pure arithmetic: who sends what, and where an expert finds its rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import TrainConfig
from moe.dispatch import Incoming, _take, outgoing_counts
from moe.memory import activation_specs, received_rows
from ops.nn.routing import SlotPlan
from tests.moe.test_mesh import make_mesh, make_model


@st.composite
def routings(draw) -> tuple[int, int, list[np.ndarray]]:
    """(owners, experts, choices idx_TK of each source); a source may have no micro-batch (T=0)."""
    owners = draw(st.sampled_from((1, 2, 4)))
    experts = owners * draw(st.integers(1, 4))
    k = draw(st.integers(1, min(experts, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = draw(st.integers(1, 9))
    chosen = []
    for _ in range(owners):
        # A skewed router, up to all tokens to the same experts.
        bias = draw(st.sampled_from((0.0, 3.0, 1e9))) * np.arange(experts)
        logits = rng.standard_normal((tokens * draw(st.integers(0, 1)), experts)) + bias
        order = np.argsort(-logits, axis=1, kind="stable")
        chosen.append(np.ascontiguousarray(order[:, :k], np.int32))
    return owners, experts, chosen


def exchange(owners: int, experts: int, chosen: list[np.ndarray]):
    """The rows (source, token, expert) that each owner receives, and its `Incoming`."""
    plans = [SlotPlan.of(idx, experts) for idx in chosen]
    sends = []
    for source, (plan, idx) in enumerate(zip(plans, chosen, strict=True)):
        tokens = plan.token_of_slot_P
        rows = np.stack([np.full_like(tokens, source), tokens, idx.reshape(-1)[plan.choice_P]], 1)
        counts = outgoing_counts(plan.counts_E, owners).sum(axis=1)
        sends.append(np.split(rows, np.cumsum(counts)[:-1]))
    for owner in range(owners):
        incoming = Incoming(
            np.stack([outgoing_counts(plan.counts_E, owners)[owner] for plan in plans])
        )
        yield np.concatenate([parts[owner] for parts in sends]), incoming


@settings(max_examples=200, deadline=None)
@given(routings())
def test_each_expert_finds_its_rows_in_the_order_of_source_and_slot(routing):
    owners, experts, chosen = routing
    each = experts // owners
    for owner, (rows, incoming) in enumerate(exchange(owners, experts, chosen)):
        assert incoming.total == sum(incoming.of_source) == len(rows)
        for x in range(each):
            expert = owner * each + x
            found = [tuple(row) for row in rows[incoming.rows(x)].tolist()]
            wanted = [
                (source, token, expert)
                for source, idx in enumerate(chosen)
                for token in range(len(idx))
                if expert in idx[token]
            ]
            assert found == wanted
        together = np.concatenate([incoming.rows(x) for x in range(each)])
        assert sorted(together.tolist()) == list(range(len(rows)))


@settings(max_examples=100, deadline=None)
@given(routings(), st.integers(1, 5))
def test_pieces_are_the_rows_in_order_and_no_longer_than_asked(routing, rows_max):
    for _, incoming in exchange(*routing):
        for x in range(incoming.counts_SX.shape[1]):
            pieces = list(incoming.pieces(x, rows_max))
            assert all(0 < len(piece) <= rows_max for piece in pieces)
            rows = incoming.rows(x)
            assert (np.concatenate([rows[:0], *pieces]) == rows).all()
            assert len(pieces) == -(-len(rows) // rows_max)


@settings(max_examples=200, deadline=None)
@given(routings())
def test_no_routing_sends_more_rows_than_planned(routing):
    owners, experts, chosen = routing
    tokens = max(1, *(len(idx) for idx in chosen))
    model = make_model(num_experts=experts, num_experts_per_tok=chosen[0].shape[1])
    share = make_mesh(dp=owners, ep=owners).share(model, 0)
    train = TrainConfig(seq_len=tokens)
    for _, incoming in exchange(owners, experts, chosen):
        assert incoming.total <= received_rows(model, train, share)


def test_buffers_for_received_rows_exist_only_where_rows_are_received():
    model = make_model()
    train = TrainConfig(seq_len=16, gradient_accumulation_steps=3, recompute="none")

    def specs(**mesh: int):
        return {
            x.name: x for x in activation_specs(model, train, make_mesh(**mesh).share(model, 0))
        }

    alone, both = specs(dp=4), specs(dp=4, ep=4)
    rows = 4 * 16 * min(model.num_experts_per_tok, model.num_experts // 4)
    for name, width in (("recv_x", model.hidden_size), ("recv_dout", model.hidden_size)):
        assert both[name].shape == (rows, width) and both[name].copies == 3
    assert both["recv_w"].shape == (rows, 1)
    assert set(both) - set(alone) == {"recv_x", "recv_dout", "recv_w"}
    assert set(alone) - set(both) == {"g", "u"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_gathered_in_the_dtype_that_is_sent(dtype):
    source = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
    rows = np.random.default_rng(2).integers(0, 50, 2500).astype(np.int32)
    out = np.empty((2500, 3), dtype)
    _take(source, rows, out)
    assert (out == source[rows].astype(dtype)).all()
