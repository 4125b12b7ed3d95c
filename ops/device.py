"""The device as the engine sees it: wrap host bytes as tensors, and wait. No MindSpore here.

`ops/backend.py` implements `Backend` on MindSpore; `NumpyBackend` serves tests of tiers and
engine that must not pay MindSpore's import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ops.errors import ConfigError


class Backend(Protocol):
    """What the engine needs of a tensor library. One instance a process; call from one thread."""

    name: str

    def configure(self, threads: int | None = None) -> None:
        """Fix process-wide settings, before the first computation. Raises `ConfigError`."""

    def wrap(self, array: np.ndarray) -> Any:
        """Return a tensor on the same memory; the tensor keeps `array` alive.

        The caller changes the memory only after `sync`.
        """

    def to_numpy(self, tensor: Any) -> np.ndarray:
        """Return the tensor's memory as an array, after waiting for its value."""

    def sync(self) -> None:
        """Block until all launched work is done."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions and settings that bits may depend on, for run reports."""


class NumpyBackend:
    """Tensors are arrays; everything is done when it returns."""

    name = "numpy"

    def configure(self, threads: int | None = None) -> None:
        """Check `threads`; NumPy has nothing to set."""
        check_threads(threads)

    def wrap(self, array: np.ndarray) -> np.ndarray:
        """Return `array` itself."""
        return array

    def to_numpy(self, tensor: np.ndarray) -> np.ndarray:
        """Return `tensor` itself."""
        return tensor

    def sync(self) -> None:
        """Return at once."""

    def versions(self) -> Mapping[str, str]:
        """Return NumPy's version."""
        return {"numpy": np.__version__}


def check_threads(threads: int | None) -> None:
    """Raise `ConfigError` unless `threads` is None or at least 1."""
    if threads is not None and threads < 1:
        raise ConfigError(f"compute threads is {threads}, it must be at least 1")


def check_numpy(version: str = np.__version__) -> None:
    """Raise `ConfigError` on NumPy 2, with which MindSpore 2.10 breaks; call before importing it.

    MindSpore's metadata allows it, but `Tensor + 1` then fails with "Numpy init failed".
    """
    if int(version.split(".")[0]) >= 2:
        raise ConfigError(
            f"NumPy {version} is installed, but MindSpore 2.10 needs NumPy 1.26 to below 2; "
            f'run: pip install "numpy>=1.26,<2"'
        )
