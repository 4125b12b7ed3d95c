"""One side of `bench_step`: a training step in its own process, and the raw replay of its I/O."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.workers import serve

PRESET = "small-moe"
WRAP_BYTES = 4 << 30  # of the file that transfers are replayed on
# Initial weights so wide that tokens differ and every expert is used, and a learning rate that
# moves nothing, so that it stays so: every parameter is updated in every step, as by the peers.
COMMON = [
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=1",
    "optimizer.max_grad_norm=1e9",
    "optimizer.learning_rate=1e-12",
    "model.initializer_range=0.1",
]
DISCARDED = 2  # steps of a block whose timing still shows the stop before it


def offload_overrides(host_bytes: int, schedule: str, pipeline: str, folder: str) -> list[str]:
    """The configuration of the offloaded side."""
    return [
        f"offload.host.capacity={host_bytes}",
        "offload.device.capacity=384MiB",
        "offload.nvme.capacity=18GiB",
        f"offload.nvme.path={folder}",
        f"offload.pipeline={pipeline}",
        f"optimizer.update_schedule={schedule}",
    ]


class Recorder:
    """Remembers the transfers that reach the data file, in order."""

    def __init__(self) -> None:
        self.transfers: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def open_file(self, path: str, direct: bool) -> Any:
        """An `OpenFile` that records."""
        from offload.nvme.files import open_os_file

        return _RecordingFile(open_os_file(path, direct), self)

    def note(self, verb: str, offset: int, nbytes: int) -> None:
        """One transfer."""
        with self._lock:
            self.transfers.append((verb, offset, nbytes))

    def take(self) -> list[tuple[str, int, int]]:
        """What was recorded since the last call."""
        with self._lock:
            taken, self.transfers = self.transfers, []
        return taken


class _RecordingFile:
    def __init__(self, inner: Any, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def readv_into(self, buffers: Any, offset: int) -> int:
        moved = self._inner.readv_into(buffers, offset)
        self._recorder.note("read", offset, moved)
        return moved

    def writev_from(self, buffers: Any, offset: int) -> int:
        moved = self._inner.writev_from(buffers, offset)
        self._recorder.note("write", offset, moved)
        return moved


def replay(path: Path, transfers: list[tuple[str, int, int]], num_workers: int) -> float:
    """Seconds for the same transfers on the file `path`, raw."""
    from offload.nvme.aligned import aligned_buffer

    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    largest = max(nbytes for _, _, nbytes in transfers)
    waiting, lock = iter(transfers), threading.Lock()

    def work() -> None:
        memory = aligned_buffer(largest, 4096).data
        memory[:] = os.urandom(largest)
        while True:
            with lock:
                transfer = next(waiting, None)
            if transfer is None:
                return
            verb, offset, nbytes = transfer
            move = os.preadv if verb == "read" else os.pwritev
            move(fd, [memory[:nbytes]], offset)

    threads = [threading.Thread(target=work) for _ in range(num_workers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - started
    os.close(fd)
    return spent


def _batch(config: Any) -> tuple[Any, Any]:
    import numpy as np

    shape = (config.train.batch_sequences, config.train.seq_len + 1)
    tokens = np.random.default_rng(1).integers(0, 256, shape).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _kernel_bytes() -> dict[str, int]:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(rows["read_bytes"]), "written": int(rows["write_bytes"])}


class Side:
    """One configuration in this process: steps on demand, timed in forward and the rest."""

    def __init__(
        self, overrides: list[str], stack: ExitStack, folder: Path | None, keep: bool = False
    ) -> None:
        from launch import environment
        from launch.config import load_config

        config = self.config = load_config(PRESET, [*COMMON, *overrides])
        environment.prepare(config.runtime)
        from launch.build import compute_parts, initialize, make_engine, make_plan
        from moe.step import TrainingStep
        from ops.kernels.pool import KernelPool

        self.plan = make_plan(config)
        assert self.plan.fits, self.plan.problems
        backend, stages = compute_parts(config)
        pool = stack.enter_context(KernelPool(config.runtime.num_threads))
        self.recorder = Recorder()
        self.store = self._open_store(folder) if folder is not None else None
        if self.store is not None:
            stack.callback(self.store.close, delete=not keep)
        engine = self.engine = make_engine(config, self.plan, backend, pool, self.store)
        stack.callback(engine.close)
        initialize(config, engine)
        self._step = TrainingStep(config.model, config.train, engine, stages, backend)
        self._tokens, self._targets = _batch(config)
        self._forward_s = 0.0
        self._time_forward()
        self._transfers: list[tuple[str, int, int]] = []
        self._commits = config.offload.durability == "step"

    def _open_store(self, folder: Path) -> Any:
        from offload.nvme.store import NvmeStore

        offload = self.config.offload
        return NvmeStore(
            offload.nvme.paths,
            offload.nvme.capacity,
            workers=offload.io_workers,
            request_bytes=offload.io_request_size,
            required_bytes=self.plan.tiers["nvme"].used_bytes,
            open_file=self.recorder.open_file,
        )

    def _time_forward(self) -> None:
        forward = self._step._forward
        run = forward.run

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*arguments)
            finally:
                self._forward_s = time.perf_counter() - started

        forward.run = timed

    def block(self, num_steps: int) -> dict[str, Any]:
        """Train `num_steps` steps; times of those that count, and bytes of their border to border.

        The bytes are those of whole steps: from the drained store to the drained store.
        """
        forward, rest, stall = [], [], []
        before, kernel = self._counters(), _kernel_bytes()
        for _ in range(num_steps):
            self.recorder.take()
            stalled = self.engine.stats.snapshot().stall_seconds
            started = time.perf_counter()
            commit = {"step": self.engine.optimizer_step + 1} if self._commits else None
            rate = self.config.optimizer.learning_rate
            self._step.train(self._tokens, self._targets, rate, commit)
            spent = time.perf_counter() - started
            forward.append(self._forward_s)
            rest.append(spent - self._forward_s)
            stall.append(self.engine.stats.snapshot().stall_seconds - stalled)
            self._transfers = self.recorder.take() or self._transfers
        self.engine.drain()
        after, kernel_after = self._counters(), _kernel_bytes()
        moved = {
            way: {cause: after[way][cause] - before[way][cause] for cause in after[way]}
            for way in after
        }
        return {
            "forward_s": forward[DISCARDED:],
            "rest_s": rest[DISCARDED:],
            "stall_s": stall[DISCARDED:],
            "steps": num_steps,
            "moved": moved,
            "kernel": {way: kernel_after[way] - kernel[way] for way in kernel},
        }

    def saves(self, number: int, every: int) -> dict[str, Any]:
        """Train with a commit in every `every`-th step, so many times; what each of them cost."""
        assert self.store is not None
        spent: list[float] = []
        self.engine.commits.take_published()
        for index in range(number * every):
            step = self.engine.optimizer_step + 1
            commit = self._meta(step) if index % every == 0 else None
            started = time.perf_counter()
            rate = self.config.optimizer.learning_rate
            self._step.train(self._tokens, self._targets, rate, commit)
            spent.append(time.perf_counter() - started)
        self.engine.drain()
        self.engine.commits.wait()
        published = [dataclasses.asdict(x) for x in self.engine.commits.take_published()]
        blocks = self.store.blocks().values()
        return {
            "commits": published,
            "step_s": spent,
            "every": every,
            "checkpoint_bytes": sum(nbytes for nbytes, _ in blocks),
            "cold_bytes": self.plan.tiers["nvme"].terms[0].nbytes,
        }

    def _meta(self, step: int) -> dict[str, Any]:
        from launch.resume import save_plan
        from moe.data.stream import Cursor

        return {"step": step, "cursor": Cursor().to_json(), **save_plan(self.config).facts}

    def _counters(self) -> dict[str, dict[str, int]]:
        if self.store is None:
            return {"read": {}, "written": {}}
        stats = self.store.stats()
        return {
            way: {**lane.payload_bytes, "padding": sum(lane.padding_bytes.values())}
            for way, lane in (("read", stats.read), ("written", stats.written))
        }

    def replay(self) -> dict[str, Any]:
        """Replay the last step's transfers on a file beside the store, offsets wrapped."""
        assert self.store is not None
        target = Path(self.config.offload.nvme.paths[0]) / "replay.bin"
        if not target.exists():
            _fill(target, WRAP_BYTES + max(nbytes for *_, nbytes in self._transfers))
        transfers = [
            (verb, offset % WRAP_BYTES, nbytes) for verb, offset, nbytes in self._transfers
        ]
        seconds = replay(target, transfers, self.config.offload.io_workers)
        return {"seconds": seconds, "bytes": sum(nbytes for *_, nbytes in transfers)}

    def write(self, nbytes: int) -> float:
        """Seconds to write so many bytes in a row, raw, over a file of 1 GiB beside the store."""
        target, wrap = Path(self.config.offload.nvme.paths[0]) / "write.bin", 1 << 30
        if not target.exists():
            _fill(target, wrap)
        piece = self.config.offload.io_request_size
        writes = [("write", offset % wrap, piece) for offset in range(0, nbytes, piece)]
        return replay(target, writes, self.config.offload.io_workers)

    def info(self) -> dict[str, Any]:
        """What the plan says."""
        homes = self.plan.homes
        cold = sum(x.size for x in self._layouts() if homes[x.name, "state"] == "nvme")
        coldest = sum(x.size for x in self._layouts() if homes[x.name, "weight"] == "nvme")
        return {
            "parameters": self.plan.parameters,
            "state_bytes": self.plan.state_bytes,
            "cold_parameters": cold,
            "cold_weight_parameters": coldest,
            "stream_bytes": self.plan.stream_bytes,
            "host_bytes": self.config.offload.host.capacity,
        }

    def _layouts(self) -> Any:
        from moe.memory import layouts_of

        config = self.config
        return layouts_of(config.model, config.train, config.optimizer.decay_norms)


def _fill(path: Path, nbytes: int) -> None:
    from offload.nvme.aligned import aligned_buffer

    piece = aligned_buffer(8 << 20, 4096).data
    piece[:] = os.urandom(len(piece))  # zeros could be cheaper for the drive
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    for offset in range(0, nbytes, len(piece)):
        os.pwritev(fd, [piece], offset)
    os.fsync(fd)
    os.close(fd)


def run_side(overrides: list[str], folder: str | None, then: str = "delete") -> None:
    """Serve requests of the measuring process until its end; `keep` leaves the store behind."""
    with ExitStack() as stack:
        path = None if folder is None else Path(folder)
        side = Side(overrides, stack, path, then == "keep")
        functions = (side.block, side.replay, side.write, side.info, side.saves)
        serve({function.__name__: function for function in functions})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=json.loads, required=True)
    run_side(*parser.parse_args().side)
