"""Starts a module on several ranks under `mpirun`, for tests; no process is left behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MPIRUN = Path(sys.executable).parent / "mpirun"


def mpirun_command(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs `python -m module arguments` on so many ranks."""
    return [*_mpirun(), "-n", str(ranks), sys.executable, "-m", module, *arguments]


def _mpirun() -> list[str]:
    command = [str(MPIRUN), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return command


def run_commands(*ranks: Sequence[str], seconds_max: float) -> subprocess.CompletedProcess[str]:
    """Run a command of its own on every rank, as where each machine has one typed."""
    parts = [part for rank in ranks for part in (":", "-n", "1", *rank)]
    return _run([*_mpirun(), *parts[1:]], seconds_max)


def run_ranks(
    ranks: int, module: str, *arguments: str, seconds_max: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` on so many ranks; the test fails after `seconds_max`."""
    return _run(mpirun_command(ranks, module, *arguments), seconds_max)


def _run(command: list[str], seconds_max: float) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds_max)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(
            f"{shlex.join(command)} did not end within {seconds_max} s:\n{stdout}\n{stderr}"
        )
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
