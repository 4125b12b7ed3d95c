"""The stages of a rank: every layer once, in order, what belongs to it and nothing else."""

from __future__ import annotations

import pytest

from moe.config import TrainConfig
from moe.memory import activation_specs, demands_of, layouts_of
from moe.mesh import Mesh, ParallelConfig, Share
from moe.params import build_units
from moe.places import Places
from moe.schedule import (
    chunk_micro_batches,
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

FORMS = (
    {"recompute": "none"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 2},
    {"recompute": "full", "recompute_every": 5},
)


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


@pytest.mark.parametrize("config", MESHES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_what_is_saved_is_not_overwritten_before_it_is_used(config, form):
    """Walk the step: each index is in range, and holds what its reader expects."""
    model, train = model_of(), train_of(config, gradient_accumulation_steps=5, **form)
    full = train.recompute == "full"
    for share in shares_of(config):
        places = Places(train, share)
        copies = {spec.name: spec.copies for spec in activation_specs(model, train, share)}
        micro = chunk_micro_batches(train)
        held: dict[tuple[str, int], tuple[int, int, int]] = {}

        def place(name: str, layer: int, m: int, chunk: int) -> tuple[str, int]:
            if name == "stream":
                found = places.stream_in(layer, m, chunk)  # noqa: B023
            else:
                found = name, places.slot(layer, m, chunk)  # noqa: B023
            assert 0 <= found[1] < copies[found[0]]  # noqa: B023
            return found

        def save(layer: int, chunk: int, *names: str) -> None:
            for name in names:
                for m in range(micro):  # noqa: B023
                    held[place(name, layer, m, chunk)] = (layer, chunk, m)  # noqa: B023

        def check(layer: int, chunk: int, *names: str) -> None:
            for name in names:
                for m in range(micro):  # noqa: B023
                    assert held[place(name, layer, m, chunk)] == (layer, chunk, m)  # noqa: B023

        for step in training_passes(train, share):
            if step.kind == "forward":
                for layer in share.layers:
                    save(layer, step.chunk, "stream", "xn")
                continue
            for segment in reversed(segments(train, share)):
                for layer in segment if full else ():
                    if layer != segment.start:
                        save(layer, step.chunk, "stream")
                    check(layer, step.chunk, "stream")
                    save(layer, step.chunk, "xn")
                for layer in reversed(segment):
                    check(layer, step.chunk, "stream", "xn")


def test_a_stage_takes_memory_for_what_it_does():
    """Each end of a pipeline has its own arrays, and only the ends those of the vocabulary."""
    config = ParallelConfig(pipeline_stage=4)
    # A vocabulary that outweighs everything else in the workspace.
    model, train = model_of(vocab_size=4000, vocab_slice_rows=3000), train_of(config)
    mesh = Mesh(config)
    specs, workspace = [], []
    for rank in range(4):
        share = mesh.share(model, rank)
        specs.append({x.name: x for x in activation_specs(model, train, share)})
        layouts = layouts_of(model, train, False, share)
        workspace.append(demands_of(model, train, layouts, share).workspace_bytes)
    assert [("h_out" in found, "xn_out" in found) for found in specs] == 3 * [(False, False)] + [
        (True, True)
    ]
    assert [found["tied"].copies if "tied" in found else 0 for found in specs] == [0, 0, 0, 2]
    grads = [found["tied_grad"].copies if "tied_grad" in found else 0 for found in specs]
    assert grads == [1, 0, 0, 2]
    assert specs[3]["tied"].shape == (3000, model.hidden_size)
    assert workspace[1] == workspace[2] < min(workspace[0], workspace[3])
    untied = model_of(vocab_size=4000, vocab_slice_rows=3000, tie_word_embeddings=False)
    share = mesh.share(untied, 3)
    layouts = layouts_of(untied, train, False, share)
    less = demands_of(untied, train, layouts, share).workspace_bytes
    assert workspace[3] - less == pytest.approx(3000 * model.hidden_size * 4, abs=4096)


def test_nothing_waits_for_a_gradient_of_a_frozen_embedding():
    config = ParallelConfig(pipeline_stage=2)
    train = train_of(config, freeze=["embed.*"])
    for share in shares_of(config):
        names = [spec.name for spec in activation_specs(model_of(), train, share)]
        assert "tied_grad" not in names
        assert ("tied" in names) == share.has_head
