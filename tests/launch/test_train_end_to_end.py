"""The real command in a process of its own: what it writes, how it ends, what it refuses.

One small model, so that a run is a few seconds of which most is importing and compiling.
"""

from __future__ import annotations

import errno
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.report import LANES, REPORT_KEYS, STEP_KEYS
from offload.nvme.lock import OwnerLock
from ops.trace import TraceReader
from tests.launch.helpers import ROOT

CONFIG: dict[str, Any] = {
    "model": {
        "vocab_size": 260,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "train": {"steps": 4, "seq_len": 32, "micro_batch_size": 2, "eval_batches": 2},
    "optimizer": {"learning_rate": 2e-3, "warmup_steps": 2},
    "offload": {
        "device": {"capacity": "8MiB"},
        "host": {"capacity": "2MiB"},
        "nvme": {"capacity": "64MiB"},
        "prefetch_buffer_size": "1MiB",
        "io_workers": 2,
    },
}


def command(folder: Path, *arguments: str, text: str | None = None) -> list[str]:
    """The command line of a run with its files below `folder`."""
    config = json.loads(json.dumps(CONFIG))
    config["offload"]["nvme"]["path"] = str(folder / "nvme")
    if text is not None:
        config["data"] = {"source": text}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    run = ["--run-dir", str(folder / "run")]
    return [sys.executable, "-m", "launch", "train", str(path), *run, *arguments]


def call(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; `options` go to subprocess.run."""
    return subprocess.run(
        command(folder, *arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        **options,
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("finished")
    return folder, call(folder, "--trace", str(folder / "trace.json"))


def test_a_run_ends_well_and_says_where_its_report_is(finished):
    folder, result = finished
    assert result.returncode == 0, result.stderr
    assert "report.json" in result.stdout
    assert list((folder / "nvme/rank-00000").glob("manifest.*")), "it can be resumed from its end"


def test_every_step_has_a_record(finished):
    folder, _ = finished
    steps = steps_of(folder)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert set(STEP_KEYS) <= set(row)
        assert float.fromhex(row["loss_hex"]) == pytest.approx(row["loss"])
        assert set(row["lanes"]) == set(LANES)
        assert row["lanes"]["h2d_bytes"] > 0 and row["lanes"]["d2h_bytes"] > 0
        for way in ("read", "write"):
            by_cause = sum(causes[f"{way}_bytes"] for causes in row["nvme_by_cause"].values())
            assert by_cause == row["lanes"][f"nvme_{way}_bytes"]
    assert sum(row["lanes"]["nvme_write_bytes"] for row in steps) > 0


def test_the_trace_shows_every_step(finished):
    folder, _ = finished
    reader = TraceReader(folder / "trace.json")
    steps = [event for event in reader.events if event["ph"] == "X" and event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, 5)]
    assert [event["args"]["loss"] for event in steps] == [row["loss"] for row in steps_of(folder)]
    assert reader.busy_s("start-up") > 0


def test_the_trace_shows_every_lane_and_that_transfers_run_beside_compute(finished):
    folder, _ = finished
    reader = TraceReader(folder / "trace.json")
    lanes = {"nvme read", "nvme write", "host to device", "device to host"}
    assert lanes | {"compute", "stall", "update", "commit"} <= set(reader.tracks())
    moved = [event for event in reader.events if event["ph"] == "X" and "nvme" in event["cat"]]
    for lane in ("nvme read", "nvme write"):
        assert reader.overlap_s(lane, "compute") > 0
        spans = [event["args"] for event in moved if event["cat"] == lane]
        steps = sum(row["lanes"][lane.replace(" ", "_") + "_bytes"] for row in steps_of(folder))
        assert sum(args["bytes"] for args in spans) >= steps > 0
        assert all(args["block"] and args["bytes"] > 0 for args in spans)
    assert {"update", "commit"} <= {event["args"]["cause"] for event in moved}


def test_the_report_holds_what_is_promised(finished):
    folder, _ = finished
    report = json.loads((folder / "run/report.json").read_text())
    assert set(REPORT_KEYS) <= set(report)
    for tier in report["tiers"].values():
        assert 0 < tier["peak_bytes"] <= tier["capacity_bytes"]
    assert report["steps"] == 4 and report["exit_reason"] == "done"
    assert len(report["weights_digest"]) == 32
    evaluation = report["eval"][-1]
    assert evaluation["step"] == 4
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    grown = report["process"]["peak_rss_bytes"] - report["process"]["baseline_rss_bytes"]
    budgets = sum(report["tiers"][tier]["capacity_bytes"] for tier in ("host", "device"))
    assert grown <= 1.1 * budgets + (128 << 20)


def test_stopping_earlier_keeps_the_schedule(finished, tmp_path):
    folder, _ = finished
    result = call(tmp_path, "--steps", "2")
    assert result.returncode == 0, result.stderr
    keys = ("loss_hex", "lr", "grad_norm")
    wanted = [[row[key] for key in keys] for row in steps_of(folder)[:2]]
    assert [[row[key] for key in keys] for row in steps_of(tmp_path)] == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_the_run_after_its_step(tmp_path, number):
    """C12: whatever was in flight ends cleanly, nothing asserts, the path is free again."""
    arguments = ["--set", "train.steps=100000"]
    process = subprocess.Popen(
        command(tmp_path, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step" in line and "/100000" in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output and "Error" not in output
    lock = OwnerLock.acquire(str(tmp_path / "nvme"))
    assert lock.previous is None, "the owner gave the directory up"
    lock.release()
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["exit_reason"].startswith("Stopped")
    assert report["steps"] == len(steps_of(tmp_path)) > 0


def test_a_numeric_alarm_is_exit_4(tmp_path):
    result = call(tmp_path, "--set", "optimizer.learning_rate=1e30")
    assert result.returncode == 4, result.stderr
    assert "learning_rate" in result.stderr and "Traceback" not in result.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["exit_reason"].startswith("NumericAlarm")


FAULTY = """
import functools, launch.build
from launch.cli import main
from offload.testing_storage import Fault, FaultyStorage
fault = Fault({kind!r}, {verb!r}, at_op={at_op}, code={code})
store = launch.build.NvmeStore
launch.build.NvmeStore = functools.partial(store, open_file=FaultyStorage(fault))
main()
"""


@pytest.mark.parametrize(
    ("kind", "verb", "at_op", "code"),
    [
        ("error", "write", 20, errno.ENOSPC),
        ("error", "read", 20, errno.EIO),
        ("flip", "read", 20, 0),
    ],
    ids=["full disk", "read error", "flipped bit"],
)
def test_a_storage_fault_is_exit_3_and_names_the_file(tmp_path, kind, verb, at_op, code):
    """C04, C05 from the drive to the shell: never trained on, never a traceback, never a hang."""
    arguments = command(tmp_path)
    script = FAULTY.format(kind=kind, verb=verb, at_op=at_op, code=code)
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments[3:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert result.returncode == 3, result.stderr + result.stdout
    assert "data.bin" in result.stderr and "block=" in result.stderr
    assert "Traceback" not in result.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["exit_reason"].startswith(("StorageError", "CorruptBlock"))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["data.source=/no/such/file"], "/no/such/file"),
        (["model.num_experts_per_tok=5"], "model.num_experts_per_tok"),
        (["model.vocab_size=100"], "vocab"),
        (["offload.host.capacity=64KiB"], "offload.host.capacity"),
        (["offload.device.capacity=64KiB"], "offload.device.capacity"),
        (["offload.nvme.path=/proc/nowhere"], "offload.nvme.path"),
        (
            [
                "train.gradient_accumulation_steps=90000",
                "train.micro_batch_order=batch_major",
                "offload.host.capacity=64MiB",
            ],
            "180000",
        ),
        (["train.stepz=3"], "did you mean"),
        (["parallel.data_parallel=2"], "1 * 2 * 1 = 2 ranks, but 1 is running"),
        (["parallel.model_parallel=3"], "parallel.model_parallel = 3 is not possible"),
        (["offload.durability=always"], "offload.durability"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path, overrides, wanted):
    sets = [argument for override in overrides for argument in ("--set", override)]
    result = call(tmp_path, *sets)
    assert result.returncode == 2, result.stderr + result.stdout
    message = result.stderr.strip()
    assert wanted in message and "Traceback" not in message
    assert len(message.splitlines()) == 1


def test_a_second_job_on_the_same_path_is_told_who_holds_it(tmp_path):
    from offload.nvme.store import NvmeStore

    with NvmeStore(str(tmp_path / "nvme"), 1 << 20):
        result = call(tmp_path)
    assert result.returncode == 2
    assert "offload.nvme.path" in result.stderr


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """`headrace train … | head -1` ended the run without a word."""
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0, errors
    assert len(steps_of(tmp_path)) == 4
