"""A few persistent threads that share one kernel call over a flat range.

Kernels release the GIL and are bitwise the same for any chunking, so neither the number of
threads nor the order in which chunks run can change a result. This module knows nothing of what a
kernel computes.

Invariants: the caller's thread works too (so a pool of one starts no thread); when `run` returns
or raises, no thread touches the caller's buffers any more; a nested `run` cannot deadlock,
because helpers that have not started are cancelled rather than waited for.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ops.units import round_up

BLOCK = 4096
"""Chunks start at multiples of this many elements; the norm's summation tree relies on it."""

CHUNK_MIN = 64 * 1024
CHUNK_MAX = 1024 * 1024
_CHUNKS_PER_THREAD = 8


class KernelPool:
    """Runs chunk kernels on `threads` threads, the caller's included.

    Raises ValueError unless threads >= 1. `run` may be called from several threads at once; they
    share the helpers. Close it, or use it as a context manager, to end the helper threads.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}, at least 1 is needed")
        self.threads = threads
        self._closed = False
        self._executor = (
            ThreadPoolExecutor(threads - 1, thread_name_prefix="kernel") if threads > 1 else None
        )

    def run(
        self, chunk_kernel: Callable[[int, int], Any], size: int, chunk_elements: int | None = None
    ) -> None:
        """Call `chunk_kernel(lo, hi)` over chunks that cover [0, size) once; blocks until done.

        `chunk_elements` is a multiple of 4096; by default 64 Ki, and more when there is enough
        work for eight chunks per thread. An empty range calls nothing. The first error of any
        chunk is raised here after all threads have stopped; chunks not yet begun are skipped.
        Raises ValueError for a bad chunk length, RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("the kernel pool is closed")
        chunk = self._default_chunk(size) if chunk_elements is None else chunk_elements
        if chunk < 1 or chunk % BLOCK:
            raise ValueError(f"chunk_elements is {chunk}, a multiple of {BLOCK} is needed")
        num_chunks = -(-size // chunk)
        if self._executor is None or num_chunks <= 1:
            for lo in range(0, size, chunk):
                chunk_kernel(lo, min(lo + chunk, size))
            return
        work = _Work(chunk_kernel, size, chunk)
        helpers: list[Future[None]] = [
            self._executor.submit(work.drain) for _ in range(min(self.threads, num_chunks) - 1)
        ]
        work.drain()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if work.error is not None:
            raise work.error

    def close(self) -> None:
        """End the helper threads after their current work; idempotent, blocks until they ended."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True)

    def __enter__(self) -> KernelPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _default_chunk(self, size: int) -> int:
        even = round_up(size // (self.threads * _CHUNKS_PER_THREAD), BLOCK)
        return min(max(even, CHUNK_MIN), CHUNK_MAX)


class _Work:
    """One `run`: hands out chunks, keeps the first error; `drain` never raises."""

    def __init__(self, chunk_kernel: Callable[[int, int], Any], size: int, chunk: int) -> None:
        self._chunk_kernel = chunk_kernel
        self._size = size
        self._chunk = chunk
        self._starts = itertools.count(0, chunk)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def drain(self) -> None:
        while self.error is None:
            with self._lock:
                lo = next(self._starts)
            if lo >= self._size:
                return
            try:
                self._chunk_kernel(lo, min(lo + self._chunk, self._size))
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error
                return


def run_chunks(pool: KernelPool | None, kernel: Callable[..., Any], size: int, *args: Any) -> None:
    """Call `kernel(*args, lo, hi)` over [0, size): in one piece without a pool, else on it."""
    if pool is None:
        if size:
            kernel(*args, 0, size)
    else:
        pool.run(lambda lo, hi: kernel(*args, lo, hi), size)


def copy_flat(target: np.ndarray, source: np.ndarray, *, pool: KernelPool | None = None) -> None:
    """Copy flat `source` into `target` (same dtype and length), in chunks on `pool`'s threads."""

    def copy(lo: int, hi: int) -> None:
        np.copyto(target[lo:hi], source[lo:hi], casting="no")

    run_chunks(pool, copy, source.size)
