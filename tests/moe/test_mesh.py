"""The mesh: rank numbers, groups, layers of stages, shares, and machines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import ModelConfig, TrainConfig
from moe.mesh import (
    GROUP_KINDS,
    Mesh,
    ParallelConfig,
    Share,
    global_batch_sequences,
    machines_crossed,
    placement_warnings,
)
from ops.errors import ConfigError


def make_model(**changes):
    """A model of 8 heads, 8 experts and 6 layers."""
    keys = {
        "vocab_size": 64,
        "hidden_size": 8,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    return ModelConfig(**{**keys, **changes})


def make_mesh(pp=1, dp=1, op=1, ep=1, **changes):
    return Mesh(
        ParallelConfig(
            pipeline_stage=pp, data_parallel=dp, model_parallel=op, expert_parallel=ep, **changes
        )
    )


meshes = st.tuples(*[st.integers(1, 4)] * 4).map(
    lambda sizes: make_mesh(sizes[0], sizes[1] * sizes[3], sizes[2], sizes[3])
)


def test_ranks_of_the_target_cluster_stand_where_the_design_says():
    mesh = make_mesh(pp=2, dp=4, op=4, ep=2)
    at = mesh.coordinates(29)  # ((1 * 2 + 1) * 2 + 1) * 4 + 1
    assert (at.pp, at.edp, at.ep, at.op, at.dp) == (1, 1, 1, 1, 3)
    assert mesh.group_of("op", 29) == (28, 29, 30, 31)
    assert mesh.group_of("ep", 29) == (25, 29)
    assert mesh.group_of("edp", 29) == (21, 29)
    assert mesh.group_of("dp", 29) == (17, 21, 25, 29)
    assert mesh.group_of("pipe", 29) == (13, 29)
    assert mesh.group_of("stage", 29) == tuple(range(16, 32))


@settings(deadline=None, max_examples=50)
@given(meshes)
def test_coordinates_name_every_rank_once(mesh):
    for rank in range(mesh.num_ranks):
        at = mesh.coordinates(rank)
        assert mesh.rank_of(at.pp, at.dp, at.op) == rank
        assert at.dp == at.edp * mesh.ep + at.ep
        assert ((at.pp * mesh.edp + at.edp) * mesh.ep + at.ep) * mesh.op + at.op == rank


@settings(deadline=None, max_examples=50)
@given(meshes)
def test_groups_of_a_kind_hold_every_rank_once_and_in_order_of_its_index(mesh):
    sizes = {
        "op": mesh.op,
        "dp": mesh.dp,
        "ep": mesh.ep,
        "edp": mesh.edp,
        "stage": mesh.dp * mesh.op,
        "pipe": mesh.pp,
    }
    axes = {"op": "op", "dp": "dp", "ep": "ep", "edp": "edp", "pipe": "pp"}
    for kind in GROUP_KINDS:
        groups = mesh.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
        assert {len(group) for group in groups} == {sizes[kind]}
        for group in groups:
            assert list(group) == sorted(group)
            if kind in axes:
                found = [getattr(mesh.coordinates(rank), axes[kind]) for rank in group]
                assert found == list(range(sizes[kind]))


@settings(deadline=None, max_examples=50)
@given(meshes)
def test_experts_are_shared_inside_a_data_group_and_replicated_across_it(mesh):
    for rank in range(mesh.num_ranks):
        experts = set(mesh.group_of("ep", rank))
        replicas = set(mesh.group_of("edp", rank))
        assert experts & replicas == {rank}
        assert experts | replicas <= set(mesh.group_of("dp", rank))


def test_chunks_are_looped_over_stages():
    mesh = make_mesh(pp=3, pp_interleave_num=2)
    chunks = mesh.layer_chunks(12)
    assert chunks == [range(i, i + 2) for i in range(0, 12, 2)]
    model = make_model(num_hidden_layers=12)
    owned = [mesh.share(model, rank).layer_chunks for rank in range(3)]
    assert owned == [(chunks[0], chunks[3]), (chunks[1], chunks[4]), (chunks[2], chunks[5])]


def test_stated_layers_may_be_uneven():
    mesh = make_mesh(pp=2, pp_interleave_num=2, pipeline_layers=[1, 3, 1, 1])
    model = make_model()
    assert mesh.share(model, 0).layers == (0, 4)
    assert mesh.share(model, 1).layers == (1, 2, 3, 5)
    with pytest.raises(ConfigError, match="not the layers of 4 chunks of 7"):
        mesh.layer_chunks(7)


def test_the_share_of_the_only_rank_is_everything():
    model = make_model()
    share = Share.whole(model)
    assert share.layers == tuple(range(6))
    assert share.layer_chunks == (range(6),)
    assert share.experts == range(8)
    assert share.has_embedding and share.has_head
    assert share.op_part(12) == range(12)
    assert share.weight_shards(is_expert=True) == share.weight_shards(is_expert=False) == (0, 1)


@settings(deadline=None, max_examples=50)
@given(meshes, st.integers(1, 3))
def test_shares_cover_layers_and_experts_as_often_as_there_are_replicas(mesh, each):
    model = make_model(num_hidden_layers=mesh.pp * each, num_experts=mesh.ep * 2)
    count: dict[tuple[int, int], int] = {}
    for rank in range(mesh.num_ranks):
        share = mesh.share(model, rank)
        at = share.at
        assert share.has_embedding == (at.pp == 0)
        assert share.has_head == (at.pp == mesh.pp - 1)
        assert share.weight_shards(is_expert=False) == (at.dp, mesh.dp)
        assert share.weight_shards(is_expert=True) == (at.edp, mesh.edp)
        assert list(share.op_part(mesh.op * 3)) == [at.op * 3 + i for i in range(3)]
        for layer in share.layers:
            for expert in share.experts:
                count[layer, expert] = count.get((layer, expert), 0) + 1
    assert len(count) == model.num_hidden_layers * model.num_experts
    assert set(count.values()) == {mesh.edp * mesh.op}


def test_the_global_batch_counts_every_data_parallel_rank():
    train = TrainConfig(micro_batch_size=3, gradient_accumulation_steps=2)
    assert global_batch_sequences(ParallelConfig(data_parallel=4, model_parallel=2), train) == 24


def test_machines_are_filled_in_rank_order_and_operator_groups_stay_inside():
    """8 machines of 4: operator groups inside one machine first, then experts, then data."""
    mesh = make_mesh(dp=8, op=4, ep=8)
    assert machines_crossed(mesh, [4] * 8) == {
        "op": 0, "dp": 4, "ep": 4, "edp": 0, "stage": 1, "pipe": 0,
    }  # fmt: skip
    assert not placement_warnings(mesh, [4] * 8)
    small = make_mesh(dp=16, op=2, ep=2)
    assert machines_crossed(small, [4] * 8)["ep"] == 0


def test_an_operator_group_across_machines_is_warned_about():
    (sentence,) = placement_warnings(make_mesh(dp=4, op=8), [4] * 8)
    assert "parallel.model_parallel = 8: 4 of 4 operator-parallel groups cross" in sentence
    assert sentence.endswith("hold groups of 1, 2, 4 whole")
    (sentence,) = placement_warnings(make_mesh(dp=3, op=2), [3, 3])
    assert "1 of 3" in sentence


def test_only_the_machines_in_use_decide_which_groups_they_hold():
    """Eight ranks fill the first two of [4, 4, 3]; the third let nothing but groups of 1 fit."""
    (sentence,) = placement_warnings(make_mesh(op=8), [4, 4, 3])
    assert sentence.endswith("hold groups of 1, 2, 4 whole")
    # Twelve ranks of [6, 6] in groups of 4: 3 fits, but is no part of them.
    (sentence,) = placement_warnings(make_mesh(dp=3, op=4), [6, 6])
    assert sentence.endswith("hold groups of 1, 2 whole")
    mesh = make_mesh(dp=3, op=2, use_seq_parallel=True)
    (sentence,) = placement_warnings(mesh, [3, 3])
    assert sentence.endswith("hold no smaller groups whole")


def test_machines_with_too_few_slots_are_refused():
    with pytest.raises(ConfigError, match=r"7 slots.*1 \* 4 \* 2 needs 8 ranks"):
        machines_crossed(make_mesh(dp=4, op=2), [4, 3])
