"""Compile every shape a micro-batch can meet before the first step, so that no step pays for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np

from ops.nn.primitives import np_dtype
from ops.nn.routing import bucket_sizes
from ops.nn.stages import AttnSaved, AttnWeights, Stages


def warm_up(
    stages: Stages,
    num_sequences: int,
    *,
    ffn_size: int,
    shared_ffn_size: int = 0,
    vocab_rows: Iterable[int] = (),
) -> None:
    """Run every stage once on zeros, at micro-batches of `num_sequences` sequences.

    `vocab_rows` are the sizes of this rank's parts of the vocabulary slices, `ffn_size` and
    `shared_ffn_size` the widths of its parts of an expert and of the shared expert, 0 for none.
    All ranks of operator parallelism enter it. Takes 0.05-0.3 s a shape and the memory of the
    largest stage.
    """
    dims = stages.dims
    T, D = num_sequences * dims.seq_len, dims.hidden_size
    dout, ln, pos = _stream(stages, T, D), _stream(stages, D), _index(T, dims.num_experts_per_tok)
    h = _stream(stages, stages.num_own_tokens(T), D)
    _attention(stages, h, ln)
    wr = _stream(stages, dims.num_experts, D)
    xn, logits = stages.router_fwd(h, ln, wr)
    w_TK, _, _ = stages.router_weights(logits, pos)
    stages.router_bwd(h, ln, wr, logits, pos, dout, w_TK, 0.0, 0.0)
    y_PD = _compute(stages, T * dims.num_experts_per_tok, D)
    stages.combine(h, y_PD, pos, w_TK)
    stages.uncombine(y_PD, pos)
    if ffn_size:
        weights = _swiglu(stages, ffn_size)
        for rows in bucket_sizes(T):
            x, g = _compute(stages, rows, D), _compute(stages, rows, ffn_size)
            stages.expert_fwd(x, *weights)
            stages.expert_bwd(x, g, g, _stream(stages, rows), _stream(stages, rows, D), *weights)
    if shared_ffn_size:
        weights, g = _swiglu(stages, shared_ffn_size), _compute(stages, T, shared_ffn_size)
        stages.shared_fwd(xn, *weights)
        stages.shared_bwd(xn, g, g, dout, *weights)
        stages.combine(h, y_PD, pos, w_TK, xn)
        stages.uncombine(y_PD, pos, xn)
    _ends(stages, h, ln, dout, xn, vocab_rows)


def _attention(stages: Stages, h: Any, ln: Any) -> None:
    dims = stages.dims
    D, q_size = dims.hidden_size, dims.num_heads * dims.head_dim
    kv_size = dims.num_kv_heads * dims.head_dim
    norm = _stream(stages, dims.head_dim) if dims.qk_norm else None
    wkv = _compute(stages, kv_size, D)
    weights = AttnWeights(
        ln, _compute(stages, q_size, D), wkv, wkv, _compute(stages, D, q_size), norm, norm
    )
    _, saved = stages.attn_fwd(h, weights)
    stages.attn_bwd(h, weights, AttnSaved(*saved), h)


def _ends(stages: Stages, h: Any, ln: Any, dout: Any, xn: Any, vocab_rows: Iterable[int]) -> None:
    T, D = dout.shape
    tokens, ones = _index(T), _stream(stages, T)
    stages.final_norm_fwd(h, ln)
    stages.final_norm_bwd(h, ln, dout)
    for rows in sorted(set(vocab_rows)):
        w = _compute(stages, rows, D)
        stages.embed_fwd(tokens, w, 0)
        stages.embed_bwd(tokens, dout, 0, rows)
        stages.head_slice_fwd(xn, w, tokens, 0)
        stages.head_slice_bwd(xn, w, tokens, 0, ones, ones)


def _swiglu(stages: Stages, size: int) -> tuple[Any, Any, Any]:
    D = stages.dims.hidden_size
    up = _compute(stages, size, D)
    return up, up, _compute(stages, D, size)


def _compute(stages: Stages, *shape: int) -> Any:
    return ms.Tensor(np.zeros(shape, np_dtype(stages.compute_dtype)))


def _stream(stages: Stages, *shape: int) -> Any:
    return ms.Tensor(np.zeros(shape, np_dtype(stages.stream_dtype)))


def _index(*shape: int) -> Any:
    """Indices 0, 1, ... in the last dimension: distinct, as a token's experts are."""
    return ms.Tensor(np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape).copy())
