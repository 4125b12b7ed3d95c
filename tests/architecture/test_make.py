"""`make setup` picks a suitable interpreter, or says what is missing, and skips what is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.sources import ROOT

INTERPRETERS = ("python", "python3", "python3.10", "python3.11", "python3.12")
UNSUITABLE = "#!/bin/sh\nexit 1\n"
# Suitable; makes an environment whose interpreter notes how it was called.
SUITABLE = """#!/bin/sh
echo "$0 $*" >> "{log}"
if [ "$1 $2 $3" = "-m venv --clear" ]; then
    mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
fi
"""


def make_setup(folder: Path, **scripts: str) -> subprocess.CompletedProcess[str]:
    """Run `make setup` where every interpreter is unsuitable but those in `scripts`."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in INTERPRETERS:
        script = tools / name
        script.write_text(scripts.get(name.replace(".", "_"), UNSUITABLE))
        script.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["make", "setup", f"VENV={folder / 'venv'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_suitable_python_is_said_in_one_line(tmp_path: Path) -> None:
    result = make_setup(tmp_path)
    assert result.returncode == 2
    assert "Headrace needs Python 3.10, 3.11 or 3.12, and none was found" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_another_interpreter_is_found_where_python3_is_too_new(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = make_setup(tmp_path, python3_11=SUITABLE.format(log=log))
    assert result.returncode == 0, result.stderr
    calls = log.read_text().splitlines()
    assert any("tools/python3.11 -m venv" in line for line in calls)
    assert any("venv/bin/python -m pip install" in line and ".[dev,mpi]" in line for line in calls)


def test_a_current_environment_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_setup(tmp_path, python3=SUITABLE.format(log=log))
    log.unlink()
    result = make_setup(tmp_path, python3=SUITABLE.format(log=log))
    assert result.returncode == 0
    assert not log.exists()


def test_without_fio_the_store_benchmark_says_so_in_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_nvme", "--require-fio"],
        cwd=ROOT,
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("fio is not installed") and result.stderr.count("\n") == 1
