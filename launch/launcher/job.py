"""A launch while it runs: one rank on the terminal, signals on to all, failures explained.

The launcher (mpirun or msrun) has a session of its own, so that Ctrl-C reaches only this process.

- The first SIGINT, SIGTERM or SIGHUP asks every rank to stop after its step, the second to stop at
  once; ranks get the signal a single run would have got. After the second they have
  `end_seconds`; then they are killed.
- When a rank fails, its last lines are shown at once. Its runner gives the others
  `Launch.grace_seconds` to end by themselves, then the launcher kills them. Should it not,
  `end_seconds` after the failure it is terminated, and `kill_seconds` later killed, and the kernel
  kills every process of this machine that it had started.
- The exit status is that of the rank that failed first.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO, TextIO

import psutil

from launch.launcher.logs import LogDirectory, RankExit, last_lines
from launch.launcher.rank_runner import die_with_parent
from ops.errors import HeadraceError, Stopped

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RUNNER = "launch.launcher.rank_runner"
_OTHERS_SHOWN = 8
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Patience:
    """Seconds that a job waits for what others have to do."""

    end_seconds: float = 20.0  # from the first failure, or the second signal, to SIGTERM
    kill_seconds: float = 5.0  # from there to SIGKILL
    record_seconds: float = 3.0  # for the record of a failed rank on a slow file system
    poll_seconds: float = 0.1


DEFAULT_PATIENCE = Patience()


class Job:
    """One start of all ranks. `run` may be called once, from the main thread.

    `launcher` is `mpirun` or `msrun`, and writes to `log`. The first of the ranks in `logs` is
    shown on `out`, what went wrong on `err`.
    """

    def __init__(
        self,
        launcher: str,
        command: Sequence[str],
        logs: LogDirectory,
        log: BinaryIO,
        out: BinaryIO,
        err: TextIO,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._launcher = launcher
        self._command = list(command)
        self._logs = logs
        self._log = log
        self._out = out
        self._err = err
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[signal.Signals] = []
        self._passed_on = 0
        self._first: RankExit | None = None
        self._position = 0
        self._deadline: float | None = None
        self._terminated = False

    def run(self) -> int:
        """Start the command, watch it to its end and return the exit status.

        Blocks as long as the ranks run. Raises HeadraceError when the command does not start.
        """
        previous = {number: signal.signal(number, self._receive) for number in _STOPPING}
        try:
            self._process = self._start()
            while self._process.poll() is None:
                self._look()
                time.sleep(self._patience.poll_seconds)
            return self._conclude(self._process.returncode)
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_gently,
            )
        except OSError as error:
            raise HeadraceError(f"{self._command[0]} does not start: {error}.") from None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))

    def _look(self) -> None:
        self._stream()
        for received in self._signals[self._passed_on :]:
            self._pass_on(received)
        if self._first is None:
            self._first = next(filter(_is_failure, self._logs.exits()), None)
            if self._first is not None:
                self._show_failure(self._first)
                self._deadline = time.monotonic() + self._patience.end_seconds
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._end()

    def _stream(self) -> None:
        try:
            with self._logs.rank_log(self._logs.first_rank).open("rb") as file:
                file.seek(self._position)
                while chunk := file.read(_CHUNK_BYTES):
                    self._position += len(chunk)
                    self._out.write(chunk)
        except FileNotFoundError:
            return  # the rank has not started, or writes where this machine cannot see it
        self._out.flush()

    def _pass_on(self, received: signal.Signals) -> None:
        """SIGUSR1 and SIGUSR2 to every rank's runner, where they become SIGINT and SIGTERM."""
        assert self._process is not None
        self._passed_on += 1
        if self._passed_on == 1:
            self._say("stopping every rank after its step; a second signal stops them at once")
        else:
            self._deadline = time.monotonic() + self._patience.end_seconds
        number = signal.SIGUSR1 if received == signal.SIGINT else signal.SIGUSR2
        if self._launcher == "mpirun":
            self._process.send_signal(number)  # it passes these on to all machines
            return
        for runner in self._local_runners():
            with contextlib.suppress(psutil.Error):
                runner.send_signal(number)

    def _local_runners(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if _is_runner(child)]

    def _end(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            return
        if self._terminated:
            self._say("the ranks do not end; killing them")
            self._process.kill()
        else:
            self._process.terminate()
        self._terminated = True
        self._deadline = time.monotonic() + self._patience.kill_seconds

    def _conclude(self, status: int) -> int:
        status = status if status >= 0 else 128 - status
        deadline = time.monotonic() + (self._patience.record_seconds if status else 0)
        while True:
            self._look()
            if time.monotonic() >= deadline or any(exit.failed for exit in self._logs.exits()):
                break
            time.sleep(self._patience.poll_seconds)
        if self._first is not None:
            self._show_others(self._first)
            return self._first.status
        if self._signals or any(exit.status == Stopped.exit_code for exit in self._logs.exits()):
            return Stopped.exit_code
        if status:
            self._say(f"{self._launcher} ended with exit status {status}; its last lines:")
            self._quote(last_lines(self._logs.launcher_log))
        return status

    def _show_failure(self, first: RankExit) -> None:
        path = self._logs.rank_log(first.rank)
        stopped = [exit.rank for exit in self._logs.exits() if self._left_before(exit, first)]
        if stopped:
            ranks = f"rank {stopped[0]}" if len(stopped) == 1 else f"ranks {_listed(stopped)}"
            self._say(f"{ranks} had stopped before, though this launch was not asked to stop")
        self._say(f"rank {first.rank} {_ended(first)}; the end of {path}:")
        self._quote(last_lines(path))

    def _left_before(self, exit: RankExit, first: RankExit) -> bool:
        """Whether a rank stopped unasked before `first` failed, which it may have caused."""
        unasked = exit.status == Stopped.exit_code and not (exit.told or self._signals)
        return unasked and exit.rank != first.rank and exit.time_ns < first.time_ns

    def _show_others(self, first: RankExit) -> None:
        """The last line of every other rank that failed of itself, unless it is the same again."""
        others = [exit for exit in self._logs.exits() if _is_failure(exit) and exit != first]
        known = self._last_words(first)
        different = [other for other in others if self._last_words(other) != known]
        for other in different[:_OTHERS_SHOWN]:
            said = self._last_words(other)
            self._err.write(f"[rank {other.rank}] {_ended(other)}: {said}\n")
        if len(others) > len(different):
            self._say(f"{len(others) - len(different)} other ranks failed with the same words")
        if len(different) > _OTHERS_SHOWN:
            self._say(f"{len(different) - _OTHERS_SHOWN} more failed; see {self._logs.path}")
        self._err.flush()

    def _last_words(self, exit: RankExit) -> str:
        lines = last_lines(self._logs.rank_log(exit.rank), 1) or [""]
        return lines[0].removeprefix(f"[rank {exit.rank}] ")

    def _quote(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._err.write(f"  | {line}\n")
        self._err.flush()

    def _say(self, text: str) -> None:
        self._err.write(f"headrace launch: {text}\n")
        self._err.flush()


def _die_gently() -> None:
    die_with_parent(signal.SIGTERM)  # mpirun then ends the ranks of all machines


def _is_failure(exit: RankExit) -> bool:
    """Not so a rank that stopped as it was asked, or as all did."""
    return exit.failed and (exit.alone or exit.status != Stopped.exit_code)


def _is_runner(process: psutil.Process) -> bool:
    try:
        return _RUNNER in process.cmdline()
    except psutil.Error:
        return False


def _ended(exit: RankExit) -> str:
    status = exit.status
    if exit.alone:
        return (
            f"stopped with exit status {status}, but this launch was not asked to stop and other "
            "ranks did not"
        )
    if status > 128:
        try:
            return f"was ended by {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"failed with exit status {status}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_OTHERS_SHOWN])
    return f"{shown} and {len(ranks) - _OTHERS_SHOWN} more" if ranks[_OTHERS_SHOWN:] else shown
