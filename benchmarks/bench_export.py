"""`headrace checkpoint export --moments` beside what the drive does for the same bytes.

Ours: a commit of one rank becomes safetensors files with weights and moments: read past the page
cache, every byte verified, masters joined, written and synced, from opening the commit until
the export is published. `--weights` exports the weights alone.

Reference: threads that do nothing but preadv of as many bytes of the store's own data file and
pwritev of as many bytes to new files, past the page cache, synced: either both at once or one after
the other, whichever is faster here.

Data is random. Run from the repository root:

    python -m benchmarks.bench_export [--directory .] [--mib 2048] [--pairs 9] [--weights]

Needs four times `--mib` of free disk, and removes its files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench_nvme import random_memory
from benchmarks.common import compare, seconds_of
from launch.config import RunConfig
from launch.resume import save_plan
from moe.checkpoint import SavedRun, saved_ledger, saved_run
from moe.data.stream import Cursor
from moe.weights.directory import ExportDirectory
from moe.weights.export import Export, ExportOptions, facts_of
from offload.checkpoint.catalog import find_checkpoints, open_parts
from offload.checkpoint.units import UnitReader
from offload.nvme.aligned import aligned_buffer
from offload.nvme.store import NvmeStore
from ops.kernels.pool import KernelPool
from ops.units import round_up

MIB = 1 << 20
EXPERTS = 8
REQUEST_BYTES = 4 * MIB
READERS, WRITERS = 6, 4
PARTS = ("weight", "state")


def make_config(directory: str, state_bytes: int) -> RunConfig:
    """A model of small-moe's experts whose state takes about so many bytes."""
    expert_bytes = 12 * 3 * 1024 * 704
    return RunConfig.from_dict(
        {
            "name": "bench-export",
            "model": {
                "vocab_size": 4096,
                "hidden_size": 1024,
                "num_hidden_layers": max(1, state_bytes // (EXPERTS * expert_bytes)),
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "moe_intermediate_size": 704,
                "num_experts": EXPERTS,
                "num_experts_per_tok": 2,
            },
            "offload": {
                "device": {"capacity": 1 << 30},
                "host": {"capacity": 1 << 30},
                "nvme": {"capacity": 1 << 30, "path": directory},
            },
        }
    )


def make_commit(path: str, config: RunConfig) -> SavedRun:
    """A commit of one rank with random bytes in every block."""
    engine = {"ledger": {"step": 1, "rates": []}, "loss_scale": {"scale": 1.0, "good_steps": 0}}
    run = {"step": 1, "cursor": Cursor().to_json(), **save_plan(config).facts}
    meta = {"step": 1, "engine": engine, "run": run}
    saved = saved_run(meta)
    sizes = {
        f"{layout.name}/{part}": layout.nbytes(part)
        for layout in saved.whole.values()
        for part in PARTS
    }
    memory = random_memory(round_up(max(sizes.values()), 4096), seed=1)
    capacity = sum(round_up(size, 4096) for size in sizes.values())
    with NvmeStore(path, capacity) as store:
        for name, size in sizes.items():
            store.write(name, memory[:size], "commit", version=1)
        store.publish(store.cut(meta))
    return saved


class Ours:
    """Exports of the newest commit under `path`; `nbytes` of the last one, read and written."""

    def __init__(self, path: str, out: str, saved: SavedRun, moments: bool) -> None:
        self._path = path
        self._out = out
        self._saved = saved
        self._options = ExportOptions(moments=moments)
        self.read_bytes = 0
        self.written_bytes = 0

    def export(self) -> None:
        """Once, into a directory that is not there."""
        run = self._saved
        with ExitStack() as stack:
            (checkpoint, *_) = find_checkpoints([self._path])
            (part,) = open_parts(checkpoint, hold=True)
            stack.callback(part.close)
            directory = stack.enter_context(ExportDirectory(self._out))
            pool = stack.enter_context(KernelPool(len(os.sched_getaffinity(0))))
            ledger = saved_ledger(run, {0: part.meta})
            reader = UnitReader({0: part}, run.layouts, ledger, 0.1, pool)
            facts = facts_of(run, part.meta, ledger.step, self._options, {})
            work = Export(run, self._options)
            self.written_bytes = work.write(
                reader, ledger.step, directory, facts, lambda nbytes: None, pool
            )
            self.read_bytes = part.bytes_read

    def speed(self) -> float:
        """MB/s, read and written bytes together."""
        seconds = seconds_of(self.export)
        shutil.rmtree(self._out)
        return (self.read_bytes + self.written_bytes) / 1e6 / seconds


class Drive:
    """The same bytes, moved by threads that do nothing else."""

    def __init__(self, source: str, target: str, read_bytes: int, written_bytes: int) -> None:
        self._source = source
        self._target = target
        self._read_bytes = read_bytes // REQUEST_BYTES * REQUEST_BYTES
        self._written_bytes = round_up(written_bytes, REQUEST_BYTES)
        self._buffers = [random_memory(REQUEST_BYTES, n) for n in range(WRITERS)]
        self._buffers += [aligned_buffer(REQUEST_BYTES, 4096) for _ in range(READERS)]

    def speed(self, together: bool) -> float:
        """MB/s, read and written bytes together."""
        fd = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        source = os.open(self._source, os.O_RDONLY | os.O_DIRECT)
        try:
            seconds = seconds_of(lambda: self._move(source, fd, together))
        finally:
            os.close(source)
            os.close(fd)
            os.unlink(self._target)
        return (self._read_bytes + self._written_bytes) / 1e6 / seconds

    def _move(self, source: int, target: int, together: bool) -> None:
        os.posix_fallocate(target, 0, self._written_bytes)
        threads = [
            threading.Thread(target=self._lane, args=(target, self._written_bytes, lane, WRITERS))
            for lane in range(WRITERS)
        ]
        readers = [
            threading.Thread(
                target=self._lane, args=(source, self._read_bytes, lane, READERS, WRITERS)
            )
            for lane in range(READERS)
        ]
        for group in [[*threads, *readers]] if together else [readers, threads]:
            for thread in group:
                thread.start()
            for thread in group:
                thread.join()
        os.fdatasync(target)

    def _lane(self, fd: int, total: int, lane: int, lanes: int, first: int = 0) -> None:
        buffer = self._buffers[first + lane].data
        call = os.preadv if first else os.pwritev
        for offset in range(lane * REQUEST_BYTES, total, lanes * REQUEST_BYTES):
            call(fd, [buffer], offset)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=".")
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--weights", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-export-", dir=arguments.directory) as folder:
        path, out = os.path.join(folder, "store"), os.path.join(folder, "out")
        saved = make_commit(path, make_config(path, arguments.mib * MIB))
        ours = Ours(path, out, saved, not arguments.weights)
        ours.speed()
        data = str(Path(path) / "rank-00000" / "data.bin")
        moved: dict[str, Any] = {"read_bytes": ours.read_bytes, "written_bytes": ours.written_bytes}
        drive = Drive(data, os.path.join(folder, "raw"), ours.read_bytes, ours.written_bytes)
        speeds = {together: drive.speed(together) for together in (True, False)}
        together = max(speeds, key=lambda x: speeds[x])
        compare(
            "export weights" if arguments.weights else "export weights and moments",
            "MB/s",
            ours.speed,
            lambda: drive.speed(together),
            "threads, both at once" if together else "threads, one after the other",
            arguments.pairs,
            **moved,
        )


if __name__ == "__main__":
    main()
