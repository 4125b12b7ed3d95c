"""The files of a run: `steps.jsonl` while it runs and `report.json` at its end.

Both are strict JSON: a number that is not finite is written as the text "nan", "inf" or "-inf".
A line of `steps.jsonl` is complete once written; `report.json` appears whole or not at all:
(1) write a temporary file beside it, (2) fsync it, (3) rename, (4) fsync the directory.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from launch.config import RunConfig
from launch.environment import versions
from ops.errors import ConfigError, StorageError

STEPS_FILE = "steps.jsonl"
REPORT_FILE = "report.json"
STEP_KEYS = (
    "step",
    "loss",
    "loss_hex",
    "grad_norm",
    "clip_factor",
    "lr",
    "tokens",
    "seconds",
    "stall_seconds",
    "experts_idle",
    "lanes",
    "nvme_by_cause",
)
LANES = ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes")
REPORT_KEYS = (
    "config",
    "versions",
    "arithmetic",
    "tiers",
    "process",
    "parameters",
    "state_bytes",
    "steps",
    "tokens_per_s",
    "stall_share",
    "eval",
    "weights_digest",
    "bigram_loss",
    "exit_reason",
)


def prepare_run_dir(run_dir: Path | None, name: str, resume: bool = False) -> Path:
    """Create the run's directory (default `runs/NAME-TIME`) and return it.

    Raises ConfigError when it cannot be written, or already holds a run that is not resumed.
    """
    path = run_dir if run_dir is not None else _fresh_path(name)
    if (path / STEPS_FILE).exists() and not resume:
        raise ConfigError(
            f"--run-dir {path} already holds a run ({STEPS_FILE}): choose another directory, or "
            "continue it with --resume latest."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--run-dir {path} cannot be written: {reason}.") from None
    return path


def _fresh_path(name: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path("runs") / f"{name}-{stamp}"
    number = 2
    while path.exists():
        path = Path("runs") / f"{name}-{stamp}-{number}"
        number += 1
    return path


class ReportWriter:
    """Observer that writes the run's two files; completes the report with config and versions."""

    def __init__(self, run_dir: Path, config: RunConfig, resume: bool = False) -> None:
        self._dir = run_dir
        self._config = config
        self._resume = resume
        self._steps: TextIO | None = None

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Create `steps.jsonl`; raises ConfigError when another run took the directory.

        A run that goes on after `first_step` keeps the records up to that step and appends to them.
        """
        if self._resume:
            self._continue(int(info.get("first_step", 0)))
            return
        try:
            self._steps = (self._dir / STEPS_FILE).open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"--run-dir {self._dir} was taken by another run.") from None
        except OSError as error:
            raise _failure(error, self._dir / STEPS_FILE) from error

    def _continue(self, first_step: int) -> None:
        """Drop records of steps that will be made again, then open the file at its end."""
        path = self._dir / STEPS_FILE
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = [line for line in lines if _step_of(line) <= first_step]
            write_atomically(path, "".join(line + "\n" for line in kept))
            self._steps = path.open("a", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--run-dir {self._dir}: {STEPS_FILE} cannot be continued: {error}."
            ) from error

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Append one line and flush it; raises StorageError when the disk refuses."""
        missing = [key for key in STEP_KEYS if key not in record]
        assert not missing, f"step record without {missing}"
        assert self._steps is not None, "on_step before on_start"
        ordered = {key: record[key] for key in STEP_KEYS} | dict(record)
        try:
            self._steps.write(to_json(ordered) + "\n")
            self._steps.flush()
        except OSError as error:
            raise _failure(error, self._dir / STEPS_FILE) from error

    def on_eval(self, record: Mapping[str, Any]) -> None:
        """Nothing: evaluations are part of the report."""

    def on_message(self, text: str) -> None:
        """Nothing: messages are for the terminal."""

    def on_end(self, report: Mapping[str, Any]) -> None:
        """Write `report.json`; raises StorageError when the disk refuses."""
        full = self._defaults() | dict(report)
        missing = [key for key in REPORT_KEYS if key not in full]
        assert not missing, f"report without {missing}"
        ordered = {key: full[key] for key in REPORT_KEYS} | full
        write_atomically(self._dir / REPORT_FILE, to_json(ordered, indent=2) + "\n")

    def close(self) -> None:
        """Close `steps.jsonl`."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _defaults(self) -> dict[str, Any]:
        train, runtime = self._config.train, self._config.runtime
        arithmetic = {
            "weight_dtype": train.weight_dtype,
            "compute_dtype": train.compute_dtype,
            "grad_dtype": train.grad_dtype,
            "onednn_fpmath": runtime.onednn_fpmath,
            "threads": runtime.num_threads,
        }
        return {
            "config": self._config.to_dict(),
            "versions": versions(),
            "arithmetic": arithmetic,
            "bigram_loss": None,
        }


def _step_of(line: str) -> float:
    """The step of a line of `steps.jsonl`; infinite for the torn last line of a killed run."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON of plain values, dataclasses, paths and NumPy scalars."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, durable on return; raises StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _failure(error, path) from error


def _failure(error: OSError, path: Path) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"the run's file cannot be written: {reason}", path=str(path))
