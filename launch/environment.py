"""The process's environment: checked and set before MindSpore is imported, because it reads
its settings only once, when its libraries load.

The only file, with `launch/cli.py`, that touches environment variables. It imports neither NumPy
nor MindSpore, so that a wrong version of either is met by a sentence and not by a crash.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from launch.config import RuntimeConfig
from launch.cores import confine
from ops.errors import ConfigError

PYTHON_VERSIONS = ((3, 10), (3, 11), (3, 12))
_REPORTED = ("headrace", "mindspore", "numpy", "numba", "ml-dtypes", "xxhash", "tokenizers")


def prepare(runtime: RuntimeConfig) -> None:
    """Check interpreter and packages, then set the process's cores and the variables MindSpore,
    OpenMP and Numba read.

    Call it before anything imports MindSpore or NumPy. Raises ConfigError when a package is
    missing or of the wrong version, or when MindSpore is already loaded with other settings.
    """
    check_python()
    check_numpy()
    check_mindspore()
    check_fpmath(runtime)
    confine(runtime.threads)
    wanted = variables(runtime)
    if "mindspore" in sys.modules:
        key = "ONEDNN_DEFAULT_FPMATH_MODE"
        if os.environ.get(key, "STRICT") != wanted[key]:
            raise ConfigError(
                f"runtime.onednn_fpmath = {runtime.onednn_fpmath} cannot take effect: MindSpore "
                "is already loaded in this process with another mode; start a new process."
            )
    os.environ.update(wanted)
    # Warnings of the framework's start-up say nothing to a user; GLOG_v=1 brings them back.
    os.environ.setdefault("GLOG_v", "3")


def variables(runtime: RuntimeConfig) -> dict[str, str]:
    """The environment variables that carry `runtime` to the libraries."""
    threads = str(runtime.num_threads)
    return {
        "ONEDNN_DEFAULT_FPMATH_MODE": runtime.onednn_fpmath.upper(),
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
    }


def check_python() -> None:
    """Raise ConfigError unless MindSpore's wheels exist for this interpreter and system."""
    if sys.version_info[:2] not in PYTHON_VERSIONS or sys.platform != "linux":
        found = f"Python {platform.python_version()} on {platform.system()}"
        raise ConfigError(
            f"Headrace needs Python 3.10, 3.11 or 3.12 on Linux, and this is {found}."
        )


def check_numpy() -> None:
    """Raise ConfigError unless NumPy 1.x is installed."""
    version = _version("numpy")
    if version is None:
        raise ConfigError("NumPy is not installed: run `make setup`.")
    if int(version.split(".")[0]) >= 2:
        raise ConfigError(
            f"NumPy {version} is installed, but MindSpore 2.10 fails on NumPy 2: "
            'run `pip install "numpy<2"` or `make setup`.'
        )


def check_mindspore() -> None:
    """Raise ConfigError unless MindSpore is installed, as a wheel for this machine's processor."""
    try:
        wheel = importlib.metadata.distribution("mindspore").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "MindSpore is not installed: run `make setup` (headrace plan works without it)."
        ) from None
    tags = [line.partition(":")[2].strip() for line in wheel.splitlines() if line[:4] == "Tag:"]
    machine = platform.machine()
    if tags and not any(tag.endswith((machine, "-any")) for tag in tags):
        raise ConfigError(
            f"the installed MindSpore is built for {tags[0]}, but this machine is {machine}: "
            "remove the environment and run `make setup`."
        )


def check_fpmath(runtime: RuntimeConfig, cpuinfo: str | None = None) -> None:
    """Raise ConfigError when bf16 products are asked of an x86-64 processor without AMX.

    oneDNN rounds fp32 matrix products to bf16 only in AMX; elsewhere the key would do nothing.
    """
    if runtime.onednn_fpmath != "bf16" or platform.machine() != "x86_64":
        return
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    if "amx_bf16" not in text:
        raise ConfigError(
            "runtime.onednn_fpmath = bf16 has no effect on this processor, which lacks amx_bf16: "
            "allowed here is strict."
        )


def versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that determine a run's bits."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _REPORTED:
        version = _version(name)
        if version is not None:
            found[name] = version
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
