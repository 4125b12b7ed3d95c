"""The `data` section of a configuration.

It knows which text to train on and how it is divided, not how long a sequence is (that belongs
to the training section) nor how many tokens the model knows (that belongs to the model's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ops.errors import ConfigError

CPYTHON = "cpython"
HELD_OUT_FRACTION_MAX = 0.5
SEED_MAX = 2**63 - 1


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from, in which order they are read, and what is held out.

    `source` is `cpython` (the documentation inside every CPython, needs no download) or the path
    of a token file made by `headrace data prepare`. `seed` keys the order of the sequences; it
    does not change which text is held out. `held_out_fraction` is the share of tokens kept out
    of training for evaluation. Raises `ConfigError`.
    """

    source: str = CPYTHON
    seed: int = 1
    held_out_fraction: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source.strip():
            raise ConfigError(
                f"data.source is {self.source!r}; allowed: {CPYTHON!r} or the path of a token "
                "file made by `headrace data prepare`"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(
                f"data.seed is {self.seed!r}; allowed: an integer from 0 to {SEED_MAX}"
            )
        if not 0 <= self.seed <= SEED_MAX:
            raise ConfigError(f"data.seed is {self.seed}; allowed: 0 to {SEED_MAX}")
        fraction = self.held_out_fraction
        is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if (
            not is_number
            or not math.isfinite(fraction)
            or not (0 < fraction <= HELD_OUT_FRACTION_MAX)
        ):
            raise ConfigError(
                f"data.held_out_fraction is {fraction!r}; allowed: above 0 and at most "
                f"{HELD_OUT_FRACTION_MAX}"
            )
