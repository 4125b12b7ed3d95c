"""MindSpore as the engine's `Backend`: process-wide settings, zero-copy tensors, waiting.

Importing this module imports MindSpore (2.3 s, 400 MiB) after checking NumPy. oneDNN reads
ONEDNN_DEFAULT_FPMATH_MODE when it is loaded, so `launch/` sets it before this import; what it was
then is reported by `onednn_mode`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ops.device import check_numpy, check_threads

check_numpy()

_ONEDNN_MODE = os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT") or "STRICT"

import mindspore as ms  # noqa: E402
from mindspore.graph.api import _pynative_executor  # noqa: E402


class MindSporeBackend:
    """`Backend` on MindSpore; see there for the contracts."""

    name = "mindspore"

    def __init__(self) -> None:
        self._threads: int | None = None

    def configure(self, threads: int | None = None) -> None:
        """Select the CPU and deterministic kernels; `threads` bounds the compute threads.

        Call once, before the first computation: MindSpore makes its thread pool then. None keeps
        MindSpore's choice, one thread a core. Raises `ConfigError` for threads below 1.
        """
        check_threads(threads)
        self._threads = threads
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_deterministic(True)
        if threads is not None:
            ms.device_context.cpu.op_tuning.threads_num(threads)

    def wrap(self, array: np.ndarray) -> Any:
        """Return a tensor on the memory of `array`, which must be C-contiguous."""
        return tensor_on(array)

    def to_numpy(self, tensor: Any) -> np.ndarray:
        """Return a writable view of the tensor's memory."""
        _pynative_executor.sync()
        array: np.ndarray = tensor.asnumpy()
        return array

    def sync(self) -> None:
        """Block until all launched work is done, jit calls included."""
        _pynative_executor.sync()

    def versions(self) -> Mapping[str, str]:
        """Return versions, oneDNN's precision mode and the threads."""
        return {
            "mindspore": ms.__version__,
            "numpy": np.__version__,
            "onednn_fpmath_mode": self.onednn_mode(),
            "threads": str(self._threads or os.cpu_count()),
        }

    def onednn_mode(self) -> str:
        """Return ONEDNN_DEFAULT_FPMATH_MODE as it was when MindSpore was loaded."""
        return _ONEDNN_MODE


def tensor_on(array: np.ndarray) -> Any:
    """Return a tensor that shares the memory of `array` and keeps it alive.

    `Tensor.from_numpy` is marked deprecated; where it is gone the tensor is a copy, which is
    correct but costs memory and time, so a canary test tells.
    """
    assert array.flags.c_contiguous, "a strided array cannot be shared"
    from_numpy = getattr(ms.Tensor, "from_numpy", None)
    return ms.Tensor(array) if from_numpy is None else from_numpy(array)
