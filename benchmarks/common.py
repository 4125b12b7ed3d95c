"""Measure something of ours beside a peer or a limit, alternately, and print one JSON line.

The machine's speed drifts while a benchmark runs, so each run of ours is paired with a run of the
reference right beside it, the order within a pair alternates, and the result is the median of
the per-pair ratios.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

PAIRS_MIN = 9


def seconds_of(work: Callable[[], Any], calls: int = 1) -> float:
    """Wall seconds per call of `work`, over `calls` calls in a row."""
    start_ns = time.perf_counter_ns()
    for _ in range(calls):
        work()
    return (time.perf_counter_ns() - start_ns) / calls / 1e9


def compare(
    name: str,
    unit: str,
    ours: Callable[[], float],
    reference: Callable[[], float],
    reference_name: str,
    pairs: int = PAIRS_MIN,
    *,
    higher_is_better: bool = True,
    **extra: Any,
) -> dict[str, Any]:
    """Run `ours` and `reference` in `pairs` alternating pairs; print and return the record.

    Both callables return one positive measurement in `unit`. `value` and `reference` are medians,
    `ratio` is the median of ours / reference over pairs: at least 1 is good where
    `higher_is_better` (throughput), at most 1 where it is not (times); the record says which.
    `spread` is the interquartile range of the ratios over their median, `ratios` their extremes.
    `extra` is added to the record (sizes, thread counts). Raises ValueError for fewer than 9 pairs
    or a measurement that is not positive.
    """
    if pairs < PAIRS_MIN:
        raise ValueError(f"pairs is {pairs}, at least {PAIRS_MIN} are needed for a median")
    ours(), reference()  # both warm before anything counts
    values, references = [], []
    for pair in range(pairs):
        if pair % 2:
            references.append(reference())
            values.append(ours())
        else:
            values.append(ours())
            references.append(reference())
    if min(values + references) <= 0:
        raise ValueError(f"{name}: a measurement is not positive: {values} {references}")
    ratios = [value / other for value, other in zip(values, references, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    record = {
        "name": name,
        "value": statistics.median(values),
        "unit": unit,
        "reference": statistics.median(references),
        "reference_name": reference_name,
        "ratio": middle,
        "higher_is_better": higher_is_better,
        "spread": (high - low) / middle,
        "ratios": [min(ratios), max(ratios)],
        "pairs": pairs,
        **extra,
    }
    print(json.dumps(_rounded(record)), flush=True)
    return record


def _rounded(value: Any) -> Any:
    """Floats to five significant digits, so that a line can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
