"""`config.json`: the model in the words of Hugging Face's transformers. Pure.

With `qk_norm` and without shared experts the model is Qwen3-MoE, tensor for tensor. No published
architecture computes the other combinations under these names; they get a model type that nobody
knows, so that no program takes them for something else.
"""

from __future__ import annotations

from typing import Any

from moe.config import ModelConfig

PUBLISHED = "qwen3_moe"
OWN = "headrace_moe"


def is_published(model: ModelConfig) -> bool:
    """Whether transformers knows this architecture."""
    return model.qk_norm and not model.n_shared_experts


def hugging_face_config(model: ModelConfig, seq_len: int, dtype: str) -> dict[str, Any]:
    """The content of `config.json`; `dtype` is float32 or bfloat16, `seq_len` what was trained."""
    config: dict[str, Any] = {
        "model_type": PUBLISHED if is_published(model) else OWN,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Of dense layers, of which there are none: every layer has experts.
        "intermediate_size": model.moe_intermediate_size,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "moe_intermediate_size": model.moe_intermediate_size,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "norm_topk_prob": model.norm_topk_prob,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
        "output_router_logits": False,
        "rms_norm_eps": model.rms_norm_eps,
        # Older versions of transformers read the first, newer ones the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": seq_len,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if is_published(model):
        return {"architectures": ["Qwen3MoeForCausalLM"], **config}
    own = {"qk_norm": model.qk_norm, "n_shared_experts": model.n_shared_experts}
    return {**config, **own}
