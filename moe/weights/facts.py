"""`headrace.json`: where the run of an export stood, believed as far as its schema goes.

The file may come from anywhere. What is wrong in it is refused here, before it becomes part of a
commit that no run could then read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe.data.config import DataConfig
from moe.weights.directory import FACTS_FILE
from moe.weights.export import DTYPES, FORMAT
from moe.weights.names import PACKED_FORMS
from moe.weights.plain_files import parse_json, read_plain
from moe.weights.reading import refuse_unfinished
from offload.config import IDLE_EXPERT_POLICIES
from offload.ledger import STEP_MAX
from offload.nvme.files import describe_os_error
from ops.errors import ConfigError

KEY = "import DIR"
_FACTS_BYTES_MAX = 64 << 20
_CURSOR_MAX = (1 << 63) - 1
_TOP = ("format", "step", "optimizer_step", "moments", "run", "loss_scale", "frozen")
_TOP_OPTIONAL = ("weights", "parameter_groups", "versions")
_RUN = ("name", "config", "cursor")
_RUN_OPTIONAL = ("step", "digests", "versions")
_CONFIG = ("model", "train", "optimizer", "data", "offload", "runtime")


@dataclass(frozen=True)
class Facts:
    """What `headrace.json` says: `run` as a commit has it, `frozen` names tensors."""

    step: int
    optimizer_step: int
    has_moments: bool
    run: Mapping[str, Any]
    loss_scale: Mapping[str, Any]
    frozen: frozenset[str] = field(default_factory=frozenset)

    def meta(self, **run: Any) -> dict[str, Any]:
        """What a commit of these facts says; `run` replaces parts of what it says of its run.

        An export has caught up with every step, so the ledger has no step left to replay.
        """
        engine = {
            "ledger": {"step": self.optimizer_step, "rates": []},
            "loss_scale": dict(self.loss_scale),
        }
        told = {**self.run, **run, "step": self.step}
        return {"step": self.step, "engine": engine, "run": told}


def read_facts(directory: str) -> Facts | None:
    """The facts of an export; None where there are none.

    Raises ConfigError when the export is unfinished, or they are unsound. Sections that configure
    model, training and optimizer are left to `moe.checkpoint.saved_run`.
    """
    refuse_unfinished(directory, KEY)
    path = os.path.join(directory, FACTS_FILE)
    try:
        saved = parse_json(read_plain(path, _FACTS_BYTES_MAX))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error})") from None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        said = saved.get("format") if isinstance(saved, dict) else None
        raise ConfigError(f"{path} is of format {_shown(said)}; this version reads {FORMAT!r}")
    try:
        return _facts(saved)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def _facts(saved: Mapping[str, Any]) -> Facts:
    """The facts; ValueError, or ConfigError, that names what is wrong."""
    _check_keys("", saved, _TOP, _TOP_OPTIONAL)
    step = _count("step", saved["step"])
    optimizer_step = _count("optimizer_step", saved["optimizer_step"])
    if optimizer_step > step:
        raise ValueError(f"optimizer_step = {optimizer_step} is more than step = {step}")
    if type(saved["moments"]) is not bool:
        raise ValueError(f"moments = {_shown(saved['moments'])} is neither true nor false")
    frozen = saved["frozen"]
    if not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
        raise ValueError("frozen is no list of names")
    _check_weights(saved)
    _check_loss_scale(saved["loss_scale"])
    _check_run(saved["run"], step)
    return Facts(
        step, optimizer_step, saved["moments"], saved["run"], saved["loss_scale"], frozenset(frozen)
    )


def _check_weights(saved: Mapping[str, Any]) -> None:
    """What is told for other programs."""
    weights = saved.get("weights", {"dtype": DTYPES[0], "packed_experts": None})
    _check_keys("weights", weights, ("dtype", "packed_experts"))
    _check_choice("weights.dtype", weights["dtype"], DTYPES)
    _check_choice("weights.packed_experts", weights["packed_experts"], (None, *PACKED_FORMS))
    if not isinstance(saved.get("parameter_groups", []), list):
        raise ValueError("parameter_groups is no list")
    _check_texts("versions", saved.get("versions", {}))


def _check_loss_scale(saved: Any) -> None:
    _check_keys("loss_scale", saved, ("scale", "good_steps"))
    scale = saved["scale"]
    if type(scale) not in (int, float) or not 0 < scale < 1 << 128:
        raise ValueError(f"loss_scale.scale = {_shown(scale)} is no positive number")
    _count("loss_scale.good_steps", saved["good_steps"])


def _check_run(run: Any, step: int) -> None:
    _check_keys("run", run, _RUN, _RUN_OPTIONAL)
    if not isinstance(run["name"], str):
        raise ValueError("run.name is no text")
    if type(run.get("step", step)) is not int or run.get("step", step) != step:
        raise ValueError(f"run.step = {_shown(run['step'])} is not step = {step}")
    for name in ("digests", "versions"):
        _check_texts(f"run.{name}", run.get(name, {}))
    _check_keys("run.cursor", run["cursor"], ("epoch", "position", "seed", "stream"))
    for name in ("epoch", "position", "seed"):
        _count(f"run.cursor.{name}", run["cursor"][name], _CURSOR_MAX)
    if not isinstance(run["cursor"]["stream"], str):
        raise ValueError("run.cursor.stream is no text")
    config = run["config"]
    _check_keys("run.config", config, _CONFIG)
    for name in _CONFIG:
        _check_keys(f"run.config.{name}", config[name])
    if not isinstance(config["train"].get("freeze", []), list):
        raise ValueError("run.config.train.freeze is no list")
    DataConfig(**config["data"])
    _check_keys("run.config.offload", config["offload"], ("idle_expert_policy",))
    policy = config["offload"]["idle_expert_policy"]
    _check_choice("run.config.offload.idle_expert_policy", policy, IDLE_EXPERT_POLICIES)
    for name, value in config["runtime"].items():
        if type(value) not in (bool, int, float, str):
            raise ValueError(f"run.config.runtime.{name[:100]} = {_shown(value)} is no setting")


def _check_keys(
    where: str, saved: Any, needed: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Whether `saved` is a mapping with these keys; any, when none are given."""
    if not isinstance(saved, dict):
        raise ValueError(f"{where} is no mapping")
    prefix = f"{where}." if where else ""
    for name in needed:
        if name not in saved:
            raise ValueError(f"{prefix}{name} is missing")
    for name in saved if needed else ():
        if name not in needed and name not in optional:
            raise ValueError(f"{prefix}{name[:100]} is not known to this version")


def _check_texts(where: str, saved: Any) -> None:
    if not isinstance(saved, dict) or not all(isinstance(x, str) for x in saved.values()):
        raise ValueError(f"{where} is no mapping of names to texts")


def _check_choice(where: str, value: Any, allowed: Sequence[str | None]) -> None:
    if not isinstance(value, str | None) or value not in allowed:
        names = ", ".join(str(x) for x in allowed)
        raise ValueError(f"{where} = {_shown(value)}; allowed are {names}")


def _count(where: str, value: Any, most: int = STEP_MAX) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{where} = {_shown(value)} is no whole number from 0 to {most}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
