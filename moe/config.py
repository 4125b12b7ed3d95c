"""Model and training configuration: frozen dataclasses, validated on construction.

Key names follow Hugging Face's Qwen3-MoE configuration and the MindSpore ecosystem.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ops.validate import check_bool, check_choice, check_float, check_int, refuse


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only MoE Transformer (Qwen3-MoE form)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    n_shared_experts: int = 0
    qk_norm: bool = True
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    moe_aux_loss_coeff: float = 0.01
    moe_z_loss_coeff: float = 0.001
    vocab_slice_rows: int = 16384

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "vocab_slice_rows",
        ):
            check_int(f"model.{name}", getattr(self, name), low=1)
        check_int("model.n_shared_experts", self.n_shared_experts, low=0)
        for name in ("norm_topk_prob", "qk_norm", "tie_word_embeddings"):
            check_bool(f"model.{name}", getattr(self, name))
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            check_float(f"model.{name}", getattr(self, name), low=0.0, open_low=True)
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            check_float(f"model.{name}", getattr(self, name), low=0.0)
        if self.num_experts_per_tok > self.num_experts:
            raise refuse(
                "model.num_experts_per_tok",
                self.num_experts_per_tok,
                f"allowed is at most model.num_experts = {self.num_experts}",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise refuse(
                "model.num_key_value_heads",
                self.num_key_value_heads,
                f"allowed is a divisor of model.num_attention_heads = {self.num_attention_heads}",
            )
        if self.head_dim % 2:
            raise refuse(
                "model.head_dim", self.head_dim, "allowed is an even number (rotary pairs)"
            )

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts together; 0 without them."""
        return self.n_shared_experts * self.moe_intermediate_size


@dataclass(frozen=True)
class TrainConfig:
    """Batches, arithmetic, recomputation, evaluation and the run's length.

    `recompute: none` keeps the projections of attention and experts; those of experts only where
    `parallel.expert_parallel` is 1 (`moe/dispatch.py` says why).

    `freeze` lists units that are used but not trained, by name or shell pattern: `embed.*`,
    `layers.0`, `layers.*.experts.*`, `norm`, `head.*`.

    `init_from` is a directory of safetensors files whose weights a new run starts with; empty makes
    initial values from `seed`.
    """

    steps: int = 100
    seed: int = 1
    seq_len: int = 256
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    micro_batch_order: str = "layer_major"
    recompute: str = "selective"
    recompute_every: int = 1
    compute_dtype: str = "float32"
    weight_dtype: str = "bfloat16"
    grad_dtype: str = "bfloat16"
    eval_interval: int = 0
    save_steps: int = 0
    save_minutes: float = 0.0
    alarm_multiple: float = 0.0
    eval_batches: int = 8
    freeze: list[str] = field(default_factory=list)
    init_from: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "micro_batch_size", "gradient_accumulation_steps"):
            check_int(f"train.{name}", getattr(self, name), low=1)
        check_int("train.seed", self.seed, low=0, high=2**63 - 1)
        check_int("train.recompute_every", self.recompute_every, low=1)
        check_int("train.eval_interval", self.eval_interval, low=0)
        check_int("train.save_steps", self.save_steps, low=0)
        check_float("train.save_minutes", self.save_minutes, low=0.0)
        check_float("train.alarm_multiple", self.alarm_multiple, low=0.0)
        if 0 < self.alarm_multiple <= 1:
            allowed = "allowed is 0 (off) or a number above 1"
            raise refuse("train.alarm_multiple", self.alarm_multiple, allowed)
        check_int("train.eval_batches", self.eval_batches, low=1)
        if not all(isinstance(pattern, str) and pattern for pattern in self.freeze):
            raise refuse("train.freeze", self.freeze, "allowed is a list of unit names or patterns")
        if not isinstance(self.init_from, str):
            allowed = "allowed is a directory of safetensors files, or nothing"
            raise refuse("train.init_from", self.init_from, allowed)
        check_choice(
            "train.micro_batch_order", self.micro_batch_order, ("layer_major", "batch_major")
        )
        check_choice("train.recompute", self.recompute, ("none", "selective", "full"))
        check_choice("train.compute_dtype", self.compute_dtype, ("float32", "float16"))
        check_choice("train.weight_dtype", self.weight_dtype, ("bfloat16", "float32", "float16"))
        check_choice("train.grad_dtype", self.grad_dtype, ("bfloat16", "float32"))
        if (self.weight_dtype == "float16") != (self.compute_dtype == "float16"):
            raise refuse(
                "train.weight_dtype",
                self.weight_dtype,
                "allowed is float16 exactly when train.compute_dtype is float16, "
                f"which is {self.compute_dtype}",
            )
        if self.recompute_every > 1 and self.recompute != "full":
            raise refuse(
                "train.recompute_every",
                self.recompute_every,
                f"allowed is 1 unless train.recompute is full (it is {self.recompute})",
            )

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch, T = micro_batch_size x seq_len."""
        return self.micro_batch_size * self.seq_len

    @property
    def batch_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps
