"""Runs one rank: `python -m launch.launcher.rank_runner LOG_DIR RANKS SECONDS PROGRAM ...`.

RANKS are those that end together, as `FIRST-LAST`: all, or under msrun those of this machine.

mpirun and msrun differ in where output goes, what they do with signals and how they tell a failure,
so they start this small process for every rank instead, and it starts the program:

1. The program's stdout and stderr go to the rank's log.
2. SIGUSR1 asks for a stop and becomes SIGINT for the program, SIGUSR2 becomes SIGTERM: mpirun
   passes these two on to every machine, whereas it answers SIGINT and SIGTERM by killing the ranks.
3. How the program ended is recorded. A failure is passed on to the launcher, which kills the other
   ranks, only SECONDS later: ranks that fail or stop in agreement may end in peace. Who stops
   though nobody asked the launch to, and is not followed by the others, has failed as well.
4. The program has a session of its own, so that a signal to a process group reaches it once, and is
   killed by the kernel when this process dies. This process, too, dies with its launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from launch.launcher.logs import LogDirectory, RankExit
from launch.ranks import detect_ranks, is_scheduler
from ops.errors import Stopped

STOPPED_PATIENCE_SECONDS = 60.0  # all were asked to stop: whoever still saves is waited for
# Times SECONDS, where the launch was not asked. If one rank was and all agreed, they have saved
# together and only give back their memory apart.
UNASKED_PATIENCE = 3.0
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_FORWARDED = {
    signal.SIGUSR1: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
_LIBC = ctypes.CDLL(None)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


class _Runner:
    """The program of one rank, and the signals on their way to it."""

    def __init__(self) -> None:
        self.told = False  # the launcher ends this rank
        self.asked = False  # the launch asks all ranks to stop
        self._program: subprocess.Popen[bytes] | None = None
        self._early: list[signal.Signals] = []
        for number in _FORWARDED:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received not in (signal.SIGUSR1, signal.SIGUSR2):
            self.told = True
        else:
            self.asked = True
        if self._program is None:
            self._early.append(_FORWARDED[received])
        elif self._program.poll() is None:
            self._program.send_signal(_FORWARDED[received])

    def run(self, program: Sequence[str], log: Path) -> int:
        """Start the program and wait for its end; returns its status as a shell counts it."""
        with log.open("wb") as file:
            self._program = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        for early in self._early:
            self._program.send_signal(early)
        status = self._program.wait()
        return status if status >= 0 else 128 - status


def main(arguments: Sequence[str]) -> int:
    """Run the rank and return its status; `arguments` are those of the module's first line."""
    log_dir, ranks, patience, *program = arguments
    die_with_parent()
    if is_scheduler():
        os.execvp(program[0], program)
    first, last = ranks.split("-")
    logs = LogDirectory(Path(log_dir), range(int(first), int(last) + 1))
    rank = detect_ranks().rank
    runner = _Runner()
    status = runner.run(program, logs.rank_log(rank))
    record = RankExit(rank, status, time.time_ns(), runner.told)
    logs.write_exit(record)
    if status != 0 and not _others_end(runner, logs, status, float(patience)):
        stopped_alone = status == Stopped.exit_code and not (runner.told or runner.asked)
        if stopped_alone:
            logs.write_exit(replace(record, alone=True))
    return status


def _others_end(runner: _Runner, logs: LogDirectory, status: int, seconds: float) -> bool:
    """Wait for the other ranks, as long as the end of this one allows; whether all have ended.

    Returns at once when the launcher tells this rank to end.
    """
    start = time.monotonic()
    while not runner.told:
        if logs.num_exits() >= len(logs.ranks or ()):
            return True
        limit = seconds
        if status == Stopped.exit_code:
            limit = STOPPED_PATIENCE_SECONDS if runner.asked else UNASKED_PATIENCE * seconds
        if time.monotonic() - start >= limit:
            return False
        time.sleep(_POLL_SECONDS)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
