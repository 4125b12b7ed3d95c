"""The stages of a rank: every layer once, in order, what belongs to it and nothing else."""

from __future__ import annotations

import pytest

from moe.config import TrainConfig
from moe.mesh import Mesh, ParallelConfig, Share
from moe.params import build_units
from moe.schedule import (
    evaluation_stages,
    gradient_uses,
    num_chunks,
    num_lanes,
    segments,
    training_passes,
    training_stages,
)
from offload.schedule import AccessSchedule
from tests.moe.pipeline_cases import LAYERS, MESHES, model_of, train_of


def shares_of(config: ParallelConfig, **changes) -> list[Share]:
    mesh = Mesh(config)
    return [mesh.share(model_of(**changes), rank) for rank in range(mesh.num_ranks)]


def dense_layers(stages, kind: str, chunk: int) -> list[int]:
    """Layers whose dense weights the stages use, in order."""
    start, end = f"{kind} layers.", f" chunk {chunk}"
    names = [stage.name for stage in stages if stage.name.startswith(start)]
    return [int(name[len(start) : -len(end)]) for name in names if name.endswith(end)]


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_all_ranks_together_walk_every_layer_once_each_way(config):
    train = train_of(config, gradient_accumulation_steps=3, recompute="full", recompute_every=2)
    shares = shares_of(config)
    steps = [training_stages(model_of(), train, share) for share in shares]
    for chunk in range(num_chunks(train)):
        forward = [dense_layers(stages, "fwd", chunk) for stages in steps]
        backward = [dense_layers(stages, "bwd", chunk) for stages in steps]
        again = [dense_layers(stages, "redo", chunk) for stages in steps]
        assert sorted(layer for layers in forward for layer in layers) == list(range(LAYERS))
        assert [layers[::-1] for layers in backward] == forward
        assert [sorted(layers) for layers in again] == forward
        assert all(layers == sorted(layers) for layers in forward)


@pytest.mark.parametrize("config", MESHES, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_rank_uses_its_own_units_and_each_gets_a_gradient(config, tied):
    model = model_of(tie_word_embeddings=tied)
    train = train_of(config, gradient_accumulation_steps=2)
    for share in shares_of(config, tie_word_embeddings=tied):
        owned = {unit.name for unit in build_units(model, share=share)}
        stages = training_stages(model, train, share)
        assert {unit for stage in stages for unit in stage.units} == owned
        uses = gradient_uses(model, share)
        assert set(uses) == owned
        in_schedule = AccessSchedule(stages).gradient_uses()
        assert in_schedule == {unit: count * num_chunks(train) for unit, count in uses.items()}
        evaluated = {unit for stage in evaluation_stages(model, share) for unit in stage.units}
        assert evaluated == owned


def test_one_rank_has_the_schedule_it_always_had():
    names = [stage.name for stage in training_stages(model_of(num_hidden_layers=2), TrainConfig())]
    assert names == [
        *("fwd embed.0 chunk 0", "fwd embed.1 chunk 0"),
        *("fwd layers.0 chunk 0", "fwd experts.0 chunk 0"),
        *("fwd layers.1 chunk 0", "fwd experts.1 chunk 0"),
        *("fwd norm chunk 0", "fwd head embed.0 chunk 0", "fwd head embed.1 chunk 0"),
        *("bwd head embed.0 chunk 0", "bwd head embed.1 chunk 0", "bwd norm chunk 0"),
        *("bwd experts.1 chunk 0", "bwd layers.1 chunk 0"),
        *("bwd experts.0 chunk 0", "bwd layers.0 chunk 0"),
        *("bwd embed.0 chunk 0", "bwd embed.1 chunk 0"),
    ]


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_a_segment_lies_in_one_layer_chunk(config):
    train = train_of(config, recompute="full", recompute_every=2)
    for share in shares_of(config):
        found = segments(train, share)
        assert [layer for segment in found for layer in segment] == list(share.layers)
        assert all(1 <= len(segment) <= 2 for segment in found)
        for chunk in share.layer_chunks:
            assert chunk.start in [segment.start for segment in found]


@pytest.mark.parametrize("config", [x for x in MESHES if x.pipeline_schedule == "1f1b"], ids=str)
def test_1f1b_has_few_micro_batches_under_way(config):
    """At most one for each pipeline stage from a rank's own to the last."""
    for steps in (1, 2, 3, 8):
        train = train_of(config, gradient_accumulation_steps=steps)
        for share in shares_of(config):
            passes = training_passes(train, share)
            under_way: set[int] = set()
            most = 0
            for step in passes:
                if step.kind == "forward":
                    under_way.add(step.chunk)
                else:
                    under_way.remove(step.chunk)
                most = max(most, len(under_way))
            assert not under_way
            assert most == min(config.pipeline_stage - share.at.pp, steps)
            assert most == num_lanes(train, share)
            for kind in ("forward", "backward"):
                chunks = [step.chunk for step in passes if step.kind == kind]
                assert chunks == list(range(steps)), "gradients are summed in this order"
