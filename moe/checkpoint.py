"""The model and the mesh of a commit, as it tells them, and what each of its ranks stored.

What a commit says comes from a file and is believed only as far as the classes that validate a
configuration believe it; fields this version does not know are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from moe.config import ModelConfig, TrainConfig
from moe.memory import layouts_of
from moe.mesh import Mesh, ParallelConfig
from moe.mesh_check import check_mesh
from moe.params import size_of
from offload.blocks import UnitLayout
from offload.config import IDLE_EXPERT_POLICIES, OptimizerConfig
from offload.ledger import STEP_MAX, Ledger
from offload.loss_scale import checked_loss_scale
from ops.errors import ConfigError, StorageError
from ops.kernels.adamw import AdamW
from ops.validate import check_choice, check_int, refuse

T = TypeVar("T")
_RANKS_MAX = 1 << 16
_UNITS_MAX = 1 << 20
_SIZE_MAX = 1 << 24  # of one dimension, and of a batch
_UNBOUNDED = ("steps", "seed", "eval_interval", "save_steps", "eval_batches")


@dataclass(frozen=True)
class SavedRun:
    """What made a commit: `step` steps were done, `ranks` is the mesh's size."""

    step: int
    model: ModelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    idle_expert_policy: str

    @property
    def num_ranks(self) -> int:
        """Ranks that have a part of it."""
        return self.parallel.num_ranks

    @property
    def num_units(self) -> int:
        """Units of the model over all ranks; nothing is made in proportion to them."""
        return size_of(self.model).units

    def require_held(self, num_parts: int, num_blocks: int, nbytes: int) -> None:
        """Raise StorageError when parts with so many blocks and bytes in all cannot be this run's.

        A lower bound, without making a unit: a unit has a block at least, a parameter two bytes.
        """
        parameters = size_of(self.model).numbers
        if num_parts != self.num_ranks:
            what = f"has {num_parts} parts, its mesh {self.num_ranks} ranks"
        elif num_blocks < self.num_units:
            what = f"has {num_blocks} blocks, its model {self.num_units} units"
        elif nbytes < 2 * parameters:
            what = f"has {nbytes} bytes, its model at least {parameters} parameters"
        else:
            return
        raise StorageError(f"the commit {what}: it is of another model")

    def ranks_of(self, unit: str) -> list[int]:
        """The ranks that store a part of a unit, ascending."""
        return [rank for rank in range(self.num_ranks) if unit in self.layouts[rank]]

    @cached_property
    def layouts(self) -> Mapping[int, Mapping[str, UnitLayout]]:
        """What each rank stores of each unit; made for a rank when it is first asked for."""
        return _Layouts(self)

    @cached_property
    def whole(self) -> dict[str, UnitLayout]:
        """Every unit as the only rank of a run would store it, in forward order."""
        decay = self.optimizer.decay_norms
        return {x.name: x for x in layouts_of(self.model, self.train, decay)}


class _Layouts(dict[int, Mapping[str, UnitLayout]]):
    """Layouts by rank, made when missing."""

    def __init__(self, run: SavedRun) -> None:
        super().__init__()
        self._run = run

    def __missing__(self, rank: int) -> Mapping[str, UnitLayout]:
        run = self._run
        share = Mesh(run.parallel).share(run.model, rank)
        layouts = layouts_of(run.model, run.train, run.optimizer.decay_norms, share)
        self[rank] = {x.name: x for x in layouts}
        return self[rank]


