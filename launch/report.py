"""The files of a run: `steps.jsonl` and `evals.jsonl` while it runs, `report.json` at its end.

All are strict JSON: a number that is not finite is written as the text "nan", "inf" or "-inf".
A line is complete once written; `report.json` appears whole or not at all: (1) write a temporary
file beside it, (2) fsync it, (3) rename, (4) fsync the directory.

A run that goes on after step N keeps the lines up to step N and appends to them. Lines beyond it
are those of steps that will be made again, or the torn last one of a killed run. Where nothing is
kept though there are steps, the file is set aside instead: the commit may only have been looked for
in the wrong place. `report.json` stays that of the part before until this one ends.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import logging
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
EVALS_FILE = "evals.jsonl"
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
    "resumed_from",
    "commits",
    "redone_steps",
    "redone_share",
    "codec",
    "tokens_per_s",
    "stall_share",
    "eval",
    "weights_digest",
    "bigram_loss",
    "exit_reason",
)


_log = logging.getLogger(__name__)


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
        self._evals: dict[int, dict[str, Any]] = {}

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Create `steps.jsonl`; raises ConfigError when another run took the directory.

        A run that goes on after `first_step` continues it.
        """
        path = self._dir / STEPS_FILE
        try:
            if self._resume:
                first_step = int(info.get("first_step", 0))
                evals = self._dir / EVALS_FILE
                keep_lines(path, first_step)
                keep_lines(evals, first_step)
                lines = evals.read_text(encoding="utf-8").splitlines() if evals.exists() else []
                self._evals = {record["step"]: record for record in map(json.loads, lines)}
            self._steps = path.open("a" if self._resume else "x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"--run-dir {self._dir} was taken by another run.") from None
        except OSError as error:
            raise _failure(error, path) from error

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
        """Append one line to `evals.jsonl`, unless the part before has evaluated this step too."""
        if record["step"] in self._evals:
            return
        self._evals[record["step"]] = dict(record)
        path = self._dir / EVALS_FILE
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json(record) + "\n")
        except OSError as error:
            raise _failure(error, path) from error

    def on_message(self, text: str) -> None:
        """Nothing: messages are for the terminal."""

    def on_end(self, report: Mapping[str, Any]) -> None:
        """Write `report.json`; raises StorageError when the disk refuses."""
        full = self._defaults() | dict(report)
        evals = self._evals | {record["step"]: record for record in report.get("eval", ())}
        full["eval"] = [evals[step] for step in sorted(evals)]
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


def keep_lines(path: Path, last_step: int) -> None:
    """Cut the file at the first line that is torn or of a later step.

    Where nothing is kept of a file that had lines, because the run starts at step 0 after all, it
    is renamed to the first free `NAME.before-N`. Raises OSError.
    """
    if not path.exists():
        return
    kept_bytes = 0
    with path.open("rb") as file:
        for line in file:
            if _step_of(line) > last_step:
                break
            kept_bytes += len(line)
    if kept_bytes == path.stat().st_size:
        return
    if last_step:
        os.truncate(path, kept_bytes)
        return
    names = (path.with_name(f"{path.name}.before-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    _log.warning("%s is of a run that is not continued: renamed to %s", path, aside.name)


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for the torn last line of a killed run."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
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
