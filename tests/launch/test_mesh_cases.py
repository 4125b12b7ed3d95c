"""Ways in which a run of several ranks can go wrong, with real ranks and the real command.

Starting two ranks takes seconds, so one run is interrupted again and again in different ways
(`LIVES`), and in the end it must be the run that nobody interrupted, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from moe.data.token_file import TokenFileWriter
from offload.nvme.directory import rank_directory
from offload.nvme.files import OsDirectoryFiles
from offload.nvme.recovery import read_slots
from offload.rank_commits import RecordFile
from tests.launch import mesh_case_ranks
from tests.launch.helpers import ROOT
from tests.mpirun import mpirun_command, run_ranks

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")

SECONDS_MAX = 1800.0  # bounds a wait; a start takes seconds where nobody else computes
STEPS = 8
CONFIG: dict[str, Any] = {
    "model": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_slice_rows": 32,
    },
    "train": {
        "steps": STEPS,
        "seq_len": 8,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "eval_batches": 1,
    },
    "optimizer": {"learning_rate": 2e-3, "warmup_steps": 2},
    "offload": {
        "device": {"capacity": "8MiB"},
        "host": {"capacity": "8MiB"},
        "nvme": {"capacity": "64MiB"},
        "prefetch_buffer_size": "64KiB",
        "io_workers": 2,
        "durability": "step",
    },
    "parallel": {"data_parallel": 2},
}


def configure(folder: Path, **parallel: int) -> str:
    """A configuration whose files are below `folder`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = folder / "text.tokens"
    if not tokens.exists():
        with TokenFileWriter(tokens, 64, 63) as writer:
            writer.append(np.random.default_rng(5).integers(0, 63, 4000))
            writer.end_document()
            writer.publish()
    config = json.loads(json.dumps(CONFIG))
    config["offload"]["nvme"]["path"] = str(folder / "nvme")
    config["data"] = {"source": str(tokens)}
    config["parallel"] = parallel or config["parallel"]
    path = folder / f"small{''.join(f'-{key}-{value}' for key, value in parallel.items())}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def train(
    folder: Path, what: str = "nothing", rank: int = 0, step: int = 0, *arguments: str, **mesh: int
) -> subprocess.CompletedProcess[str]:
    """Train on two ranks, beginning or going on; see `mesh_case_train.py`."""
    run = ["train", configure(folder, **mesh), "--run-dir", str(folder / "run"), *arguments]
    return run_ranks(
        2,
        "tests.launch.mesh_case_train",
        *(what, str(rank), str(step)),
        *run,
        seconds_max=SECONDS_MAX,
    )


def go_on(
    folder: Path, what: str = "nothing", rank: int = 0, step: int = 0, **mesh: int
) -> subprocess.CompletedProcess[str]:
    return train(folder, what, rank, step, "--resume", "latest", **mesh)


def committed_step(folder: Path) -> int:
    """The step of the newest commit of the record, of which every rank has its part."""
    record = RecordFile(str(folder / "nvme")).read()[0]
    steps = set()
    for rank, generation in enumerate(record.generations):
        directory = rank_directory(str(folder / "nvme"), rank)
        slots = read_slots(directory, OsDirectoryFiles())
        found = [slot.manifest for slot in slots if slot.manifest is not None]
        steps |= {x.meta["step"] for x in found if x.generation == generation} or {f"none: {rank}"}
    (step,) = steps
    return step


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/report.json").read_text())


def losses_of(folder: Path) -> list[tuple[int, str]]:
    rows = map(json.loads, (folder / "run/steps.jsonl").read_text().splitlines())
    return [(row["step"], row["loss_hex"]) for row in rows]


