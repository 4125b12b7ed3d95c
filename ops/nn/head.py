"""Ends of the model: embedding, final norm, and the loss head, by slices of the vocabulary.

A slice holds rows row0..row0+R of the [V, D] matrix. Embedding slices give zeros for tokens of
other slices and are summed. Head slices give the three numbers a token's loss needs; merged over
slices they make logsumexp exactly as one slice would up to rounding (the online softmax of
Milakov and Gimelshein 2018). Logits are fp32. Shape suffixes: see `ops/nn/dims.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops

from ops.nn.dims import StageDims
from ops.nn.primitives import (
    Tensor,
    jit,
    ms_dtype,
    nn,
    nt,
    rms_norm,
    rms_norm_dx,
    spread,
    stream_dtype,
    sum_last,
    sum_rows,
    tn,
)


def build_head(dims: StageDims, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return jit-compiled embedding, final norm and head functions (see `Stages`)."""
    ct, st = ms_dtype(dtype), ms_dtype(stream_dtype(dtype))
    eps = dims.rms_norm_eps

    def locate(tokens: Tensor, row0: Tensor, rows: int) -> tuple[Tensor, ...]:
        local = tokens - row0
        inside = ops.logical_and(local >= 0, local < rows)
        return ops.clamp(local, 0, rows - 1), inside.astype(st).reshape((-1, 1))

    def embed_fwd(tokens: Tensor, w: Tensor, row0: Tensor) -> Tensor:
        row, inside = locate(tokens, row0, w.shape[0])
        x = ops.gather(w, row, 0).astype(st)
        return x * spread(inside, x.shape[1])

    def embed_bwd(tokens: Tensor, dx: Tensor, row0: Tensor, rows: int) -> Tensor:
        row, inside = locate(tokens, row0, rows)
        dx = dx.astype(st) * spread(inside, dx.shape[1])
        return ops.unsorted_segment_sum(dx, row, rows)

    def final_norm_fwd(h: Tensor, ln: Tensor) -> Tensor:
        return rms_norm(h, ln, eps).astype(ct)

    def final_norm_bwd(h: Tensor, ln: Tensor, dxn: Tensor) -> tuple[Tensor, ...]:
        dh, dln = rms_norm_dx(h, ln, dxn.astype(st), eps)
        return dh, sum_rows(dln)

    def head_slice_fwd(xn: Tensor, w: Tensor, targets: Tensor, row0: Tensor) -> tuple[Tensor, ...]:
        logits = nt(xn.astype(st), w.astype(st))
        top = ops.max(logits, -1, True)[0]
        total = sum_last(ops.exp(logits - spread(top, logits.shape[1]))).reshape((-1,))
        row, inside = locate(targets, row0, w.shape[0])
        picked = ops.gather_elements(logits, 1, row.reshape((-1, 1))) * inside
        return top.reshape((-1,)), total, picked.reshape((-1,))

    def head_slice_bwd(
        xn: Tensor, w: Tensor, targets: Tensor, row0: Tensor, lse: Tensor, dscale: Tensor
    ) -> tuple[Tensor, ...]:
        x, w32 = xn.astype(st), w.astype(st)
        scale = dscale.reshape((-1, 1))
        rows = w.shape[0]
        p = ops.exp(nt(x, w32) - spread(lse.reshape((-1, 1)), rows)) * spread(scale, rows)
        row, inside = locate(targets, row0, w.shape[0])
        dlogits = ops.tensor_scatter_elements(p, row.reshape((-1, 1)), -scale * inside, 1, "add")
        return nn(dlogits, w32), tn(dlogits, x)

    functions = (embed_fwd, embed_bwd, final_norm_fwd, final_norm_bwd)
    heads = (head_slice_fwd, head_slice_bwd)
    return {fn.__name__: jit(fn) for fn in (*functions, *heads)}
