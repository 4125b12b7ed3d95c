"""`--resume latest` with the real command: what goes on, with which bits, and what is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.save_request import SAVE_NOW_FILE
from tests.launch.helpers import (
    Completed,
    call,
    call_each,
    command,
    copy_of,
    numbers_of,
    report_of,
    steps_of,
    stop_by_signal,
)

STEPS = 4
RESUME = ("--resume", "latest")
EVALUATED = ("--set", "train.eval_interval=2")


def resume(folder: Path, *arguments: str) -> Completed:
    return call(folder, *RESUME, *arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    result = call(folder, *EVALUATED)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory) -> Path:
    """The same run, stopped after two steps; of a commit that is made at exit."""
    folder = tmp_path_factory.mktemp("stopped")
    result = call(folder, "--steps", "2", *EVALUATED)
    assert result.returncode == 0, result.stderr
    assert "last commit" in result.stdout and "--resume latest" in result.stdout
    return folder


@pytest.fixture
def stopped(tmp_path, stopped_once) -> Path:
    """One of its own to go on with, for each test."""
    return copy_of(stopped_once, tmp_path)


def check_is_whole(folder: Path, whole: Path) -> None:
    """A run that went on after step 2 is the run that never stopped."""
    assert numbers_of(folder) == numbers_of(whole)
    report, wanted = report_of(folder), report_of(whole)
    assert report["weights_digest"] == wanted["weights_digest"]
    assert report["eval"] == wanted["eval"], "evaluations of the part before are kept"
    assert (report["steps"], report["resumed_from"]) == (STEPS, 2)
    assert report["commits"]["last_step"] == STEPS
    assert report["tokens_per_s"] > 0


OTHER_WAYS = {
    "all in memory, without overlap": (
        "offload.host.capacity=64MiB",
        "offload.pipeline=sync",
        "train.recompute=full",
    ),
    "dense, with a commit every step": (
        "offload.idle_expert_policy=dense",
        "offload.durability=step",
        "offload.io_workers=1",
    ),
}


@pytest.mark.parametrize("ways", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_going_on_equals_never_stopping(whole, stopped, ways):
    """C60: bit for bit, whatever the budgets, the pipeline, the idle policy or the recompute."""
    (stopped / "run/steps.jsonl").open("a").write('{"step": 3, "lo')  # of a run that was killed
    (stopped / "run" / SAVE_NOW_FILE).touch()
    sets = [argument for way in ways for argument in ("--set", way)]
    result = resume(stopped, *EVALUATED, *sets)
    assert result.returncode == 0, result.stderr
    assert "resuming after step 2" in result.stdout
    for way in ways:
        key, _, value = way.partition("=")
        told = key.startswith(("train.", "offload.idle"))
        assert (f"{key} = {value} (was " in result.stdout) is told, "what is computed is compared"
    assert not (stopped / "run" / SAVE_NOW_FILE).exists()
    can_save = "offload.durability=step" in ways
    assert ("save-now: step " in result.stdout) is can_save
    assert ("save-now is refused" in result.stdout) is not can_save
    commits = report_of(stopped)["commits"]
    assert commits["published"] == (2 if can_save else 1)
    assert 0 < commits["stall_seconds_max"] <= commits["stall_seconds"]
    check_is_whole(stopped, whole)


def test_a_finished_run_goes_on_when_it_is_given_more_steps(whole, tmp_path):
    copy_of(whole, tmp_path)
    again = resume(tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to train: step 4 of 4 is done" in again.stdout
    assert report_of(tmp_path)["weights_digest"] == report_of(whole)["weights_digest"]
    more = resume(tmp_path, "--set", "train.steps=6")
    assert more.returncode == 0, more.stderr
    assert "train.steps = 6 (was 4)" in more.stdout
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert report_of(tmp_path)["resumed_from"] == 4


REFUSED = {
    "model.rope_theta=5000": ("model.rope_theta = 5000", "made with 10000.0"),
    "train.seq_len=16": ("the saved data position", "sequence length"),
    "offload.nvme.capacity=2MiB": ("offload.nvme.capacity = 2.0 MiB", "retained commits"),
}


def test_what_cannot_go_on_is_refused_and_loses_nothing(whole, stopped):
    new = command(stopped)
    commands = [command(stopped, *RESUME, "--set", override) for override in REFUSED]
    *results, without = call_each(stopped / "said", [*commands, new])
    for result, parts in zip(results, REFUSED.values(), strict=True):
        assert result.returncode == 2, result.stdout
        assert all(part in result.stderr for part in parts), result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert without.returncode == 2, "a new run does not take the directory"
    assert [row["step"] for row in steps_of(stopped)] == [1, 2]
    result = resume(stopped, *EVALUATED)
    assert result.returncode == 0, result.stderr
    check_is_whole(stopped, whole)


@pytest.mark.long
def test_a_run_that_was_asked_to_stop_goes_on_bit_for_bit(tmp_path):
    """C12, C60: `durability: none` commits when it is stopped."""
    folder, other = tmp_path / "stopped", tmp_path / "whole"
    folder.mkdir()
    other.mkdir()
    far = ("--set", "train.steps=100000")
    stop_by_signal(folder, signal.SIGTERM, *far)
    done = report_of(folder)["commits"]["last_step"]
    assert done == len(steps_of(folder)) > 0
    until = (*far, "--steps", str(done + 2))
    assert resume(folder, *until).returncode == 0
    assert call(other, *until).returncode == 0
    assert numbers_of(folder) == numbers_of(other)
    assert report_of(folder)["weights_digest"] == report_of(other)["weights_digest"]


def test_a_new_run_says_what_it_discards(stopped):
    (stopped / "run").rename(stopped / "first")
    result = call(stopped, "--steps", "1")
    assert result.returncode == 0, result.stderr
    (line,) = [x for x in result.stdout.splitlines() if "discarded" in x]
    assert "commit 1 (step 2)" in line and str(stopped / "nvme") in line
    assert result.stderr == ""
