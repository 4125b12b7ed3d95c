"""The real command in a process of its own: what it writes, how it ends, what it refuses."""

from __future__ import annotations

import errno
import math
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.report import LANES, REPORT_KEYS, STEP_KEYS
from offload.nvme.lock import OwnerLock
from offload.nvme.store import NvmeStore
from ops.trace import TraceReader
from tests.launch.helpers import (
    Completed,
    call,
    call_each,
    command,
    report_of,
    start,
    steps_of,
    stop_by_signal,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Completed]:
    folder = tmp_path_factory.mktemp("finished")
    usual = ("--set", "data.source=cpython", "--set", "runtime.threads=0")
    return folder, call(folder, *usual, "--trace", str(folder / "trace.json"))


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
    report = report_of(folder)
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


# With both signals in `test_cli.py`, where nothing is trained.
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
    ids=lambda n: n.name,
)
def test_a_signal_ends_the_run_after_its_step(tmp_path, number):
    """C12: whatever was in flight ends cleanly, nothing asserts, the path is free again."""
    output = stop_by_signal(tmp_path, number, "--set", "train.steps=100000")
    assert "Traceback" not in output and "Error" not in output
    lock = OwnerLock.acquire(str(tmp_path / "nvme"))
    assert lock.previous is None, "the owner gave the directory up"
    lock.release()
    report = report_of(tmp_path)
    assert report["exit_reason"].startswith("Stopped")
    assert report["steps"] == len(steps_of(tmp_path)) > 0
    assert report["commits"]["last_step"] == report["steps"], "it can be resumed from there"


FAULTY = """
import functools, launch.build, offload.nvme.store, offload.nvme.transfers
from offload.testing_storage import Fault, FaultyStorage
# Which neighbours share a call is a matter of timing, and so would be how many calls there are.
offload.nvme.transfers.NEIGHBOURS_MAX = 1
fault = Fault({kind!r}, {verb!r}, at_op={at_op}, code={code})
store = offload.nvme.store.NvmeStore
launch.build.NvmeStore = functools.partial(store, open_file=FaultyStorage(fault))
"""
FAULTS = {
    "full disk": ("error", "write", 20, errno.ENOSPC),
    "read error": ("error", "read", 20, errno.EIO),
    "flipped bit": ("flip", "read", 20, 0),
}
FAULT_FIELDS = ("kind", "verb", "at_op", "code")
BAD_INPUT = [
    ("/no/such/file", "data.source=/no/such/file"),
    ("model.num_experts_per_tok", "model.num_experts_per_tok=5"),
    ("vocab", "model.vocab_size=100"),
    ("offload.host.capacity", "offload.host.capacity=64KiB"),
    ("offload.device.capacity", "offload.device.capacity=64KiB"),
    ("offload.nvme.path", "offload.nvme.path=/proc/nowhere"),
    (
        "180000",
        "train.gradient_accumulation_steps=90000",
        "train.micro_batch_order=batch_major",
        "offload.host.capacity=64MiB",
    ),
    ("did you mean", "train.stepz=3"),
    ("1 * 2 * 1 = 2 ranks, but 1 is running", "parallel.data_parallel=2"),
    ("parallel.model_parallel = 3 is not possible", "parallel.model_parallel=3"),
    ("offload.durability", "offload.durability=always"),
]
ALARM = ("--set", "optimizer.learning_rate=1e30")


class Failed(NamedTuple):
    """A run that could not begin or end well, and where."""

    folder: Path
    result: Completed


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> dict[str, Failed]:
    """All runs that fail without a signal, one after another in one process, by what is wrong."""
    cases: dict[str, list[str]] = {
        wanted: [argument for override in overrides for argument in ("--set", override)]
        for wanted, *overrides in BAD_INPUT
    }
    cases |= {"held": [], "alarm": [*ALARM], **{name: [] for name in FAULTS}}
    folders = {name: tmp_path_factory.mktemp("failed") for name in cases}
    before = {}
    for number, name in enumerate(cases):
        if name in FAULTS:
            before[number] = FAULTY.format(**dict(zip(FAULT_FIELDS, FAULTS[name])))
    commands = [command(folders[name], *arguments) for name, arguments in cases.items()]
    with NvmeStore(str(folders["held"] / "nvme"), 1 << 20):
        results = call_each(tmp_path_factory.mktemp("said") / "said", commands, before)
    return {
        name: Failed(folders[name], result) for name, result in zip(cases, results, strict=True)
    }


def test_a_numeric_alarm_is_exit_4(failed):
    folder, result = failed["alarm"]
    assert result.returncode == 4, result.stderr
    assert "learning_rate" in result.stderr and "Traceback" not in result.stderr
    report = report_of(folder)
    assert report["exit_reason"].startswith("NumericAlarm")
    assert report["commits"]["last_step"] == report["steps"], "its last step is saved"
    assert f"Step {report['steps']} is saved" in result.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_a_storage_fault_is_exit_3_and_names_the_file(failed, name):
    """C04, C05 from the drive to the shell: never trained on, never a traceback, never a hang."""
    folder, result = failed[name]
    assert result.returncode == 3, result.stderr + result.stdout
    assert "data.bin" in result.stderr and "block=" in result.stderr
    assert "Traceback" not in result.stderr
    assert report_of(folder)["exit_reason"].startswith(("StorageError", "CorruptBlock"))


@pytest.mark.parametrize("wanted", [wanted for wanted, *_ in BAD_INPUT])
def test_bad_input_is_one_sentence_and_exit_2(failed, wanted):
    result = failed[wanted].result
    assert result.returncode == 2, result.stderr + result.stdout
    message = result.stderr.strip()
    assert wanted in message and "Traceback" not in message
    assert len(message.splitlines()) == 1


def test_a_second_job_on_the_same_path_is_told_who_holds_it(failed):
    result = failed["held"].result
    assert result.returncode == 2
    assert "offload.nvme.path" in result.stderr


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """`headrace train … | head -1` ended the run without a word."""
    process = start(tmp_path, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0, errors
    assert len(steps_of(tmp_path)) == 4
