"""`--resume latest` with the real command: what goes on, with which bits, and what is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import NamedTuple

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
    small_text,
    steps_of,
    stop_by_signal,
)

STEPS = 4
RESUME = ("--resume", "latest")
EVALUATED = ("--set", "train.eval_interval=2")
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
REFUSED = {
    "model.rope_theta=5000": ("model.rope_theta = 5000", "made with 10000.0"),
    "train.seq_len=16": ("train.seq_len = 16", "made with 32"),
    f"data.source={small_text(seed=5)}": ("the saved data position", "train.init_from"),
    "offload.nvme.capacity=2MiB": ("offload.nvme.capacity = 2.0 MiB", "retained commits"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> tuple[Path, Path]:
    """A run that was never interrupted, and the same stopped after two steps."""
    whole, stopped = (tmp_path_factory.mktemp(name) for name in ("whole", "stopped"))
    commands = [command(whole, *EVALUATED), command(stopped, "--steps", "2", *EVALUATED)]
    results = call_each(whole / "said", commands)
    assert [result.returncode for result in results] == [0, 0], results
    # Of a commit that is made at exit.
    assert "last commit" in results[1].stdout and "--resume latest" in results[1].stdout
    return whole, stopped


@pytest.fixture(scope="module")
def whole(begun) -> Path:
    return begun[0]


class Again(NamedTuple):
    """A command that was given to a process that had not begun the run, and where it ran."""

    folder: Path
    result: Completed


@pytest.fixture(scope="module")
def again(begun, tmp_path_factory) -> dict[str, Again]:
    """What starts where a run has ended, one after another in one process; each of the tests has a
    copy of its own."""
    whole, stopped = begun
    names = {**dict.fromkeys(OTHER_WAYS, stopped), "bad": stopped, "new": stopped, "done": whole}
    at = {name: copy_of(run, tmp_path_factory.mktemp("copy")) for name, run in names.items()}
    calls: dict[str, tuple[Path, list[str]]] = {}

    def add(name: str, folder: Path, *arguments: str) -> None:
        calls[name] = folder, command(folder, *arguments)

    for name, ways in OTHER_WAYS.items():
        with (at[name] / "run/steps.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')  # of a run that was killed
        (at[name] / "run" / SAVE_NOW_FILE).touch()
        sets = [argument for way in ways for argument in ("--set", way)]
        add(name, at[name], *RESUME, *EVALUATED, *sets)
    add("done", at["done"], *RESUME)
    report = str(at["done"] / "run/report.json")
    before = {len(calls): f"import shutil; shutil.copy({report!r}, {str(at['done'])!r})"}
    add("more", at["done"], *RESUME, "--set", "train.steps=6")
    for override in REFUSED:
        add(override, at["bad"], *RESUME, "--set", override)
    add("taken", at["bad"])
    add("bad", at["bad"], *RESUME, *EVALUATED)
    (at["new"] / "run").rename(at["new"] / "first")
    add("new", at["new"], "--steps", "1")
    said = tmp_path_factory.mktemp("again") / "said"
    results = call_each(said, [line for _, line in calls.values()], before)
    return {
        name: Again(folder, result)
        for (name, (folder, _)), result in zip(calls.items(), results, strict=True)
    }


def check_is_whole(folder: Path, whole: Path) -> None:
    """A run that went on after step 2 is the run that never stopped."""
    assert numbers_of(folder) == numbers_of(whole)
    report, wanted = report_of(folder), report_of(whole)
    assert report["weights_digest"] == wanted["weights_digest"]
    assert report["eval"] == wanted["eval"], "evaluations of the part before are kept"
    assert (report["steps"], report["resumed_from"]) == (STEPS, 2)
    assert report["commits"]["last_step"] == STEPS
    assert report["tokens_per_s"] > 0


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_going_on_equals_never_stopping(whole, again, name):
    """C60, C64: bit for bit, whatever the budgets, pipeline, idle policy or recompute."""
    folder, result = again[name]
    assert result.returncode == 0, result.stderr
    assert "resuming after step 2" in result.stdout
    for way in OTHER_WAYS[name]:
        key, _, value = way.partition("=")
        told = key.startswith(("train.", "offload.idle"))
        assert (f"{key} = {value} (was " in result.stdout) is told, "what is computed is compared"
    assert not (folder / "run" / SAVE_NOW_FILE).exists()
    can_save = "offload.durability=step" in OTHER_WAYS[name]
    assert ("save-now: step " in result.stdout) is can_save
    assert ("save-now is refused" in result.stdout) is not can_save
    commits = report_of(folder)["commits"]
    assert commits["published"] == (2 if can_save else 1)
    assert 0 < commits["stall_seconds_max"] <= commits["stall_seconds"]
    check_is_whole(folder, whole)


def test_a_finished_run_goes_on_when_it_is_given_more_steps(whole, again):
    assert again["done"].result.returncode == 0, again["done"].result.stderr
    assert "nothing is left to train: step 4 of 4 is done" in again["done"].result.stdout
    folder, more = again["more"]
    report = json.loads((folder / "report.json").read_text())
    assert report["weights_digest"] == report_of(whole)["weights_digest"]
    assert more.returncode == 0, more.stderr
    assert "train.steps = 6 (was 4)" in more.stdout
    assert [row["step"] for row in steps_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert numbers_of(folder)[:STEPS] == numbers_of(whole)
    assert report_of(folder)["resumed_from"] == 4


def test_what_cannot_go_on_is_refused_and_loses_nothing(whole, again):
    for override, parts in REFUSED.items():
        result = again[override].result
        assert result.returncode == 2, result.stdout
        assert all(part in result.stderr for part in parts), result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert again["taken"].result.returncode == 2, "a new run does not take the directory"
    folder, result = again["bad"]
    assert result.returncode == 0, result.stderr
    check_is_whole(folder, whole)


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
    assert call(folder, *RESUME, *until).returncode == 0
    assert call(other, *until).returncode == 0
    assert numbers_of(folder) == numbers_of(other)
    assert report_of(folder)["weights_digest"] == report_of(other)["weights_digest"]


def test_a_new_run_says_what_it_discards(again):
    folder, result = again["new"]
    assert result.returncode == 0, result.stderr
    (line,) = [x for x in result.stdout.splitlines() if "discarded" in x]
    assert "commit 1 (step 2)" in line and str(folder / "nvme") in line
    assert result.stderr == ""
