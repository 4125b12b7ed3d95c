"""Which unit is needed next: the stages of a training step and of an evaluation batch. Pure.

The step walks over exactly these stages (the engine checks it), so prefetch, eviction and compute
can never disagree about the order. `chunk` numbers the micro-batches of a batch-major step; a
layer-major step is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe.config import ModelConfig, TrainConfig
from moe.params import NORM_UNIT, embedding_units, expert_unit, head_units, layer_unit
from offload.schedule import Stage


def num_chunks(train: TrainConfig) -> int:
    """Passes over the layers in one step: 1 layer-major, one a micro-batch batch-major."""
    return train.gradient_accumulation_steps if train.micro_batch_order == "batch_major" else 1


def chunk_micro_batches(train: TrainConfig) -> int:
    """Micro-batches that pass through the layers together."""
    return train.gradient_accumulation_steps // num_chunks(train)


def segments(model: ModelConfig, train: TrainConfig) -> list[range]:
    """Runs of layers between two checkpoints of the residual stream."""
    every = train.recompute_every if train.recompute == "full" else 1
    layers = model.num_hidden_layers
    return [range(first, min(first + every, layers)) for first in range(0, layers, every)]


def expert_group(layer: int, chunk: int) -> str:
    """Name of the stages whose experts one routing decision fixes."""
    return f"experts {layer} chunk {chunk}"


def stage_name(kind: str, unit: str, chunk: int) -> str:
    """Name of a stage; `kind` is `fwd`, `redo` or `bwd`."""
    return f"{kind} {unit} chunk {chunk}"


def training_stages(model: ModelConfig, train: TrainConfig) -> list[Stage]:
    """All stages of one optimizer step, in order."""
    stages: list[Stage] = []
    for chunk in range(num_chunks(train)):
        stages += _forward(model, chunk)
        stages += _backward(model, train, chunk)
    return stages


def evaluation_stages(model: ModelConfig) -> list[Stage]:
    """All stages of one evaluation pass."""
    return list(_forward(model, 0))


def gradient_uses(model: ModelConfig) -> dict[str, int]:
    """Gradient uses of each unit in a layer-major step: 2 for a tied embedding, else 1."""
    uses: dict[str, int] = {}
    train = TrainConfig()
    for stage in _backward(model, train, 0):
        for unit in stage.units:
            uses[unit] = uses.get(unit, 0) + (1 if stage.gradient else 0)
    return uses


def _dense(kind: str, unit: str, chunk: int, gradient: bool = False) -> Stage:
    return Stage(stage_name(kind, unit, chunk), (unit,), None, gradient)


def _experts(
    kind: str, model: ModelConfig, layer: int, chunk: int, gradient: bool = False
) -> Stage:
    units = tuple(expert_unit(layer, expert) for expert in range(model.num_experts))
    name = stage_name(kind, f"experts.{layer}", chunk)
    return Stage(name, units, expert_group(layer, chunk), gradient)


def _forward(model: ModelConfig, chunk: int) -> Iterator[Stage]:
    for unit in embedding_units(model):
        yield _dense("fwd", unit, chunk)
    for layer in range(model.num_hidden_layers):
        yield _dense("fwd", layer_unit(layer), chunk)
        yield _experts("fwd", model, layer, chunk)
    yield _dense("fwd", NORM_UNIT, chunk)
    for unit in head_units(model):
        yield _dense("fwd head", unit, chunk)


def _backward(model: ModelConfig, train: TrainConfig, chunk: int) -> Iterator[Stage]:
    for unit in head_units(model):
        yield _dense("bwd head", unit, chunk, True)
    yield _dense("bwd", NORM_UNIT, chunk, True)
    for segment in reversed(segments(model, train)):
        if train.recompute == "full":
            for layer in segment:
                yield _dense("redo", layer_unit(layer), chunk)
                if layer != segment[-1]:
                    yield _experts("redo", model, layer, chunk)
        for layer in reversed(segment):
            yield _experts("bwd", model, layer, chunk, True)
            yield _dense("bwd", layer_unit(layer), chunk, True)
    for unit in embedding_units(model):
        yield _dense("bwd", unit, chunk, True)
