"""Which parameters a model has, how they form units, and their initial values.

Names are the canonical Hugging Face names of Qwen3-MoE, one tensor per expert. Initial values
depend only on (seed, name, global index), so they are the same on every mesh and slicing.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence

import numpy as np

from moe.config import ModelConfig
from offload.blocks import TensorSpec, UnitSpec
from ops.validate import refuse

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_INIT_BLOCK = 1 << 16


def layer_unit(layer: int) -> str:
    """Name of the unit with a layer's dense weights (attention, norms, router, shared experts)."""
    return f"layers.{layer}"


def expert_unit(layer: int, expert: int) -> str:
    """Name of the unit of one expert."""
    return f"layers.{layer}.experts.{expert}"


def slice_rows(model: ModelConfig) -> list[tuple[int, int]]:
    """(first row, rows) of each vocabulary slice; a function of the model alone."""
    step = model.vocab_slice_rows
    return [(row, min(step, model.vocab_size - row)) for row in range(0, model.vocab_size, step)]


def embedding_units(model: ModelConfig) -> list[str]:
    """Names of the embedding slices, in row order."""
    return [f"embed.{index}" for index in range(len(slice_rows(model)))]


def head_units(model: ModelConfig) -> list[str]:
    """Names of the head slices, in row order; the embedding's when tied."""
    if model.tie_word_embeddings:
        return embedding_units(model)
    return [f"head.{index}" for index in range(len(slice_rows(model)))]


NORM_UNIT = "norm"


def build_units(model: ModelConfig, decay_norms: bool = False) -> list[UnitSpec]:
    """All units of the model in forward order."""
    std = model.initializer_range

    def matrix(name: str, *shape: int, kept: bool = False, row0: int = 0) -> TensorSpec:
        return TensorSpec(name, shape, kept, True, std, row0)

    def norm(name: str, size: int) -> TensorSpec:
        return TensorSpec(name, (size,), True, decay_norms, None)

    units = []
    for index, (row0, rows) in enumerate(slice_rows(model)):
        tensor = matrix(EMBEDDING, rows, model.hidden_size, row0=row0)
        units.append(UnitSpec(f"embed.{index}", -1, None, (tensor,)))
    for layer in range(model.num_hidden_layers):
        units.append(UnitSpec(layer_unit(layer), layer, None, _dense(model, layer, matrix, norm)))
        for expert in range(model.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors = _ffn(prefix, model.hidden_size, model.moe_intermediate_size, matrix)
            units.append(UnitSpec(expert_unit(layer, expert), layer, expert, tensors))
    last = model.num_hidden_layers
    units.append(UnitSpec(NORM_UNIT, last, None, (norm(FINAL_NORM, model.hidden_size),)))
    if not model.tie_word_embeddings:
        for index, (row0, rows) in enumerate(slice_rows(model)):
            tensor = matrix(HEAD, rows, model.hidden_size, row0=row0)
            units.append(UnitSpec(f"head.{index}", last, None, (tensor,)))
    return units


def frozen_units(names: Sequence[str], patterns: Sequence[str]) -> frozenset[str]:
    """The units that `train.freeze` names; ConfigError for a pattern that names none, or for all.

    Patterns are those of `fnmatch`, over unit names.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            example = ", ".join(list(dict.fromkeys((names[0], "layers.0", names[-1]))))
            raise refuse(
                "train.freeze", pattern, f"no unit has that name; names are like {example}"
            )
        frozen.update(found)
    if len(frozen) == len(names):
        raise refuse("train.freeze", list(patterns), "it must leave something to train")
    return frozenset(frozen)


def _ffn(prefix: str, hidden: int, ffn: int, matrix) -> tuple[TensorSpec, ...]:  # type: ignore[no-untyped-def]
    return (
        matrix(f"{prefix}.gate_proj.weight", ffn, hidden),
        matrix(f"{prefix}.up_proj.weight", ffn, hidden),
        matrix(f"{prefix}.down_proj.weight", hidden, ffn),
    )


def _dense(model: ModelConfig, layer: int, matrix, norm) -> tuple[TensorSpec, ...]:  # type: ignore[no-untyped-def]
    prefix = f"model.layers.{layer}"
    hidden, head = model.hidden_size, model.head_dim
    q_dim, kv_dim = model.num_attention_heads * head, model.num_key_value_heads * head
    tensors = [
        norm(f"{prefix}.input_layernorm.weight", hidden),
        matrix(f"{prefix}.self_attn.q_proj.weight", q_dim, hidden),
        matrix(f"{prefix}.self_attn.k_proj.weight", kv_dim, hidden),
        matrix(f"{prefix}.self_attn.v_proj.weight", kv_dim, hidden),
        matrix(f"{prefix}.self_attn.o_proj.weight", hidden, q_dim),
    ]
    if model.qk_norm:
        tensors.append(norm(f"{prefix}.self_attn.q_norm.weight", head))
        tensors.append(norm(f"{prefix}.self_attn.k_norm.weight", head))
    tensors.append(norm(f"{prefix}.post_attention_layernorm.weight", hidden))
    tensors.append(matrix(f"{prefix}.mlp.gate.weight", model.num_experts, hidden, kept=True))
    if model.n_shared_experts:
        shared = f"{prefix}.mlp.shared_experts"
        tensors.extend(_ffn(shared, hidden, model.shared_intermediate_size, matrix))
    return tuple(tensors)


def initial_values(tensor: TensorSpec, seed: int) -> np.ndarray:
    """fp32 initial values of a tensor (or its slice of rows), flat.

    Normal values come from blocks of 65 536 elements, each with its own Philox stream keyed by
    (seed, name, block), so that any range of the whole tensor can be made alone.
    """
    if tensor.init_std is None:
        return np.ones(tensor.size, np.float32)
    first = tensor.row0 * (tensor.size // tensor.shape[0])
    last = first + tensor.size
    pieces = []
    for block in range(first // _INIT_BLOCK, -(-last // _INIT_BLOCK)):
        key = hashlib.blake2b(f"{seed}/{tensor.name}/{block}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        values = generator.standard_normal(_INIT_BLOCK, np.float32)
        begin = block * _INIT_BLOCK
        pieces.append(values[max(first - begin, 0) : last - begin])
    return np.concatenate(pieces) * np.float32(tensor.init_std)
