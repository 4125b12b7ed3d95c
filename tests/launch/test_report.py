"""`steps.jsonl` and `report.json`: whole, strict, and never over another run's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from launch import report
from launch.config import load_config
from launch.report import (
    REPORT_KEYS,
    STEP_KEYS,
    ReportWriter,
    prepare_run_dir,
    to_json,
    write_atomically,
)
from ops.errors import ConfigError, StorageError
from tests.launch.helpers import run_report, step_record


@pytest.fixture
def writer(tmp_path: Path) -> ReportWriter:
    """A writer of the default configuration that has started."""
    made = ReportWriter(tmp_path, load_config("tiny-moe"))
    made.on_start({})
    return made


def test_each_step_is_one_line_on_disk_at_once(writer: ReportWriter, tmp_path: Path) -> None:
    writer.on_step(step_record(1))
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]
    writer.on_step(step_record(2, extra=7))
    writer.close()
    last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[1])
    assert tuple(last) == (*STEP_KEYS, "extra")
    assert float.fromhex(last["loss_hex"]) == last["loss"]


def test_the_report_is_completed_with_config_and_versions(
    writer: ReportWriter, tmp_path: Path
) -> None:
    writer.on_end(run_report())
    found = json.loads((tmp_path / "report.json").read_text())
    assert tuple(found) == REPORT_KEYS
    assert found["config"] == load_config("tiny-moe").to_dict()
    assert found["versions"]["numpy"]
    assert found["arithmetic"]["weight_dtype"] == "bfloat16"
    assert found["arithmetic"]["threads"] >= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "steps.jsonl"]


def test_what_the_trainer_reports_wins(writer: ReportWriter, tmp_path: Path) -> None:
    writer.on_end(run_report(arithmetic={"threads": 5}))
    assert json.loads((tmp_path / "report.json").read_text())["arithmetic"] == {"threads": 5}


@pytest.mark.parametrize("key", ["weights_digest", "tiers", "exit_reason"])
def test_an_incomplete_report_is_our_own_fault(writer: ReportWriter, key: str) -> None:
    incomplete = run_report()
    del incomplete[key]
    with pytest.raises(AssertionError, match=key):
        writer.on_end(incomplete)


def test_an_incomplete_step_is_our_own_fault(writer: ReportWriter) -> None:
    with pytest.raises(AssertionError, match="loss"):
        writer.on_step({"step": 1})


def test_json_is_strict() -> None:
    values = {
        "nan": float("nan"),
        "inf": float("-inf"),
        "single": np.float32(0.5),
        "count": np.int64(3),
        "path": Path("a/b"),
        "pair": (1, True, None),
        4: np.float32("inf"),
    }
    found = json.loads(to_json(values), parse_constant=pytest.fail)
    assert found == {
        "nan": "nan",
        "inf": "-inf",
        "single": 0.5,
        "count": 3,
        "path": "a/b",
        "pair": [1, True, None],
        "4": "inf",
    }


def test_a_directory_with_a_run_is_refused(writer: ReportWriter, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare_run_dir(tmp_path, "x")
    with pytest.raises(ConfigError, match="was taken by another run"):
        ReportWriter(tmp_path, load_config("tiny-moe")).on_start({})


def test_a_directory_of_a_refused_run_is_accepted_again(tmp_path: Path) -> None:
    assert prepare_run_dir(tmp_path / "a" / "b", "x") == prepare_run_dir(tmp_path / "a" / "b", "x")


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"--run-dir .* cannot be written"):
            prepare_run_dir(path, "x")


def test_default_directories_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {prepare_run_dir(None, "tiny-moe") for _ in range(3)}
    assert len(paths) == 3
    assert all(path.parent == Path("runs") for path in paths)


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        write_atomically(path, "new")
    assert caught.value.path == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_during_a_step_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    writer = ReportWriter(tmp_path, load_config("tiny-moe"))
    writer._steps = (tmp_path / "steps.jsonl").open("w")
    with pytest.raises(StorageError, match="No space left"):
        writer.on_step(step_record(1))


def continued(folder: Path, first_step: int) -> ReportWriter:
    """A writer of a run that goes on after `first_step`."""
    made = ReportWriter(folder, load_config("tiny-moe"), resume=True)
    made.on_start({"first_step": first_step})
    return made


def test_a_resumed_run_appends_after_the_steps_that_stay(
    writer: ReportWriter, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        writer.on_step(step_record(step))
        writer.on_eval({"step": step, "loss": 2.0 + step, "perplexity": 8.0})
    writer.close()
    for name in ("steps.jsonl", "evals.jsonl"):  # torn, as a killed run leaves it
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 4, "lo\xff')
    again = continued(tmp_path, 2)
    again.on_step(step_record(3))
    again.on_eval({"step": 2, "loss": 4.0, "perplexity": 8.0})
    again.on_eval({"step": 3, "loss": 5.0, "perplexity": 8.0})
    again.on_end(run_report(eval=[{"step": 3, "loss": 5.0, "perplexity": 8.0}]))
    again.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").open()]
    evals = [json.loads(line) for line in (tmp_path / "evals.jsonl").open()]
    assert steps == [1, 2, 3]
    assert [(record["step"], record["loss"]) for record in evals] == [(1, 3.0), (2, 4.0), (3, 5.0)]
    assert json.loads((tmp_path / "report.json").read_text())["eval"] == evals


def test_records_of_a_run_without_a_commit_are_set_aside_not_lost(
    writer: ReportWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped store path must not cost the records of a long run."""
    writer.on_step(step_record(1))
    writer.close()
    before = (tmp_path / "steps.jsonl").read_text()
    for number in (1, 2):
        again = continued(tmp_path, 0)
        again.on_step(step_record(1))
        again.close()
        assert (tmp_path / f"steps.jsonl.before-{number}").read_text() == before
    assert "renamed to steps.jsonl.before-2" in caplog.text
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
