"""The directory of a launch: a log for every rank, and a record of how each rank ended.

    rank-00007.log      what rank 7 wrote to stdout and stderr
    launcher.log        what mpirun or msrun wrote itself; locked as long as the launch runs
    launcher-00001.log  the same of machine 1, where each machine has a launch of its own
    msrun/              msrun only: its scheduler's log, and its own of each rank (empty)
    hostfile            mpirun only: the machines it was given
    exits/00007.json    how rank 7 ended; written whole, or not there

Ranks of several machines meet here, so the directory has to be one that all of them see. Two
launches must not: a default directory is made new, and the launcher's log is locked. Nothing here
imports more than the standard library and the errors: every rank's runner loads it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from ops.errors import ConfigError

TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_OBEYED = (130, 128 + signal.SIGTERM, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: `status` as a shell counts it (128 + the number of a signal).

    `told` says that the launcher told the rank to end, because of something else. `alone` says
    that it stopped (130) though the launch was not asked to, and that the others did not follow.
    """

    rank: int
    status: int
    time_ns: int
    told: bool
    alone: bool = False

    @property
    def failed(self) -> bool:
        """Whether this rank ended badly of itself: not by doing as it was told."""
        return self.status != 0 and not (self.told and self.status in _OBEYED)


@dataclass(frozen=True)
class LogDirectory:
    """Names and records below `path`.

    `ranks` are those of this launch; nothing of another rank is counted or touched. None means
    whatever ranks are there. `node` is the number of this machine where each of several machines
    has a launch of its own and all share `path`.
    """

    path: Path
    ranks: range | None = None
    node: int | None = None

    @property
    def launcher_log(self) -> Path:
        """What mpirun or msrun wrote itself."""
        return self.path / (
            "launcher.log" if self.node is None else f"launcher-{self.node:05d}.log"
        )

    @property
    def hostfile(self) -> Path:
        """The machines that mpirun was given."""
        return self.path / "hostfile"

    @property
    def first_rank(self) -> int:
        """The rank that speaks for this launch."""
        return self.ranks[0] if self.ranks else 0

    def rank_log(self, rank: int) -> Path:
        """What a rank wrote."""
        return self.path / f"rank-{rank:05d}.log"

    @contextlib.contextmanager
    def claim(self) -> Iterator[BinaryIO]:
        """Create the directory, forget the ranks of an earlier launch; yields the launcher's log.

        The log is locked as long as it is open here or in a process that writes to it. Raises
        ConfigError when another launch has it, and OSError.
        """
        (self.path / "exits").mkdir(parents=True, exist_ok=True)
        with self.launcher_log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--log-dir {self.path} is in use by another launch that still runs: allowed "
                    "is another directory, or this one when that launch has ended."
                ) from None
            except OSError:
                pass  # a file system without locks
            log.truncate(0)
            for old in self._of_ranks():
                old.unlink(missing_ok=True)
            yield log

    def _of_ranks(self) -> Iterator[Path]:
        """Logs and records of the ranks; where machines share the directory, of this one's."""
        exits = self.path / "exits"
        if self.node is None or self.ranks is None:
            yield from (*exits.iterdir(), *self.path.glob("rank-*.log"))
            return
        for rank in self.ranks:
            yield from (self.rank_log(rank), *exits.glob(f"{rank:05d}.*"))

    def write_exit(self, record: RankExit) -> None:
        """Record how a rank ended. May raise OSError."""
        path = self.path / "exits" / f"{record.rank:05d}.json"
        fields = asdict(record)
        del fields["rank"]
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(fields))
        os.replace(temporary, path)

    def num_exits(self) -> int:
        """How many of the ranks have ended, as far as this machine sees."""
        with contextlib.suppress(OSError):
            return len(self._records())
        return 0

    def exits(self) -> list[RankExit]:
        """The ranks that have ended, the first to end first."""
        found = []
        for path in self._records():
            with contextlib.suppress(OSError, ValueError):
                found.append(RankExit(rank=int(path.stem), **json.loads(path.read_text())))
        return sorted(found, key=lambda record: (record.time_ns, record.rank))

    def _records(self) -> list[Path]:
        paths = [path for path in (self.path / "exits").glob("*.json") if path.stem.isdecimal()]
        return [path for path in paths if self.ranks is None or int(path.stem) in self.ranks]


def last_lines(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that are not empty; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return list(deque((line for line in text.splitlines() if line.strip()), maxlen=num_lines))


def default_directory(run_dir: Path | None, *, create: bool) -> Path:
    """Where logs lie unless --log-dir says otherwise: a new directory for every launch.

    Below the run's directory where the command names one, else below `launch-logs`. With `create`
    it is made, so that no launch of the same second takes it too. May raise OSError.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("launch-logs") if run_dir is None else run_dir / "logs"
    paths = (base / (stamp if n == 1 else f"{stamp}-{n}") for n in itertools.count(1))
    if not create:
        return next(path for path in paths if not path.exists())
    for path in paths:
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("numbers do not end")
