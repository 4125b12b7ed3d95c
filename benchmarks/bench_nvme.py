"""Whole blocks through the NVMe store, every byte checksummed, beside fio and beside a bare loop.

Ours: `NvmeStore.write` / `read` of blocks of 32 MiB, from the call until the last handle is done.
References, each with direct I/O, the same request size and depth, over as many bytes in the same
directory, and without looking at the bytes:

- fio (where it is installed);
- threads that do nothing but preadv / pwritev, on as much memory as ours. It is the harder one
  where huge pages can be had: our and the loop's memory asks for them, fio's does not, so that
  fio's requests reach the drive in more pieces.

Nothing is flushed. Data is random. Run from the repository root:

    python -m benchmarks.bench_nvme [--directory .] [--mib 512] [--workers 8] [--request-mib 4]
        [--engine io_uring] [--pairs 9]

Needs four times `--mib` of free disk (blocks are written out of place), and removes its files.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.common import compare, seconds_of
from offload.nvme.aligned import aligned_buffer
from offload.nvme.handle import wait_all
from offload.nvme.store import NvmeStore

MIB = 1 << 20
BLOCK_BYTES = 32 * MIB


def random_memory(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random bytes, uint8 [nbytes], that start on a page."""
    memory = aligned_buffer(nbytes, 4096)
    generator = np.random.default_rng(seed)
    for start in range(0, nbytes, BLOCK_BYTES):
        part = memory[start : start + BLOCK_BYTES]
        part[:] = np.frombuffer(generator.bytes(part.nbytes), np.uint8)
    return memory


class Ours:
    """A store with `total_bytes` in blocks, and one buffer per block."""

    def __init__(self, directory: str, total_bytes: int, workers: int, request_bytes: int) -> None:
        self.store = NvmeStore(
            os.path.join(directory, "store"),
            2 * total_bytes,
            workers=workers,
            request_bytes=request_bytes,
        )
        self.total_bytes = total_bytes
        memory = random_memory(total_bytes, seed=0)
        self._buffers = [
            memory[start : start + BLOCK_BYTES] for start in range(0, total_bytes, BLOCK_BYTES)
        ]
        for _ in range(2):  # both places of every block exist on the disk before anything counts
            self.write()

    def write(self) -> float:
        """MB/s of writing every block once."""
        return self._speed(self.store.write)

    def read(self) -> float:
        """MB/s of reading and verifying every block once."""
        return self._speed(self.store.read)

    def _speed(self, call: Callable) -> float:
        def move() -> None:
            wait_all(
                [
                    call(f"block.{index}", buffer, "update", deadline=index)
                    for index, buffer in enumerate(self._buffers)
                ]
            )

        return self.total_bytes / 1e6 / seconds_of(move)


def fio_speed(path: str, verb: str, total_bytes: int, depth: int, bs: int, engine: str) -> float:
    """MB/s that fio reports for one pass over `path`."""
    command = [
        *("fio", "--name=reference", f"--filename={path}", f"--rw={verb}", f"--bs={bs}"),
        *("--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", f"--size={total_bytes}"),
        "--output-format=json",
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return report["jobs"][0][verb]["bw_bytes"] / 1e6


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


def main() -> None:
    """Measure both directions and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=".")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--request-mib", type=int, default=4)
    parser.add_argument("--engine", default="io_uring")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--loop", action="store_true", help="beside the bare loop as well as fio")
    options = parser.parse_args()
    total_bytes, bs = options.mib * MIB, options.request_mib * MIB
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=options.directory) as directory:
        references: list[tuple[str, str, Callable[[str], float]]] = []
        if options.loop or not shutil.which("fio"):
            loop = PlainLoop(os.path.join(directory, "loop.bin"), total_bytes, options.workers, bs)
            references.append(("_loop", "preadv/pwritev loop", loop.speed))
        if shutil.which("fio"):
            path = os.path.join(directory, "fio.bin")

            def fio(verb: str) -> float:
                return fio_speed(path, verb, total_bytes, options.workers, bs, options.engine)

            references.insert(0, ("", f"fio {options.engine}", fio))
        ours = Ours(directory, total_bytes, options.workers, bs)
        with ours.store:
            for (suffix, name, reference), verb in itertools.product(references, ("write", "read")):
                compare(
                    f"nvme_{verb}{suffix}",
                    "MB/s",
                    ours.write if verb == "write" else ours.read,
                    functools.partial(reference, verb),
                    name,
                    options.pairs,
                    total_bytes=total_bytes,
                    request_bytes=bs,
                    workers=options.workers,
                    direct=ours.store.access.direct,
                )


if __name__ == "__main__":
    main()
