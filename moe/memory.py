"""The layouts of a rank's units, and the bytes a step needs besides them. Pure.

The plan and the run call the same functions, so what is planned is what is taken.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe.config import ModelConfig, TrainConfig
from moe.mesh import Share
from moe.params import (
    build_units,
    embedding_units,
    frozen_units,
    rank_slice_rows,
    unit_names,
)
from moe.places import Places
from moe.schedule import chunk_micro_batches, gradient_uses, uses_tied_copy
from offload.activations import ActivationSpec, activation_bytes
from offload.blocks import UnitLayout, UnitSpec
from offload.gradients import accumulator_bytes
from offload.placement import Demands
from offload.shards import share_of
from ops.nn.dims import StageDims
from ops.nn.workspace import STAGES, workspace_bytes
from ops.units import round_up


def stage_dims(model: ModelConfig, train: TrainConfig, share: Share | None = None) -> StageDims:
    """The shapes of the stage functions of this model and batch on one rank."""
    op = share.op_size if share else 1
    return StageDims(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads // op,
        num_kv_heads=model.num_key_value_heads // op,
        head_dim=model.head_dim,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        seq_len=train.seq_len,
        qk_norm=model.qk_norm,
        norm_topk_prob=model.norm_topk_prob,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
    )


def layouts_of(
    model: ModelConfig, train: TrainConfig, decay_norms: bool, share: Share | None = None
) -> list[UnitLayout]:
    """The layout of every unit of one rank, in forward order; without `share`, of the only rank.

    With `optimizer_parallel` a unit's replicas store a part each (dense units over data_parallel,
    experts over their replicas), else each stores the whole and its tensors count the replicas.
    """
    share = share or Share.whole(model)
    frozen = frozen_units(unit_names(model), train.freeze)
    kinds = (train.weight_dtype, train.grad_dtype, train.compute_dtype)
    layouts = []
    for unit in build_units(model, decay_norms, share):
        unit = replace(unit, frozen=unit.name in frozen)
        index, size = share.weight_shards(unit.expert is not None)
        if not share.mesh.config.optimizer_parallel:
            unit, index, size = _replicated(unit, size), 0, 1
        layouts.append(share_of(unit, *kinds, rank=index, size=size))
    return layouts


def _replicated(unit: UnitSpec, replicas: int) -> UnitSpec:
    """`unit` whose tensors are held whole by so many times more ranks."""
    tensors = tuple(replace(x, replicas=x.replicas * replicas) for x in unit.tensors)
    return replace(unit, tensors=tensors)


def activation_specs(
    model: ModelConfig, train: TrainConfig, share: Share | None = None
) -> list[ActivationSpec]:
    """Every array that waits on the host of one rank between two stages of a step.

    Per layer slot and micro-batch: `h_in`, the residual stream at a checkpoint (`h_seg` inside a
    segment); q, k, v, o, h_mid, xn, logits, from which backward continues without repeating a
    projection; with recompute none also the experts' g, u. Under `full` a segment's worth of
    slots is reused. Per micro-batch: y, dh, dx; with a head h_out, xn_out, dxn_out. With expert
    parallelism also, per micro-batch, the rows that arrive: `recv_x` (results replace them),
    `recv_dout`, `recv_w`, of `received_rows` rows each; and no g, u, which backward recomputes.
    A pipeline's copy of a tied embedding is `tied` and its gradients `tied_grad`, an array a
    vocabulary slice on the last stage; the first stage has one `tied_grad`, where each arrives.
    With sequence parallelism h_in, h_seg, h_mid and h_out have this rank's tokens only, and
    `embedded` is the sum over slices of the vocabulary until it is scattered.
    """
    compute, stream = train.compute_dtype, "float32"
    tokens, hidden = train.micro_batch_tokens, model.hidden_size
    share = share or Share.whole(model)
    own_tokens = tokens // share.op_size if is_sequence_parallel(share) else tokens
    op, micro, places = share.op_size, chunk_micro_batches(train), Places(train, share)
    slots_P, ffn = tokens * model.num_experts_per_tok, model.moe_intermediate_size // op
    q_dim = model.num_attention_heads * model.head_dim // op
    kv_dim = model.num_key_value_heads * model.head_dim // op
    saved = places.num_slots

    def spec(name: str, rows: int, width: int, dtype: str, copies: int) -> ActivationSpec:
        return ActivationSpec(name, (rows, width), dtype, copies * micro)

    specs = [
        spec("h_in", own_tokens, hidden, stream, places.num_checkpoints),
        spec("q", tokens, q_dim, compute, saved),
        spec("k", tokens, kv_dim, compute, saved),
        spec("v", tokens, kv_dim, compute, saved),
        spec("o", tokens, q_dim, compute, saved),
        spec("h_mid", own_tokens, hidden, stream, saved),
        spec("xn", tokens, hidden, compute, saved),
        spec("logits", tokens, model.num_experts, stream, saved),
        spec("y", slots_P, hidden, compute, 1),
        spec("dh", tokens, hidden, stream, 1),
        spec("dx", slots_P, hidden, compute, 1),
    ]
    if share.has_head:
        specs.append(spec("h_out", own_tokens, hidden, stream, 1))
        specs.append(spec("xn_out", tokens, hidden, compute, 1))
        specs.append(spec("dxn_out", tokens, hidden, stream, 1))
    if train.recompute == "full" and train.recompute_every > 1:
        specs.append(spec("h_seg", own_tokens, hidden, stream, saved))
    if share.has_embedding and is_sequence_parallel(share) and len(embedding_units(model)) > 1:
        specs.append(spec("embedded", tokens, hidden, stream, 1))
    shared = model.shared_intermediate_size // op
    if shared:
        specs.append(spec("shared", tokens, hidden, compute, 1))
    if share.mesh.ep > 1:
        rows = received_rows(model, train, share)
        specs += [spec(name, rows, hidden, compute, 1) for name in ("recv_x", "recv_dout")]
        specs.append(spec("recv_w", rows, 1, stream, 1))
    if train.recompute == "none":
        if share.mesh.ep == 1:
            specs += [spec(name, slots_P, ffn, compute, saved) for name in ("g", "u")]
        if shared:
            specs += [spec(name, tokens, shared, compute, saved) for name in ("sg", "su")]
    return specs + _tied_specs(model, train, share)


def _tied_specs(model: ModelConfig, train: TrainConfig, share: Share) -> list[ActivationSpec]:
    """Where a tied embedding and its head's gradients wait, see `moe/pipeline_parallel.py`."""
    if not model.tie_word_embeddings or share.mesh.pp == 1:
        return []
    slices = rank_slice_rows(model, share)
    shape = (max(rows for _, rows in slices), model.hidden_size)
    frozen = frozen_units(unit_names(model), train.freeze)
    has_gradient = not frozen.issuperset(embedding_units(model))
    specs = []
    if share.has_head:
        specs.append(ActivationSpec("tied", shape, train.compute_dtype, len(slices)))
        if has_gradient:
            specs.append(ActivationSpec("tied_grad", shape, "float32", len(slices)))
    elif share.has_embedding and has_gradient:
        specs.append(ActivationSpec("tied_grad", shape, "float32", 1))
    return specs


