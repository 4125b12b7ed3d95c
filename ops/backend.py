"""MindSpore as the engine's `Backend`: process-wide settings, zero-copy tensors, waiting.

Importing this module imports MindSpore (2.3 s, 400 MiB) after checking NumPy. oneDNN reads
ONEDNN_DEFAULT_FPMATH_MODE when it is loaded, so `launch/` sets it before this import and tells
the backend what it set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ops.device import check_numpy, check_threads

check_numpy()

import mindspore as ms  # noqa: E402
from mindspore.graph.api import _pynative_executor  # noqa: E402


class MindSporeBackend:
    """`Backend` on MindSpore; see there for the contracts."""

    name = "mindspore"
    device_target = "CPU"

    def __init__(self, onednn_mode: str = "STRICT") -> None:
        """`onednn_mode` is what ONEDNN_DEFAULT_FPMATH_MODE was when MindSpore was loaded."""
        self._onednn_mode = onednn_mode
        self._threads: int | None = None

    def configure(self, threads: int | None = None) -> None:
        """Select the CPU and deterministic kernels; `threads` bounds the compute threads.

        Call once, before the first computation: MindSpore makes its thread pool then. None keeps
        MindSpore's choice, one thread a core. Raises `ConfigError` for threads below 1.
        """
        check_threads(threads)
        self._threads = threads
        # Set already where ranks talk through it.
        if ms.get_context("device_target") != self.device_target:
            ms.set_device(self.device_target)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_deterministic(True)
        if threads is not None:
            ms.device_context.cpu.op_tuning.threads_num(threads)
        # Worker threads start with the first kernel that is large enough to share.
        self.to_numpy(ms.ops.exp(ms.Tensor(np.zeros(1 << 20, np.float32))))
        pin_workers()

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
        return self._onednn_mode


def pin_workers() -> int:
    """Give each of MindSpore's kernel threads a core of its own; returns how many were pinned.

    The thread that launches a kernel waits for the workers by yielding in a loop, which the
    scheduler takes for work: it often leaves both workers on one core and that thread alone on
    the other, and the kernel takes twice as long (measured on two cores: 13 or 26 ms for an
    expert's backward; 13 to 16 when pinned). Bits do not depend on it. Nothing is pinned where
    there are more workers than cores, or where the system has no thread affinity.
    """
    folder = "/proc/self/task"
    try:
        cores = sorted(os.sched_getaffinity(0))
        workers = [int(task) for task in os.listdir(folder) if _is_worker(f"{folder}/{task}/comm")]
        if len(workers) > len(cores):
            return 0
        for worker, core in zip(sorted(workers), cores):
            os.sched_setaffinity(worker, {core})
    except (AttributeError, OSError):
        return 0
    return len(workers)


def _is_worker(path: str) -> bool:
    with open(path) as file:
        return file.read().startswith(("ActorThread", "KernelThread"))


def tensor_on(array: np.ndarray) -> Any:
    """Return a tensor that shares the memory of `array` and keeps it alive.

    `Tensor.from_numpy` is marked deprecated; where it is gone the tensor is a copy, which is
    correct but costs memory and time, so a canary test tells.
    """
    assert array.flags.c_contiguous, "a strided array cannot be shared"
    from_numpy = getattr(ms.Tensor, "from_numpy", None)
    return ms.Tensor(array) if from_numpy is None else from_numpy(array)
