"""Communicators of a rank: the right members, independent of each other, none for one rank."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from moe.config import TrainConfig
from moe.memory import layouts_of
from moe.mesh import GROUP_KINDS
from moe.parallel import ParallelGroups, open_groups
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import ConfigError
from tests.moe.test_mesh import make_mesh, make_model


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 2, 2, 2), (1, 4, 1, 2), (2, 2, 2, 1)])
def test_every_group_has_the_members_of_the_mesh_in_their_order(sizes):
    mesh = make_mesh(*sizes)

    def one_rank(world):
        groups = open_groups(mesh, world, make_model())
        assert groups.share == mesh.share(make_model(), world.rank)
        for kind in GROUP_KINDS:
            wanted = mesh.group_of(kind, world.rank)
            found = getattr(groups, kind)
            assert (found.size, found.rank) == (len(wanted), wanted.index(world.rank))
            if found.size > 1:
                assert found.ranks == wanted
            ranks = np.full(1, world.rank)
            found.all_reduce(ranks)
            assert ranks[0] == sum(wanted)
        groups.free()

    run_local(mesh.num_ranks, one_rank)


def test_a_thread_that_gathers_weights_does_not_meet_the_one_that_computes():
    """Gathers run ahead on communicators of their own, in an order compute knows nothing of."""
    mesh = make_mesh(dp=4, ep=2)

    def one_rank(world):
        groups = open_groups(mesh, world, make_model())
        found = np.zeros((2, 4), np.int64)

        def gather():
            for _ in range(20):
                groups.weights_dp.all_gather(np.array([world.rank]), found[0])
                groups.weights_edp.all_gather(np.array([world.rank]), found[1, :2])

        thread = threading.Thread(target=gather)
        thread.start()
        for step in range(20):
            total = np.array([float(step)])
            groups.edp.all_reduce(total)
            groups.dp.all_reduce(total)
            assert total[0] == 8 * step
        thread.join(60)
        assert not thread.is_alive()
        assert found[0].tolist() == [0, 1, 2, 3]
        assert found[1, :2].tolist() == list(mesh.group_of("edp", world.rank))

    run_local(4, one_rank)


def test_one_rank_has_no_communicator_to_enter():
    groups = ParallelGroups.single(make_model())
    assert groups.share.layers == tuple(range(6))
    for kind in (*GROUP_KINDS, "weights_dp", "weights_edp"):
        assert isinstance(getattr(groups, kind), SingleRank)
    layouts = layouts_of(make_model(), TrainConfig(), False)
    assert groups.sharing(layouts) == {}
    groups.free()


def test_kinds_of_one_rank_each_are_not_split_off():
    """A split is a collective and, under MPI, a communicator: both are scarce."""
    split = []

    def one_rank(world):
        plain = world.split
        world.split = lambda groups, name: split.append((world.rank, name)) or plain(groups, name)
        groups = open_groups(make_mesh(op=2), world, make_model())
        assert isinstance(groups.dp, SingleRank)
        assert groups.dp.stats is world.stats

    run_local(2, one_rank)
    assert sorted(split) == [(rank, name) for rank in (0, 1) for name in ("op", "stage")]


@pytest.mark.parametrize("optimizer_parallel", [True, False])
def test_units_are_shared_with_the_ranks_that_have_them(optimizer_parallel):
    mesh = make_mesh(dp=4, ep=2, optimizer_parallel=optimizer_parallel)

    def one_rank(world):
        groups = open_groups(mesh, world, make_model())
        layouts = layouts_of(make_model(), TrainConfig(), False, groups.share)
        sharing = groups.sharing(layouts)
        assert set(sharing) == {layout.name for layout in layouts}
        dense, expert = sharing["layers.1"], sharing[f"layers.1.experts.{groups.share.experts[1]}"]
        assert dense.weights is groups.weights_dp and dense.gradients is groups.dp
        assert expert.weights is groups.weights_edp and expert.gradients is groups.edp

    run_local(4, one_rank)


def test_experts_without_replicas_are_shared_with_nobody():
    mesh = make_mesh(dp=2, ep=2)

    def one_rank(world):
        groups = open_groups(mesh, world, make_model())
        sharing = groups.sharing(layouts_of(make_model(), TrainConfig(), False, groups.share))
        assert "layers.0" in sharing and not any("experts" in name for name in sharing)

    run_local(2, one_rank)


def test_another_number_of_ranks_is_refused_before_anything_is_entered():
    def one_rank(world):
        with pytest.raises(ConfigError, match="mesh has 4 ranks, but the world has 2"):
            open_groups(make_mesh(dp=4), world, make_model())

    run_local(2, one_rank)
