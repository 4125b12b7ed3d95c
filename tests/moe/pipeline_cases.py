"""Pipelines of many shapes, for tests of what is pure about them."""

from __future__ import annotations

from typing import Any

from moe.config import ModelConfig, TrainConfig
from moe.mesh import ParallelConfig

LAYERS = 8


def _meshes() -> list[ParallelConfig]:
    meshes = [ParallelConfig()]
    for stages, interleave in ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)):
        meshes.append(ParallelConfig(pipeline_stage=stages, pp_interleave_num=interleave))
    for layers in ([3, 5], [7, 1], [1, 2, 5], [2, 2, 1, 3], [1, 1, 1, 1, 1, 3]):
        stages = 2 if len(layers) in (2, 6) else len(layers)
        meshes.append(
            ParallelConfig(
                pipeline_stage=stages,
                pp_interleave_num=len(layers) // stages,
                pipeline_layers=layers,
            )
        )
    for stages, layers in ((2, []), (4, []), (8, []), (3, [1, 2, 5])):
        meshes.append(
            ParallelConfig(pipeline_stage=stages, pipeline_schedule="1f1b", pipeline_layers=layers)
        )
    return meshes


MESHES = _meshes()


def model_of(**changes: Any) -> ModelConfig:
    """A model of `LAYERS` layers."""
    shape: dict[str, Any] = {
        "vocab_size": 23,
        "hidden_size": 12,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "moe_intermediate_size": 10,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_slice_rows": 12,
    }
    return ModelConfig(**(shape | changes))


def train_of(config: ParallelConfig, **changes: Any) -> TrainConfig:
    """Settings that suit the mesh's schedule."""
    order = "batch_major" if config.pipeline_schedule == "1f1b" else "layer_major"
    return TrainConfig(**({"seq_len": 5, "micro_batch_order": order} | changes))
