"""Which unit of a rank is needed next: the stages of a step and of an evaluation batch. Pure.

The step walks over exactly these stages (the engine checks it), so prefetch, eviction and compute
can never disagree about the order. `chunk` numbers the micro-batches of a batch-major step; a
layer-major step is one chunk. A pass takes a chunk forward or backward through all layers that
the rank has; only `1f1b` has passes of several chunks under way at once.

A rank of a pipeline has stages for its own layers, for the embedding when it is in the first
pipeline stage, for norm and head when it is in the last. What the ranks of a pipeline tell each
other between them is in `moe/pipeline_messages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe.config import ModelConfig, TrainConfig
from moe.mesh import Share
from moe.params import NORM_UNIT, embedding_units, expert_unit, head_units, layer_unit
from offload.schedule import Stage


def num_chunks(train: TrainConfig) -> int:
    """Passes over the layers in one step: 1 layer-major, one a micro-batch batch-major."""
    return train.gradient_accumulation_steps if train.micro_batch_order == "batch_major" else 1


def chunk_micro_batches(train: TrainConfig) -> int:
    """Micro-batches that pass through the layers together."""
    return train.gradient_accumulation_steps // num_chunks(train)


@dataclass(frozen=True)
class Pass:
    """One walk of a chunk of micro-batches through all layers of a rank."""

    kind: str  # "forward" or "backward"
    chunk: int


def num_lanes(train: TrainConfig, share: Share) -> int:
    """The most chunks that are under way at once, between their forward and their backward.

    One, except under `1f1b`: a rank `n` pipeline stages before the end has sent n micro-batches
    ahead when it turns the first one round. Chunk c uses lane c % num_lanes.
    """
    if share.mesh.config.pipeline_schedule != "1f1b":
        return 1
    return min(share.mesh.pp - share.at.pp, num_chunks(train))


def training_passes(train: TrainConfig, share: Share) -> list[Pass]:
    """The passes of one step, in order: what is under way never exceeds `num_lanes`.

    Under `1f1b` (PipeDream-Flush; Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN
    Training) a rank runs some forward passes ahead, then one forward and one backward in turn,
    then the backward passes that are left.
    """
    chunks, ahead = num_chunks(train), num_lanes(train, share) - 1
    passes = [Pass("forward", chunk) for chunk in range(ahead)]
    for chunk in range(chunks):
        if chunk + ahead < chunks:
            passes.append(Pass("forward", chunk + ahead))
        passes.append(Pass("backward", chunk))
    return passes


def segments(train: TrainConfig, share: Share) -> list[range]:
    """Runs of a rank's layers between two checkpoints of the residual stream, ascending.

    What a layer chunk receives is a checkpoint, so a segment never spans two of them.
    """
    every = train.recompute_every if train.recompute == "full" else 1
    return [
        range(first, min(first + every, layers.stop))
        for layers in share.layer_chunks
        for first in range(layers.start, layers.stop, every)
    ]


def leased_head_units(model: ModelConfig, share: Share) -> list[str]:
    """The head slices a rank leases: none when the embedding that is tied lives on another."""
    if not share.has_head or uses_tied_copy(model, share):
        return []
    return head_units(model)


def uses_tied_copy(model: ModelConfig, share: Share) -> bool:
    """Whether the rank's head works with a copy of an embedding that the first stage owns."""
    return model.tie_word_embeddings and share.has_head and not share.has_embedding


def expert_group(layer: int, chunk: int) -> str:
    """Name of the stages whose experts one routing decision fixes."""
    return f"experts {layer} chunk {chunk}"


def stage_name(kind: str, unit: str, chunk: int) -> str:
    """Name of a stage; `kind` is `fwd`, `redo` or `bwd`."""
    return f"{kind} {unit} chunk {chunk}"


def training_stages(
    model: ModelConfig, train: TrainConfig, share: Share | None = None
) -> list[Stage]:
    """All stages of one optimizer step of a rank, in order; without `share`, of the only rank."""
    share = share or Share.whole(model)
    stages: list[Stage] = []
    for step in training_passes(train, share):
        if step.kind == "forward":
            stages += _forward(model, share, step.chunk)
        else:
            stages += _backward(model, train, share, step.chunk)
    return stages


def evaluation_stages(model: ModelConfig, share: Share | None = None) -> list[Stage]:
    """All stages of one evaluation pass of a rank."""
    return list(_forward(model, share or Share.whole(model), 0))


def gradient_uses(model: ModelConfig, share: Share | None = None) -> dict[str, int]:
    """Gradient uses of each unit of a rank in a layer-major step.

    One; two for a tied embedding whose head is on the same rank.
    """
    uses: dict[str, int] = {}
    for stage in _backward(model, TrainConfig(), share or Share.whole(model), 0):
        for unit in stage.units:
            uses[unit] = uses.get(unit, 0) + (1 if stage.gradient else 0)
    return uses


def _dense(kind: str, unit: str, chunk: int, gradient: bool = False) -> Stage:
    return Stage(stage_name(kind, unit, chunk), (unit,), None, gradient)


def _experts(kind: str, share: Share, layer: int, chunk: int, gradient: bool = False) -> Stage:
    units = tuple(expert_unit(layer, expert) for expert in share.experts)
    name = stage_name(kind, f"experts.{layer}", chunk)
    return Stage(name, units, expert_group(layer, chunk), gradient)


def _forward(model: ModelConfig, share: Share, chunk: int) -> Iterator[Stage]:
    if share.has_embedding:
        for unit in embedding_units(model):
            yield _dense("fwd", unit, chunk)
    for layer in share.layers:
        yield _dense("fwd", layer_unit(layer), chunk)
        yield _experts("fwd", share, layer, chunk)
    if share.has_head:
        yield _dense("fwd", NORM_UNIT, chunk)
    for unit in leased_head_units(model, share):
        yield _dense("fwd head", unit, chunk)


def _backward(model: ModelConfig, train: TrainConfig, share: Share, chunk: int) -> Iterator[Stage]:
    for unit in leased_head_units(model, share):
        yield _dense("bwd head", unit, chunk, True)
    if share.has_head:
        yield _dense("bwd", NORM_UNIT, chunk, True)
    for segment in reversed(segments(train, share)):
        if train.recompute == "full":
            for layer in segment:
                yield _dense("redo", layer_unit(layer), chunk)
                if layer != segment[-1]:
                    yield _experts("redo", share, layer, chunk)
        for layer in reversed(segment):
            yield _experts("bwd", share, layer, chunk, True)
            yield _dense("bwd", layer_unit(layer), chunk, True)
    if share.has_embedding:
        for unit in embedding_units(model):
            yield _dense("bwd", unit, chunk, True)
