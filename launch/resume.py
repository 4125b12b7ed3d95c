"""Where a run starts: at the beginning, or at the newest commit of its store.

What a commit says of the run that made it (`save_plan`) is compared with the configuration of the
run that goes on. What the state depends on must agree, and so must what could no longer have an
effect (the seeds); other differences are told. Budgets, paths and pipeline are not compared: they
change nothing that is computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from launch.compose import flatten
from launch.config import RunConfig
from launch.environment import versions
from launch.origin import Origin
from moe.data.source import TokenSource
from moe.data.stream import Cursor
from moe.save_plan import SavePlan
from offload.nvme.directory import rank_directory
from ops.errors import ConfigError, StorageError

# Other values would be another model, masters and moments that mean something else, or would have
# no effect: the initial weights are made, and the cursor brings its own seed. The cursor counts
# sequences of one length in one part of the text.
_STATE_KEYS = frozenset(
    {
        "train.weight_dtype",
        "train.compute_dtype",
        "train.freeze",
        "train.seed",
        "train.seq_len",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.decay_norms",
        "data.seed",
        "data.held_out_fraction",
    }
)
RANKS_FACT = "ranks"
"""Where a commit says how many ranks made it."""

_SECTIONS = ("model", "train", "optimizer", "data")
_IDLE_POLICY = "offload.idle_expert_policy"


@dataclass(frozen=True)
class StartingPoint:
    """Steps done before, the place in the data, and what to tell the user."""

    step: int
    cursor: Cursor
    resumed: bool
    message: str


def save_plan(config: RunConfig, source: TokenSource | None = None) -> SavePlan:
    """When this run commits, and what its commits say of it; `source` is its text."""
    every = {"step": 1, "checkpoint": config.train.save_steps, "none": 0}
    ranks = config.parallel.num_ranks
    facts = {
        "name": config.name,
        "config": _recorded(config),
        RANKS_FACT: ranks,
        **_mesh_of(config),
        "digests": _digests(config, source),
        "versions": versions(),
    }
    durability = config.offload.durability
    return SavePlan(
        every[durability], facts, config.train.save_minutes, on_request=durability != "none"
    )


def _digests(config: RunConfig, source: TokenSource | None) -> dict[str, str]:
    """Of the model's configuration (xxh3-128 of it as JSON), of the text and its tokenizer."""
    model = json.dumps(config.to_dict()["model"], sort_keys=True)
    found = {"model": xxhash.xxh3_128_hexdigest(model.encode())}
    return (
        found if source is None else found | {"text": source.digest, "tokenizer": source.tokenizer}
    )


def _recorded(config: RunConfig) -> dict[str, Any]:
    """What a commit keeps of the configuration: whatever the numbers of a run depend on."""
    whole = config.to_dict()
    del whole["train"]["init_from"]  # what it led to is in the commit
    return {
        **{key: whole[key] for key in _SECTIONS},
        "offload": {"idle_expert_policy": config.offload.idle_expert_policy},
        "runtime": {
            "threads": config.runtime.num_threads,
            "onednn_fpmath": config.runtime.onednn_fpmath,
        },
    }


def starting_point(config: RunConfig, origin: Origin | None, resume: bool) -> StartingPoint:
    """Where the run begins; raises ConfigError for a commit of another model."""
    if origin is None:
        where = rank_directory(config.offload.nvme.paths[0], 0)
        reason = f": no commit in {where}" if resume else ""
        cursor = Cursor(seed=config.data.seed)
        return StartingPoint(0, cursor, False, f"starting at step 0{reason}")
    run, path = origin.meta.get("run"), origin.paths[0]
    if not isinstance(run, Mapping) or not isinstance(run.get("step"), int):
        raise StorageError("the commit was not made by a training run", path=path)
    changed = _differences(run.get("config", {}), config)
    refused = sorted(key for key, values in changed.items() if _is_refused(key, values))
    if refused:
        key = refused[0]
        was, now = changed[key]
        raise ConfigError(
            f"--resume: {key} = {now}, but the commit of step {run['step']} in {path} "
            f"was made with {was}; allowed is {was} (differing: {', '.join(refused)})."
        )
    by = "" if run.get("name") == config.name else f" of {run.get('name')}"
    message = f"resuming after step {run['step']} ({origin.label}{by})"
    if not origin.is_own:
        message += f" from {os.pathsep.join(origin.paths)}"
    if origin.skipped:
        message += f"; it is the newest that is whole: {'; '.join(origin.skipped)}"
    changed |= _differences({"parallel": run.get("parallel", {})}, config, _mesh_of(config))
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


def _mesh_of(config: RunConfig) -> dict[str, Any]:
    return {"parallel": config.to_dict()["parallel"]}


def _differences(
    saved: Any, config: RunConfig, wanted: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose value differs: (value of the commit, value now)."""
    now = flatten(_recorded(config) if wanted is None else wanted)
    before = flatten(saved if isinstance(saved, Mapping) else {})
    keys = now.keys() | before.keys()
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}
