"""A whole tiny model built from stages, in float64, against the reference's loss and gradient."""

from dataclasses import asdict

import numpy as np

from ops.backend import tensor_on
from ops.nn.dims import StageDims
from ops.nn.routing import SlotPlan, choose_experts
from ops.nn.stages import AttnWeights, Stages, merge_slices
from tests import reference as ref

SHAPE = ref.Shape(8, 2, 1, 4, 4, 2, 6)
BALANCE, Z = 0.02, 0.01


def layer_forward(stages, p, h):
    """Run one block; return its output, losses and what backward needs."""
    attn = AttnWeights(*(tensor_on(p[n]) for n in ("ln", "wq", "wk", "wv", "wo", "qn", "kn")))
    h_mid, saved = stages.attn_fwd(h, attn)
    norm = h_mid, tensor_on(p["ln2"]), tensor_on(p["wr"])
    xn, logits = stages.router_fwd(*norm)
    idx = choose_experts(logits.asnumpy(), SHAPE.num_experts_per_tok)
    plan = SlotPlan.of(idx, SHAPE.num_experts)
    w_TK, balance, z = stages.router_weights(logits, tensor_on(idx))
    y, experts = np.empty((idx.size, SHAPE.hidden_size)), {}
    for e in np.flatnonzero(plan.counts_E):
        weights, rows = [tensor_on(w) for w in p["experts"][e]], plan.rows(e)
        x = tensor_on(xn.asnumpy()[rows].copy())
        y_N, g, u = stages.expert_fwd(x, *weights)
        y[plan.slots(e)] = y_N.asnumpy()[: plan.counts_E[e]]
        experts[e] = x, rows, g, u, tensor_on(plan.weights(e, w_TK.asnumpy())), weights
    out = stages.combine(h_mid, tensor_on(y), tensor_on(plan.pos_TK), w_TK)
    extra = BALANCE * float(balance.asnumpy()) + Z * float(z.asnumpy())
    return out, extra, (h, attn, saved, norm, logits, idx, plan, experts)


def layer_backward(stages, kept, dout, num_sequences):
    """Return the gradient of the block's input and of wq."""
    h, attn, saved, norm, logits, idx, plan, experts = kept
    dx, dw = np.empty((idx.size, SHAPE.hidden_size)), np.empty(idx.size)
    for e, (x, rows, g, u, w_N, weights) in experts.items():
        dx_N, dw_N, *_ = stages.expert_bwd(x, g, u, w_N, tensor_on(dout[rows]), *weights)
        dx[plan.slots(e)] = dx_N.asnumpy()[: plan.counts_E[e]]
        dw[plan.slots(e)] = dw_N.asnumpy()[: plan.counts_E[e]]
    dxn = stages.uncombine(tensor_on(dx), tensor_on(plan.pos_TK))
    dw_TK = tensor_on(plan.by_token(dw))
    scales = BALANCE / num_sequences, Z / num_sequences
    dh, _, _ = stages.router_bwd(*norm, logits, tensor_on(idx), dxn, dw_TK, *scales)
    dh_in, grads = stages.attn_bwd(h, attn, saved, tensor_on(dh.asnumpy() + dout))
    return dh_in.asnumpy(), grads.wq.asnumpy()


def test_loss_and_gradient_of_a_whole_model_agree_with_the_reference():
    rng, vocab, num_sequences = np.random.default_rng(0), 10, 2
    params = {
        "embed": rng.standard_normal((vocab, SHAPE.hidden_size)),
        "layers": [ref.random_layer(rng, SHAPE, 6) for _ in range(2)],
        "ln_f": 1 + rng.standard_normal(SHAPE.hidden_size) * 0.1,
        "head": rng.standard_normal((vocab, SHAPE.hidden_size)),
    }
    tokens, targets = rng.integers(0, vocab, (2, 12)).astype(np.int32)
    stages = Stages(StageDims(**asdict(SHAPE)), "float64")

    h = stages.embed_fwd(tensor_on(tokens), tensor_on(params["embed"]), 0)
    extra, kept = 0.0, []
    for p in params["layers"]:
        h, more, saved = layer_forward(stages, p, h)
        extra += more
        kept.append(saved)
    final = tensor_on(params["ln_f"])
    head = stages.final_norm_fwd(h, final), tensor_on(params["head"]), tensor_on(targets), 0
    lse, losses = merge_slices([tuple(x.asnumpy() for x in stages.head_slice_fwd(*head))])
    choices = [saved[5] for saved in kept]
    coefficients = {"balance_coef": BALANCE, "z_coef": Z}
    want, free = ref.model_loss(params, tokens, targets, SHAPE, **coefficients)
    assert all(np.array_equal(a, b) for a, b in zip(free, choices))
    np.testing.assert_allclose(losses.mean() + extra / num_sequences, want, rtol=1e-12)

    scale = tensor_on(np.full(tokens.size, 1 / tokens.size))
    dxn, _ = stages.head_slice_bwd(*head, tensor_on(lse), scale)
    dh = stages.final_norm_bwd(h, final, dxn)[0].asnumpy()
    dwq = []
    for saved in reversed(kept):
        dh, dw = layer_backward(stages, saved, dh, num_sequences)
        dwq.insert(0, dw)
    dembed = stages.embed_bwd(tensor_on(tokens), tensor_on(dh), 0, vocab).asnumpy()

    def loss():
        return ref.model_loss(params, tokens, targets, SHAPE, **coefficients, idx=choices)[0]

    for array, got in ((params["embed"], dembed), (params["layers"][0]["wq"], dwq[0])):
        entries = rng.choice(array.size, 15, replace=False)
        numeric = ref.numeric_gradient(loss, array, entries)
        error = np.abs(got.reshape(-1)[entries] - numeric).max() / np.abs(numeric).max()
        assert error <= 1e-6
