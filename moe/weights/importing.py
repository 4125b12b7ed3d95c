"""Safetensors files as a native checkpoint of one rank, which a run can resume at.

An export with moments says in `headrace.json` where its run stood and becomes a commit of that
step. Plain weights become a commit of step 0 with moments of zero. Units are written one by one;
nothing is a checkpoint before the last of them is durable (`NvmeStore.publish`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from moe.checkpoint import saved_run
from moe.weights.directory import out_error, require_room
from moe.weights.export import OnBytes
from moe.weights.facts import KEY, Facts
from moe.weights.initial import TensorSource, initial_weights
from moe.weights.names import Match, model_shapes, require_size
from moe.weights.reading import WeightFiles
from offload.blocks import UnitLayout
from offload.nvme.aligned import aligned_buffer, choose_access
from offload.nvme.directory import free_bytes_at, rank_directory
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.handle import Handle
from offload.nvme.recovery import read_slots
from offload.nvme.store import NvmeStore
from offload.rank_commits import RECORD_NAME
from offload.runs import runs_of
from offload.unit_values import MOMENTS, UnitValues
from ops.errors import ConfigError, StorageError
from ops.kernels.pool import KernelPool
from ops.units import round_up

_PARTS = ("weight", "state")
_COMPARISONS_MAX = 1 << 24
_PATTERNS_SPARE = 1024


class Import:
    """A directory of weights and the commit that is to be made of them."""

    def __init__(self, directory: str, meta: Mapping[str, Any], facts: Facts | None) -> None:
        """`meta` is the commit's; moments come from `directory` if `facts` say it has them.

        Reads the headers of the files first, because what `meta` tells of its model is believed
        only as far as they can hold it. Raises ConfigError when they cannot, or `meta` tells of no
        run of this version.
        """
        self._directory = directory
        self._meta = meta
        try:
            self._run = saved_run(meta)
        except StorageError as error:
            raise ConfigError(f"{directory}: {error}") from None
        self._facts = facts if facts is not None and facts.has_moments else None
        with WeightFiles(directory, KEY) as files:
            require_size(self._run.model, files.tensors, f"{KEY} = {directory}")
        self._require_few_patterns()
        self._layouts = list(self._run.whole.values())

    def _require_few_patterns(self) -> None:
        """Every pattern of `train.freeze` is compared with the name of every unit."""
        patterns, units = len(self._run.train.freeze), self._run.num_units
        if patterns > units + _PATTERNS_SPARE or patterns * units > _COMPARISONS_MAX:
            raise ConfigError(
                f"{KEY} = {self._directory}: train.freeze has {patterns:,} patterns, too many for "
                "the units of the model"
            )

    @property
    def data_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(x.nbytes(part) for x in self._layouts for part in _PARTS)

    def write(self, path: str, on_bytes: OnBytes, pool: KernelPool) -> None:
        """Make the checkpoint under `path`; returns when it is durable.

        Raises ConfigError when `path` holds a checkpoint or cannot be used, or the files are not of
        this model; StorageError when the disk has too little room, or reading or writing fails.
        """
        refuse_checkpoint(path)
        with ExitStack() as stack:
            weights = stack.enter_context(
                initial_weights(
                    self._directory,
                    self._run.model,
                    f"the import of {self._directory}: weights",
                    self._run.train.weight_dtype,
                )
            )
            moments = {stem: self._moments(stack, stem) for stem in MOMENTS if self._facts}
            align = _alignment_bytes(path, self.data_bytes)
            room = sum(round_up(x.nbytes(p), align) for x in self._layouts for p in _PARTS)
            store = stack.enter_context(_new_store(path, room))
            self._write_units(store, weights, moments, align, on_bytes, pool)
            store.publish(store.cut(self._meta))

    def _moments(self, stack: ExitStack, stem: str) -> TensorSource:
        """The moments of every tensor that was trained and still is."""
        key = f"the import of {self._directory}: {stem}"
        files = stack.enter_context(WeightFiles(self._directory, key, stem))
        assert self._facts is not None
        trained = {
            place.spec.name
            for layout in self._layouts
            for place in layout.places
            if not layout.frozen and place.spec.name not in self._facts.frozen
        }
        shapes = model_shapes(self._run.model)
        wanted = {name: shape for name, shape in shapes.items() if name in trained}
        match = Match(self._run.model, files.tensors, wanted)
        match.require(key, extra=False)
        return TensorSource(files, match.places, low=0.0 if stem == "exp_avg_sq" else -np.inf)

    def _write_units(
        self,
        store: NvmeStore,
        weights: TensorSource,
        moments: Mapping[str, TensorSource],
        align: int,
        on_bytes: OnBytes,
        pool: KernelPool,
    ) -> None:
        """Write every unit; one is written while the next is read."""
        version = 0 if self._facts is None else self._facts.optimizer_step
        sizes = [round_up(max(x.nbytes(p) for x in self._layouts), align) for p in _PARTS]
        scratch = [[aligned_buffer(size, align) for size in sizes] for _ in range(2)]
        writing: list[list[Handle]] = [[], []]
        for index, layout in enumerate(self._layouts):
            blocks, handles = scratch[index % 2], writing[index % 2]
            while handles:
                handles.pop().wait()
            _fill(layout, blocks, weights, moments, pool)
            for part, block in zip(_PARTS, blocks):
                nbytes = layout.nbytes(part)
                if nbytes:
                    runs = runs_of(layout, part)
                    name = f"{layout.name}/{part}"
                    data = block[: round_up(nbytes, align)]
                    handles.append(
                        store.write(name, data, "commit", nbytes=nbytes, version=version, runs=runs)
                    )
                    on_bytes(nbytes)
        store.drain()


def _fill(
    layout: UnitLayout,
    blocks: list[np.ndarray],
    weights: TensorSource,
    moments: Mapping[str, TensorSource],
    pool: KernelPool,
) -> None:
    """Put a unit together from files; moments that there are not are zero."""
    weight, state = blocks
    weight[:] = 0
    state[:] = 0
    values = UnitValues(layout, weight, None if layout.frozen else state, pool)
    for place in layout.places:
        values.put_masters(place, weights.values(place.spec))
        for stem, source in moments.items():
            if not layout.frozen and place.spec.name in source:
                values.put_moments(place, stem, source.values(place.spec))


def refuse_checkpoint(path: str) -> None:
    """Raise ConfigError when a checkpoint, or a part of one, lies under `path`."""
    directory = rank_directory(path, 0)
    is_there = os.path.lexists(os.path.join(path, RECORD_NAME))
    try:
        if not is_there and os.path.isdir(directory):
            is_there = bool(read_slots(directory, OsDirectoryFiles()))
    except OSError as error:
        raise out_error(path, error) from error
    if is_there:
        raise ConfigError(f"--out {path} holds a checkpoint: choose another directory")


def _alignment_bytes(path: str, nbytes: int) -> int:
    """Make the directory `path`, see that so many bytes fit; what files there are aligned to."""
    try:
        os.makedirs(path, exist_ok=True)
        require_room(path, nbytes, _free_bytes(path))
        return choose_access(path).alignment_bytes
    except OSError as error:
        raise out_error(path, error) from error


def _new_store(path: str, room: int) -> NvmeStore:
    """A store with room for so many bytes; what an interrupted import left is thrown away.

    It says of `--out` what a store says of the keys of a run.
    """
    try:
        require_room(path, room, _free_bytes(path))
        return NvmeStore(path, room, rank=0, required_bytes=0)
    except OSError as error:
        raise out_error(path, error) from error
    except (ConfigError, StorageError) as error:
        if isinstance(error.__cause__, OSError):
            raise out_error(path, error.__cause__) from error
        if isinstance(error, StorageError):
            raise
        raise ConfigError(str(error).replace("offload.nvme.path:", "--out:", 1)) from None


def _free_bytes(path: str) -> int:
    """Room under `path`, with that of a data file that an interrupted import has left."""
    directory = rank_directory(path, 0)
    return free_bytes_at(directory if os.path.isdir(directory) else path)
