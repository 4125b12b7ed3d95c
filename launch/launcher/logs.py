"""The directory of a launch: a log for every rank, and a record of how each rank ended.

    rank-00007.log      what rank 7 wrote to stdout and stderr
    launcher.log        what mpirun or msrun wrote itself
    msrun/              msrun only: its scheduler's log, and its own of each rank (empty)
    exits/00007.json    how rank 7 ended; written whole, or not there

Ranks of several machines meet here, so the directory has to be one that all of them see. Nothing
here imports more than the standard library: every rank's runner loads it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_OBEYED = (130, 128 + signal.SIGTERM, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: `status` as a shell counts it (128 + the number of a signal).

    `told` says that the launcher told the rank to end, because of something else.
    """

    rank: int
    status: int
    time_ns: int
    told: bool

    @property
    def failed(self) -> bool:
        """Whether this rank ended badly of itself: not by doing as it was told."""
        return self.status != 0 and not (self.told and self.status in _OBEYED)


@dataclass(frozen=True)
class LogDirectory:
    """Names and records below `path`."""

    path: Path

    @property
    def launcher_log(self) -> Path:
        """What mpirun or msrun wrote itself."""
        return self.path / "launcher.log"

    def rank_log(self, rank: int) -> Path:
        """What a rank wrote."""
        return self.path / f"rank-{rank:05d}.log"

    def prepare(self) -> None:
        """Create the directory and forget the ranks of an earlier launch. May raise OSError."""
        exits = self.path / "exits"
        exits.mkdir(parents=True, exist_ok=True)
        for old in (*exits.iterdir(), *self.path.glob("rank-*.log")):
            old.unlink()

    def write_exit(self, record: RankExit) -> None:
        """Record how a rank ended. May raise OSError."""
        path = self.path / "exits" / f"{record.rank:05d}.json"
        fields = {"status": record.status, "time_ns": record.time_ns, "told": record.told}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(fields))
        os.replace(temporary, path)

    def num_exits(self) -> int:
        """How many ranks have ended, as far as this machine sees."""
        with contextlib.suppress(OSError):
            return sum(name.endswith(".json") for name in os.listdir(self.path / "exits"))
        return 0

    def exits(self) -> list[RankExit]:
        """The ranks that have ended, the first to end first."""
        found = []
        for path in (self.path / "exits").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(RankExit(rank=int(path.stem), **json.loads(path.read_text())))
        return sorted(found, key=lambda record: (record.time_ns, record.rank))


def last_lines(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that are not empty; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return list(deque((line for line in text.splitlines() if line.strip()), maxlen=num_lines))


def default_directory(run_dir: Path | None) -> Path:
    """Where logs lie unless --log-dir says otherwise: a new directory for every launch.

    Below the run's directory where the command names one, else below `launch-logs`.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("launch-logs") if run_dir is None else run_dir / "logs"
    path = base / stamp
    number = 2
    while path.exists():
        path = base / f"{stamp}-{number}"
        number += 1
    return path
