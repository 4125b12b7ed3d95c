"""Independent NumPy fp64 reference: the decoder block and a whole tiny model, forward only.

Written from the formulas, with loops where they are plainer, and sharing no code with `ops/nn/`.
Gradients come from central differences (`numeric_gradient`). Choices of experts may be frozen, so
that a perturbation never moves a token to another expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Numbers of the reference model, named as in Hugging Face configurations."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    seq_len: int
    norm_topk_prob: bool = True
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6


def rms_norm(x, weight, eps):
    """Normalise the last axis by its root mean square."""
    return weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def softmax(x):
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def logsumexp(x):
    """log(sum(exp(x))) over the last axis."""
    top = x.max(axis=-1)
    return top + np.log(np.exp(x - top[..., None]).sum(axis=-1))


def rotate(x_SC, theta):
    """Rotate the pairs (i, i + C/2) of the vector at position s by s * theta^(-2i/C)."""
    out = np.empty_like(x_SC)
    half = x_SC.shape[1] // 2
    for s in range(x_SC.shape[0]):
        for i in range(half):
            angle = s * theta ** (-2.0 * i / x_SC.shape[1])
            a, b = x_SC[s, i], x_SC[s, i + half]
            out[s, i] = a * np.cos(angle) - b * np.sin(angle)
            out[s, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(h_TD, p, shape):
    """Return h + attention(norm(h)); p: ln, wq, wk, wv, wo and optionally qn, kn."""
    S, C, eps = shape.seq_len, shape.head_dim, shape.rms_norm_eps
    group = shape.num_heads // shape.num_kv_heads
    out = np.empty_like(h_TD)
    for first in range(0, h_TD.shape[0], S):
        h = h_TD[first : first + S]
        xn = rms_norm(h, p["ln"], eps)
        q, k, v = xn @ p["wq"].T, xn @ p["wk"].T, xn @ p["wv"].T
        heads = []
        for head in range(shape.num_heads):
            kv = head // group
            q_SC = q[:, head * C : (head + 1) * C]
            k_SC, v_SC = k[:, kv * C : (kv + 1) * C], v[:, kv * C : (kv + 1) * C]
            if p.get("qn") is not None:
                q_SC, k_SC = rms_norm(q_SC, p["qn"], eps), rms_norm(k_SC, p["kn"], eps)
            score = rotate(q_SC, shape.rope_theta) @ rotate(k_SC, shape.rope_theta).T / np.sqrt(C)
            score = np.where(np.tril(np.ones((S, S), bool)), score, -np.inf)
            heads.append(softmax(score) @ v_SC)
        out[first : first + S] = h + np.concatenate(heads, axis=1) @ p["wo"].T
    return out


def choose(logits_TE, k):
    """Return each token's k best experts, ties to the lower one, by repeated search."""
    rest = logits_TE.astype(np.float64).copy()
    idx = np.empty((rest.shape[0], k), np.int64)
    for choice in range(k):
        for t in range(rest.shape[0]):
            idx[t, choice] = int(np.argmax(rest[t]))
            rest[t, idx[t, choice]] = -np.inf
    return idx


def router(logits_TE, idx_TK, shape):
    """Return (w_TK, balance, z), the losses summed over sequences."""
    prob = softmax(logits_TE)
    w = np.take_along_axis(prob, idx_TK, axis=1)
    if shape.norm_topk_prob:
        w = w / w.sum(axis=1, keepdims=True)
    balance = z = 0.0
    S = shape.seq_len
    for first in range(0, logits_TE.shape[0], S):
        part = slice(first, first + S)
        for e in range(shape.num_experts):
            share = (idx_TK[part] == e).sum() / idx_TK[part].size
            balance += shape.num_experts * share * prob[part, e].mean()
        z += (logsumexp(logits_TE[part]) ** 2).mean()
    return w, balance, z


