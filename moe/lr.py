"""Learning rate: linear warm-up, then cosine decay (Loshchilov & Hutter 2017, "SGDR", eq. 5)."""

from __future__ import annotations

import math

from offload.config import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Rate of step `step` (the first is 1) of a run of `total_steps`; float64.

    Rises linearly to the peak at `warmup_steps`, then falls to `min_lr_ratio` of it at the end.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    floor = config.min_lr_ratio
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
