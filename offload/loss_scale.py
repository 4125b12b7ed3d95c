"""Dynamic loss scaling (Micikevicius et al. 2018, "Mixed Precision Training", 3.2). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offload.config import LossScaleConfig
from ops.validate import check_float, check_int, refuse


class LossScaler:
    """A power of two: halved when gradients overflow, doubled after enough good steps."""

    def __init__(self, config: LossScaleConfig, enabled: bool) -> None:
        self._config = replace(config)
        self.enabled = enabled
        self.scale = config.initial if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> bool:
        """Enter a step's outcome; returns False when the scale cannot be lowered any more."""
        if not self.enabled:
            return finite
        if finite:
            self.good_steps += 1
            if self.good_steps == self._config.growth_interval:
                self.scale *= 2.0
                self.good_steps = 0
            return True
        self.good_steps = 0
        if self.scale <= self._config.minimum:
            return False
        self.scale /= 2.0
        return True

    def to_json(self) -> dict[str, Any]:
        """What a commit keeps of the scaler."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on where `to_json` was taken; ConfigError for other data."""
        scale, good_steps = checked_loss_scale(data)
        if self.enabled:
            self.scale, self.good_steps = scale, good_steps


def checked_loss_scale(data: Mapping[str, Any]) -> tuple[float, int]:
    """Scale and good steps of what `to_json` made; ConfigError for other data."""
    key = "engine.loss_scale"
    if not isinstance(data, Mapping):
        raise refuse(key, data, "allowed is a mapping")
    check_float(f"{key}.scale", data.get("scale"), low=0.0, open_low=True)
    check_int(f"{key}.good_steps", data.get("good_steps"), low=0, high=1 << 53)
    return float(data["scale"]), data["good_steps"]
