"""Where a run starts: at the beginning, or at the newest commit of its store.

What a commit says of the run that made it (`save_plan`) is compared with the configuration of the
run that goes on. What the state depends on must agree, and so must what could no longer have an
effect (the seeds); other differences are told. Budgets, paths and pipeline are not compared: they
change nothing that is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.config import RunConfig
from moe.data.stream import Cursor
from moe.save_plan import SavePlan
from offload.nvme.store import NvmeStore
from ops.errors import ConfigError, StorageError

# Other values would be another model, masters and moments that mean something else, or would have
# no effect: the initial weights are made, and the cursor brings its own seed.
_STATE_KEYS = frozenset(
    {
        "train.weight_dtype",
        "train.compute_dtype",
        "train.freeze",
        "train.seed",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.decay_norms",
        "data.seed",
    }
)
RANKS_FACT = "ranks"
"""Where a commit says how many ranks made it."""

_SECTIONS = ("model", "train", "optimizer", "data")
_SUPERSEDED = "has been superseded"
_IDLE_POLICY = "offload.idle_expert_policy"


@dataclass(frozen=True)
class StartingPoint:
    """Steps done before, the place in the data, and what to tell the user."""

    step: int
    cursor: Cursor
    resumed: bool
    message: str


def save_plan(config: RunConfig) -> SavePlan:
    """When this run commits, and what its commits say of it."""
    every = {"step": 1, "checkpoint": config.train.save_steps, "none": 0}
    ranks = config.parallel.num_ranks
    facts = {
        "name": config.name,
        "config": _recorded(config),
        RANKS_FACT: ranks,
        "parallel": config.to_dict()["parallel"],
    }
    durability = config.offload.durability
    return SavePlan(
        every[durability], facts, config.train.save_minutes, on_request=durability != "none"
    )


def _recorded(config: RunConfig) -> dict[str, Any]:
    """What a commit keeps of the configuration: whatever the numbers of a run depend on."""
    whole = config.to_dict()
    return {
        **{key: whole[key] for key in _SECTIONS},
        "offload": {"idle_expert_policy": config.offload.idle_expert_policy},
        "runtime": {
            "threads": config.runtime.num_threads,
            "onednn_fpmath": config.runtime.onednn_fpmath,
        },
    }


def starting_point(config: RunConfig, store: NvmeStore, resume: bool) -> StartingPoint:
    """Where the run begins; raises ConfigError for a commit of another model."""
    record = store.recovered
    if record is None:
        reason = f": no commit in {store.directory}" if resume else ""
        cursor = Cursor(seed=config.data.seed)
        return StartingPoint(0, cursor, False, f"starting at step 0{reason}")
    run = record.meta.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("step"), int):
        raise StorageError("the commit was not made by a training run", path=store.directory)
    changed = _differences(run.get("config", {}), config)
    refused = sorted(key for key, values in changed.items() if _is_refused(key, values))
    if refused:
        key = refused[0]
        was, now = changed[key]
        raise ConfigError(
            f"--resume: {key} = {now}, but the commit of step {run['step']} in {store.directory} "
            f"was made with {was}; allowed is {was} (differing: {', '.join(refused)})."
        )
    by = "" if run.get("name") == config.name else f" of {run.get('name')}"
    message = f"resuming after step {run['step']} (commit {record.generation}{by})"
    # A slot that a later commit has superseded is none that could have been taken.
    damaged = [reason for reason in record.skipped if not reason.endswith(_SUPERSEDED)]
    if damaged:
        message += f"; it is the newest that is whole, not usable: {', '.join(damaged)}"
    if changed:
        message += "; changed since: " + ", ".join(
            f"{key} = {now} (was {was})" for key, (was, now) in sorted(changed.items())
        )
    cursor = Cursor.from_json(run.get("cursor", {}))
    return StartingPoint(run["step"], cursor, True, message)


def _is_refused(key: str, values: tuple[Any, Any]) -> bool:
    """Whether a run may not go on with another value of `key`.

    `replay` and `dense` leave the same state behind; `skip` says otherwise what idling means.
    """
    if key == _IDLE_POLICY:
        return "skip" in values
    return key.startswith("model.") or key in _STATE_KEYS


def _differences(saved: Any, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose value differs: (value of the commit, value now)."""
    now = _flat(_recorded(config))
    before = _flat(saved if isinstance(saved, Mapping) else {})
    keys = now.keys() | before.keys()
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:  # JSON knows no tuples
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found
