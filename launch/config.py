"""The configuration of a run: one frozen dataclass composed from YAML and `--set` overrides.

Each section is validated by the class that owns it; here stand only the section that belongs to
no lower layer (`runtime`) and the checks that span sections. What this file does not
know: whether the run fits its budgets (`launch/plan.py`) and whether its files exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.compose import apply_overrides, compose, parse_mapping
from moe.config import ModelConfig, TrainConfig
from moe.data.config import DataConfig
from moe.mesh import ParallelConfig, global_batch_sequences
from moe.mesh_check import check_mesh
from offload.config import LossScaleConfig, OffloadConfig, OptimizerConfig, TierConfig
from ops.errors import ConfigError
from ops.validate import check_choice, check_float, check_int, refuse

SIZE_KEYS = frozenset(
    {
        "offload.device.capacity",
        "offload.host.capacity",
        "offload.nvme.capacity",
        "offload.prefetch_buffer_size",
        "offload.io_request_size",
    }
)
COLLECTIVE_TIMEOUT_MAX = 30 * 24 * 3600
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True)
class RuntimeConfig:
    """Cores and arithmetic of the process; both change the bits of a run, no budget does.

    `collective_timeout`: seconds that a rank waits for others before it takes them for dead.
    """

    threads: int = 0
    onednn_fpmath: str = "strict"
    collective_timeout: float = 600.0  # ops.comm.base.TIMEOUT_SECONDS, which would load NumPy

    def __post_init__(self) -> None:
        check_int("runtime.threads", self.threads, low=0, high=1024)
        check_float(
            "runtime.collective_timeout",
            self.collective_timeout,
            low=1,
            high=COLLECTIVE_TIMEOUT_MAX,
        )
        check_choice("runtime.onednn_fpmath", self.onednn_fpmath, ("strict", "bf16"))

    @property
    def num_threads(self) -> int:
        """Compute threads: `threads`, or every core this process may use when it is 0."""
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run. Raises ConfigError when sections contradict each other."""

    name: str
    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: OffloadConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            allowed = "allowed are letters, digits, dot, hyphen and underscore (it names a folder)"
            raise refuse("name", self.name, allowed)
        optimizer, train, offload = self.optimizer, self.train, self.offload
        if optimizer.warmup_steps > train.steps:
            allowed = f"allowed is at most train.steps = {train.steps}"
            raise refuse("optimizer.warmup_steps", optimizer.warmup_steps, allowed)
        if train.compute_dtype != "float16" and optimizer.loss_scale != LossScaleConfig():
            raise ConfigError(
                "optimizer.loss_scale has no effect unless train.compute_dtype is float16, "
                f"which is {train.compute_dtype}."
            )
        periodic = train.save_steps > 0 or train.save_minutes > 0
        if (offload.durability == "checkpoint") != periodic:
            raise ConfigError(
                f"offload.durability = {offload.durability} and train.save_steps = "
                f"{train.save_steps}, train.save_minutes = {train.save_minutes:g} contradict each "
                "other: `checkpoint` commits every train.save_steps steps or train.save_minutes "
                "minutes, one of which must then be above 0; `step` commits every step and `none` "
                "at exit, and there both must be 0."
            )
        default_lag = OffloadConfig.__dataclass_fields__["replay_lag_max"].default
        if offload.idle_expert_policy != "replay" and offload.replay_lag_max != default_lag:
            raise ConfigError(
                f"offload.replay_lag_max = {offload.replay_lag_max} has no effect unless "
                f"offload.idle_expert_policy is replay, which is {offload.idle_expert_policy}."
            )
        check_mesh(self.parallel, self.model, train)

    @property
    def global_batch_sequences(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return global_batch_sequences(self.parallel, self.train)

    @staticmethod
    def from_dict(mapping: dict[str, Any]) -> RunConfig:
        """The configuration of nested mappings, as `to_dict` makes them; raises ConfigError."""
        return compose(
            RunConfig, mapping, factories={TierConfig: _tier_of_mapping}, sizes=SIZE_KEYS
        )

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value in force, sizes in bytes; `from_dict` restores an equal one."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """`to_dict` as YAML that `load_config` reads back, sizes as people write them."""
        mapping = self.to_dict()
        for key in SIZE_KEYS:
            *path, leaf = key.split(".")
            section = mapping
            for part in path:
                section = section[part]
            section[leaf] = exact_size(section[leaf])
        return yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)


def _tier_of_mapping(key: str, mapping: dict[str, Any]) -> TierConfig:
    return TierConfig.of(key, mapping["capacity"])


def exact_size(nbytes: int) -> str | int:
    """`nbytes` in the largest binary unit that divides it (`48MiB`), or as a plain number."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{unit}"
    return nbytes


def preset_names() -> tuple[str, ...]:
    """Names of the shipped configurations, sorted."""
    folder = importlib.resources.files("launch") / "presets"
    names = (item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    return tuple(sorted(name[: -len(".yaml")] for name in names))


def load_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated configuration of a YAML file or a preset's name, with `a.b=c` overrides.

    A preset's name wins over a file of the same name (write `./NAME` for the file). The run's
    `name` is the preset's or the file's unless the YAML gives one. Raises ConfigError.
    """
    text, name = _read(source)
    mapping = parse_mapping(text, f"the configuration {source}")
    mapping.setdefault("name", name)
    return RunConfig.from_dict(apply_overrides(mapping, overrides))


def _read(source: str) -> tuple[str, str]:
    names = preset_names()
    if source in names:
        folder = importlib.resources.files("launch") / "presets"
        return (folder / f"{source}.yaml").read_text(encoding="utf-8"), source
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        near = difflib.get_close_matches(source, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the presets are {', '.join(names)}."
        raise ConfigError(f"{source} is neither a file nor a preset{hint}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"the configuration {source} cannot be read: {reason}.") from None
    return text, re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
