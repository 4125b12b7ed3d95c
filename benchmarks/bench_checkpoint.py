"""What a save costs training, and how fast a commit is read onto another mesh, on `small-moe`.

    make bench-checkpoint

- `stall`: the wall time that compute loses to a save (`docs/formats/run_directory.md` says what is
  counted), median of 10 saves in steps that train on, beside 2 % of the time of a plain sequential
  write of the checkpoint's bytes, raw and direct, in the same process. The checkpoint's cold state,
  above 4 GiB, is not copied; what lies in host memory, 0.9 GB, is written behind the training.
- `save_step`: how much longer a step with a save takes, and the step after it, than others.
- `restore`: reading units of the commit onto other meshes, every byte verified, beside raw direct
  reads of as many bytes; `chunks` are read once.

Needs 20 GiB of disk, under HEADRACE_BENCH_DIR or the temporary folder, and removes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import seconds_of
from benchmarks.step_side import offload_overrides, replay
from benchmarks.workers import Worker

HOST_SHARE = 0.4  # 4.1 GiB are cold, 0.9 GB are in host memory and have to be written
STATE_BYTES = 12 * 453_000_000
MESHES: dict[str, dict[str, Any]] = {
    "1": {},
    "dp2": {"data_parallel": 2},
    "op2": {"model_parallel": 2},
    "pp2": {"pipeline_stage": 2},
}


def saves(worker: Worker, number: int, every: int) -> None:
    """The lines about saves."""
    worker.call("block", 2)  # warm
    found = worker.call("saves", number, every)
    plain = [worker.call("write", found["checkpoint_bytes"]) for _ in range(3)]
    write_s = statistics.median(plain)
    stalls = [commit["stall_seconds"] for commit in found["commits"]]
    limit_s = max(0.02 * write_s, 0.05)
    print_line(
        "stall",
        statistics.median(stalls) / limit_s,
        "x of what is allowed",
        stall_s=statistics.median(stalls),
        stalls_s=stalls,
        limit_s=limit_s,
        plain_write_s=write_s,
        checkpoint_bytes=found["checkpoint_bytes"],
        cold_bytes=found["cold_bytes"],
        written_bytes=statistics.median(x["written_bytes"] for x in found["commits"]),
        publish_s=statistics.median(x["publish_seconds"] for x in found["commits"]),
    )
    steps = found["step_s"]
    by_place = [statistics.median(steps[place::every]) for place in range(every)]
    print_line("save_step", by_place[0] / by_place[-1], "x of a step", by_place_s=by_place)


def restores(folder: str) -> None:
    """The lines about reading the commit in `folder`, a store without an owner."""
    from moe.checkpoint import saved_ledger, saved_run
    from moe.mesh import Mesh, ParallelConfig
    from offload.checkpoint.catalog import find_checkpoints, open_parts
    from offload.checkpoint.units import UnitReader
    from ops.kernels.pool import KernelPool

    checkpoint = find_checkpoints([folder])[0]
    run = saved_run(checkpoint.meta)
    ledger = saved_ledger(run, {0: checkpoint.meta})
    data = os.path.join(checkpoint.directories(0)[0], "data.bin")
    for name, parallel in MESHES.items():
        layouts = _layouts(run, Mesh(ParallelConfig(**parallel)))
        (part,) = open_parts(checkpoint)
        with closing(part), KernelPool(2) as pool:
            reader = UnitReader({0: part}, run.layouts, ledger, run.optimizer.weight_decay, pool)
            needed = _chunks_needed(reader, layouts)
            spent = seconds_of(partial(_fill, reader, layouts))
            nbytes, chunks = part.bytes_read, part.chunks_read
        raw = [("read", at * (4 << 20), 4 << 20) for at in range(nbytes >> 22)]
        raw_s = replay_reads(data, raw)
        print_line(
            "restore",
            raw_s / spent,
            "x of raw reads",
            onto=name,
            bytes_read=nbytes,
            bytes_per_s=nbytes / spent,
            chunks_read=chunks,
            chunks_needed=len(needed),
            read_twice=chunks - len(needed),
        )


def _chunks_needed(reader: Any, layouts: list[Any]) -> set[tuple[int, str, int]]:
    return {
        (rank, block, chunk)
        for layout in layouts
        for (rank, block), chunks in reader.needed(layout).items()
        for chunk in chunks
    }


def _fill(reader: Any, layouts: list[Any]) -> None:
    weight = np.zeros(max(x.nbytes("weight") for x in layouts), np.uint8)
    state = np.zeros(max(x.nbytes("state") for x in layouts), np.uint8)
    reader.expect(layouts)
    for layout in layouts:
        reader.fill(layout, weight[: layout.nbytes("weight")], state[: layout.nbytes("state")])


def replay_reads(path: str, transfers: list[tuple[str, int, int]]) -> float:
    """Seconds of these reads, wrapped into the file."""
    size = os.path.getsize(path) >> 22 << 22
    return replay(Path(path), [(verb, at % size, n) for verb, at, n in transfers], 8)


def _layouts(run: Any, mesh: Any) -> list[Any]:
    from moe.memory import layouts_of

    share = mesh.share(run.model, 0)
    return layouts_of(run.model, run.train, run.optimizer.decay_norms, share)


def print_line(name: str, value: float, unit: str, **extra: Any) -> None:
    """One JSON line."""

    def short(item: Any) -> Any:
        if isinstance(item, float):
            return float(f"{item:.5g}")
        return [short(x) for x in item] if isinstance(item, list) else item

    record = {"name": name, "value": value, "unit": unit, **extra}
    print(json.dumps({key: short(item) for key, item in record.items()}), flush=True)


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--parts", default="saves,restores")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=os.environ.get("HEADRACE_BENCH_DIR"))
    try:
        overrides = offload_overrides(int(HOST_SHARE * STATE_BYTES), "chased", "overlap", folder)
        overrides += ["offload.durability=checkpoint", "train.save_steps=1000"]
        side = json.dumps([overrides, folder, "keep"])
        with Worker("benchmarks.step_side", ["--side", side]) as worker:
            saves(worker, arguments.saves, arguments.every)
        if "restores" in arguments.parts:
            restores(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
