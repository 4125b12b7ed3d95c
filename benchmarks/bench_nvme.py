"""Whole blocks through the NVMe store, every byte checksummed, beside fio on the same file.

Ours: `NvmeStore.write` / `read` of blocks as a small model has them (an expert's weight of 4.1 MiB
and its state of 20.6 MiB) and of 64 MiB, from the call until the last handle is done. References,
which look at no byte:

- fio with direct I/O, the same request size and depth, over as many bytes of the store's own data
  file, and writing in the same two places in turn; with io_uring or with one thread a request
  (psync), whichever is faster here. Its memory asks for huge pages as ours does (a tunable of
  glibc), which makes it up to 70 % faster;
- `--loop`, and without fio: threads that do nothing but preadv / pwritev, on as much memory as
  ours.

`--mix` measures instead how reads and writes share the drive: as many bytes read as written, in
turns of so many MiB, beside all reads followed by all writes. A ratio above 1 says that turns of
that size are worth while on this drive; what moves at once is the turn of "all".

Nothing is flushed. Data is random. Run from the repository root:

    python -m benchmarks.bench_nvme [--directory .] [--mib 768] [--workers 8] [--request-mib 4]
        [--pairs 9] [--loop] [--mix] [--require-fio]

Needs three times `--mib` of free disk (blocks are written out of place), and removes its files.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import compare, seconds_of
from offload.nvme.aligned import aligned_buffer
from offload.nvme.handle import wait_all
from offload.nvme.store import NvmeStore

MIB = 1 << 20
EXPERT_PARAMETERS = 3 * 1024 * 704  # of small-moe
BLOCK_BYTES = {
    "4.1MiB": 2 * EXPERT_PARAMETERS,  # bf16 weight
    "20.6MiB": 10 * EXPERT_PARAMETERS,  # residual and both moments
    "64MiB": 64 * MIB,
}
TURNS_MIB = (4, 16, 64, 256)


def random_memory(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random bytes, uint8 [nbytes], that start on a page."""
    memory = aligned_buffer(nbytes, 4096)
    generator = np.random.default_rng(seed)
    for start in range(0, nbytes, 32 * MIB):
        part = memory[start : start + 32 * MIB]
        part[:] = np.frombuffer(generator.bytes(part.nbytes), np.uint8)
    return memory


class Ours:
    """A store whose blocks of one size fill `memory`, one buffer a block."""

    def __init__(
        self, directory: str, memory: npt.NDArray[np.uint8], block_bytes: int, **options: Any
    ) -> None:
        starts = range(0, memory.nbytes - block_bytes + 1, block_bytes)
        self.buffers = [memory[start : start + block_bytes] for start in starts]
        self.total_bytes = block_bytes * len(self.buffers)
        self.store = NvmeStore(os.path.join(directory, "store"), 2 * self.total_bytes, **options)
        for _ in range(2):  # both places of every block exist on the disk before anything counts
            self.move("write")

    def move(self, verb: str, blocks: Iterable[int] | None = None) -> None:
        """Write or read (and verify) these blocks, or all."""
        wait_all(self.submit(verb, range(len(self.buffers)) if blocks is None else blocks))

    def submit(self, verb: str, blocks: Iterable[int]) -> list:
        """The handles of these blocks' transfers."""
        call = getattr(self.store, verb)
        return [call(f"block.{n}", self.buffers[n], "update", deadline=n) for n in blocks]

    def speed(self, verb: str) -> float:
        """MB/s of moving every block once."""
        return self.total_bytes / 1e6 / seconds_of(lambda: self.move(verb))


class Fio:
    """fio on a file of two places of `total_bytes`, with one of its engines."""

    ENGINES = ("io_uring", "psync")

    def __init__(self, path: str, total_bytes: int, depth: int, request_bytes: int) -> None:
        self._path = path
        self._depth = depth
        self._request_bytes = request_bytes
        stride = depth * request_bytes
        self._total_bytes = total_bytes // stride * stride
        self._places = itertools.cycle((0, total_bytes))

    def speed(self, engine: str, verb: str) -> float:
        """MB/s of one pass, from the start of its first request to the end of its last.

        From fio's log of requests: what fio reports for a group of threads is all their bytes over
        the time of the slowest one, each from its own start. Threads seldom start together, and
        that counts as speed (2 to 6 %, at times 80 %). With one thread both agree within 0.3 %.

        Writes take turns in both places of the store's blocks, as the store's own do, so that
        both sides write to the same part of the disk. What that alone changes was not measured.
        """
        place = next(self._places) if verb == "write" else 0
        if engine == "psync":
            size = self._total_bytes // self._depth
            lanes = [f"--numjobs={self._depth}", f"--offset_increment={size}", f"--size={size}"]
        else:
            lanes = [f"--iodepth={self._depth}", f"--size={self._total_bytes}"]
        command = [
            *("fio", "--name=fio", f"--filename={self._path}", f"--rw={verb}", "--direct=1"),
            f"--offset={place}",
            *(f"--bs={self._request_bytes}", f"--ioengine={engine}", *lanes),
            *("--thread", "--iomem_align=2M", "--log_unix_epoch=1"),
        ]
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        with tempfile.TemporaryDirectory(prefix="bench-nvme-fio-") as directory:
            log = f"--write_lat_log={directory}/fio"
            subprocess.run([*command, log], check=True, capture_output=True, env=environment)
            logs = Path(directory).glob("fio_lat.*.log")
            lines = [line.split(",") for path in logs for line in path.read_text().splitlines()]
        # Each is: when it ended (ms), its latency (ns), direction, bytes, ...
        ends_s = [int(line[0]) / 1e3 for line in lines]
        starts_s = [end_s - int(line[1]) / 1e9 for end_s, line in zip(ends_s, lines)]
        moved_bytes = sum(int(line[3]) for line in lines)
        if moved_bytes != self._total_bytes:
            raise ValueError(f"fio moved {moved_bytes} bytes of {self._total_bytes}")
        return moved_bytes / 1e6 / (max(ends_s) - min(starts_s))

    def fastest(self, verb: str, rounds: int = 3) -> str:
        """The engine with the best median here and now, of those that this machine lets run."""
        speeds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for engine in self.ENGINES:
                try:
                    speeds.setdefault(engine, []).append(self.speed(engine, verb))
                except (subprocess.CalledProcessError, ValueError):
                    continue  # io_uring may be forbidden
        return max(speeds, key=lambda engine: statistics.median(speeds[engine]))


