"""Whole masters in and out: initial values, export, digest. The update stream must be idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from offload.arena import Buffer
from offload.blocks import TensorPlace, TensorSpec, UnitLayout
from offload.host_memory import HostMemory
from offload.nvme.store import NvmeStore
from offload.residency import Shared, UnitState
from offload.runs import runs_of
from offload.unit_values import UnitValues
from ops.errors import StorageError
from ops.kernels.pool import KernelPool

Fill = Callable[[UnitLayout, np.ndarray, np.ndarray | None], int]
"""Fills the weight and the state block (u8) of a unit; returns the version of what they hold."""


class MasterAccess:
    """Reads and writes the fp32 masters of units, whatever their home and storage form."""

    def __init__(
        self, shared: Shared, host: HostMemory, store: NvmeStore | None, pool: KernelPool
    ) -> None:
        self._shared = shared
        self._host = host
        self._store = store
        self._pool = pool

    def restore(self, step: int, idle_are_skipped: bool) -> None:
        """Take every unit from the store's blocks, which a commit of optimizer step `step` left.

        Cold blocks stay where they are. Raises StorageError when a block is missing, has another
        length, or does not belong to the other one of its unit; then nothing may be used.
        """
        assert self._store is not None
        stored = self._store.blocks()
        for unit in self._shared.units.values():
            unit.version = self._stored_version(unit, stored, step)
            skipped = idle_are_skipped or unit.layout.frozen
            unit.synced_step = step if skipped else unit.version
            for part, buffer in (("weight", unit.host_weight), ("state", unit.host_state)):
                if buffer is not None:
                    self._transfer(unit, part, buffer, write=False)

    def fill(self, read: Fill, step: int, idle_are_skipped: bool) -> None:
        """Take every unit from `read`, of a commit of optimizer step `step`; blocks.

        What `read` raises is passed on; then nothing may be used.
        """
        for unit in self._shared.units.values():
            weight, state = self._blocks(unit)
            try:
                version = read(unit.layout, weight.array, None if state is None else state.array)
            except BaseException as error:
                self._shared.fail(error)
                raise
            unit.version = version
            skipped = idle_are_skipped or unit.layout.frozen
            unit.synced_step = step if skipped else version
            for part, buffer, cold in (
                ("weight", weight, unit.weight_on_nvme),
                ("state", state, unit.state_on_nvme),
            ):
                if cold and buffer is not None:
                    self._transfer(unit, part, buffer, write=True)

    def _stored_version(
        self, unit: UnitState, stored: dict[str, tuple[int, int]], step: int
    ) -> int:
        """The step of the unit's blocks in the store; StorageError when they make no unit."""
        assert self._store is not None
        parts = ["weight"] if unit.layout.frozen else ["weight", "state"]
        for part in parts:
            wanted, found = unit.layout.nbytes(part), stored.get(unit.block(part), (0, 0))[0]
            if found != wanted:
                raise StorageError(
                    f"the commit has {found} bytes, the model needs {wanted}: it is a commit of "
                    "another model",
                    path=self._store.directory,
                    block=unit.block(part),
                )
        versions = sorted({stored[unit.block(part)][1] for part in parts})
        if len(versions) != 1 or versions[0] > step:
            raise StorageError(
                f"the blocks of {unit.name} are of steps {versions}, the commit is of {step}",
                path=self._store.directory,
            )
        return versions[0]

    def initialize(self, values: Callable[[TensorSpec], np.ndarray]) -> None:
        """Write `values(tensor)` (fp32, flat) and zero moments to every unit's home; blocks."""
        for unit in self._shared.units.values():
            weight, state = self._blocks(unit)
            if state is not None:
                state.array[:] = 0
            blocks = self._values(unit, weight, state)
            for place in unit.layout.places:
                spec = place.spec
                numbers = values(spec) if spec.name else np.zeros(spec.size, np.float32)
                blocks.put_masters(place, numbers)
            for part, buffer, cold in (
                ("weight", weight, unit.weight_on_nvme),
                ("state", state, unit.state_on_nvme),
            ):
                if cold and buffer is not None:
                    self._transfer(unit, part, buffer, write=True)

    def tensors(self) -> list[TensorSpec]:
        """The tensors, or pieces of them, in the order of `sorted`."""
        return [place.spec for _, place in self._places()]

    def _places(self) -> list[tuple[UnitState, TensorPlace]]:
        wanted = [
            (place.spec.name.encode(), *place.spec.position, unit, place)
            for unit in self._shared.units.values()
            for place in unit.layout.places
            if place.spec.name
        ]
        wanted.sort(key=lambda row: row[:4])
        return [(unit, place) for *_, unit, place in wanted]

    def sorted(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """(tensor, flat fp32 masters) by UTF-8 name and row; an array lives until the next."""
        loaded: UnitState | None = None
        for unit, place in self._places():
            if unit is not loaded:
                weight, state = self._blocks(unit)
                self._read(unit, weight, state)
                loaded = unit
            masters = np.empty(place.spec.size, np.float32)
            self._values(unit, weight, state).masters(place)(0, masters.size, masters)
            yield place.spec, masters

    def _values(self, unit: UnitState, weight: Buffer, state: Buffer | None) -> UnitValues:
        array = None if state is None else state.array
        return UnitValues(unit.layout, weight.array, array, self._pool)

    def _blocks(self, unit: UnitState) -> tuple[Buffer, Buffer | None]:
        """The unit's blocks: its homes, or parts of an idle update slot; frozen: no state."""
        weight, state, offset = unit.host_weight, unit.host_state, 0
        if unit.weight_on_nvme:
            weight = self._host.update_slots[0].slice(0, unit.weight_bytes)
            offset = unit.weight_bytes
        if unit.state_on_nvme:
            state = self._host.update_slots[0].slice(offset, unit.state_bytes)
        assert weight is not None and (state is not None or unit.layout.frozen)
        return weight, state

    def _read(self, unit: UnitState, weight: Buffer, state: Buffer | None) -> None:
        for part, buffer, cold in (
            ("weight", weight, unit.weight_on_nvme),
            ("state", state, unit.state_on_nvme),
        ):
            if cold and buffer is not None:
                self._transfer(unit, part, buffer, write=False)

    def _transfer(self, unit: UnitState, part: str, buffer: Buffer, *, write: bool) -> None:
        assert self._store is not None
        block, nbytes = unit.block(part), unit.layout.nbytes(part)
        try:
            if write:
                runs = runs_of(unit.layout, part)
                handle = self._store.write(
                    block, buffer.array, "commit", nbytes=nbytes, version=unit.version, runs=runs
                )
            else:
                handle = self._store.read(block, buffer.array, "commit", nbytes=nbytes)
            handle.wait()
        except BaseException as error:
            self._shared.fail(error)  # after a corrupt block nothing is trained on
            raise
