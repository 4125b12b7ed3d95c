"""The command line's contract: what it prints, where it writes, with which status it exits.

Training itself is replaced by fakes of `launch.build` and `launch.run`; the real one has tests of
its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from rich.markup import render

from launch import checkpoint_command, cli, data_command, environment, store_command
from launch.config import load_config
from launch.progress import Observer
from launch.run import advice
from moe.mesh import ParallelConfig
from ops.comm.base import World
from ops.errors import (
    ConfigError,
    DataError,
    HeadraceError,
    NumericAlarm,
    PlanError,
    Stopped,
    StorageError,
)
from ops.trace import Tracer, TraceReader
from tests.launch.helpers import ROOT, rank_plans, run_python, run_report, step_record

Call = Callable[..., int]
INFO = {"name": "n", "steps": 2, "parameters": 1, "state_bytes": 12}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`launch.build` and `launch.run` in one, training two steps; tests change its functions."""
    module = types.ModuleType("launch.build")
    runs = types.ModuleType("launch.run")

    def run_training(
        config: Any,
        steps: int | None,
        observer: Observer,
        stop: threading.Event,
        trace: Tracer,
        resume: str | None,
        world: World,
        save_asked: Callable[[], bool],
    ) -> None:
        module.received = (config, world.size, steps)  # type: ignore[attr-defined]
        with trace.span("compute", "everything"):
            pass
        observer.on_start(INFO)
        observer.on_step(step_record(1))
        observer.on_step(step_record(2))
        observer.on_end(run_report())

    module.run_training = run_training  # type: ignore[attr-defined]
    module.make_plans = lambda config, resumed=False: rank_plans()  # type: ignore[attr-defined]
    runs.run_training = lambda *args: module.run_training(*args)  # type: ignore[attr-defined]
    for name, fake in (("launch.build", module), ("launch.run", runs)):
        monkeypatch.setitem(sys.modules, name, fake)
        monkeypatch.setattr(name, fake, raising=False)
    return module


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run the command line in an empty directory; returns the exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "prepare", lambda runtime: None)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return code if isinstance(code, int) else 0 if code is None else 1

    return run


