"""An offloaded optimizer step beside the bound its schedule promises, on `small-moe`.

    make bench-step

Lines named `bound_chased` and `bound_speculative`: the median step time over

    chased        1.15 T_b + max(T_f, IO - H / BW)
    speculative   1.25 max(T_f + T_b, IO)

T_f and T_b are forward and backward (with everything behind it) of the same model in a process
whose budgets are so large that nothing moves; IO is the time of a raw replay of one step's own
reads and writes, in order, with the same workers and request size, without compute; H is the host
memory for read-ahead and write-behind; BW is the step's bytes over IO. The two processes run in
alternating blocks, one stopped while the other is measured, and the replay follows each block of
steps.

Further lines: bytes of a step by cause and per cold parameter, the kernel's count of the same bytes
(`/proc/self/io`), `pipeline: sync` beside `overlap`, and how traffic falls with the host budget.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.workers import Worker, serve

PRESET = "small-moe"
# A learning rate that moves nothing keeps the routing of the first step: every expert is used.
COMMON = [
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=1",
    "optimizer.max_grad_norm=1e9",
    "optimizer.learning_rate=1e-12",
]
HUGE = "16GiB"
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
        memory[:] = bytes(largest)
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

    def __init__(self, overrides: list[str], stack: ExitStack, folder: Path | None) -> None:
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
            stack.callback(self.store.close, delete=True)
        engine = self.engine = make_engine(config, self.plan, backend, pool, self.store)
        stack.callback(engine.close)
        initialize(config, engine)
        self._step = TrainingStep(config.model, config.train, engine, stages, backend)
        self._tokens, self._targets = _batch(config)
        self._forward_s = 0.0
        self._time_forward()
        self._transfers: list[tuple[str, int, int]] = []

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
            self._step.train(self._tokens, self._targets, self.config.optimizer.learning_rate)
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

    def _counters(self) -> dict[str, dict[str, int]]:
        if self.store is None:
            return {"read": {}, "written": {}}
        stats = self.store.stats()
        return {
            way: {**lane.payload_bytes, "padding": sum(lane.padding_bytes.values())}
            for way, lane in (("read", stats.read), ("written", stats.written))
        }

    def replay(self) -> dict[str, Any]:
        """Replay the last step's transfers on a copy of the data file's size."""
        assert self.store is not None
        paths = self.config.offload.nvme.paths
        target = Path(paths[0]) / "replay.bin"
        end = max(offset + nbytes for _, offset, nbytes in self._transfers)
        if not target.exists():
            _fill(target, end)
        elif target.stat().st_size < end:
            target.unlink()
            _fill(target, end)
        seconds = replay(target, self._transfers, self.config.offload.io_workers)
        return {"seconds": seconds, "bytes": sum(nbytes for *_, nbytes in self._transfers)}

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
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    for offset in range(0, nbytes, len(piece)):
        os.pwritev(fd, [piece], offset)
    os.fsync(fd)
    os.close(fd)


def run_side(overrides: list[str], folder: str | None) -> None:
    """Serve requests of the measuring process until its end."""
    with ExitStack() as stack:
        path = None if folder is None else Path(folder)
        side = Side(overrides, stack, path)
        serve({"block": side.block, "replay": side.replay, "info": side.info})


def bound(schedule: str, t_f: float, t_b: float, io: float, hidden: float) -> float:
    """Seconds a step may take."""
    if schedule == "chased":
        return 1.15 * t_b + max(t_f, io - hidden)
    return 1.25 * max(t_f + t_b, io)


def measure(schedule: str, host_bytes: int, rounds: int, steps: int, memory: Worker) -> None:
    """Print the lines of one update schedule."""
    folder = tempfile.mkdtemp(prefix="bench-step-", dir=os.environ.get("HEADRACE_BENCH_DIR"))
    try:
        with ExitStack() as stack:
            ours = stack.enter_context(_worker(schedule, "overlap", host_bytes, folder))
            info = ours.call("info")
            blocks, baselines, replays = [], [], []
            for _ in range(rounds):
                baselines.append(memory.call("block", DISCARDED + 2))
                blocks.append(ours.call("block", DISCARDED + steps))
                replays.append(ours.call("replay"))
            _report(schedule, info, blocks, baselines, replays)
        with ExitStack() as stack:
            sync = stack.enter_context(_worker(schedule, "sync", host_bytes, folder))
            plain = _median_step([sync.call("block", DISCARDED + 2)])
            whole = _median_step(blocks)
            _line(
                f"sync_over_overlap_{schedule}", plain / whole, "x", overlap_s=whole, sync_s=plain
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _worker(schedule: str, pipeline: str, host_bytes: int, folder: str) -> Worker:
    overrides = offload_overrides(host_bytes, schedule, pipeline, folder)
    return Worker("benchmarks.bench_step", ["--side", json.dumps([overrides, folder])])


def _median_step(blocks: list[dict[str, Any]]) -> float:
    whole = [f + r for x in blocks for f, r in zip(x["forward_s"], x["rest_s"])]
    return statistics.median(whole)


def _report(
    schedule: str,
    info: dict[str, Any],
    blocks: list[dict[str, Any]],
    baselines: list[dict[str, Any]],
    replays: list[dict[str, Any]],
) -> None:
    t_f = statistics.median(t for x in baselines for t in x["forward_s"])
    t_b = statistics.median(t for x in baselines for t in x["rest_s"])
    io = statistics.median(x["seconds"] for x in replays)
    step_bytes = statistics.median(x["bytes"] for x in replays)
    hidden = info["stream_bytes"] / (step_bytes / io)
    value = _median_step(blocks)
    limit = bound(schedule, t_f, t_b, io, hidden)
    _line(
        f"bound_{schedule}",
        value / limit,
        "x",
        step_s=value,
        bound_s=limit,
        forward_s=t_f,
        backward_s=t_b,
        io_s=io,
        hidden_s=hidden,
        bytes_per_s=step_bytes / io,
        stall_s=statistics.median(t for x in blocks for t in x["stall_s"]),
        **info,
    )
    block = blocks[-1]
    moved, steps = block["moved"], block["steps"]
    per_step = {way: {c: n / steps for c, n in causes.items()} for way, causes in moved.items()}
    cold = info["cold_parameters"]
    _line(
        f"bytes_{schedule}",
        sum(sum(causes.values()) for causes in per_step.values()) / info["parameters"],
        "B/parameter/step",
        read=per_step["read"],
        written=per_step["written"],
        read_per_cold_parameter=(per_step["read"]["update"] + per_step["read"]["weight"]) / cold,
        written_per_cold_parameter=per_step["written"]["update"] / cold,
    )
    for way in ("read", "written"):
        counted = sum(moved[way].values())
        seen = block["kernel"][way]
        _line(f"kernel_{way}_{schedule}", seen / counted, "x", counted=counted, kernel=seen)


def _line(name: str, value: float, unit: str, **extra: Any) -> None:
    record = {"name": name, "value": value, "unit": unit, **extra}
    print(json.dumps({key: _short(item) for key, item in record.items()}), flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value


def proportion(host_shares: tuple[float, ...], state_bytes: int) -> None:
    """How the bytes of a step fall as the host budget grows (`durability: none`)."""
    for share in host_shares:
        folder = tempfile.mkdtemp(prefix="bench-step-", dir=os.environ.get("HEADRACE_BENCH_DIR"))
        try:
            host_bytes = int(share * state_bytes)
            with _worker("chased", "overlap", host_bytes, folder) as worker:
                info, block = worker.call("info"), worker.call("block", DISCARDED + 1)
            total = sum(sum(causes.values()) for causes in block["moved"].values())
            cold = info["cold_parameters"] / info["parameters"]
            per_step = total / block["steps"]
            _line(
                "traffic", per_step, "B/step", host_share=share, cold_share=cold,
                bytes_per_cold_parameter=per_step / max(info["cold_parameters"], 1),
            )  # fmt: skip
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", default="chased,speculative")
    parser.add_argument("--host-share", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-proportion", action="store_true")
    parser.add_argument("--side", type=json.loads)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(*arguments.side)
        return
    huge = [f"offload.{tier}.capacity={HUGE}" for tier in ("device", "host")]
    huge.append("offload.nvme.capacity=18GiB")
    with Worker("benchmarks.bench_step", ["--side", json.dumps([huge, None])]) as memory:
        state_bytes = memory.call("info")["state_bytes"]
        for schedule in arguments.schedules.split(","):
            host_bytes = int(arguments.host_share * state_bytes)
            measure(schedule, host_bytes, arguments.rounds, arguments.steps, memory)
    if not arguments.no_proportion:
        proportion((0.4, 0.5, 0.75), state_bytes)


if __name__ == "__main__":
    main()
