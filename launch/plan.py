"""`headrace plan`: one rank's memory plan as tables and as JSON.

Presentation only; the arithmetic is in `offload/placement.py`. Works without MindSpore.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from launch.terminal import cells
from offload.placement import MemoryPlan, Term
from ops.units import format_bytes


def plan_to_dict(name: str, plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain values, every size in bytes."""
    return {
        "name": name,
        "fits": plan.fits,
        "parameters": plan.parameters,
        "state_bytes": plan.state_bytes,
        "tiers": {
            tier: {
                "capacity_bytes": item.capacity_bytes,
                "minimum_bytes": item.minimum_bytes,
                "used_bytes": item.used_bytes,
                "terms": _terms(item.terms),
                "minimum_terms": _terms(item.minimum_terms),
            }
            for tier, item in plan.tiers.items()
        },
        "components": {name: dict(tiers) for name, tiers in plan.components.items()},
        "problems": list(plan.problems),
        "remedies": list(plan.remedies),
    }


def _terms(terms: tuple[Term, ...]) -> list[dict[str, Any]]:
    return [{"name": term.name, "bytes": term.nbytes, "why": term.why} for term in terms]


def render_plan(name: str, plan: MemoryPlan, console: Console) -> None:
    """Print components by tier, the terms of every tier's use and minimum, and the verdict.

    Why a plan does not fit, and what would help, is said by `require_all_fit`.
    """
    console.print(
        f"{name}: {plan.parameters:,} parameters, {format_bytes(plan.state_bytes)} of state",
        highlight=False,
        markup=False,
        emoji=False,
    )
    render_terms(plan, console)
    verdict = "The plan fits." if plan.fits else "The plan does not fit."
    console.print(verdict, style="bold", highlight=False)


def render_terms(plan: MemoryPlan, console: Console) -> None:
    """Print components by tier, and the terms of every tier's use and minimum."""
    console.print(_components_table(plan))
    for tier in plan.tiers:
        console.print(_terms_table(plan, tier))


def _components_table(plan: MemoryPlan) -> Table:
    table = Table(title="bytes by component and tier", title_justify="left")
    table.add_column("component")
    for tier in plan.tiers:
        table.add_column(tier, justify="right")
    for component, per_tier in plan.components.items():
        row = [_cell(per_tier.get(tier, 0)) for tier in plan.tiers]
        table.add_row(*cells(component, *row))
    table.add_section()
    tiers = plan.tiers.values()
    table.add_row("used", *(format_bytes(item.used_bytes) for item in tiers))
    table.add_row("minimum", *(format_bytes(item.minimum_bytes) for item in tiers))
    table.add_row("capacity", *(format_bytes(item.capacity_bytes) for item in tiers))
    return table


def _terms_table(plan: MemoryPlan, tier: str) -> Table:
    item = plan.tiers[tier]
    same = item.terms == item.minimum_terms
    least = "which is the least it needs" if same else "and the least it needs"
    table = Table(title=f"{tier}: what it holds, {least}", title_justify="left")
    table.add_column("term")
    table.add_column("bytes", justify="right")
    table.add_column("why", overflow="fold")
    for term in item.terms:
        table.add_row(*cells(term.name, format_bytes(term.nbytes), term.why))
    table.add_section()
    for term in () if same else item.minimum_terms:
        table.add_row(*cells(f"minimum: {term.name}", format_bytes(term.nbytes), term.why))
    return table


def _cell(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"
