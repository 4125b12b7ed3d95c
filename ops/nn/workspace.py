"""Declared device memory of each stage, as arithmetic the planner can use without MindSpore.

The numbers are upper bounds of what one call takes beyond memory it already holds: inputs,
outputs, temporaries, and the index tables some CPU kernels keep. They were fitted to measured
resident memory (MindSpore 2.10 frees a temporary after its last use, mostly); a test checks them.
Compiled code itself (about 6.5 MiB a shape) is not included. Shape suffixes: `ops/nn/dims.py`.
"""

from __future__ import annotations

from ops.nn.dims import StageDims

STAGES = (
    "embed_fwd",
    "embed_bwd",
    "attn_fwd",
    "attn_bwd",
    "router_fwd",
    "router_weights",
    "router_bwd",
    "expert_fwd",
    "expert_bwd",
    "shared_fwd",
    "shared_bwd",
    "combine",
    "uncombine",
    "final_norm_fwd",
    "final_norm_bwd",
    "head_slice_fwd",
    "head_slice_bwd",
)


def query_block(seq_len: int) -> int:
    """Return the queries a score block holds: 256, or an eighth of a longer sequence."""
    return min(seq_len, max(256, -(-seq_len // 8)))


def workspace_bytes(
    stage: str,
    dims: StageDims,
    compute_dtype: str = "float32",
    *,
    num_tokens: int,
    rows: int = 0,
    ffn_size: int = 0,
    vocab_rows: int = 0,
    over_ranks: bool = False,
) -> int:
    """Return an upper bound, in bytes, of the device memory of one call of `stage`.

    `num_tokens` T of the micro-batch; `rows` N of the expert's bucket; `ffn_size` F of the expert
    or shared expert; `vocab_rows` R of the vocabulary slice. `over_ranks` is for a stage of
    `OperatorStages`: all of these are the rank's own, but T. Raises `KeyError` for an unknown
    stage.
    """
    names = (num_tokens, rows, ffn_size, vocab_rows)
    inputs, working = _elements(stage, dims, *names)
    if over_ranks:  # normed rows and a gradient gathered from other ranks; what is summed together
        inputs += 3 * num_tokens * dims.hidden_size
    if compute_dtype == "float64":
        return 8 * (inputs + working)
    if compute_dtype == "float16":  # casts stand beside fp32; the fp16 matmul has its own copies
        each = 24 if stage.startswith(("expert", "shared")) else 6
        return 4 * inputs + each * working
    return 4 * (inputs + working)


def _elements(stage: str, dims: StageDims, T: int, N: int, F: int, R: int) -> tuple[int, int]:
    """Return (input elements, output and temporary elements) of `stage`."""
    D, E, K = dims.hidden_size, dims.num_experts, dims.num_experts_per_tok
    if stage.startswith("attn"):
        return _attention_elements(stage, dims, T)
    if stage.startswith("shared"):
        N = T
    h, expert, vocab, scores = T * D, 3 * F * D, R * D, T * E
    table = {
        "embed_fwd": (T, 3 * h),
        "embed_bwd": (h + T, vocab + 2 * h),
        "router_fwd": (h + E * D, 4 * h + 2 * scores),
        "router_weights": (scores + T * K, 16 * scores),
        "router_bwd": (2 * h + 2 * scores + E * D, 7 * h + 16 * scores + E * D),
        "expert_fwd": (N * D, 2 * N * D + 4 * N * F),
        "expert_bwd": (2 * N * D + 2 * N * F, 4 * N * D + 6 * N * F + expert),
        "shared_fwd": (h, 2 * N * D + 4 * N * F),
        "shared_bwd": (2 * h + 2 * N * F, 4 * N * D + 6 * N * F + expert),
        "combine": ((K + 2) * h, (3 * K + 3) * h),
        "uncombine": ((K + 1) * h, (K + 3) * h),
        "final_norm_fwd": (h, 4 * h),
        "final_norm_bwd": (2 * h, 7 * h),
        "head_slice_fwd": (h + T, 3 * T * R + 2 * h),
        "head_slice_bwd": (h + 3 * T, 3 * T * R + 2 * h + vocab),
    }
    return table[stage]


def _attention_elements(stage: str, dims: StageDims, T: int) -> tuple[int, int]:
    D = dims.hidden_size
    h, q = T * D, T * dims.num_heads * dims.head_dim
    kv = T * dims.num_kv_heads * dims.head_dim
    weights = 2 * (q + kv) // T * D
    sequences = -(-T // dims.seq_len)
    scores = sequences * dims.num_heads * query_block(dims.seq_len) * dims.seq_len
    return {
        "attn_fwd": (h, 3 * h + 8 * q + 8 * kv + 6 * scores),
        "attn_bwd": (
            2 * h + 2 * q + 2 * kv,
            6 * h + 20 * q + 20 * kv + weights + 8 * scores,
        ),
    }[stage]