class PlainLoop:
    """Threads that move a file with direct preadv / pwritev: who is free takes the next request."""

    def __init__(self, path: str, total_bytes: int, depth: int, request_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, total_bytes)
        self._total_bytes = total_bytes
        self._request_bytes = request_bytes
        self._depth = depth
        self._memory = random_memory(total_bytes, seed=1).data
        self.speed("write")

    def speed(self, verb: str) -> float:
        """MB/s of one pass."""
        move = os.preadv if verb == "read" else os.pwritev
        offsets = iter(range(0, self._total_bytes, self._request_bytes))

        def work() -> None:
            for offset in offsets:  # shared: whoever is free takes the next
                move(self._fd, [self._memory[offset : offset + self._request_bytes]], offset)

        def run() -> None:
            threads = [threading.Thread(target=work) for _ in range(self._depth)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return self._total_bytes / 1e6 / seconds_of(run)


def measure_blocks(directory: str, options: argparse.Namespace) -> None:
    """Each block size, written and read, beside each reference."""
    memory = random_memory(options.mib * MIB, seed=0)
    request_bytes = options.request_mib * MIB
    has_fio = shutil.which("fio") is not None
    loop = None
    if options.loop or not has_fio:
        path = os.path.join(directory, "loop.bin")
        loop = PlainLoop(path, memory.nbytes, options.workers, request_bytes)
    for size, block_bytes in BLOCK_BYTES.items():
        settings = {"workers": options.workers, "request_bytes": request_bytes}
        ours = Ours(directory, memory, block_bytes, **settings)
        fio = Fio(
            os.path.join(ours.store.directory, "data.bin"),
            ours.total_bytes,
            options.workers,
            request_bytes,
        )
        for verb in ("write", "read"):
            references: list[tuple[str, str, Callable[[], float]]] = []
            if has_fio:
                engine = fio.fastest(verb)
                speed = functools.partial(fio.speed, engine, verb)
                references.append(("fio", f"fio {engine}", speed))
            if loop is not None:
                speed = functools.partial(loop.speed, verb)
                references.append(("loop", "preadv/pwritev loop", speed))
            ours.move("write")  # fio has written over the blocks
            for prefix, name, reference in references:
                compare(
                    f"{prefix}_{verb}_{size}",
                    "MB/s",
                    functools.partial(ours.speed, verb),
                    reference,
                    name,
                    options.pairs,
                    total_bytes=ours.total_bytes,
                    block_bytes=block_bytes,
                    direct=ours.store.access.direct,
                    **settings,
                )
        ours.store.close(delete=True)


def measure_mix(directory: str, options: argparse.Namespace) -> None:
    """Reads and writes in turns of several sizes, beside one after the other."""
    memory = random_memory(options.mib * MIB, seed=0)
    settings = {"workers": options.workers, "request_bytes": options.request_mib * MIB}
    ours = Ours(directory, memory, 4 * MIB, **settings)
    half = len(ours.buffers) // 2
    reads, writes = range(half), range(half, 2 * half)
    moved_bytes = 2 * half * 4 * MIB

    def in_turns(blocks: int) -> float:
        def move() -> None:
            for start in range(0, half, blocks):
                ours.move("read", reads[start : start + blocks])
                ours.move("write", writes[start : start + blocks])

        return moved_bytes / 1e6 / seconds_of(move)

    def at_once() -> float:
        def move() -> None:
            handles = []
            for block_read, block_written in zip(reads, writes):
                handles += ours.submit("read", [block_read])
                handles += ours.submit("write", [block_written])
            wait_all(handles)

        return moved_bytes / 1e6 / seconds_of(move)

    turns = {f"{mib}MiB": functools.partial(in_turns, mib // 4) for mib in TURNS_MIB}
    for name, run in (turns | {"all": at_once}).items():
        serial = functools.partial(in_turns, half)
        compare(
            f"mix_{name}",
            "MB/s",
            run,
            serial,
            "all reads, then all writes",
            options.pairs,
            moved_bytes=moved_bytes,
            **settings,
        )
    ours.store.close(delete=True)


def main() -> int:
    """Measure and print one JSON line each; 2 when fio is required and missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=".")
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--request-mib", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--loop", action="store_true", help="beside the bare loop as well as fio")
    parser.add_argument("--mix", action="store_true", help="reads and writes in turns instead")
    parser.add_argument("--require-fio", action="store_true", help="refuse to run without fio")
    options = parser.parse_args()
    if options.require_fio and not shutil.which("fio"):
        print("fio is not installed; install it (apt install fio) to measure", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=options.directory) as directory:
        (measure_mix if options.mix else measure_blocks)(directory, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