def left_behind(folder: Path) -> list[psutil.Process]:
    """Processes of a run in `folder` that are there half a minute after they should not."""
    alive = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and str(folder) in " ".join(process.info["cmdline"] or ()):
            alive.append(process)
    return psutil.wait_procs(alive, timeout=30)[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train(folder)
    assert result.returncode == 0, result.stderr
    return folder


def check_end(folder: Path, uninterrupted: Path) -> None:
    """Go on to the end: the same run as the one that nobody interrupted."""
    result = go_on(folder)
    assert result.returncode == 0, result.stderr
    assert losses_of(folder) == losses_of(uninterrupted)
    assert report_of(folder)["weights_digest"] == report_of(uninterrupted)["weights_digest"]


# How a life of the run ends, on which rank and after which step; its exit status, and the step
# of the commit that it leaves.
LIVES = (
    ("killed_before_prepare", 1, 2, 137, 1),
    ("killed_after_record", 0, 3, 137, 3),
    ("killed_before_record", 1, 4, 137, 3),
)


@pytest.mark.long
def test_kills_at_every_instant_of_a_commit_change_no_bit(tmp_path, uninterrupted):
    """C62: a part that only some ranks prepared is resumed by none, a recorded one by all."""
    for what, rank, step, status, committed in LIVES:
        result = go_on(tmp_path, what, rank, step)
        assert result.returncode == status, (what, result.stderr)
        assert committed_step(tmp_path) == committed, what
        assert not left_behind(tmp_path)
    check_end(tmp_path, uninterrupted)


@pytest.mark.long
def test_kills_at_random_moments_change_no_bit(tmp_path, uninterrupted, rotating_seed):
    """Twenty kills -9, in turn of one rank and of all at once, while the run gets on."""
    rng = np.random.default_rng([rotating_seed, 11])
    for number in range(20):
        kill_somewhere(tmp_path, rng, all_ranks=bool(number % 2))
    check_end(tmp_path, uninterrupted)


def kill_somewhere(folder: Path, rng: np.random.Generator, all_ranks: bool) -> None:
    """Go on, and kill one rank or all at a random moment from their start to the end of a step."""
    run = ["train", configure(folder), "--run-dir", str(folder / "run"), "--resume", "latest"]
    before = len(losses_of(folder)) if (folder / "run/steps.jsonl").exists() else 0
    process = subprocess.Popen(
        mpirun_command(2, "launch", *run),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    steps_wanted = before + int(rng.integers(0, 2)) if before < STEPS - 2 else before
    while (
        not (folder / "run/steps.jsonl").exists()
        or len(losses_of(folder)) < steps_wanted
        or len(ranks_of(process.pid)) < 2
    ):
        assert process.poll() is None, process.communicate()
        wait(process, 0.01)
    wait(process, float(rng.random()) * (0.3 if steps_wanted > before else 6.0))
    ranks = ranks_of(process.pid)
    for victim in ranks if all_ranks else [ranks[int(rng.integers(len(ranks)))]]:
        victim.kill()
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode in (0, 137), err
    assert not left_behind(folder)


def wait(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def ranks_of(mpirun: int) -> list[psutil.Process]:
    try:
        found = psutil.Process(mpirun).children(recursive=True)
    except psutil.Error:
        return []
    return [process for process in found if process.name().startswith("python")]


def test_a_signal_to_one_rank_stops_all_at_one_step_and_no_core_has_two_ranks(tmp_path):
    """C53: union of the threads' cores disjoint, time used at most cores times wall time."""
    result = train(tmp_path, "told_to_stop", 1, 3)
    assert result.returncode == 130, result.stderr
    assert "stopped after step 3 of 8, as asked" in result.stderr
    assert report_of(tmp_path)["exit_reason"].startswith("Stopped")
    assert losses_of(tmp_path)[-1][0] == committed_step(tmp_path) == 3
    told = [json.loads((tmp_path / f"cores-{rank}.json").read_text()) for rank in (0, 1)]
    if len(os.sched_getaffinity(0)) >= 2:
        assert not set(told[0]["cores"]) & set(told[1]["cores"])
    for rank in told:
        assert rank["used"] <= 1.05 * len(rank["cores"]) * rank["wall"] + 0.05


def test_a_gradient_that_is_not_finite_ends_all_ranks_with_an_alarm(tmp_path):
    """A rank that was quicker with the commit of that step waited for the other's part for ever."""
    result = train(tmp_path, "not_finite", 1, 3)
    assert result.returncode == 4, result.stderr
    assert "step 3: loss" in result.stderr and "did not end within" not in result.stderr
    assert report_of(tmp_path)["exit_reason"].startswith("NumericAlarm")
    assert committed_step(tmp_path) == 3


def test_an_exception_in_one_rank_ends_all_at_once(tmp_path):
    """It closed its engine first, whose publisher waited for the other rank: for ten minutes."""
    result = train(tmp_path, "fails", 1, 4)
    assert result.returncode == 1, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "something broke" in line][:1]
    assert line == "[rank 1] RuntimeError: something broke in step 4"
    assert "did not end within" not in result.stderr
    assert not left_behind(tmp_path)
    assert committed_step(tmp_path) == 2


def test_a_rank_that_hangs_becomes_a_failure_with_the_stacks_of_all(tmp_path):
    result = train(tmp_path, "hangs", 1, 2)
    assert result.returncode == 5, result.stderr
    assert "[rank 0] headrace: " in result.stderr and "did not end within 10 s" in result.stderr
    assert "rank 0 reports: " in result.stderr  # said by rank 1, before its own stacks
    assert 'mesh_case_train.py", line' in result.stderr.partition("rank 0 reports: ")[2]
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"data_parallel": 4}, "4 ranks, but 2 are running: allowed are"),
        ({"model_parallel": 2, "pipeline_stage": 3}, "allowed"),
        ({"data_parallel": 2, "expert_parallel": 3}, "allowed"),
    ],
)
def test_a_wrong_mesh_is_refused_by_all_ranks_before_anything_is_made(tmp_path, mesh, said):
    config = configure(tmp_path, **mesh)
    before = sorted(os.listdir(tmp_path))
    run = ["train", config, "--run-dir", str(tmp_path / "run")]
    result = run_ranks(2, "launch", *run, seconds_max=SECONDS_MAX)
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if "headrace: " in line]
    assert lines and len({line.partition("] ")[2] for line in lines}) == 1, result.stderr
    assert said in lines[0] and "Traceback" not in result.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.long
def test_every_case_passes_on_four_ranks(tmp_path):
    """C26, C40, C44, C46."""
    result = run_ranks(
        mesh_case_ranks.RANKS,
        "tests.launch.mesh_case_ranks",
        str(tmp_path),
        seconds_max=SECONDS_MAX,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split() == [case.__name__ for case in mesh_case_ranks.CASES]
