"""Activations between stages: named host arrays taken at start-up, and copies to and from them.

A spec says how many copies of an array a step needs (layers x micro-batches); the store takes them
from the host arena and counts what crosses the lanes. Called by compute only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from offload.arena import Arena
from offload.stats import Stats
from ops.units import round_up

_ALIGN_BYTES = 4096


@dataclass(frozen=True)
class ActivationSpec:
    """`copies` arrays of `shape` and NumPy `dtype` under one name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    copies: int

    @property
    def nbytes(self) -> int:
        """Bytes of one copy, rounded up to pages."""
        return round_up(prod(self.shape) * np.dtype(self.dtype).itemsize, _ALIGN_BYTES)


def activation_bytes(specs: Sequence[ActivationSpec]) -> int:
    """Host bytes of all copies of all specs."""
    return sum(spec.nbytes * spec.copies for spec in specs)


class ActivationStore:
    """Arrays addressed by (name, copy index)."""

    def __init__(
        self,
        specs: Sequence[ActivationSpec],
        arena: Arena,
        stats: Stats,
        delay: Callable[[str], None],
    ) -> None:
        self._stats = stats
        self._delay = delay
        self._arrays: dict[str, list[np.ndarray]] = {}
        for spec in specs:
            arrays = []
            for _ in range(spec.copies):
                buffer = arena.require(spec.nbytes, f"activation {spec.name}")
                flat = buffer.view(spec.dtype, 0, prod(spec.shape))
                arrays.append(flat.reshape(spec.shape))
            self._arrays[spec.name] = arrays

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def host(self, name: str, index: int) -> np.ndarray:
        """The array itself, for what moves between ranks; it crosses no lane."""
        return self._arrays[name][index]

    def put(self, name: str, index: int, value: np.ndarray) -> None:
        """Copy a whole array device → host."""
        self._delay("d2h")
        np.copyto(self._arrays[name][index], value, casting="no")
        self._stats.add(d2h_bytes=value.nbytes)

    def put_rows(self, name: str, index: int, rows: slice | np.ndarray, value: np.ndarray) -> None:
        """Copy `rows` (a slice or indices) of an array device → host."""
        self._delay("d2h")
        target = self._arrays[name][index]
        assert value.dtype == target.dtype, f"{name} is {target.dtype}, not {value.dtype}"
        target[rows] = value
        self._stats.add(d2h_bytes=value.nbytes)

    def get(self, name: str, index: int) -> np.ndarray:
        """A device copy of a whole array (host → device)."""
        self._delay("h2d")
        array = self._arrays[name][index].copy()
        self._stats.add(h2d_bytes=array.nbytes)
        return array

    def get_rows(
        self, name: str, index: int, rows: slice | np.ndarray, padded_rows: int
    ) -> np.ndarray:
        """A device copy of `rows` (a slice or indices), zero-padded to `padded_rows`."""
        self._delay("h2d")
        source = self._arrays[name][index]
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        array = np.empty((padded_rows, *source.shape[1:]), source.dtype)
        array[:count] = source[rows]
        array[count:] = 0
        self._stats.add(h2d_bytes=array.nbytes)
        return array
