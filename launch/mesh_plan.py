"""The plans of all ranks of a mesh: one for each set of ranks that are alike, shown and refused.

Presentation only; `launch/build.py` makes the plans. Works without MindSpore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.config import RunConfig
from launch.plan import plan_to_dict, render_terms
from launch.terminal import say
from moe.mesh import Mesh, placement_warnings
from offload.placement import MemoryPlan
from ops.errors import PlanError
from ops.units import format_bytes


@dataclass(frozen=True)
class RankPlan:
    """`plan` of each of `ranks`, which are alike. Its parameters are those of the first; where
    shares are padded at their end, another rank may have a few less."""

    ranks: tuple[int, ...]
    plan: MemoryPlan

    @property
    def title(self) -> str:
        """`rank 3` or `ranks 0-3, 8-11`."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {as_ranges(self.ranks)}"


def merge_alike(plans: Sequence[RankPlan]) -> list[RankPlan]:
    """One plan for all ranks whose plans have the same numbers, in order of their first rank."""
    found: list[RankPlan] = []
    for item in sorted(plans, key=lambda x: x.ranks):
        for index, other in enumerate(found):
            if _numbers(other.plan) == _numbers(item.plan):
                found[index] = RankPlan(tuple(sorted((*other.ranks, *item.ranks))), other.plan)
                break
        else:
            found.append(item)
    return found


def _numbers(plan: MemoryPlan) -> tuple[Any, ...]:
    return plan.tiers, plan.components, plan.parameters, plan.state_bytes, plan.problems


def as_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs drawn together: `0-3, 8`."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(runs)


def require_all_fit(plans: Sequence[RankPlan]) -> None:
    """Raise PlanError, naming the ranks, unless the plans of all fit."""
    reasons = []
    for item in plans:
        if not item.plan.fits:
            where = f"{item.title}: " if len(plans) > 1 or len(item.ranks) > 1 else ""
            reasons.append(where + "; ".join((*item.plan.problems, *item.plan.remedies)))
    if reasons:
        raise PlanError("; ".join(reasons) + ".")


def mesh_lines(
    config: RunConfig, plans: Sequence[RankPlan], slots: Sequence[int] = ()
) -> list[str]:
    """What a run on several ranks says at its start: mesh, parameters and bytes of every rank.

    `slots` are the ranks of each machine, where they are known: then warnings follow. A run on one
    rank has nothing to say. Raises ConfigError when the slots are too few.
    """
    mesh = Mesh(config.parallel)
    if mesh.num_ranks == 1:
        return []
    lines = [_mesh_line(config), _batch_line(config)]
    for item in plans:
        plan = item.plan
        tiers = ", ".join(f"{tier} {format_bytes(x.used_bytes)}" for tier, x in plan.tiers.items())
        lines.append(
            f"{item.title} ({_stages(config, item)}): {plan.parameters:,} parameters, "
            f"{format_bytes(plan.state_bytes)} of state each; {tiers}"
        )
    return lines + mesh_warnings(config, slots)


def mesh_warnings(config: RunConfig, slots: Sequence[int]) -> list[str]:
    """Sentences about a mesh that machines with so many slots carry badly; none if unknown."""
    if not slots:
        return []
    found = placement_warnings(Mesh(config.parallel), slots)
    return [f"warning: {sentence}" for sentence in found]


def _mesh_line(config: RunConfig) -> str:
    p = config.parallel
    replicas = Mesh(p).edp
    line = (
        f"mesh: {p.num_ranks} ranks = pipeline_stage {p.pipeline_stage} x data_parallel "
        f"{p.data_parallel} x model_parallel {p.model_parallel}; expert_parallel "
        f"{p.expert_parallel}, {replicas} replica{'s' if replicas > 1 else ''} of each expert"
    )
    if p.pipeline_stage > 1:
        line += f"; {p.pipeline_schedule}, {p.num_chunks} chunks of layers"
    return line