def saved_run(meta: Mapping[str, Any]) -> SavedRun:
    """The run that a part's `meta` tells of; StorageError when it tells of none.

    Everything that a reader takes from `meta` is looked at here, but for the rates of the ledger
    (`saved_ledger`): the keys are there, of the right type, finite and within bounds.
    """
    try:
        run, config = _mapping(meta, "run"), _mapping(meta, "run.config")
        step, ranks = run.get("step"), run.get("ranks", 1)
        check_int("run.step", step, low=0, high=STEP_MAX)
        if type(meta.get("step")) is not int or meta["step"] != step:
            raise refuse("step", meta.get("step"), f"allowed is that of run.step, {step}")
        check_int("run.ranks", ranks, low=1, high=_RANKS_MAX)
        _check_cursor(_mapping(meta, "run.cursor"))
        ledger = _mapping(meta, "engine.ledger")
        check_int("engine.ledger.step", ledger.get("step"), low=0, high=step)
        checked_loss_scale(_mapping(meta, "engine.loss_scale"))
        policy = _mapping(meta, "run.config.offload").get("idle_expert_policy")
        check_choice("offload.idle_expert_policy", policy, IDLE_EXPERT_POLICIES)
        saved = SavedRun(
            run["step"],
            _made(ModelConfig, config.get("model"), "model"),
            _made(TrainConfig, config.get("train"), "train"),
            _made(OptimizerConfig, config.get("optimizer"), "optimizer"),
            _made(ParallelConfig, run.get("parallel", {}), "parallel"),
            str(policy),
        )
        _check_sizes(saved)
        if saved.num_ranks != ranks:
            raise ValueError(f"it is of {ranks} ranks and of a mesh of {saved.num_ranks}")
        check_mesh(saved.parallel, saved.model, saved.train)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise StorageError(f"the commit says nothing usable of its run: {error}") from None
    return saved


def _mapping(meta: Any, dotted: str) -> Mapping[str, Any]:
    """The mapping at a dotted key of `meta`; ConfigError when there is none."""
    found, path = meta, ""
    for key in dotted.split("."):
        path = f"{path}.{key}" if path else key
        found = found.get(key)
        if not isinstance(found, Mapping):
            raise refuse(path, found, "allowed is a mapping")
    return found


def _check_cursor(cursor: Mapping[str, Any]) -> None:
    for name in ("epoch", "position", "seed"):
        check_int(f"run.cursor.{name}", cursor.get(name), low=0, high=(1 << 63) - 1)
    if not isinstance(cursor.get("stream", ""), str):
        raise refuse("run.cursor.stream", cursor["stream"], "allowed is text")


def _check_sizes(run: SavedRun) -> None:
    """Refuse numbers that no commit can have, before anything is made in proportion to them."""
    for section, config in (("model", run.model), ("train", run.train)):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if type(value) is int and field.name not in _UNBOUNDED:
                check_int(f"{section}.{field.name}", value, low=0, high=_SIZE_MAX)
    if run.num_units > _UNITS_MAX:
        raise ValueError(f"its model has {run.num_units} units; allowed are at most {_UNITS_MAX}")


def saved_ledger(run: SavedRun, metas: Mapping[int, Mapping[str, Any]]) -> Ledger:
    """The ledger that covers what any of the ranks still has to replay; StorageError.

    `metas` are what the parts of the commit say, by rank. Each rank forgets what its own units have
    applied, so they differ in how far back they go; where they overlap they agree.
    """
    optimizer = run.optimizer
    ledger = Ledger(AdamW(optimizer.beta1, optimizer.beta2, optimizer.eps))
    rates: dict[int, float] = {}
    steps = set()
    try:
        all_saved = [_mapping(meta, "engine.ledger") for meta in metas.values()]
        for saved in all_saved:
            check_int("engine.ledger.step", saved.get("step"), low=0, high=STEP_MAX)
            steps.add(saved["step"])
        if len(steps) != 1:
            raise ValueError(f"its ranks are at optimizer steps {sorted(steps)}")
        for saved in all_saved:
            ledger.restore(saved)
            rates.update(saved["rates"])
        ledger.restore({"step": steps.pop(), "rates": [list(x) for x in sorted(rates.items())]})
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise StorageError(f"the commit says nothing usable of its steps: {error}") from None
    return ledger


def _made(cls: type[T], saved: Any, section: str) -> T:
    """A configuration section from JSON data; ValueError names what is unknown or wrong."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{section} is no mapping")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(saved.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{section}.{unknown[0]} is not known to this version")
    values = dict(saved)
    for name, field in fields.items():
        inner = field.default_factory
        if name in values and isinstance(inner, type) and dataclasses.is_dataclass(inner):
            values[name] = _made(inner, values[name], f"{section}.{name}")
    return cls(**values)
