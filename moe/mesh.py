"""The mesh of ranks: who computes what with whom, and what one rank owns. Pure.

Ranks are numbered with operator parallelism fastest, then experts, then data, then stages:

    rank = ((pp_index * edp + edp_index) * ep + ep_index) * op + op_index
    op = model_parallel, ep = expert_parallel, edp = data_parallel / ep, pp = pipeline_stage
    dp_index = edp_index * ep + ep_index

Launchers fill one machine after the other, so operator groups, which talk most, lie inside one
machine before expert groups do, and those before data groups. Which meshes suit a model is told
by `moe/mesh_check.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

from moe.config import ModelConfig, TrainConfig
from ops.errors import ConfigError
from ops.validate import check_bool, check_choice, check_int, refuse

GroupKind = Literal["op", "dp", "ep", "edp", "stage", "pipe"]
GROUP_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)
SCHEDULES = ("breadth_first", "1f1b")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are divided over ranks.

    `optimizer_parallel` shards the units of replicas over them; without it every replica stores
    the whole. `pipeline_layers` are the layers of each of the `pipeline_stage *
    pp_interleave_num` chunks, in order of depth; empty divides them evenly.
    """

    pipeline_stage: int = 1
    data_parallel: int = 1
    model_parallel: int = 1
    expert_parallel: int = 1
    optimizer_parallel: bool = True
    use_seq_parallel: bool = False
    pipeline_schedule: str = "breadth_first"
    pp_interleave_num: int = 1
    pipeline_layers: list[int] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        for name in (
            "pipeline_stage",
            "data_parallel",
            "model_parallel",
            "expert_parallel",
            "pp_interleave_num",
        ):
            check_int(f"parallel.{name}", getattr(self, name), low=1)
        check_bool("parallel.optimizer_parallel", self.optimizer_parallel)
        check_bool("parallel.use_seq_parallel", self.use_seq_parallel)
        check_choice("parallel.pipeline_schedule", self.pipeline_schedule, SCHEDULES)
        for count in self.pipeline_layers:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                allowed = "allowed is a list of whole numbers of at least 1"
                raise refuse("parallel.pipeline_layers", self.pipeline_layers, allowed)

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.pipeline_stage * self.data_parallel * self.model_parallel

    @property
    def num_chunks(self) -> int:
        """Runs of layers that the pipeline is made of."""
        return self.pipeline_stage * self.pp_interleave_num


