"""`--resume latest` with the real command: what goes on, with which bits, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.helpers import ROOT
from tests.launch.test_train_end_to_end import call, command, steps_of

STEPS = 4
Finished = tuple[Path, subprocess.CompletedProcess[str]]


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/report.json").read_text())


def losses_of(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["loss_hex"]) for row in steps_of(folder)]


def resume(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(folder, "--resume", "latest", *arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    result = call(folder, "--set", "train.eval_interval=2")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def stopped(tmp_path) -> Path:
    """The same run, stopped after two steps; of a commit that is made at exit."""
    result = call(tmp_path, "--steps", "2", "--set", "train.eval_interval=2")
    assert result.returncode == 0, result.stderr
    assert "last commit" in result.stdout and "--resume latest" in result.stdout
    return tmp_path


OTHER_WAYS = {
    "the same way": (),
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
    sets = [argument for way in ways for argument in ("--set", way)]
    result = resume(stopped, "--set", "train.eval_interval=2", *sets)
    assert result.returncode == 0, result.stderr
    assert "resuming after step 2" in result.stdout
    for way in ways:
        key, _, value = way.partition("=")
        told = key.startswith(("train.", "offload.idle"))
        assert (f"{key} = {value} (was " in result.stdout) is told, "what is computed is compared"
    assert losses_of(stopped) == losses_of(whole)
    report, wanted = report_of(stopped), report_of(whole)
    assert report["weights_digest"] == wanted["weights_digest"]
    assert report["eval"] == wanted["eval"], "evaluations of the part before are kept"
    assert (report["steps"], report["resumed_from"]) == (STEPS, 2)
    assert report["commits"]["last_step"] == STEPS
    assert report["tokens_per_s"] > 0


def test_a_finished_run_goes_on_when_it_is_given_more_steps(whole, tmp_path):
    assert call(tmp_path).returncode == 0
    again = resume(tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to train: step 4 of 4 is done" in again.stdout
    assert report_of(tmp_path)["weights_digest"] == report_of(whole)["weights_digest"]
    more = resume(tmp_path, "--set", "train.steps=6")
    assert more.returncode == 0, more.stderr
    assert "train.steps = 6 (was 4)" in more.stdout
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert report_of(tmp_path)["resumed_from"] == 4


def test_without_a_commit_it_says_so_and_starts_at_0(tmp_path):
    result = resume(tmp_path, "--steps", "1")
    assert result.returncode == 0, result.stderr
    assert "starting at step 0: no commit in" in result.stdout
    assert [row["step"] for row in steps_of(tmp_path)] == [1]
    assert report_of(tmp_path)["resumed_from"] is None


REFUSED = {
    "model.rope_theta=5000": ("model.rope_theta = 5000", "made with 10000.0"),
    "train.seq_len=16": ("the saved data position", "sequence length"),
    "offload.nvme.capacity=2MiB": ("offload.nvme.capacity = 2.0 MiB", "retained commits"),
}


def test_what_cannot_go_on_is_refused_and_loses_nothing(whole, stopped):
    for override, parts in REFUSED.items():
        result = resume(stopped, "--set", override)
        assert result.returncode == 2, override
        assert all(part in result.stderr for part in parts), result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert [row["step"] for row in steps_of(stopped)] == [1, 2]
    assert call(stopped).returncode == 2, "a new run does not take the directory"
    result = resume(stopped)
    assert result.returncode == 0, result.stderr
    assert losses_of(stopped) == losses_of(whole)


def test_a_run_that_was_asked_to_stop_goes_on_bit_for_bit(tmp_path):
    """C12, C60: `durability: none` commits when it is stopped."""
    folder, other = tmp_path / "stopped", tmp_path / "whole"
    folder.mkdir()
    other.mkdir()
    long = ("--set", "train.steps=100000")
    process = subprocess.Popen(
        command(folder, *long),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    done = report_of(folder)["commits"]["last_step"]
    assert done == len(steps_of(folder)) > 0
    until = (*long, "--steps", str(done + 2))
    assert resume(folder, *until).returncode == 0
    assert call(other, *until).returncode == 0
    assert losses_of(folder) == losses_of(other)
    assert report_of(folder)["weights_digest"] == report_of(other)["weights_digest"]


def test_a_new_run_says_what_it_discards(stopped):
    (stopped / "run").rename(stopped / "first")
    result = call(stopped, "--steps", "1")
    assert result.returncode == 0, result.stderr
    (line,) = [x for x in result.stdout.splitlines() if "discarded" in x]
    assert "commit 1 (step 2)" in line and str(stopped / "nvme") in line
    assert result.stderr == ""
