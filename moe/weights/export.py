"""A commit as safetensors files: unit after unit, in constant memory, whatever mesh made it.

One thread puts the next unit together from the commit, this one turns the last one into numbers,
others write. Memory: two units, the buffers of the writer, and what the commit's reader holds. What
idle experts missed is replayed on the way, so that an export is of one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moe.checkpoint import SavedRun
from moe.weights.directory import CONFIG_FILE, FACTS_FILE, STEM, ExportDirectory
from moe.weights.hugging_face import hugging_face_config
from moe.weights.names import IN_OUT, model_shapes, packed_names, packed_shapes
from moe.weights.writing import Entry, FileSet, ShardWriter
from offload.blocks import TensorPlace, UnitLayout
from offload.unit_values import MOMENTS, Produce, UnitValues
from ops.kernels.pool import KernelPool

FORMAT = "headrace export 1"
DTYPES = ("float32", "bfloat16")
_MESH_FACTS = ("ranks", "parallel")
OnBytes = Callable[[int], None]


class UnitSource(Protocol):
    """Where units come from: a `UnitReader`."""

    def expect(
        self, targets: Iterable[UnitLayout], until: int | None = None, moments: bool = True
    ) -> None:
        """Read ahead: `fill` will be called for these, in this order, with these options."""

    def fill(
        self,
        target: UnitLayout,
        weight: npt.NDArray[np.uint8],
        state: npt.NDArray[np.uint8] | None,
        until: int | None = None,
        moments: bool = True,
    ) -> int:
        """Fill the blocks of `target`, replayed up to optimizer step `until`."""


@dataclass(frozen=True)
class ExportOptions:
    """What is written and how: `dtype` of the weights, one of `DTYPES`; `packed` experts in one of
    `names.PACKED_FORMS`, or None for a tensor each; shards of at most `shard_bytes`."""

    dtype: str = "float32"
    moments: bool = False
    packed: str | None = None
    shard_bytes: int = 4 << 30


class Export:
    """The files of one commit, before and while they are written."""

    def __init__(self, run: SavedRun, options: ExportOptions) -> None:
        self._run = run
        self._options = options
        self._layouts = list(run.whole.values())
        self._shapes = model_shapes(run.model)
        self._entries = {STEM: self._entries_of(STEM)}
        if options.moments:
            self._entries |= {stem: self._entries_of(stem) for stem in MOMENTS}

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors that are to be written."""
        return sum(entry.nbytes for entries in self._entries.values() for entry in entries)

    def _entries_of(self, stem: str) -> list[Entry]:
        """The tensors of a set, in the order in which they come."""
        is_bf16 = stem == STEM and self._options.dtype == "bfloat16"
        dtype = "BF16" if is_bf16 else "F32"
        found: dict[str, Entry] = {}
        for layout in self._layouts:
            if stem in MOMENTS and layout.frozen:
                continue
            packed = self._packed_of(layout)
            if packed:
                shapes = packed_shapes(self._run.model, self._options.packed or IN_OUT)
                found |= {name: Entry(name, dtype, shape) for name, shape in zip(packed, shapes)}
                continue
            for place in layout.places:
                name = place.spec.name
                found.setdefault(name, Entry(name, dtype, self._shapes[name]))
        return list(found.values())

    def _packed_of(self, layout: UnitLayout) -> tuple[str, str] | None:
        """The packed tensors that take this unit; None where its own tensors are written."""
        is_packed = self._options.packed is not None and layout.unit.expert is not None
        return packed_names(layout.unit.layer) if is_packed else None

    def write(
        self,
        source: UnitSource,
        optimizer_step: int,
        directory: ExportDirectory,
        facts: Mapping[str, Any],
        on_bytes: OnBytes,
        pool: KernelPool | None = None,
    ) -> int:
        """Write and publish everything; returns the bytes of all data files.

        `facts` become `headrace.json`. `on_bytes` is told of the tensor bytes of each unit. Raises
        StorageError when the disk has too little room, or reading or writing fails.
        """
        directory.require_room(self.data_bytes)
        until = None if self._run.idle_expert_policy == "skip" else optimizer_step
        with ShardWriter(directory.path) as writer:
            shard_bytes = self._options.shard_bytes
            sets = {
                stem: writer.new_set(stem, entries, shard_bytes)
                for stem, entries in self._entries.items()
            }
            directory.require_room(sum(files.nbytes for files in sets.values()))
            for unit in self._filled(source, until, pool):
                on_bytes(sum(self._append(unit, stem, files) for stem, files in sets.items()))
            for files in sets.values():
                files.finish()
            for files in sets.values():
                files.publish()
            for stem in sets.keys() - {STEM}:
                directory.write_json(f"{stem}.safetensors.index.json", sets[stem].index())
            directory.write_json(FACTS_FILE, facts)
            config = hugging_face_config(
                self._run.model, self._run.train.seq_len, self._options.dtype
            )
            directory.write_json(CONFIG_FILE, config)
            directory.publish(sets[STEM].index())
            return writer.bytes_written

    def _filled(
        self, source: UnitSource, until: int | None, pool: KernelPool | None
    ) -> Iterator[UnitValues]:
        """Every unit, each valid until the next one; the next one is read meanwhile."""
        layouts, moments = self._layouts, self._options.moments
        sizes = [max(x.nbytes(part) for x in layouts) for part in ("weight", "state")]
        scratch = [[np.empty(size, np.uint8) for size in sizes] for _ in range(2)]

        def fill(index: int) -> UnitValues:
            layout = layouts[index]
            weight, state = scratch[index % 2]
            weight = weight[: layout.nbytes("weight")]
            block = None if layout.frozen else state[: layout.nbytes("state")]
            source.fill(layout, weight, block, until, moments)
            return UnitValues(layout, weight, block, pool)

        source.expect(layouts, until, moments)
        with ThreadPoolExecutor(1, thread_name_prefix="units") as reading:
            coming = reading.submit(fill, 0)
            for index in range(len(layouts)):
                unit = coming.result()
                if index + 1 < len(layouts):
                    coming = reading.submit(fill, index + 1)
                yield unit

    def _append(self, unit: UnitValues, stem: str, files: FileSet) -> int:
        """Hand the unit's tensors to a set; returns their bytes."""
        layout, is_bf16 = unit.layout, stem == STEM and self._options.dtype == "bfloat16"
        if self._packed_of(layout):
            return self._append_packed(unit, stem, files, is_bf16)
        if stem in MOMENTS and layout.frozen:
            return 0
        for place in layout.places:
            produce = _produce(unit, place, stem, is_bf16)
            files.append(place.spec.name, place.spec.size, produce)
        return (2 if is_bf16 else 4) * sum(place.spec.size for place in layout.places)

    def _append_packed(self, unit: UnitValues, stem: str, files: FileSet, is_bf16: bool) -> int:
        """The same for an expert that goes into the packed tensors of its layer.

        A frozen expert in a layer with others that are trained has moments of zero there.
        """
        gate_up, down = packed_names(unit.layout.unit.layer)
        if gate_up not in files:
            return 0
        places = {place.spec.name.split(".")[-2]: place for place in unit.layout.places}
        gate, up, last = (places[f"{kind}_proj"] for kind in ("gate", "up", "down"))
        if self._options.packed == IN_OUT:
            dtype = np.dtype(np.uint16 if is_bf16 else np.float32)
            both = [_matrix(_produce(unit, x, stem, is_bf16), x, dtype) for x in (gate, up)]
            files.append(gate_up, gate.spec.size + up.spec.size, _copying(np.concatenate(both).T))
            single = _matrix(_produce(unit, last, stem, is_bf16), last, dtype)
            files.append(down, last.spec.size, _copying(single.T))
        else:
            for name, place in ((gate_up, gate), (gate_up, up), (down, last)):
                files.append(name, place.spec.size, _produce(unit, place, stem, is_bf16))
        return (2 if is_bf16 else 4) * (gate.spec.size + up.spec.size + last.spec.size)