def global_batch_sequences(parallel: ParallelConfig, train: TrainConfig) -> int:
    """Sequences of one optimizer step over all ranks; `train.batch_sequences` is one rank's."""
    return train.batch_sequences * parallel.data_parallel


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on each axis of the mesh; `ep` and `edp` are the two parts of `dp`."""

    pp: int
    dp: int
    op: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Mesh:
    """The ranks of a valid `config` and the groups they form.

    `groups` names them: `op` shares every operator; `dp` holds replicas of the dense units; `ep`
    shares a layer's experts; `edp` holds replicas of the same experts; `stage` is all ranks of a
    pipeline stage; `pipe` is one rank of each stage, in stage order. Ranks of a group ascend, so a
    rank's place in its group is its index on that axis.
    """

    config: ParallelConfig

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.config.pipeline_stage

    @property
    def dp(self) -> int:
        """Data-parallel ranks of a stage, for one index of operator parallelism."""
        return self.config.data_parallel

    @property
    def op(self) -> int:
        """Ranks that share every operator."""
        return self.config.model_parallel

    @property
    def ep(self) -> int:
        """Ranks that share a layer's experts."""
        return self.config.expert_parallel

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.dp // self.ep

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.config.num_ranks

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank`, 0 <= rank < num_ranks."""
        rest, op = divmod(rank, self.op)
        pp, dp = divmod(rest, self.dp)
        edp, ep = divmod(dp, self.ep)
        return Coordinates(pp, dp, op, ep, edp)

    def rank_of(self, pp: int = 0, dp: int = 0, op: int = 0) -> int:
        """The rank at a place."""
        return (pp * self.dp + dp) * self.op + op

    def groups(self, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
        """All groups of one kind; every rank is in exactly one of them."""
        return self._groups[kind]

    @cached_property
    def _groups(self) -> dict[GroupKind, tuple[tuple[int, ...], ...]]:
        found: dict[GroupKind, dict[tuple[int, ...], list[int]]] = {x: {} for x in GROUP_KINDS}
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            same: dict[GroupKind, tuple[int, ...]] = {
                "op": (at.pp, at.dp),
                "dp": (at.pp, at.op),
                "ep": (at.pp, at.op, at.edp),
                "edp": (at.pp, at.op, at.ep),
                "stage": (at.pp,),
                "pipe": (at.dp, at.op),
            }
            for kind, place in same.items():
                found[kind].setdefault(place, []).append(rank)
        return {kind: tuple(map(tuple, groups.values())) for kind, groups in found.items()}

    def group_of(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The ranks of the group of this kind that `rank` is in."""
        return next(group for group in self.groups(kind) if rank in group)

    def layer_chunks(self, num_layers: int) -> list[range]:
        """Layers of each chunk, in order of depth; chunk c lives on stage c % pp."""
        chunks = self.config.num_chunks
        counts = self.config.pipeline_layers or [num_layers // chunks] * chunks
        edges = list(accumulate(counts, initial=0))
        if edges[-1] != num_layers or len(counts) != chunks:
            raise ConfigError(f"{counts} are not the layers of {chunks} chunks of {num_layers}.")
        return [range(first, last) for first, last in pairwise(edges)]

    def share(self, model: ModelConfig, rank: int) -> Share:
        """What `rank` owns of `model`."""
        at = self.coordinates(rank)
        each = model.num_experts // self.ep
        return Share(
            mesh=self,
            rank=rank,
            at=at,
            layer_chunks=tuple(self.layer_chunks(model.num_hidden_layers)[at.pp :: self.pp]),
            experts=range(at.ep * each, (at.ep + 1) * each),
        )


@dataclass(frozen=True)
class Share:
    """What one rank owns: its place, the layers of its stage (chunks ascending), its experts."""

    mesh: Mesh
    rank: int
    at: Coordinates
    layer_chunks: tuple[range, ...]
    experts: range

    @staticmethod
    def whole(model: ModelConfig) -> Share:
        """The share of the only rank: everything."""
        return Mesh(ParallelConfig()).share(model, 0)

    @property
    def op_size(self) -> int:
        """Ranks that share every operator."""
        return self.mesh.op

    @property
    def op_index(self) -> int:
        """This rank's part of every operator."""
        return self.at.op

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Every layer of this rank's stage, ascending."""
        return tuple(layer for chunk in self.layer_chunks for layer in chunk)

    @property
    def has_embedding(self) -> bool:
        """Whether this rank's stage is the first, which owns the embedding."""
        return self.at.pp == 0

    @property
    def has_head(self) -> bool:
        """Whether this rank's stage is the last, which has the final norm, the head and the loss.

        A head tied to the embedding is owned by the first stage all the same.
        """
        return self.at.pp == self.mesh.pp - 1

    def op_part(self, count: int) -> range:
        """This rank's part of `count` heads, columns or rows that the operator group divides."""
        each = count // self.op_size
        return range(self.op_index * each, (self.op_index + 1) * each)

    def is_first_of(self, is_expert: bool) -> bool:
        """Whether this rank is the first of those that hold a part of its dense or expert units."""
        return self.op_index == 0 and self.weight_shards(is_expert)[0] == 0

    def weight_shards(self, is_expert: bool) -> tuple[int, int]:
        """(index, size) among the replicas of a dense or an expert unit of this rank."""
        if is_expert:
            return self.at.edp, self.mesh.edp
        return self.at.dp, self.mesh.dp


def machines_of(mesh: Mesh, slots: Sequence[int]) -> list[int]:
    """The machine of every rank when launchers fill machines of so many `slots` one by one.

    Raises ConfigError when the slots are too few.
    """
    machines = [machine for machine, count in enumerate(slots) for _ in range(count)]
    if len(machines) < mesh.num_ranks:
        raise ConfigError(
            f"the machines have {len(machines)} slots in all, but parallel.pipeline_stage * "
            f"data_parallel * model_parallel = {mesh.pp} * {mesh.dp} * {mesh.op} needs "
            f"{mesh.num_ranks} ranks: allowed are machines with at least so many slots, or a "
            "smaller mesh."
        )
    return machines[: mesh.num_ranks]


def machines_crossed(mesh: Mesh, slots: Sequence[int]) -> dict[GroupKind, int]:
    """How many groups of each kind have ranks on several machines."""
    machines = machines_of(mesh, slots)
    return {
        kind: sum(len({machines[rank] for rank in group}) > 1 for group in mesh.groups(kind))
        for kind in GROUP_KINDS
    }


def placement_warnings(mesh: Mesh, slots: Sequence[int]) -> list[str]:
    """A sentence when operator-parallel groups cross machines, which slows every layer.

    It names the smaller groups that the machines in use hold whole, of sizes that the same ranks
    can be divided into.
    """
    crossed = machines_crossed(mesh, slots)["op"]
    if not crossed:
        return []
    groups = len(mesh.groups("op"))
    used = Counter(machines_of(mesh, slots)).values()
    smallest = 2 if mesh.config.use_seq_parallel else 1  # which needs groups
    fitting = [
        n
        for n in range(smallest, mesh.op)
        if mesh.op % n == 0 and all(count % n == 0 for count in used)
    ]
    held = f"groups of {', '.join(map(str, fitting))}" if fitting else "no smaller groups"
    return [
        f"parallel.model_parallel = {mesh.op}: {crossed} of {groups} operator-parallel groups "
        "cross machines, and every layer waits for the network between them; machines of these "
        f"sizes hold {held} whole"
    ]
