"""Finds mpirun and msrun, and decides between them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ops.errors import ConfigError

LAUNCHERS = ("auto", "mpirun", "msrun")
_OPEN_MPI = re.compile(r"\(Open MPI\) (\d+)\.(\d+)")
_DEVICES = Path("/dev")


def choose_launcher(wanted: str, devices: Path = _DEVICES) -> str:
    """`mpirun` or `msrun`; `auto` takes msrun where this machine has Ascend devices.

    Raises ConfigError for any other word.
    """
    if wanted not in LAUNCHERS:
        raise ConfigError(f"--launcher {wanted}: allowed is {', '.join(LAUNCHERS)}.")
    if wanted != "auto":
        return wanted
    return "msrun" if has_ascend(devices) else "mpirun"


def has_ascend(devices: Path = _DEVICES) -> bool:
    """Whether the Ascend driver's device files are there.

    /dev/davinci_manager and a /dev/davinciN for each card are what Ascend's documents pass into
    containers, so they show what this process can use, with or without its tools installed.
    """
    return (devices / "davinci_manager").exists() and any(devices.glob("davinci[0-9]*"))


def find_mpirun() -> str:
    """The path of Open MPI's mpirun: beside this interpreter, else on PATH.

    Raises ConfigError when there is none, when it does not run, or when it is not Open MPI 4 or 5.
    """
    path = _find("mpirun")
    if path is None:
        raise ConfigError(
            f"mpirun is neither beside {sys.executable} nor on PATH: install it into this "
            'environment with `pip install "headrace[mpi]"`, or Open MPI 4 or 5 on the machine.'
        )
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} does not run: {error}.") from None
    version = _OPEN_MPI.search(answer)
    if version is None or int(version[1]) not in (4, 5):
        first = answer.strip().splitlines()[:1] or ["nothing"]
        raise ConfigError(f"{path} says {first[0]!r}: allowed is Open MPI 4 or 5.")
    return path


def find_msrun() -> str:
    """The path of MindSpore's msrun: beside this interpreter, else on PATH.

    Raises ConfigError when there is none. msrun starts `python` from PATH; see `command.py`.
    """
    path = _find("msrun")
    if path is None:
        raise ConfigError(
            f"msrun is neither beside {sys.executable} nor on PATH: it comes with MindSpore; "
            "run `make setup`."
        )
    return path


def _find(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    if beside.exists() and os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which(name)
