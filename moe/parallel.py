"""The communicators of one rank: who it computes with, and who it shares weights with.

Groups of one rank cost nothing: no communicator is made for them. What kinds have several ranks is
the same on every rank, so all ranks make the same communicators in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe.config import ModelConfig
from moe.mesh import GroupKind, Mesh, Share
from offload.blocks import UnitLayout
from offload.sharing import Sharing
from ops.comm.base import Communicator, World
from ops.comm.single import SingleRank
from ops.errors import ConfigError


@dataclass(frozen=True)
class ParallelGroups:
    """What one rank owns, and its communicators of each kind of group (`moe/mesh.py`).

    `world`, `op`, `dp`, `ep`, `edp`, `stage` and `pipe` belong to the thread that computes.
    `weights_dp` and `weights_edp` have the ranks of `dp` and `edp` and belong to the thread that
    gathers weights ahead.
    """

    share: Share
    world: World
    op: Communicator
    dp: Communicator
    ep: Communicator
    edp: Communicator
    stage: Communicator
    pipe: Communicator
    weights_dp: Communicator
    weights_edp: Communicator

    @staticmethod
    def single(model: ModelConfig) -> ParallelGroups:
        """The groups of a run with one rank."""
        share = Share.whole(model)
        return open_groups(share.mesh, SingleRank(), model)

    def sharing(self, layouts: Iterable[UnitLayout]) -> dict[str, Sharing]:
        """For each of this rank's units that other ranks have too, who those are.

        Dense units are shared with `dp`, experts with `edp`, divided or replicated alike.
        """
        found = {}
        for layout in layouts:
            is_expert = layout.unit.expert is not None
            weights = self.weights_edp if is_expert else self.weights_dp
            if weights.size > 1:
                found[layout.name] = Sharing(weights, self.edp if is_expert else self.dp)
        return found

    def free(self) -> None:
        """Give the communicators up, not the world; entered by all ranks, not after a failure."""
        for group in (
            self.weights_edp,
            self.weights_dp,
            self.pipe,
            self.stage,
            self.edp,
            self.ep,
            self.dp,
            self.op,
        ):
            group.free()


def open_groups(mesh: Mesh, world: World, model: ModelConfig) -> ParallelGroups:
    """Make the groups of this rank of `world`; entered by all ranks, blocks until they have.

    Raises ConfigError when the world has another number of ranks than the mesh.
    """
    if world.size != mesh.num_ranks:
        raise ConfigError(f"the mesh has {mesh.num_ranks} ranks, but the world has {world.size}.")

    def group(kind: GroupKind, name: str) -> Communicator:
        groups = mesh.groups(kind)
        if len(groups) == mesh.num_ranks:
            return SingleRank(name, world.stats)
        return world.split(groups, name)

    return ParallelGroups(
        share=mesh.share(model, world.rank),
        world=world,
        op=group("op", "op"),
        dp=group("dp", "dp"),
        ep=group("ep", "ep"),
        edp=group("edp", "edp"),
        stage=group("stage", "stage"),
        pipe=group("pipe", "pipe"),
        weights_dp=group("dp", "weights of dp"),
        weights_edp=group("edp", "weights of edp"),
    )
