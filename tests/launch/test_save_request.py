"""The file `save-now`: one touch is one save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.save_request import SAVE_NOW_FILE, SaveRequest


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
