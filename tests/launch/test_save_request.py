"""The file `save-now`: one touch is one save."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launch.save_request import SAVE_NOW_FILE, SaveRequest
from tests.launch.helpers import report_of, start


def test_the_file_is_removed_and_counts_once(tmp_path: Path) -> None:
    asked, file = SaveRequest(tmp_path), tmp_path / SAVE_NOW_FILE
    assert not asked()
    for _ in range(2):
        file.touch()
        assert asked() and not file.exists()
        assert not asked()


def test_a_directory_that_is_gone_asks_for_nothing(tmp_path: Path) -> None:
    assert not SaveRequest(tmp_path / "gone")()


def test_a_file_that_cannot_be_removed_counts_once_until_it_is_touched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, file = SaveRequest(tmp_path), tmp_path / SAVE_NOW_FILE
    file.mkdir()  # unlink refuses a directory, whoever asks
    assert asked() and file.exists()
    assert "cannot be removed" in caplog.text
    assert not asked() and not asked()
    os.utime(file, ns=(0, 0))
    assert asked() and not asked()
    file.rmdir()
    assert not asked()
    file.touch()
    assert asked() and not file.exists()


def test_a_file_that_somebody_else_removes_first_has_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, file = SaveRequest(tmp_path), tmp_path / SAVE_NOW_FILE
    file.touch()

    def gone(path: Path) -> None:
        os.unlink(path)
        raise FileNotFoundError

    monkeypatch.setattr(Path, "unlink", gone)
    assert asked() and not asked()


def test_a_run_saves_when_it_is_asked_and_says_so(tmp_path: Path) -> None:
    """The real command: no other commit is due before the signal that ends it."""
    settings = ("offload.durability=checkpoint", "train.save_minutes=600", "train.steps=100000")
    sets = [argument for setting in settings for argument in ("--set", setting)]
    process = start(tmp_path, *sets)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step "):
                (tmp_path / "run" / SAVE_NOW_FILE).touch()
                break
        for line in process.stdout:
            said.append(line)
            if line.startswith("save-now: step "):
                break
        process.send_signal(signal.SIGTERM)
        said.append(process.communicate(timeout=120)[0])
        assert process.returncode == 130, said
        assert not (tmp_path / "run" / SAVE_NOW_FILE).exists()
        commits = report_of(tmp_path)["commits"]
        assert commits["published"] == 3, "the start, what was asked for, and the end"
        assert 0 < commits["stall_seconds_max"] < commits["stall_seconds"]
        assert said[-2].startswith("save-now: step ") and said[-2].endswith(" is saved\n"), said
    finally:
        process.kill()
        process.communicate()
