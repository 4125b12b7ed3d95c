"""Which parameters a rank has, how they form units, and their initial values.

Names are the canonical Hugging Face names of Qwen3-MoE, one tensor per expert. Initial values
depend only on (seed, name, global index), so they are the same on every mesh and slicing.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe.config import ModelConfig
from moe.mesh import Share
from offload.blocks import TensorSpec, UnitSpec
from ops.validate import refuse

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
NORM_UNIT = "norm"
_INIT_RUN = 1 << 16


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


def rank_slice_rows(model: ModelConfig, share: Share) -> list[tuple[int, int]]:
    """(first row, rows) of this rank's part of each vocabulary slice."""
    parts = [(row0, share.op_part(rows)) for row0, rows in slice_rows(model)]
    return [(row0 + part.start, len(part)) for row0, part in parts]


def embedding_units(model: ModelConfig) -> list[str]:
    """Names of the embedding slices, in row order."""
    return [f"embed.{index}" for index in range(len(slice_rows(model)))]


def head_units(model: ModelConfig) -> list[str]:
    """Names of the head slices, in row order; the embedding's when tied."""
    if model.tie_word_embeddings:
        return embedding_units(model)
    return [f"head.{index}" for index in range(len(slice_rows(model)))]


def build_units(
    model: ModelConfig, decay_norms: bool = False, share: Share | None = None
) -> list[UnitSpec]:
    """The units of one rank, in forward order; without `share`, of the only rank.

    Units are local to operator parallelism: a rank holds its rows and columns of each tensor, and
    `replicas` of what every rank of the group holds whole (norms, router). They are not yet
    divided among replicas, see `offload/shards.py`. Names keep global layer and expert numbers.
    """
    share = share or Share.whole(model)
    make = _Tensors(model, decay_norms, share)
    units: list[UnitSpec] = []
    if share.has_embedding:
        units += _vocabulary_units(EMBEDDING, "embed", -1, model, make)
    for layer in share.layers:
        units.append(UnitSpec(layer_unit(layer), layer, None, make.dense(layer)))
        for expert in share.experts:
            tensors = make.ffn(
                f"model.layers.{layer}.mlp.experts.{expert}", model.moe_intermediate_size
            )
            units.append(UnitSpec(expert_unit(layer, expert), layer, expert, tensors))
    if share.has_head:
        last = model.num_hidden_layers
        norm = make.norm(FINAL_NORM, model.hidden_size)
        units.append(UnitSpec(NORM_UNIT, last, None, (norm,)))
        if not model.tie_word_embeddings:
            units += _vocabulary_units(HEAD, "head", last, model, make)
    return units


def unit_names(model: ModelConfig) -> list[str]:
    """Names of all units of the model, over all ranks, in forward order."""
    names = embedding_units(model)
    for layer in range(model.num_hidden_layers):
        names.append(layer_unit(layer))
        names += [expert_unit(layer, expert) for expert in range(model.num_experts)]
    return [*names, NORM_UNIT, *([] if model.tie_word_embeddings else head_units(model))]


class _Tensors:
    """Makes the tensors of one rank: rows, columns or all of each tensor of the model."""

    def __init__(self, model: ModelConfig, decay_norms: bool, share: Share) -> None:
        self.model, self.share, self._decay_norms = model, share, decay_norms

    def norm(self, name: str, size: int) -> TensorSpec:
        """A norm's scales, which every rank of the operator group holds."""
        replicas = self.share.op_size
        return TensorSpec(name, (size,), True, self._decay_norms, None, replicas=replicas)

    def router(self, name: str) -> TensorSpec:
        """The router's matrix, which every rank of the operator group holds."""
        shape, std = (self.model.num_experts, self.model.hidden_size), self.model.initializer_range
        return TensorSpec(name, shape, True, True, std, replicas=self.share.op_size)

    def rows(self, name: str, rows: int, row0: int = 0) -> TensorSpec:
        """This rank's part of `rows` rows of the whole tensor, the first of which is `row0`."""
        part = self.share.op_part(rows)
        shape, std = (len(part), self.model.hidden_size), self.model.initializer_range
        return TensorSpec(name, shape, False, True, std, row0=row0 + part.start)

    def columns(self, name: str, columns: int) -> TensorSpec:
        """This rank's part of a tensor's columns."""
        part = self.share.op_part(columns)
        shape, std = (self.model.hidden_size, len(part)), self.model.initializer_range
        if len(part) == columns:
            return TensorSpec(name, shape, False, True, std)
        return TensorSpec(name, shape, False, True, std, col0=part.start, num_cols=columns)

    def ffn(self, prefix: str, width: int) -> tuple[TensorSpec, ...]:
        """A SwiGLU of `width`: gate and up by rows, down by columns."""
        return (
            self.rows(f"{prefix}.gate_proj.weight", width),
            self.rows(f"{prefix}.up_proj.weight", width),
            self.columns(f"{prefix}.down_proj.weight", width),
        )

    def dense(self, layer: int) -> tuple[TensorSpec, ...]:
        """A layer's dense tensors: attention by heads, norms and router whole."""
        model, prefix = self.model, f"model.layers.{layer}"
        hidden, head = model.hidden_size, model.head_dim
        q_dim, kv_dim = model.num_attention_heads * head, model.num_key_value_heads * head
        tensors = [
            self.norm(f"{prefix}.input_layernorm.weight", hidden),
            self.rows(f"{prefix}.self_attn.q_proj.weight", q_dim),
            self.rows(f"{prefix}.self_attn.k_proj.weight", kv_dim),
            self.rows(f"{prefix}.self_attn.v_proj.weight", kv_dim),
            self.columns(f"{prefix}.self_attn.o_proj.weight", q_dim),
        ]
        if model.qk_norm:
            tensors.append(self.norm(f"{prefix}.self_attn.q_norm.weight", head))
            tensors.append(self.norm(f"{prefix}.self_attn.k_norm.weight", head))
        tensors.append(self.norm(f"{prefix}.post_attention_layernorm.weight", hidden))
        tensors.append(self.router(f"{prefix}.mlp.gate.weight"))
        if model.n_shared_experts:
            tensors += self.ffn(f"{prefix}.mlp.shared_experts", model.shared_intermediate_size)
        return tuple(tensors)


