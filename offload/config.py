"""Configuration of the tiers, the pipeline and the optimizer; validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ops.units import parse_bytes
from ops.validate import check_bool, check_choice, check_float, check_int, refuse

IDLE_EXPERT_POLICIES = ("replay", "dense", "skip")


def _size(key: str, value: object) -> int:
    try:
        return parse_bytes(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise refuse(key, value, f"allowed is a size such as 32MiB or 400GB ({error})") from None


@dataclass(frozen=True)
class TierConfig:
    """Hard capacity of one tier in bytes (written as a size, e.g. `64MiB`)."""

    capacity: int

    @staticmethod
    def of(key: str, capacity: object) -> TierConfig:
        """Parse and check the capacity found at the dotted `key`."""
        nbytes = _size(f"{key}.capacity", capacity)
        if nbytes < 1:
            raise refuse(f"{key}.capacity", capacity, "allowed is a size above zero")
        return TierConfig(nbytes)


@dataclass(frozen=True)
class NvmeConfig:
    """Hard capacity in bytes of the cold tier, and its directory or directories (one a drive)."""

    capacity: int
    path: str | tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity", _size("offload.nvme.capacity", self.capacity))
        paths = (self.path,) if isinstance(self.path, str) else self.path
        sound = isinstance(paths, (list, tuple)) and paths
        if not sound or not all(isinstance(path, str) and path for path in paths):
            allowed = "allowed is the path of a directory, or a list of such paths"
            raise refuse("offload.nvme.path", self.path, allowed)
        if len(set(paths)) != len(paths):
            raise refuse("offload.nvme.path", self.path, "allowed is each directory once")
        if not isinstance(self.path, str):
            object.__setattr__(self, "path", tuple(paths))

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories."""
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclass(frozen=True)
class OffloadConfig:
    """Budgets of the three tiers and how bytes move between them."""

    device: TierConfig
    host: TierConfig
    nvme: NvmeConfig
    prefetch_buffer_size: int = 32 * 2**20
    pipeline: str = "overlap"
    durability: str = "none"
    keep_in_store: int = 1
    idle_expert_policy: str = "replay"
    replay_lag_max: int = 64
    gradient_spill: str = "auto"
    io_workers: int = 8
    io_request_size: int = 4 * 2**20
    codec: str = "none"

    def __post_init__(self) -> None:
        for name in ("prefetch_buffer_size", "io_request_size"):
            object.__setattr__(self, name, _size(f"offload.{name}", getattr(self, name)))
        if not 2**20 <= self.io_request_size <= 2**23:
            raise refuse("offload.io_request_size", self.io_request_size, "allowed is 1MiB to 8MiB")
        check_choice("offload.pipeline", self.pipeline, ("overlap", "sync"))
        check_choice("offload.durability", self.durability, ("step", "checkpoint", "none"))
        check_int("offload.keep_in_store", self.keep_in_store, low=1, high=16)
        check_choice("offload.idle_expert_policy", self.idle_expert_policy, IDLE_EXPERT_POLICIES)
        check_choice("offload.gradient_spill", self.gradient_spill, ("auto", "never", "always"))
        check_int("offload.replay_lag_max", self.replay_lag_max, low=1)
        check_choice("offload.codec", self.codec, ("none", "lz4"))
        check_int("offload.io_workers", self.io_workers, low=1, high=64)

    @property
    def window_bytes(self) -> int:
        """The prefetch window in force: zero when the pipeline is `sync`."""
        return 0 if self.pipeline == "sync" else self.prefetch_buffer_size


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), used when compute is fp16."""

    initial: float = 65536.0
    growth_interval: int = 1000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for name in ("initial", "minimum"):
            value = getattr(self, name)
            check_float(f"optimizer.loss_scale.{name}", value, low=0.0, open_low=True)
            if _mantissa(value) != 0.5:
                raise refuse(f"optimizer.loss_scale.{name}", value, "allowed is a power of two")
        check_int("optimizer.loss_scale.growth_interval", self.growth_interval, low=1)


def _mantissa(value: float) -> float:
    return math.frexp(value)[0]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with warm-up + cosine decay and global-norm clipping."""

    learning_rate: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_norms: bool = False
    max_grad_norm: float = 1.0
    update_schedule: str = "chased"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)

    def __post_init__(self) -> None:
        check_float("optimizer.learning_rate", self.learning_rate, low=0.0, open_low=True)
        check_float("optimizer.min_lr_ratio", self.min_lr_ratio, low=0.0, high=1.0)
        check_int("optimizer.warmup_steps", self.warmup_steps, low=0)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check_float(f"optimizer.{name}", value, low=0.0)
            if value >= 1.0:
                raise refuse(f"optimizer.{name}", value, "allowed is a number below 1")
        check_float("optimizer.eps", self.eps, low=0.0, open_low=True)
        check_float("optimizer.weight_decay", self.weight_decay, low=0.0)
        check_bool("optimizer.decay_norms", self.decay_norms)
        check_float("optimizer.max_grad_norm", self.max_grad_norm, low=0.0, open_low=True)
        allowed = ("chased", "speculative")
        check_choice("optimizer.update_schedule", self.update_schedule, allowed)

    @property
    def speculative(self) -> bool:
        """Whether units are updated before the norm of their step is known."""
        return self.update_schedule == "speculative"
