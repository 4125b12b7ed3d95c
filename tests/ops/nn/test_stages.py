"""Stages in fp32 and fp16 against the reference; repeatability; a whole tiny model."""

from dataclasses import asdict

import numpy as np
import pytest

from ops.backend import tensor_on
from ops.errors import ConfigError
from ops.nn.dims import StageDims
from ops.nn.routing import bucket_sizes
from ops.nn.stages import AttnWeights, Stages
from ops.nn.warm_up import warm_up
from tests import reference as ref

SHAPE = ref.Shape(64, 4, 2, 16, 6, 2, 32)


def cast(tree, dtype, keep=("ln", "ln2", "wr", "qn", "kn")):
    """Tensors of a layer's weights in dtype, norms and router in fp32."""
    out = {}
    for name, value in tree.items():
        kind = np.float32 if name in keep else dtype
        if name == "experts":
            out[name] = [[tensor_on(w.astype(dtype)) for w in expert] for expert in value]
        else:
            out[name] = None if value is None else tensor_on(value.astype(kind))
    return out


def layer(stages, p, h, idx_TK, dout):
    """Attention, router and one expert, forward and backward: a list of arrays."""
    attn = AttnWeights(*(p[name] for name in ("ln", "wq", "wk", "wv", "wo", "qn", "kn")))
    h_mid, saved = stages.attn_fwd(h, attn)
    xn, logits = stages.router_fwd(h_mid, p["ln2"], p["wr"])
    w, balance, z = stages.router_weights(logits, idx_TK)
    rows = np.arange(32) * 2
    x, dout_N = tensor_on(xn.asnumpy()[rows].copy()), tensor_on(dout.asnumpy()[rows].copy())
    w_N = tensor_on(np.linspace(0, 1, 32, dtype=np.float32))
    y, g, u = stages.expert_fwd(x, *p["experts"][1])
    back = stages.expert_bwd(x, g, u, w_N, dout_N, *p["experts"][1])
    router = stages.router_bwd(h_mid, p["ln2"], p["wr"], logits, idx_TK, dout, w, 0.1, 0.1)
    dh, grads = stages.attn_bwd(h, attn, saved, router[0])
    tokens = tensor_on((np.arange(64, dtype=np.int32) * 7) % 10)
    dw = stages.embed_bwd(tokens, dh, 0, 10)
    results = (h_mid, *saved, xn, logits, w, balance, z, y, *back, *router, dh, *grads, dw)
    return [x.asnumpy().copy() for x in results]


def inputs(seed=0, num_sequences=2):
    rng = np.random.default_rng(seed)
    p = ref.random_layer(rng, SHAPE, 48, scale=0.1)
    h = rng.standard_normal((num_sequences * SHAPE.seq_len, SHAPE.hidden_size))
    return p, h, rng.standard_normal(h.shape)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float16", 4e-3)])
def test_forward_agrees_with_the_reference(dtype, tolerance):
    p, h, _ = inputs()
    stages = Stages(StageDims(**asdict(SHAPE)), dtype)
    t = cast(p, np.dtype(dtype))
    attn = AttnWeights(*(t[name] for name in ("ln", "wq", "wk", "wv", "wo", "qn", "kn")))
    h_mid, saved = stages.attn_fwd(tensor_on(h.astype(np.float32)), attn)
    want = ref.attention(h, p, SHAPE)
    assert h_mid.asnumpy().dtype == np.float32 and saved.q.asnumpy().dtype == np.dtype(dtype)
    assert np.abs(h_mid.asnumpy() - want).max() <= tolerance * np.abs(want).max()
    xn, logits = stages.router_fwd(h_mid, t["ln2"], t["wr"])
    want_xn = ref.rms_norm(want, p["ln2"], SHAPE.rms_norm_eps)
    assert np.abs(xn.asnumpy() - want_xn).max() <= 4 * tolerance * np.abs(want_xn).max()
    y, _, _ = stages.expert_fwd(tensor_on(xn.asnumpy()[:16].copy()), *t["experts"][0])
    want_y = ref.expert(want_xn[:16], *p["experts"][0])
    assert np.abs(y.asnumpy() - want_y).max() <= 4 * tolerance * np.abs(want_y).max()
    assert logits.asnumpy().dtype == np.float32


