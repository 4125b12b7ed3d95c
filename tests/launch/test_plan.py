"""The memory plan of one rank as tables and as JSON."""

from __future__ import annotations

import io
import json

from rich.console import Console

from launch.plan import plan_to_dict, render_plan
from launch.report import to_json
from tests.launch.helpers import MIB, memory_plan


def shown(fits: bool) -> str:
    """The tables as text."""
    text = io.StringIO()
    render_plan("tiny-moe", memory_plan(fits), Console(file=text, width=120))
    return text.getvalue()


def test_tables_show_components_terms_and_the_verdict() -> None:
    text = shown(fits=True)
    for part in ("1,048,576 parameters", "weight", "exp_avg", "the prefetch window", "64.0 MiB"):
        assert part in text
    assert "minimum: window" not in text, "terms that are the minimum are shown once"
    assert text.rstrip().endswith("The plan fits.")


def test_tables_of_a_plan_that_does_not_fit_end_with_that_verdict() -> None:
    assert shown(fits=False).rstrip().endswith("The plan does not fit.")


def test_json_holds_every_number_in_bytes() -> None:
    found = json.loads(to_json(plan_to_dict("tiny-moe", memory_plan(fits=False))))
    assert found["fits"] is False
    assert found["tiers"]["host"]["capacity_bytes"] == 4 * MIB
    terms = found["tiers"]["host"]["minimum_terms"]
    assert terms == [{"name": "window", "bytes": 8 * MIB, "why": "the prefetch window"}]
    assert found["components"]["exp_avg"] == {"nvme": 4 * MIB}
    assert found["problems"]
    assert found["remedies"]