def _produce(unit: UnitValues, place: TensorPlace, stem: str, is_bf16: bool) -> Produce:
    return unit.masters(place, is_bf16) if stem == STEM else unit.moments(place, stem)


def _matrix(produce: Produce, place: TensorPlace, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A tensor as a matrix of its own."""
    values = np.empty(prod(place.spec.shape), dtype)
    produce(0, values.size, values)
    return values.reshape(place.spec.shape)


def _copying(matrix: npt.NDArray[Any]) -> Produce:
    flat = np.ascontiguousarray(matrix).ravel()
    return lambda lo, hi, out: np.copyto(out, flat[lo:hi])


def facts_of(
    run: SavedRun,
    meta: Mapping[str, Any],
    optimizer_step: int,
    options: ExportOptions,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """The content of `headrace.json`: what is needed to go on, nothing of the mesh."""
    told = {key: value for key, value in meta["run"].items() if key not in _MESH_FACTS}
    return {
        "format": FORMAT,
        "step": run.step,
        "optimizer_step": optimizer_step,
        "weights": {"dtype": options.dtype, "packed_experts": options.packed},
        "moments": options.moments,
        "run": told,
        "loss_scale": meta["engine"]["loss_scale"],
        "parameter_groups": parameter_groups(run),
        "frozen": sorted({x.spec.name for u in run.whole.values() if u.frozen for x in u.places}),
        "versions": dict(versions),
    }


def parameter_groups(run: SavedRun) -> list[dict[str, Any]]:
    """The trained tensors by whether they take weight decay, in forward order."""
    names: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for layout in run.whole.values():
        if not layout.frozen:
            for place in layout.places:
                names[place.spec.decay].setdefault(place.spec.name)
    rates = {True: run.optimizer.weight_decay, False: 0.0}
    labels = {True: "decay", False: "no_decay"}
    return [
        {"name": labels[decays], "weight_decay": rates[decays], "tensors": list(names[decays])}
        for decays in (True, False)
    ]