def test_train_writes_both_files_and_exits_0(
    build: types.ModuleType, call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--run-dir", "out", "--steps", "2", "--set", "train.seed=7")
    assert call("train", "tiny-moe", *arguments) == 0
    config, ranks, steps = build.received
    assert (config.train.seed, ranks, steps) == (7, 1, 2)
    assert len((tmp_path / "out/steps.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "out/report.json").read_text())["steps"] == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "out/report.json" in shown
    command = "headrace train tiny-moe --set train.seed=7 --run-dir out --resume latest"
    assert command in shown, "the end of a run says how to go on"


def test_train_makes_a_directory_of_its_own(
    build: types.ModuleType, call: Call, tmp_path: Path
) -> None:
    assert call("train", "tiny-moe") == 0
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith("tiny-moe-")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a bad key"), 2),
        (PlanError("too small"), 2),
        (DataError("empty text"), 2),
        (StorageError("bad block", path="p", offset=3), 3),
        (NumericAlarm("loss is nan"), 4),
        (Stopped("stopped after step 3"), 130),
        (HeadraceError("something else"), 1),
    ],
)
def test_an_error_is_one_sentence_and_its_status(
    build: types.ModuleType,
    call: Call,
    capsys: pytest.CaptureFixture[str],
    error: HeadraceError,
    status: int,
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    build.run_training = fail  # type: ignore[attr-defined]
    assert call("train", "tiny-moe", "--run-dir", "out") == status
    assert capsys.readouterr().err == f"headrace: {error}\n"


def test_the_traceback_comes_when_asked_for(
    build: types.ModuleType,
    call: Call,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_TRACEBACK", "1")
    assert call("config", "nothing") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_made(
    build: types.ModuleType, call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.make_plans = lambda config, resumed=False: rank_plans(fits=False)  # type: ignore[attr-defined]
    assert call("train", "tiny-moe") == 2
    assert "set offload.host.capacity to at least 8MiB." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_run_is_refused(
    build: types.ModuleType, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", "tiny-moe", "--run-dir", "out") == 0
    assert call("train", "tiny-moe", "--run-dir", "out") == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_trace_is_drawn_where_it_was_asked_for(
    build: types.ModuleType, call: Call, tmp_path: Path
) -> None:
    assert call("train", "tiny-moe", "--trace", "t.json") == 0
    reader = TraceReader(tmp_path / "t.json")
    assert reader.tracks() == ["compute", "step"]
    assert json.loads((tmp_path / "t.json").read_text()) == reader.events
    assert {"step 1", "step 2", "end"} <= {event["name"] for event in reader.events}


@pytest.mark.parametrize("path", ["missing/t.json", ".", "notes.txt"])
def test_a_trace_that_cannot_be_written_is_refused_before_training(
    build: types.ModuleType,
    call: Call,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
) -> None:
    (tmp_path / "notes.txt").write_text("not a trace")
    assert call("train", "tiny-moe", "--run-dir", "out", "--trace", path) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"headrace: a trace cannot be written to {path}: ")
    assert captured.err.count("\n") == 1
    assert not hasattr(build, "received")
    assert (tmp_path / "notes.txt").read_text() == "not a trace"
    assert call("train", "tiny-moe", "--run-dir", "out") == 0, "the directory is still free"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-moe", "--steps", "99999"), "--steps 99999 is more than train.steps"),
        (("tiny-moe", "--steps", "0"), "--steps"),
        (("tiny-moe", "--set", "train.stps=1"), "did you mean train.steps?"),
        (("tiny-mo",), "did you mean tiny-moe?"),
        ((), "CONFIG"),
        (("tiny-moe", "--sett", "a=b"), "--sett"),
    ],
)
def test_bad_arguments_exit_2(
    build: types.ModuleType,
    call: Call,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert call("train", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
def test_plan_prints_everything_and_then_says_whether_it_fits(
    build: types.ModuleType, call: Call, capsys: pytest.CaptureFixture[str], fits: bool
) -> None:
    build.make_plans = lambda config, resumed=False: rank_plans(fits)  # type: ignore[attr-defined]
    status = 0 if fits else 2
    assert call("plan", "tiny-moe") == status
    tables = capsys.readouterr()
    assert "capacity" in tables.out
    assert call("plan", "tiny-moe", "--json") == status
    values = capsys.readouterr()
    assert json.loads(values.out)["fits"] is fits
    for errors in (tables.err, values.err):
        assert errors.count("\n") == (not fits)
        assert ("set offload.host.capacity to at least 8MiB." in errors) is not fits


def test_plan_shows_every_rank_and_warns_of_the_machines_of_a_hostfile(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hosts").write_text("one slots=3\ntwo slots=5\n")
    sets = ["--set", "parallel.model_parallel=4", "--set", "parallel.data_parallel=2"]
    assert call("plan", "tiny-moe", *sets, "--hostfile", "hosts") == 0
    shown = capsys.readouterr().out
    assert "mesh: 8 ranks" in shown and "0-7" in shown
    assert "1 of 2 operator-parallel groups cross" in " ".join(shown.split())
    assert call("plan", "tiny-moe", *sets, "--hostfile", "hosts", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1
    assert call("plan", "tiny-moe", *sets, "--set", "parallel.pipeline_stage=3",
                "--hostfile", "hosts") == 2  # fmt: skip
    assert "the machines have 8 slots in all" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "config", "train"])
def test_a_mesh_that_cannot_work_is_refused_by_every_command(
    call: Call, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert call(command, "tiny-moe", "--set", "parallel.model_parallel=3") == 2
    assert "parallel.model_parallel = 3 is not possible" in capsys.readouterr().err


def test_train_refuses_another_number_of_ranks_than_the_mesh_has(
    build: types.ModuleType, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", "tiny-moe", "--set", "parallel.data_parallel=4") == 2
    assert "= 4 ranks, but 1 is running: allowed are 4 ranks" in capsys.readouterr().err


def test_config_prints_what_it_reads_back(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("config", "small-moe", "--set", "train.steps=500") == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert load_config("mine.yaml") == load_config("small-moe", ["train.steps=500"])


def test_version_and_help(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("headrace ")
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("train", "plan", "config", "data"))


def test_no_help_loses_a_word_to_markup() -> None:
    """`[experts, in, out]` was taken for a style, and left out."""

    def texts(command: click.Command) -> Iterator[str]:
        yield command.help or ""
        for option in command.params:
            yield getattr(option, "help", None) or ""
        for other in getattr(command, "commands", {}).values():
            yield from texts(other)

    apps = (cli.app, checkpoint_command.app, data_command.app, store_command.app)
    found = [text for app in apps for text in texts(typer.main.get_command(app))]
    assert any("experts x out x in" in text for text in found)
    for text in found:
        assert render(text).plain == text


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"data_parallel": 2}, "larger micro-batches"),
        ({"model_parallel": 2}, "larger micro-batches, or a smaller parallel.model_parallel"),
        (
            {"pipeline_stage": 2},
            "larger micro-batches, or more of them a step (train.gradient_accumulation_steps)",
        ),
    ],
)
def test_waiting_ranks_are_given_advice_that_fits_their_mesh(
    mesh: dict[str, int], said: str
) -> None:
    """A smaller model_parallel was recommended where it was 1."""
    assert advice(ParallelConfig(**mesh)) == said


def test_data_commands_are_reached(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("data", "prepare", "--help") == 0
    assert "--out" in capsys.readouterr().out
    assert call("data", "prepare", "missing.txt", "--out", "tokens.bin") == 2
    assert "missing.txt" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("some text " * 100)
    assert call("data", "prepare", "a.txt", "--out", "tokens.bin") == 0
    assert (tmp_path / "tokens.bin").exists()


def test_the_command_line_loads_no_numbers_before_it_must() -> None:
    code = (
        "import sys, launch.cli\n"
        "print([n for n in ('numpy', 'numba', 'mindspore') if n in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mindspore":
            raise ImportError("MindSpore is blocked by the test")
sys.meta_path.insert(0, Block())
from launch.cli import main
sys.argv = ["headrace", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("arguments", [("tiny-moe",), ("qwen3-235b-a22b", "--json")])
def test_plan_works_without_mindspore(arguments: tuple[str, ...]) -> None:
    result = run_python(BLOCKED, "plan", *arguments)
    assert result.returncode == 0, result.stderr
    assert "capacity" in result.stdout


def test_a_budget_below_the_minimum_is_refused_with_the_arithmetic() -> None:
    """C52: a host budget smaller than the buffers is shrunk to or refused, never overrun."""
    result = run_python(BLOCKED, "plan", "tiny-moe", "--set", "offload.host.capacity=1MiB")
    assert result.returncode == 2
    assert "offload.host.capacity" in result.stderr


INTERRUPTED = """
import sys, types
from ops.errors import Stopped
build, runs = types.ModuleType("launch.build"), types.ModuleType("launch.run")
def run_training(config, steps, observer, stop, trace, resume, world, save_asked):
    print("ready", flush=True)
    if not stop.wait(60):
        raise RuntimeError("the flag never came")
    raise Stopped("stopped after step 1, as asked")
runs.run_training = run_training
from tests.launch.helpers import rank_plans
build.make_plans = lambda config, resumed=False: rank_plans()
sys.modules |= {"launch.build": build, "launch.run": runs}
from launch import cli, environment
environment.prepare = lambda runtime: None
sys.argv = ["headrace", "train", "tiny-moe", "--run-dir", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_130(
    tmp_path: Path, number: signal.Signals
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert err.endswith("headrace: stopped after step 1, as asked\n")
    assert "Traceback" not in err


def test_python_m_launch_is_the_same_program() -> None:
    code = (
        "import runpy, sys; sys.argv = ['launch', 'config', 'tiny-mo']; runpy.run_module('launch')"
    )
    result = run_python(code)
    assert result.returncode == 2
    assert result.stderr.startswith("headrace: tiny-mo is neither a file nor a preset")