@pytest.mark.parametrize("repeats", [6, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_same_inputs_give_the_same_bits_whatever_ran_between(dtype, repeats):
    p, h, dout = inputs(1)
    stages = Stages(StageDims(**asdict(SHAPE)), dtype)
    t = cast(p, np.dtype(dtype))
    idx = tensor_on(ref.choose(h[:, : SHAPE.num_experts], 2).astype(np.int32))
    h, dout = tensor_on(h.astype(np.float32)), tensor_on(dout.astype(np.float32))
    first = layer(stages, t, h, idx, dout)
    assert all(np.isfinite(x).all() for x in first)
    for repeat in range(repeats):
        if repeat % 2:
            other, h2, dout2 = inputs(repeat, num_sequences=1 + repeat % 3)
            h2 = tensor_on(h2.astype(np.float32))
            attn = cast(other, np.dtype(dtype))
            attn = AttnWeights(*(attn[n] for n in ("ln", "wq", "wk", "wv", "wo", "qn", "kn")))
            _, saved = stages.attn_fwd(h2, attn)
            stages.attn_bwd(h2, attn, saved, tensor_on(dout2.astype(np.float32)))
        again = layer(stages, t, h, idx, dout)
        assert all(np.array_equal(a, b) for a, b in zip(again, first))


def test_embedding_gradient_adds_tokens_in_order_also_when_large():
    """The kernel must not depend on how its threads share the rows."""
    rng = np.random.default_rng(7)
    stages = Stages(StageDims(**asdict(SHAPE)))
    tokens = rng.integers(0, 50, 4096).astype(np.int32)
    dx = rng.standard_normal((4096, 64)).astype(np.float32)
    want = np.zeros((50, 64), np.float32)
    for t, token in enumerate(tokens):
        want[token] += dx[t]
    for _ in range(5):
        got = stages.embed_bwd(tensor_on(tokens), tensor_on(dx), 0, 50).asnumpy()
        assert np.array_equal(got, want)


def test_padding_of_a_bucket_changes_no_gradient_even_from_a_wild_row():
    p, h, dout = inputs(2)
    stages = Stages(StageDims(**asdict(SHAPE)))
    t = cast(p, np.float32)
    xn, dout = h.astype(np.float32), dout.astype(np.float32)
    rows = np.zeros(32, np.int32)
    rows[:20] = np.arange(20) + 1
    w_N = np.where(np.arange(32) < 20, 0.5, 0).astype(np.float32)

    def gradients():
        x = tensor_on(xn[rows])
        _, g, u = stages.expert_fwd(x, *t["experts"][0])
        got = stages.expert_bwd(x, g, u, tensor_on(w_N), tensor_on(dout[rows]), *t["experts"][0])
        return [got[0].asnumpy()[:20].copy(), *(w.asnumpy().copy() for w in got[2:])]

    before = gradients()
    xn[0] *= 1e3
    dout[0] *= 1e3
    assert all(np.array_equal(a, b) for a, b in zip(gradients(), before))


def test_unknown_dtype_and_missing_head_norms_are_refused():
    dims = StageDims(**asdict(SHAPE))
    with pytest.raises(ConfigError, match="compute_dtype is 'bfloat16'"):
        Stages(dims, "bfloat16")
    with pytest.raises(ConfigError, match="head norms are missing"):
        Stages(dims).attn_fwd(None, AttnWeights(1, 2, 3, 4, 5))


def test_warm_up_covers_every_bucket():
    stages = Stages(StageDims(**asdict(SHAPE)))
    seen = []
    stages.expert_fwd = lambda x, *weights: seen.append(x.shape[0])
    stages.expert_bwd = lambda *a: None
    warm_up(stages, 2, ffn_size=8, shared_ffn_size=16, vocab_rows=(10, 12, 10))
    assert tuple(seen) == bucket_sizes(64)
