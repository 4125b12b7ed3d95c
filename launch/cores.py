"""The cores of this process: as many as `runtime.threads` says, and no other rank's.

MindSpore's CPU runtime starts two workers and two launching threads whatever it is told; kernels of
the optimizer, transfers and checksums run beside them. So the number of threads bounds nothing, and
the process is kept on its cores as a whole, before any thread starts. On one core of two this also
trains faster than with both, because launching threads then sleep instead of spinning.

Ranks of this machine divide the cores that their launcher was given, unless it has bound them. It
has where a rank may use fewer cores than the launcher itself. How many the machine has says
nothing: a batch system or `taskset` may have given the launcher a few of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.ranks import belongs_to_rank, detect_ranks


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
        _num_cores_of_launcher(),
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
    num_launcher: int,
    current: int,
) -> list[int]:
    """The cores of one of `num_ranks` local ranks, which may use `allowed`, one core at least.

    Their launcher may use `num_launcher` cores.

    A rank with more than its share was not bound by its launcher and takes a part of its own. Of
    what is left, `threads` neighbours are taken where the scheduler put the process (`current`),
    in whole blocks, so that two runs on one machine rarely meet. More threads than cores: all.
    """
    cores = list(allowed)
    if num_ranks > 1 and len(cores) > math.ceil(num_launcher / num_ranks):
        first, last = (len(cores) * number // num_ranks for number in (rank, rank + 1))
        cores = cores[first:last] or [cores[rank % len(cores)]]
    if 0 < threads < len(cores):
        place = cores.index(current) if current in cores else 0
        first = min(place // threads * threads, len(cores) - threads)
        cores = cores[first : first + threads]
    return cores


def _num_cores_of_launcher() -> int:
    """Cores of the process that started this rank, behind whatever stands between them.

    Whoever has a rank's variables from its start stands between. Where nobody is known, those of
    the first process of the machine or container.
    """
    with suppress(OSError, ValueError):
        pid = os.getppid()
        while pid > 1 and belongs_to_rank(_environment(pid)):
            pid = _parent(pid)
        return len(os.sched_getaffinity(max(pid, 1)))
    return os.cpu_count() or 1


def _environment(pid: int) -> dict[str, str]:
    """The variables a process was started with; none where it is somebody else's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict.fromkeys((os.fsdecode(entry.partition(b"=")[0]) for entry in entries), "")


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int | str) -> list[str]:
    """The fields of a process after its name: its state, its parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _current_core() -> int:
    try:
        return int(_stat("self")[36])
    except (OSError, IndexError, ValueError):
        return -1
