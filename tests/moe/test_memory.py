"""What the units and the activations of one rank take, on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.config import TrainConfig
from moe.memory import activation_specs, demands_of, layouts_of, stage_dims
from moe.mesh import Share
from offload.blocks import PARTS
from tests.moe.test_mesh import make_mesh, make_model

TRAIN = TrainConfig(seq_len=16, gradient_accumulation_steps=2)
MESHES = [(1, 2, 1, 1), (2, 1, 2, 1), (1, 4, 2, 2), (3, 2, 4, 2)]


def total_over_ranks(mesh, model, train):
    """Logical bytes of each part over all ranks, with the parameters held there."""
    sums = dict.fromkeys((*PARTS, "parameters"), 0)
    for rank in range(mesh.num_ranks):
        for layout in layouts_of(model, train, False, mesh.share(model, rank)):
            for part in PARTS:
                sums[part] += sum(item.nbytes for item in layout.fields[part])
            sums["parameters"] += layout.num_parameters
    return sums


@pytest.mark.parametrize("sizes", MESHES)
def test_state_of_all_ranks_is_the_state_of_one_but_for_padding_and_what_operators_repeat(sizes):
    model = make_model(hidden_size=64, moe_intermediate_size=64, vocab_size=128)
    mesh = make_mesh(*sizes)
    alone = total_over_ranks(make_mesh(), model, TRAIN)
    found = total_over_ranks(mesh, model, TRAIN)
    kept = sum(
        place.spec.size
        for layout in layouts_of(model, TRAIN, False)
        for place in layout.places
        if place.spec.kept
    )
    assert found["parameters"] == alone["parameters"] + (mesh.op - 1) * kept
    padding = 16 * 2 * mesh.num_ranks * 200  # bytes a parameter, runs, and more units than exist
    repeated = 16 * (mesh.op - 1) * kept
    for part in PARTS:
        assert alone[part] <= found[part] <= alone[part] + repeated + padding


def test_replicas_without_optimizer_parallel_store_everything_and_count_themselves():
    model = make_model()
    mesh = make_mesh(dp=4, op=2, ep=2, optimizer_parallel=False)
    whole = {x.name: x for x in layouts_of(model, TRAIN, False, make_mesh(op=2).share(model, 0))}
    for layout in layouts_of(model, TRAIN, False, mesh.share(model, 5)):
        assert layout.gathered is layout
        assert layout.size == whole[layout.name].size
        copies = 2 if layout.unit.expert is not None else 4
        for mine, other in zip(layout.places, whole[layout.name].places, strict=True):
            assert mine.spec.replicas == copies * other.spec.replicas
            assert replace(mine.spec, replicas=1) == replace(
                other.spec, replicas=1, row0=mine.spec.row0, col0=mine.spec.col0
            )


def test_only_frozen_units_of_this_rank_are_frozen_here():
    model = make_model()
    train = replace(TRAIN, freeze=["layers.5.experts.7", "embed.*"])
    mesh = make_mesh(pp=2, dp=2, ep=2)
    frozen = [
        {x.name for x in layouts_of(model, train, False, mesh.share(model, rank)) if x.frozen}
        for rank in range(4)
    ]
    assert frozen == [{"embed.0"}, {"embed.0"}, set(), {"layers.5.experts.7"}]


def test_stages_compute_with_the_heads_of_their_rank():
    model = make_model()
    dims = stage_dims(model, TRAIN, make_mesh(op=4).share(model, 1))
    assert (dims.num_heads, dims.num_kv_heads) == (2, 1)
    assert (dims.hidden_size, dims.head_dim, dims.num_experts) == (8, 4, 8)
    assert stage_dims(model, TRAIN) == stage_dims(model, TRAIN, Share.whole(model))


def test_activations_shrink_with_the_layers_and_the_heads_of_a_rank():
    model = make_model(n_shared_experts=1)
    train = replace(TRAIN, recompute="none")

    def specs(share=None):
        return {x.name: x for x in activation_specs(model, train, share)}

    alone, part = specs(), specs(make_mesh(pp=2, op=2).share(model, 3))
    assert alone == specs(Share.whole(model))
    for name in ("q", "k", "v", "o", "g", "u", "sg", "su"):
        assert part[name].shape == (alone[name].shape[0], alone[name].shape[1] // 2)
        assert part[name].copies * 2 == alone[name].copies
    for name in ("h_mid", "logits"):
        assert part[name].shape == alone[name].shape
        assert part[name].copies * 2 == alone[name].copies


def test_each_chunk_of_a_stage_has_its_own_segments():
    """Two chunks of two and three layers, segments of two: 1 + 2 checkpoints of the stream."""
    model = make_model(num_hidden_layers=7)
    train = replace(TRAIN, recompute="full", recompute_every=2)
    mesh = make_mesh(pp=2, pp_interleave_num=2, pipeline_layers=[2, 1, 3, 1])
    specs = {x.name: x for x in activation_specs(model, train, mesh.share(model, 0))}
    micro = TRAIN.gradient_accumulation_steps
    assert specs["h_in"].copies == 3 * micro
    assert specs["q"].copies == 2 * micro


def test_a_rank_keeps_accumulators_of_its_own_units_at_their_gathered_size():
    model = make_model(tie_word_embeddings=True, vocab_size=4096)
    mesh = make_mesh(pp=2, dp=4)
    demands = []
    for rank in (0, 4):
        share = mesh.share(model, rank)
        layouts = layouts_of(model, TRAIN, False, share)
        demands.append(demands_of(model, TRAIN, layouts, share))
    alone = demands_of(model, TRAIN, layouts_of(model, TRAIN, False))
    assert demands[0].accumulator_bytes == alone.accumulator_bytes > 0
    assert demands[1].accumulator_bytes == 0
    assert demands[1].activation_bytes < alone.activation_bytes
