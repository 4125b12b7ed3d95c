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
from offload.blocks import UnitLayout
from offload.config import OptimizerConfig
from offload.ledger import Ledger
from ops.errors import ConfigError, StorageError
from ops.kernels.adamw import AdamW

T = TypeVar("T")
_RANKS_MAX = 1 << 16


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
    """The run that a part's `meta` tells of; StorageError when it tells of none."""
    try:
        run = meta["run"]
        config, step = run["config"], run["step"]
        ranks = run.get("ranks", 1)
        parallel = run.get("parallel", {})
        if type(step) is not int or step < 0 or type(ranks) is not int:
            raise ValueError("its step is no number")
        saved = SavedRun(
            step,
            _made(ModelConfig, config["model"], "model"),
            _made(TrainConfig, config["train"], "train"),
            _made(OptimizerConfig, config["optimizer"], "optimizer"),
            _made(ParallelConfig, parallel, "parallel"),
            str(config["offload"]["idle_expert_policy"]),
        )
        if saved.num_ranks != ranks or not 0 < ranks <= _RANKS_MAX:
            raise ValueError(f"it is of {ranks} ranks and of a mesh of {saved.num_ranks}")
        check_mesh(saved.parallel, saved.model, saved.train)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise StorageError(f"the commit says nothing usable of its run: {error}") from None
    return saved


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
        for meta in metas.values():
            saved = meta["engine"]["ledger"]
            steps.add(saved["step"])
            rates.update((step, rate) for step, rate in saved["rates"])
        if len(steps) != 1:
            raise ValueError(f"its ranks are at optimizer steps {sorted(steps)}")
        ledger.restore({"step": steps.pop(), "rates": sorted(rates.items())})
    except (KeyError, TypeError, ValueError) as error:
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
