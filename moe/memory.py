"""Bytes a step needs besides its units: activations, accumulators, device workspace. Pure.

The plan and the run call the same functions, so what is planned is what is taken.
"""

from __future__ import annotations

from dataclasses import replace

from moe.config import ModelConfig, TrainConfig
from moe.params import build_units, frozen_units, slice_rows
from moe.schedule import chunk_micro_batches, gradient_uses
from offload.activations import ActivationSpec, activation_bytes
from offload.blocks import UnitLayout
from offload.gradients import accumulator_bytes
from offload.placement import Demands
from ops.nn.dims import StageDims
from ops.nn.workspace import STAGES, workspace_bytes
from ops.units import round_up


def stage_dims(model: ModelConfig, train: TrainConfig) -> StageDims:
    """The shapes of the stage functions of this model and batch."""
    return StageDims(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        seq_len=train.seq_len,
        qk_norm=model.qk_norm,
        norm_topk_prob=model.norm_topk_prob,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
    )


def layouts_of(model: ModelConfig, train: TrainConfig, decay_norms: bool) -> list[UnitLayout]:
    """The layout of every unit, in forward order."""
    units = build_units(model, decay_norms)
    frozen = frozen_units([unit.name for unit in units], train.freeze)
    return [
        UnitLayout(
            replace(unit, frozen=unit.name in frozen),
            train.weight_dtype,
            train.grad_dtype,
            train.compute_dtype,
        )
        for unit in units
    ]


def activation_specs(model: ModelConfig, train: TrainConfig) -> list[ActivationSpec]:
    """Every array that waits on the host between two stages of a step.

    Per layer slot and micro-batch: `h_in`, the residual stream at a checkpoint (`h_seg` inside a
    segment); q, k, v, o, h_mid, xn, logits, from which backward continues without repeating a
    projection; with recompute none also the experts' g, u. Under `full` a segment's worth of
    slots is reused. Per micro-batch: h_out, y, xn_out, dh, dx, dxn_out.
    """
    compute, stream = train.compute_dtype, "float32"
    tokens, hidden = train.micro_batch_tokens, model.hidden_size
    slots_P, ffn = tokens * model.num_experts_per_tok, model.moe_intermediate_size
    q_dim = model.num_attention_heads * model.head_dim
    kv_dim = model.num_key_value_heads * model.head_dim
    micro, layers = chunk_micro_batches(train), model.num_hidden_layers
    full = train.recompute == "full"
    every = train.recompute_every if full else 1
    saved = min(every, layers) if full else layers

    def spec(name: str, rows: int, width: int, dtype: str, copies: int) -> ActivationSpec:
        return ActivationSpec(name, (rows, width), dtype, copies * micro)

    specs = [
        spec("h_in", tokens, hidden, stream, -(-layers // every)),
        spec("q", tokens, q_dim, compute, saved),
        spec("k", tokens, kv_dim, compute, saved),
        spec("v", tokens, kv_dim, compute, saved),
        spec("o", tokens, q_dim, compute, saved),
        spec("h_mid", tokens, hidden, stream, saved),
        spec("xn", tokens, hidden, compute, saved),
        spec("logits", tokens, model.num_experts, stream, saved),
        spec("h_out", tokens, hidden, stream, 1),
        spec("y", slots_P, hidden, compute, 1),
        spec("xn_out", tokens, hidden, compute, 1),
        spec("dxn_out", tokens, hidden, stream, 1),
        spec("dh", tokens, hidden, stream, 1),
        spec("dx", slots_P, hidden, compute, 1),
    ]
    if every > 1:
        specs.append(spec("h_seg", tokens, hidden, stream, saved))
    shared = model.shared_intermediate_size
    if shared:
        specs.append(spec("shared", tokens, hidden, compute, 1))
    if train.recompute == "none":
        specs += [spec(name, slots_P, ffn, compute, saved) for name in ("g", "u")]
        if shared:
            specs += [spec(name, tokens, shared, compute, saved) for name in ("sg", "su")]
    return specs


def demands_of(model: ModelConfig, train: TrainConfig, layouts: list[UnitLayout]) -> Demands:
    """Activation, accumulator and workspace bytes of a step."""
    sizes = {x.name: round_up(x.accumulator_nbytes, 4096) for x in layouts}
    batch_major = is_batch_major(train)
    return Demands(
        activation_bytes=activation_bytes(activation_specs(model, train)),
        accumulator_bytes=accumulator_bytes(gradient_uses(model), sizes, batch_major),
        workspace_bytes=round_up(_workspace(model, train), 4096),
    )


def is_batch_major(train: TrainConfig) -> bool:
    """Whether gradients have to be kept between micro-batches."""
    return train.micro_batch_order == "batch_major" and train.gradient_accumulation_steps > 1


def _workspace(model: ModelConfig, train: TrainConfig) -> int:
    """The largest declared stage: an expert's bucket may hold every token of a micro-batch."""
    shared = model.shared_intermediate_size
    return max(
        workspace_bytes(
            stage,
            stage_dims(model, train),
            train.compute_dtype,
            num_tokens=train.micro_batch_tokens,
            rows=train.micro_batch_tokens,
            ffn_size=shared if stage.startswith("shared") else model.moe_intermediate_size,
            vocab_rows=max(rows for _, rows in slice_rows(model)),
        )
        for stage in STAGES
        if shared or not stage.startswith("shared")
    )
