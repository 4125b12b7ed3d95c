"""Plans, records and subprocesses that the tests of `launch/` share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from launch.mesh_plan import RankPlan
from offload.placement import MemoryPlan, Term, TierPlan

ROOT = Path(__file__).parents[2]
MIB = 2**20


def tier_plan(tier: str, capacity_bytes: int, minimum_bytes: int) -> TierPlan:
    """A tier with one term."""
    terms = (Term("window", minimum_bytes, "the prefetch window"),)
    return TierPlan(tier, capacity_bytes, minimum_bytes, minimum_bytes, terms, terms)


def memory_plan(fits: bool = True) -> MemoryPlan:
    """A small plan; the host is too small unless it fits."""
    problem = "offload.host.capacity = 4.0 MiB is below the minimum of 8.0 MiB"
    return MemoryPlan(
        tiers={
            "device": tier_plan("device", 4 * MIB, MIB),
            "host": tier_plan("host", 16 * MIB if fits else 4 * MIB, 8 * MIB),
            "nvme": tier_plan("nvme", 64 * MIB, 0),
        },
        components={"weight": {"host": 2 * MIB}, "exp_avg": {"nvme": 4 * MIB}},
        parameters=2**20,
        state_bytes=12 * MIB,
        fits=fits,
        problems=() if fits else (problem,),
        remedies=() if fits else ("set offload.host.capacity to at least 8MiB",),
        homes={},
        spilled=frozenset(),
        undone=frozenset(),
        update_slot_bytes=0,
        lease_slot_bytes=0,
        grad_slot_bytes=0,
        stream_bytes=0,
        read_ahead_bytes=0,
        workspace_bytes=0,
        staging_bytes=0,
        ahead_bytes=0,
    )


def rank_plans(fits: bool = True) -> list[RankPlan]:
    """The plans of a run with one rank."""
    return [RankPlan((0,), memory_plan(fits))]


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    """One line of `steps.jsonl`."""
    record: dict[str, Any] = {
        "step": step,
        "loss": 2.5,
        "loss_hex": (2.5).hex(),
        "grad_norm": 1.0,
        "clip_factor": 1.0,
        "lr": 1e-3,
        "tokens": 512,
        "seconds": 0.5,
        "stall_seconds": 0.1,
        "experts_idle": 0,
        "lanes": {
            "nvme_read_bytes": MIB,
            "nvme_write_bytes": 2 * MIB,
            "h2d_bytes": 3 * MIB,
            "d2h_bytes": 4 * MIB,
        },
        "nvme_by_cause": {"update": {"read_bytes": MIB, "write_bytes": 2 * MIB}},
    }
    return record | changes


def run_report(**changes: Any) -> dict[str, Any]:
    """What the trainer hands over at the end; the writer adds config and versions."""
    report: dict[str, Any] = {
        "tiers": {"device": {"capacity_bytes": 4 * MIB, "peak_bytes": 3 * MIB}},
        "process": {"peak_rss_bytes": 100, "baseline_rss_bytes": 90},
        "parameters": 2**20,
        "state_bytes": 12 * MIB,
        "steps": 2,
        "resumed_from": None,
        "commits": {"published": 1, "seconds": 0.1, "last_step": 2},
        "redone_steps": 0,
        "redone_share": 0.0,
        "codec": None,
        "tokens_per_s": 1024.0,
        "stall_share": 0.2,
        "eval": [{"step": 2, "loss": 2.0, "perplexity": 7.389}],
        "weights_digest": "00" * 16,
        "bigram_loss": 2.4,
        "exit_reason": "done",
    }
    return report | changes


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter at the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
