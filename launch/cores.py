"""The cores of this process: as many as `runtime.threads` says, and no other rank's.

MindSpore's CPU runtime starts two workers and two launching threads whatever it is told; kernels of
the optimizer, transfers and checksums run beside them. So the number of threads bounds nothing, and
the process is kept on its cores as a whole, before any thread starts. On one core of two this also
trains faster than with both, because launching threads then sleep instead of spinning.

Ranks that a launcher started on this machine divide its cores, unless it has bound them already.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.ranks import detect_ranks


def confine(threads: int) -> list[int]:
    """Keep this process, and all it will start, on its cores; returns them.

    `threads` of 0 means all this rank may use. Threads that start later inherit the cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    ranks = detect_ranks()
    cores = choose(
        allowed,
        threads,
        ranks.local_rank,
        ranks.local_size,
        _num_cores_of_machine(),
        _current_core(),
    )
    if cores != allowed:
        for task in os.listdir("/proc/self/task"):  # threads of libraries that are loaded already
            with suppress(OSError):
                os.sched_setaffinity(int(task), cores)
    return cores


def choose(
    allowed: Sequence[int],
    threads: int,
    rank: int,
    num_ranks: int,
    num_machine: int,
    current: int,
) -> list[int]:
    """The cores of one of `num_ranks` local ranks, which may use `allowed` of `num_machine` cores.

    A rank with more than its share was not bound by its launcher and takes a part of its own. Of
    what is left, `threads` neighbours are taken where the scheduler put the process (`current`),
    in whole blocks, so that two runs on one machine rarely meet. More threads than cores: all.
    """
    cores = list(allowed)
    if num_ranks > 1 and len(cores) > max(1, num_machine // num_ranks):
        first, last = (len(cores) * number // num_ranks for number in (rank, rank + 1))
        cores = cores[first:last] or [cores[rank % len(cores)]]
    if 0 < threads < len(cores):
        place = cores.index(current) if current in cores else 0
        first = min(place // threads * threads, len(cores) - threads)
        cores = cores[first : first + threads]
    return cores


def _num_cores_of_machine() -> int:
    """Cores of the machine or container: those of its first process, which nobody has bound."""
    try:
        return len(os.sched_getaffinity(1))
    except OSError:
        return os.cpu_count() or 1


def _current_core() -> int:
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(after_name[36])
    except (OSError, IndexError, ValueError):
        return -1
