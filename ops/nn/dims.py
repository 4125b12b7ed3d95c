"""Dimensions of one model's stages; no MindSpore here, the planner reads them too.

Shape suffixes used in `ops/nn/`: B sequences of a micro-batch, S tokens of a sequence, T = B*S
tokens, D hidden, H query heads, G key/value heads, C head width, E experts, K experts a token,
F width of an expert, N rows of an expert's bucket, P = T*K slots, R vocabulary rows of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.errors import ConfigError


@dataclass(frozen=True)
class StageDims:
    """Numbers that fix the shapes of a model's stages on this rank.

    `num_heads`, `num_kv_heads` are those of this rank; `head_dim` need not be
    `hidden_size / num_heads`. `qk_norm` selects the per-head norms of Qwen3 (Mixtral has none).
    Raises `ConfigError` when the numbers do not fit each other.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    seq_len: int
    qk_norm: bool = True
    norm_topk_prob: bool = True
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "num_experts", "seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, "
                f"it must lie in 1..num_experts ({self.num_experts})"
            )