def _batch_line(config: RunConfig) -> str:
    train = config.train
    return (
        f"batch: {config.global_batch_sequences} sequences a step = micro_batch_size "
        f"{train.micro_batch_size} x gradient_accumulation_steps "
        f"{train.gradient_accumulation_steps} x data_parallel {config.parallel.data_parallel}"
    )


def _stages(config: RunConfig, item: RankPlan) -> str:
    """The stages of these ranks, and the layers of their first."""
    mesh = Mesh(config.parallel)
    stages = sorted({mesh.coordinates(rank).pp for rank in item.ranks})
    layers = mesh.share(config.model, item.ranks[0]).layers
    if len(stages) > 1:
        return f"stages {as_ranges(stages)}, {len(layers)} layers each"
    return f"stage {stages[0]}, layers {as_ranges(layers)}"


def mesh_plan_to_dict(
    config: RunConfig, plans: Sequence[RankPlan], slots: Sequence[int] = ()
) -> dict[str, Any]:
    """The plans as plain values, every size in bytes.

    With one rank that rank's plan. With several: `mesh` and its sizes, `warnings`, `state_bytes`
    of all ranks together, and `ranks`: what `plan_to_dict` says, for each set of `ranks` alike.
    """
    mesh = Mesh(config.parallel)
    if mesh.num_ranks == 1:
        return plan_to_dict(config.name, plans[0].plan)
    return {
        "name": config.name,
        "fits": all(item.plan.fits for item in plans),
        "state_bytes": sum(len(item.ranks) * item.plan.state_bytes for item in plans),
        "mesh": {
            "num_ranks": mesh.num_ranks,
            "pipeline_stage": mesh.pp,
            "data_parallel": mesh.dp,
            "model_parallel": mesh.op,
            "expert_parallel": mesh.ep,
            "layer_chunks": [
                {"stage": chunk % mesh.pp, "first_layer": layers.start, "num_layers": len(layers)}
                for chunk, layers in enumerate(mesh.layer_chunks(config.model.num_hidden_layers))
            ],
            "global_batch_sequences": config.global_batch_sequences,
        },
        "warnings": mesh_warnings(config, slots),
        "ranks": [
            {"ranks": list(item.ranks), **plan_to_dict(config.name, item.plan)} for item in plans
        ],
    }


def render_mesh_plan(
    config: RunConfig, plans: Sequence[RankPlan], console: Console, slots: Sequence[int] = ()
) -> None:
    """Print the mesh, a line for each set of ranks, the terms of the fullest, and the verdict."""
    for line in (_mesh_line(config), _batch_line(config)):
        say(console, f"{config.name}: {line}")
    console.print(_ranks_table(config, plans))
    fullest = max(plans, key=_fullness)
    say(console, f"{fullest.title}, with least to spare:")
    render_terms(fullest.plan, console)
    for sentence in mesh_warnings(config, slots):
        console.print(sentence, style="yellow", highlight=False, markup=False, emoji=False)
    fits = all(item.plan.fits for item in plans)
    verdict = "The plan of every rank fits." if fits else "The plan does not fit."
    console.print(verdict, style="bold", highlight=False)


def _fullness(item: RankPlan) -> float:
    return max(x.minimum_bytes / x.capacity_bytes for x in item.plan.tiers.values())


def _ranks_table(config: RunConfig, plans: Sequence[RankPlan]) -> Table:
    table = Table(title="each rank's parameters and bytes", title_justify="left")
    table.add_column("ranks", overflow="fold")
    table.add_column("of", overflow="fold")
    for name in ("parameters", "state", *plans[0].plan.tiers):
        table.add_column(name, justify="right", no_wrap=True)
    for item in plans:
        plan = item.plan
        table.add_row(
            as_ranges(item.ranks),
            _stages(config, item),
            f"{plan.parameters / 1e6:,.1f} M",
            format_bytes(plan.state_bytes),
            *(format_bytes(tier.used_bytes) for tier in plan.tiers.values()),
        )
    return table
