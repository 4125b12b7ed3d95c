"""Choice of experts, slots and buckets: host arithmetic, no MindSpore."""

import subprocess
import sys

import numpy as np
import pytest

from ops.nn.routing import SlotPlan, bucket, bucket_sizes, choose_experts


def test_choices_are_best_first_and_ties_go_to_the_lower_expert():
    logits = np.array([[1, 3, 3, 2], [0, 0, 0, 0], [-1, -2, -1, 5]], np.float32)
    assert choose_experts(logits, 3).tolist() == [[1, 2, 3], [0, 1, 2], [3, 0, 2]]


def test_buckets_are_few_cover_everything_and_end_at_the_tokens():
    for num_tokens in (1, 15, 16, 17, 24, 100, 512, 4096):
        sizes = bucket_sizes(num_tokens)
        assert sizes[-1] == num_tokens and list(sizes) == sorted(set(sizes))
        assert len(sizes) <= 4 * max(0, np.log2(num_tokens / 16)) + 2
        for count in range(1, num_tokens + 1):
            assert count <= bucket(count, num_tokens) <= max(16, 1.25 * count + 16)
    assert bucket_sizes(512) == (
        *range(16, 129, 16),
        *(160, 192, 224, 256),
        *(320, 384, 448, 512),
    )


@pytest.mark.parametrize("num_experts, k", [(8, 2), (64, 8), (3, 3), (5, 1)])
def test_slots_are_sorted_by_expert_then_token_and_invert(num_experts, k):
    rng = np.random.default_rng(0)
    idx = choose_experts(rng.standard_normal((40, num_experts)), k)
    plan = SlotPlan.of(idx, num_experts)
    assert plan.counts_E.sum() == 40 * k
    w_TK = rng.random((40, k)).astype(np.float32)
    w_P = np.empty(40 * k, np.float32)
    for e in range(num_experts):
        count = int(plan.counts_E[e])
        if count == 0:
            continue
        rows, weights = plan.rows(e), plan.weights(e, w_TK)
        assert rows.size == weights.size == bucket(count, 40)
        assert (np.diff(rows[:count]) > 0).all() and not rows[count:].any()
        assert not weights[count:].any() and weights.dtype == np.float32
        assert all(e in idx[t] for t in rows[:count])
        w_P[plan.slots(e)] = weights[:count]
    assert np.array_equal(plan.by_token(w_P), w_TK)


def test_routing_and_workspace_do_not_import_mindspore():
    code = (
        "import sys, ops.nn.routing, ops.nn.workspace, ops.nn.dims, ops.device;"
        "sys.exit('mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
