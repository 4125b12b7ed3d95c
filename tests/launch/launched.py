"""A real `headrace launch` of a small program on 4 ranks, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from launch.launcher.logs import LogDirectory
from tests.launch.helpers import ROOT

LIMIT_SECONDS = 240

# Started by the tests in a process of its own, because it takes over signals.
LAUNCH = """
import sys
from pathlib import Path
from launch.launch_command import LaunchOptions, launch
from launch.launcher.job import Patience
launcher, log_dir, grace, hostfile, node, program = sys.argv[1:]
hosts = Path(hostfile) if hostfile else None
node_rank = int(node) if node else None
options = LaunchOptions(4, hosts, launcher, log_dir=Path(log_dir), node_rank=node_rank)
patience = Patience(end_seconds=20, kill_seconds=1, record_seconds=0.5)
command = [sys.executable, "-c", program]
seconds = float(grace)
raise SystemExit(launch(options, [], program=command, grace_seconds=seconds, patience=patience))
"""
WITHOUT_SCHEDULER = """
import sys
from launch.ranks import is_scheduler
if is_scheduler():
    sys.exit()
"""
PROGRAM = """
import os, signal, sys, threading
from launch.ranks import detect_ranks
rank = detect_ranks().rank
def say(text):
    print(f"rank {rank}: {text}", flush=True)
def go_on():
    threading.Event().wait(600)
"""


class Launched:
    """`headrace launch` of a program on 4 ranks, and what it leaves in `logs`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "logs"
        self.logs = LogDirectory(self.path)
        self.process: subprocess.Popen[str] | None = None

    def start(
        self,
        program: str,
        launcher: str = "mpirun",
        grace_seconds: float = 0.2,
        hostfile: Path | None = None,
        scheduler: bool = False,
        node_rank: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start it; `program` finds `rank`, `say` and `go_on` defined.

        `scheduler` says that it connects its ranks, so that msrun's scheduler runs it too.
        """
        arguments = [launcher, str(self.path), str(grace_seconds), str(hostfile or "")]
        arguments.append("" if node_rank is None else str(node_rank))
        code = ("" if scheduler else WITHOUT_SCHEDULER) + PROGRAM + textwrap.dedent(program)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *arguments, code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr; and no process of the launch is left."""
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired as error:
            logs = {path.name: path.read_text() for path in sorted(self.path.glob("*.log"))}
            raise AssertionError(f"it does not end: {error.stderr!r}, {logs}") from None
        assert not self.left()
        return self.process.returncode, out, err

    def left(self) -> list[psutil.Process]:
        """Processes of this launch that still run, half a minute after they should not."""
        alive = [
            process
            for process in psutil.process_iter()
            if process.pid != os.getpid() and str(self.path) in _arguments(process)
        ]
        return psutil.wait_procs(alive, timeout=30)[1]

    def wait_for(self, line: str) -> None:
        """Read stdout until `line`."""
        assert self.process is not None and self.process.stdout is not None
        for found in self.process.stdout:
            if found == f"{line}\n":
                return
        raise AssertionError(f"the launch ended without saying {line!r}")


def _arguments(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