def _vocabulary_units(
    name: str, prefix: str, layer: int, model: ModelConfig, make: _Tensors
) -> list[UnitSpec]:
    return [
        UnitSpec(f"{prefix}.{index}", layer, None, (make.rows(name, rows, row0),))
        for index, (row0, rows) in enumerate(slice_rows(model))
    ]


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


def initial_values(tensor: TensorSpec, seed: int) -> np.ndarray:
    """fp32 initial values of a tensor, a block of one, or a piece of such a block; flat.

    Normal values come from runs of 65 536 elements of the whole tensor, each with its own Philox
    stream keyed by (seed, name, run), so that any part can be made alone, and only its runs are.
    """
    if not tensor.name:
        return np.zeros(tensor.size, np.float32)  # the padding of a share
    if tensor.init_std is None:
        return np.ones(tensor.size, np.float32)
    block = tensor.piece_of or tensor
    place = _BlockPlace(block)
    begin, end = tensor.flat0, tensor.flat0 + tensor.size
    result = np.empty(tensor.size, np.float32)
    for run in range(place.whole(begin) // _INIT_RUN, place.whole(end - 1) // _INIT_RUN + 1):
        first = run * _INIT_RUN
        lo = max(place.count_below(first), begin)
        hi = min(place.count_below(first + _INIT_RUN), end)
        if lo == hi:
            continue  # between two rows of a block of columns
        key = hashlib.blake2b(f"{seed}/{tensor.name}/{run}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        values = generator.standard_normal(_INIT_RUN, np.float32)
        if place.is_contiguous:
            start = place.whole(lo) - first
            result[lo - begin : hi - begin] = values[start : start + hi - lo]
        else:
            result[lo - begin : hi - begin] = values[place.whole(np.arange(lo, hi)) - first]
    result *= np.float32(tensor.init_std)
    return result


class _BlockPlace:
    """Where the elements of a block of rows and columns lie in the flat order of its tensor."""

    def __init__(self, block: TensorSpec) -> None:
        self._width = block.size // block.shape[0]
        self._stride = block.num_cols or self._width
        self._first = block.row0 * self._stride + block.col0
        self.is_contiguous = self._width == self._stride

    def whole(self, index: Any) -> Any:
        """Index in the whole tensor of the block's element `index`, a number or an array."""
        return self._first + index // self._width * self._stride + index % self._width

    def count_below(self, limit: int) -> int:
        """How many elements of the block have an index in the whole tensor below `limit`."""
        rows, rest = divmod(max(limit - self._first, 0), self._stride)
        return rows * self._width + min(rest, self._width)


@dataclass(frozen=True)
class Size:
    """What a model comes to, by arithmetic: its units, tensors (`packed`: at the least, with the
    experts of every layer packed) and numbers."""

    units: int
    tensors: int
    packed: int
    numbers: int


def size_of(model: ModelConfig) -> Size:
    """The size of a model, a tied embedding counted once; takes the same time for every model."""
    hidden, layers, experts = model.hidden_size, model.num_hidden_layers, model.num_experts
    vocabularies = 1 if model.tie_word_embeddings else 2
    slices = -(-model.vocab_size // model.vocab_slice_rows)
    dense = 7 + 2 * model.qk_norm + 3 * bool(model.n_shared_experts)
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    widths = experts * model.moe_intermediate_size + model.shared_intermediate_size
    in_layer = hidden * (2 + heads + experts + 3 * widths) + 2 * model.head_dim * model.qk_norm
    outside = vocabularies + 1
    return Size(
        units=vocabularies * slices + 1 + layers * (1 + experts),
        tensors=outside + layers * (dense + 3 * experts),
        packed=outside + layers * (dense + 2),
        numbers=hidden * (vocabularies * model.vocab_size + 1) + layers * in_layer,
    )