def expert(x, wg, wu, wd):
    """SwiGLU feed-forward."""
    return (silu(x @ wg.T) * (x @ wu.T)) @ wd.T


def experts(h_mid_TD, p, shape, idx_TK=None):
    """Return (h_out, balance, z, idx); p: ln2, wr, experts [(wg, wu, wd)], optionally shared."""
    xn = rms_norm(h_mid_TD, p["ln2"], shape.rms_norm_eps)
    logits = xn @ p["wr"].T
    if idx_TK is None:
        idx_TK = choose(logits, shape.num_experts_per_tok)
    w, balance, z = router(logits, idx_TK, shape)
    out = h_mid_TD.copy()
    for t in range(xn.shape[0]):
        for k in range(idx_TK.shape[1]):
            out[t] += w[t, k] * expert(xn[t], *p["experts"][idx_TK[t, k]])
    if p.get("shared") is not None:
        out += expert(xn, *p["shared"])
    return out, balance, z, idx_TK


def block(h_TD, p, shape, idx_TK=None):
    """Return (h_out, balance, z, idx) of one decoder block."""
    return experts(attention(h_TD, p, shape), p, shape, idx_TK)


def token_losses(h_TD, ln, w_VD, targets_T, eps):
    """Return the cross entropy of each token."""
    logits = rms_norm(h_TD, ln, eps) @ w_VD.T
    return logsumexp(logits) - logits[np.arange(targets_T.size), targets_T]


def model_loss(params, tokens_T, targets_T, shape, balance_coef=0.0, z_coef=0.0, idx=None):
    """Return (loss, [idx of each layer]); params: embed, layers, ln_f, head.

    The loss is the mean over tokens plus coefficients times the mean over sequences of each
    layer's balance and z losses. `idx` freezes the choices.
    """
    h = params["embed"][tokens_T].astype(np.float64)
    extra, chosen = 0.0, []
    for layer, p in enumerate(params["layers"]):
        h, balance, z, idx_TK = block(h, p, shape, None if idx is None else idx[layer])
        extra += balance_coef * balance + z_coef * z
        chosen.append(idx_TK)
    losses = token_losses(h, params["ln_f"], params["head"], targets_T, shape.rms_norm_eps)
    num_sequences = tokens_T.size // shape.seq_len
    return losses.mean() + extra / num_sequences, chosen


def numeric_gradient(fn, x, entries=None, step=1e-5):
    """Return central differences of scalar fn() for x (changed in place, put back).

    `entries` are flat indices to look at (all when None); the result has one number for each.
    """
    flat = x.reshape(-1)
    entries = np.arange(flat.size) if entries is None else np.asarray(entries)
    grad = np.empty(entries.size)
    for n, i in enumerate(entries):
        kept = flat[i]
        flat[i] = kept + step
        up = fn()
        flat[i] = kept - step
        down = fn()
        flat[i] = kept
        grad[n] = (up - down) / (2 * step)
    return grad


def random_layer(rng, shape, ffn_size, *, qk_norm=True, shared_size=0, scale=0.3):
    """Return random fp64 weights of one decoder block."""
    D, C = shape.hidden_size, shape.head_dim

    def normal(*size):
        return rng.standard_normal(size) * scale

    def swiglu(size):
        return normal(size, D), normal(size, D), normal(D, size)

    return {
        "ln": 1 + normal(D),
        "wq": normal(shape.num_heads * C, D),
        "wk": normal(shape.num_kv_heads * C, D),
        "wv": normal(shape.num_kv_heads * C, D),
        "wo": normal(D, shape.num_heads * C),
        "qn": 1 + normal(C) if qk_norm else None,
        "kn": 1 + normal(C) if qk_norm else None,
        "ln2": 1 + normal(D),
        "wr": normal(shape.num_experts, D),
        "experts": [swiglu(ffn_size) for _ in range(shape.num_experts)],
        "shared": swiglu(shared_size) if shared_size else None,
    }