def received_rows(model: ModelConfig, train: TrainConfig, share: Share) -> int:
    """The most rows that a rank's experts can get of one micro-batch of every `ep` rank.

    A token has `num_experts_per_tok` different experts, of which at most all that this rank owns:
    ep * T * min(K, E / ep) rows. On average T * K come; but nothing may grow in a step, and a
    router may send every token to one rank. The buffers are those of one layer: each layer uses
    them anew.
    """
    most = min(model.num_experts_per_tok, len(share.experts))
    return share.mesh.ep * train.micro_batch_tokens * most


def demands_of(
    model: ModelConfig,
    train: TrainConfig,
    layouts: list[UnitLayout],
    share: Share | None = None,
) -> Demands:
    """Activation, accumulator and workspace bytes of a step of the rank with these `layouts`."""
    sizes = {x.name: round_up(x.gathered.accumulator_nbytes, 4096) for x in layouts}
    share = share or Share.whole(model)
    uses = gradient_uses(model, share)
    return Demands(
        activation_bytes=activation_bytes(activation_specs(model, train, share)),
        accumulator_bytes=accumulator_bytes(uses, sizes, is_batch_major(train)),
        workspace_bytes=round_up(_workspace(model, train, share), 4096),
    )


def is_sequence_parallel(share: Share) -> bool:
    """Whether the ranks of operator parallelism divide the stream and the norms by tokens."""
    return share.op_size > 1 and share.mesh.config.use_seq_parallel


def is_batch_major(train: TrainConfig) -> bool:
    """Whether gradients have to be kept between micro-batches."""
    return train.micro_batch_order == "batch_major" and train.gradient_accumulation_steps > 1


def _workspace(model: ModelConfig, train: TrainConfig, share: Share) -> int:
    """The largest declared stage: an expert's bucket may hold every token of a micro-batch."""
    shared = model.shared_intermediate_size // share.op_size
    ffn = model.moe_intermediate_size // share.op_size
    dims = stage_dims(model, train, share)
    vocab_rows = max(rows for _, rows in rank_slice_rows(model, share))
    # The copy of a tied slice is no lease, so it lies in the workspace, like the gradients.
    copy_bytes = vocab_rows * model.hidden_size * np.dtype(train.compute_dtype).itemsize
    sizes = []
    for stage in STAGES:
        if not _runs(stage, share, bool(shared)):
            continue
        nbytes = workspace_bytes(
            stage,
            dims,
            train.compute_dtype,
            num_tokens=train.micro_batch_tokens,
            rows=train.micro_batch_tokens,
            ffn_size=shared if stage.startswith("shared") else ffn,
            vocab_rows=vocab_rows,
            over_ranks=share.op_size > 1,
        )
        is_copy = stage.startswith("head") and uses_tied_copy(model, share)
        sizes.append(nbytes + (copy_bytes if is_copy else 0))
    return max(sizes)


def _runs(stage: str, share: Share, has_shared: bool) -> bool:
    """Whether a rank ever calls `stage`: the ends of the model are on the outer stages only."""
    if stage.startswith("embed"):
        return share.has_embedding
    if stage.startswith(("head", "final_norm")):
        return share.has_head
    return has_shared or not stage.startswith("shared")
