"""Every stage in float64 against central differences of the NumPy reference."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest

from ops.backend import tensor_on
from ops.nn.dims import StageDims
from ops.nn.routing import SlotPlan, choose_experts
from ops.nn.stages import AttnWeights, Stages, merge_slices
from tests import reference as ref

TOLERANCE = 1e-6
MICRO_BATCH = 2


def assert_close(got, want, what=""):
    error = np.abs(got - want).max() / (np.abs(want).max() + 1e-12)
    assert error <= TOLERANCE, f"{what}: relative error {error:.2e}"


def tensors(*arrays):
    return [None if a is None else tensor_on(np.ascontiguousarray(a)) for a in arrays]


def stages_of(shape, qk_norm):
    return Stages(StageDims(**asdict(shape), qk_norm=qk_norm), "float64")


def attention_weights(p):
    return AttnWeights(*tensors(*(p[name] for name in ("ln", "wq", "wk", "wv", "wo", "qn", "kn"))))


def some(rng, array, count=25):
    return rng.choice(array.size, min(count, array.size), replace=False)


def check_gradient(rng, loss, array, got, what):
    entries = some(rng, array)
    assert_close(
        got.asnumpy().reshape(-1)[entries], ref.numeric_gradient(loss, array, entries), what
    )


SHAPES = {
    "mha": ref.Shape(12, 3, 3, 4, 5, 2, 6),
    "gqa": ref.Shape(16, 4, 2, 6, 5, 2, 7, norm_topk_prob=False),
    "one_kv_head_one_expert": ref.Shape(8, 4, 1, 2, 3, 1, 5),
    "blocks_of_queries": ref.Shape(4, 2, 1, 2, 3, 2, 300),
}


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_agrees_with_the_reference_and_its_differences(name, qk_norm):
    shape, rng = SHAPES[name], np.random.default_rng(1)
    p = ref.random_layer(rng, shape, 8, qk_norm=qk_norm)
    h = rng.standard_normal((MICRO_BATCH * shape.seq_len, shape.hidden_size))
    dout = rng.standard_normal(h.shape)
    stages = stages_of(shape, qk_norm)
    weights = attention_weights(p)
    h_mid, saved = stages.attn_fwd(tensor_on(h), weights)
    assert_close(h_mid.asnumpy(), ref.attention(h, p, shape), "h_mid")

    dh, grads = stages.attn_bwd(tensor_on(h), weights, saved, tensor_on(dout))

    def loss():
        return (ref.attention(h, p, shape) * dout).sum()

    count = 3 if name == "blocks_of_queries" else 25
    for what, got in (("h", dh), *grads._asdict().items()):
        array = h if what == "h" else p[what]
        if array is None:
            assert got is None
            continue
        entries = some(rng, array, count)
        want = ref.numeric_gradient(loss, array, entries)
        assert_close(got.asnumpy().reshape(-1)[entries], want, what)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_router_gradient_with_frozen_choices(norm_topk_prob):
    shape = ref.Shape(10, 2, 1, 4, 6, 3, 5, norm_topk_prob=norm_topk_prob)
    rng = np.random.default_rng(2)
    p = ref.random_layer(rng, shape, 8)
    h = rng.standard_normal((MICRO_BATCH * shape.seq_len, shape.hidden_size))
    stages = stages_of(shape, True)
    xn, logits = stages.router_fwd(*tensors(h, p["ln2"], p["wr"]))
    idx = choose_experts(logits.asnumpy(), shape.num_experts_per_tok)
    want_xn = ref.rms_norm(h, p["ln2"], shape.rms_norm_eps)
    assert np.array_equal(idx, ref.choose(want_xn @ p["wr"].T, shape.num_experts_per_tok))
    assert_close(xn.asnumpy(), want_xn, "xn")
    got = stages.router_weights(logits, tensor_on(idx))
    for a, b in zip(got, ref.router(want_xn @ p["wr"].T, idx, shape)):
        assert_close(a.asnumpy(), b)

    dxn, dw = rng.standard_normal(h.shape), rng.standard_normal(idx.shape)
    d_balance, d_z = 0.7, 0.3

    def loss():
        x = ref.rms_norm(h, p["ln2"], shape.rms_norm_eps)
        w, balance, z = ref.router(x @ p["wr"].T, idx, shape)
        return (x * dxn).sum() + (w * dw).sum() + d_balance * balance + d_z * z

    grads = stages.router_bwd(
        *tensors(h, p["ln2"], p["wr"]), logits, *tensors(idx, dxn, dw), d_balance, d_z
    )
    for what, array, grad in zip(("h", "ln2", "wr"), (h, p["ln2"], p["wr"]), grads):
        check_gradient(rng, loss, array, grad, what)


def run_experts(stages, p, h_mid, idx, dout):
    """Forward and backward of the expert half, as the training step does it."""
    E = stages.dims.num_experts
    plan = SlotPlan.of(idx, E)
    norm = tensors(h_mid, p["ln2"], p["wr"])
    xn, logits = stages.router_fwd(*norm)
    w_TK, balance, z = stages.router_weights(logits, tensor_on(idx))
    P, D = idx.size, h_mid.shape[1]
    y, dx, dw = np.empty((P, D)), np.empty((P, D)), np.empty(P)
    grads = {}
    for e in np.flatnonzero(plan.counts_E):
        weights, rows = tensors(*p["experts"][e]), plan.rows(e)
        x, dout_N = tensor_on(xn.asnumpy()[rows].copy()), tensor_on(dout[rows])
        count = int(plan.counts_E[e])
        y_N, g_N, u_N = stages.expert_fwd(x, *weights)
        y[plan.slots(e)] = y_N.asnumpy()[:count]
        w_N = tensor_on(plan.weights(e, w_TK.asnumpy()))
        dx_N, dw_N, *grads[e] = stages.expert_bwd(x, g_N, u_N, w_N, dout_N, *weights)
        assert not dx_N.asnumpy()[count:].any(), "padding must not reach the input's gradient"
        dx[plan.slots(e)], dw[plan.slots(e)] = dx_N.asnumpy()[:count], dw_N.asnumpy()[:count]
    pos = tensor_on(plan.pos_TK)
    shared = dx_shared = None
    if p["shared"] is not None:
        weights = tensors(*p["shared"])
        shared, g, u = stages.shared_fwd(xn, *weights)
        dx_shared, *grads["shared"] = stages.shared_bwd(xn, g, u, tensor_on(dout), *weights)
    out = stages.combine(tensors(h_mid)[0], tensor_on(y), pos, w_TK, shared)
    dxn = stages.uncombine(tensor_on(dx), pos, dx_shared)
    dh, dln, dwr = stages.router_bwd(
        *norm, logits, tensor_on(idx), dxn, tensor_on(plan.by_token(dw)), 0.4, 0.2
    )
    return (out, balance, z), (dh.asnumpy() + dout, dln, dwr), grads


@pytest.mark.parametrize(
    "routing", ["free", "all_to_one_expert", "fewer_tokens_than_experts", "with_shared_expert"]
)
def test_experts_agree_with_the_reference_and_its_differences(routing):
    seq_len = 2 if routing == "fewer_tokens_than_experts" else 12
    k = 1 if routing == "all_to_one_expert" else 2
    shape = ref.Shape(10, 2, 1, 4, 7, k, seq_len)
    rng = np.random.default_rng(3)
    p = ref.random_layer(rng, shape, 9, shared_size=6 if routing == "with_shared_expert" else 0)
    h = rng.standard_normal((MICRO_BATCH * seq_len, shape.hidden_size))
    dout = rng.standard_normal(h.shape)
    idx = ref.choose(ref.rms_norm(h, p["ln2"], 1e-6) @ p["wr"].T, k).astype(np.int32)
    if routing == "all_to_one_expert":
        idx[:] = 4
    outs, (dh, dln, dwr), grads = run_experts(stages_of(shape, True), p, h, idx, dout)
    *want, _ = ref.experts(h, p, shape, idx)
    for a, b in zip(outs, want):
        assert_close(a.asnumpy(), b)

    def loss():
        out, balance, z, _ = ref.experts(h, p, shape, idx)
        return (out * dout).sum() + 0.4 * balance + 0.2 * z

    assert_close(dh.reshape(-1)[:20], ref.numeric_gradient(loss, h, np.arange(20)), "h")
    check_gradient(rng, loss, p["ln2"], dln, "ln2")
    check_gradient(rng, loss, p["wr"], dwr, "wr")
    assert set(grads) - {"shared"} == set(np.unique(idx))
    for e, grad in grads.items():
        for array, got in zip(p["shared"] if e == "shared" else p["experts"][e], grad):
            check_gradient(rng, loss, array, got, f"expert {e}")


def test_head_slices_merge_to_the_loss_and_its_gradient():
    shape, rng = ref.Shape(10, 2, 1, 4, 3, 1, 6), np.random.default_rng(4)
    h = rng.standard_normal((12, 10)) * 3
    ln, w = 1 + rng.standard_normal(10) * 0.2, rng.standard_normal((11, 10))
    targets = rng.integers(0, 11, 12).astype(np.int32)
    weight_T = rng.random(12)
    stages = stages_of(shape, True)
    bounds = (0, 4, 9, 11)
    parts = [(tensor_on(np.ascontiguousarray(w[a:b])), a) for a, b in itertools.pairwise(bounds)]
    t = tensor_on(targets)
    xn = stages.final_norm_fwd(*tensors(h, ln))
    slices = [
        tuple(x.asnumpy() for x in stages.head_slice_fwd(xn, part, t, row0)) for part, row0 in parts
    ]
    lse, losses = merge_slices(slices)
    assert_close(losses, ref.token_losses(h, ln, w, targets, shape.rms_norm_eps))

    back = [
        stages.head_slice_bwd(xn, part, t, row0, *tensors(lse, weight_T)) for part, row0 in parts
    ]
    dxn = sum(dxn.asnumpy() for dxn, _ in back)
    dh, dln = stages.final_norm_bwd(*tensors(h, ln, dxn))

    def loss():
        return (ref.token_losses(h, ln, w, targets, shape.rms_norm_eps) * weight_T).sum()

    check_gradient(rng, loss, h, dh, "h")
    check_gradient(rng, loss, ln, dln, "ln")
    dw = np.concatenate([dw.asnumpy() for _, dw in back])
    entries = some(rng, w)
    assert_close(dw.reshape(-1)[entries], ref.numeric_gradient(loss, w, entries), "head")


def test_embedding_slices_add_up_and_add_repeated_tokens():
    stages, rng = stages_of(SHAPES["mha"], True), np.random.default_rng(5)
    w = rng.standard_normal((9, 12))
    tokens = np.array([3, 3, 8, 0, 4, 3], np.int32)
    dx = rng.standard_normal((6, 12))
    parts = [(0, 4), (4, 9)]
    x = sum(stages.embed_fwd(*tensors(tokens, w[a:b]), a).asnumpy() for a, b in parts)
    assert np.array_equal(x, w[tokens])
    dw = np.concatenate(
        [stages.embed_bwd(*tensors(tokens, dx), a, b - a).asnumpy() for a, b in parts]
    )
    want = np.zeros_like(w)
    for t, token in enumerate(tokens):
        want[token] += dx[t]
    assert np.array_equal(dw, want)
