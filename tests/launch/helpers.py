"""Plans, records and runs of the real command that the tests of `launch/` share."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from launch.mesh_plan import RankPlan
from moe.data.token_file import TokenFileWriter
from offload.placement import MemoryPlan, Term, TierPlan

ROOT = Path(__file__).parents[2]
MIB = 2**20
Completed = subprocess.CompletedProcess[str]
WIDE = os.environ | {"COLUMNS": "1000"}  # no line is broken, however long a path in it

# So small that a run is a few seconds, of which most is importing and compiling.
SMALL: dict[str, Any] = {
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
    "runtime": {"threads": 1},  # tests run side by side
    "offload": {
        "device": {"capacity": "8MiB"},
        "host": {"capacity": "2MiB"},
        "nvme": {"capacity": "64MiB"},
        "prefetch_buffer_size": "1MiB",
        "io_workers": 2,
    },
}


def tier_plan(tier: str, capacity_bytes: int, minimum_bytes: int) -> TierPlan:
    """A tier with one term."""
    terms = (Term("window", minimum_bytes, "the prefetch window"),)
    return TierPlan(tier, capacity_bytes, minimum_bytes, minimum_bytes, terms, terms)


def memory_plan(fits: bool = True) -> MemoryPlan:
    """A small plan; the host is too small unless it fits."""
    problem = "offload.host.capacity = 4.0 MiB is below the minimum of 8.0 MiB"
    return MemoryPlan(
        tiers={
            "device": tier_plan("device", 4 * MIB, MIB),
            "host": tier_plan("host", 16 * MIB if fits else 4 * MIB, 8 * MIB),
            "nvme": tier_plan("nvme", 64 * MIB, 0),
        },
        components={"weight": {"host": 2 * MIB}, "exp_avg": {"nvme": 4 * MIB}},
        parameters=2**20,
        state_bytes=12 * MIB,
        fits=fits,
        problems=() if fits else (problem,),
        remedies=() if fits else ("set offload.host.capacity to at least 8MiB",),
        homes={},
        spilled=frozenset(),
        undone=frozenset(),
        update_slot_bytes=0,
        lease_slot_bytes=0,
        grad_slot_bytes=0,
        stream_bytes=0,
        read_ahead_bytes=0,
        workspace_bytes=0,
        staging_bytes=0,
        ahead_bytes=0,
    )


def rank_plans(fits: bool = True) -> list[RankPlan]:
    """The plans of a run with one rank."""
    return [RankPlan((0,), memory_plan(fits))]


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    """One line of `steps.jsonl`."""
    record: dict[str, Any] = {
        "step": step,
        "loss": 2.5,
        "loss_hex": (2.5).hex(),
        "grad_norm": 1.0,
        "clip_factor": 1.0,
        "lr": 1e-3,
        "tokens": 512,
        "seconds": 0.5,
        "stall_seconds": 0.1,
        "experts_idle": 0,
        "lanes": {
            "nvme_read_bytes": MIB,
            "nvme_write_bytes": 2 * MIB,
            "h2d_bytes": 3 * MIB,
            "d2h_bytes": 4 * MIB,
        },
        "nvme_by_cause": {"update": {"read_bytes": MIB, "write_bytes": 2 * MIB}},
    }
    return record | changes


def run_report(**changes: Any) -> dict[str, Any]:
    """What the trainer hands over at the end; the writer adds config and versions."""
    report: dict[str, Any] = {
        "tiers": {"device": {"capacity_bytes": 4 * MIB, "peak_bytes": 3 * MIB}},
        "process": {"peak_rss_bytes": 100, "baseline_rss_bytes": 90},
        "parameters": 2**20,
        "state_bytes": 12 * MIB,
        "steps": 2,
        "resumed_from": None,
        "commits": {
            "published": 3,
            "seconds": 0.1,
            "stall_seconds": 0.25,
            "stall_seconds_max": 0.125,
            "written_bytes": MIB,
            "last_step": 2,
        },
        "redone_steps": 0,
        "redone_share": 0.0,
        "codec": None,
        "tokens_per_s": 1024.0,
        "stall_share": 0.2,
        "eval": [{"step": 2, "loss": 2.0, "perplexity": 7.389}],
        "weights_digest": "00" * 16,
        "bigram_loss": 2.4,
        "exit_reason": "done",
    }
    return report | changes


def run_python(code: str, *arguments: str, **options: Any) -> Completed:
    """Run `code` in a new interpreter at the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **{"timeout": 120} | options,
    )


@cache
def small_text(seed: int = 3) -> Path:
    """A short text that can be learnt. It is opened at once; reading CPython's takes seconds."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-text-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = np.random.default_rng(seed).integers(97, 123, (50, 4))
    with TokenFileWriter(folder / "text.tokens", 257, 256) as writer:
        writer.append(words[np.random.default_rng(4).zipf(1.5, 5000) % 50].reshape(-1))
        writer.end_document()
        writer.publish()
    return folder / "text.tokens"


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line that trains SMALL with its files below `folder`."""
    offload = SMALL["offload"]
    nvme = offload["nvme"] | {"path": str(folder / "nvme")}
    data = {"source": str(small_text())}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"offload": offload | {"nvme": nvme}, "data": data}))
    run = ["--run-dir", str(folder / "run")]
    return [sys.executable, "-m", "launch", "train", str(path), *run, *arguments]


def call(folder: Path, *arguments: str) -> Completed:
    """Train to the end."""
    return subprocess.run(
        command(folder, *arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=WIDE,
        timeout=300,
    )


def call_script(script: str, folder: Path, *arguments: str) -> Completed:
    """The same with a Python script in the place of `-m launch`."""
    return subprocess.run(
        [sys.executable, "-c", script, *command(folder, *arguments)[3:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=WIDE,
        timeout=300,
    )


# What the calls print is captured below Python, so that libraries in C are heard, too. MindSpore
# takes the number of its threads but once.
EACH = """
import json, os, sys
from launch.cli import main
folder, cases = sys.argv[1], json.load(sys.stdin)
codes = []
def configured(self, threads=None):
    self._threads = threads
for number, (before, arguments) in enumerate(cases):
    for fd, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, fd)
        os.close(file)
    exec(before)
    sys.argv = ["headrace", *arguments]
    try:
        main()
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code or 0)
    sys.stdout.flush()
    if "ops.backend" in sys.modules:
        sys.modules["ops.backend"].MindSporeBackend.configure = configured
with open(f"{folder}/codes", "w") as file:
    json.dump(codes, file)
"""


def call_each(
    folder: Path, commands: Sequence[Sequence[str]], before: Mapping[int, str] | None = None
) -> list[Completed]:
    """Several commands (see `command`) one after another in one process, which starts and compiles
    but once. What they print is kept apart, in `folder`. `before` is Python that is executed
    before the command of that number, and stays in force.
    """
    folder.mkdir(parents=True)
    text = json.dumps([((before or {}).get(n, ""), line[3:]) for n, line in enumerate(commands)])
    process = run_python(EACH, str(folder), input=text, env=WIDE, timeout=600)
    told = sorted(folder.glob("*.err"), key=lambda path: int(path.stem))
    assert process.returncode == 0, told[-1].read_text() if told else process.stderr
    codes = json.loads((folder / "codes").read_text())
    out, err = (
        [(folder / f"{number}.{name}").read_text() for number in range(len(commands))]
        for name in ("out", "err")
    )
    return [Completed(*row) for row in zip(commands, codes, out, err, strict=True)]


def start(folder: Path, *arguments: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
    """Begin to train; what is printed can be read from `stdout`."""
    return subprocess.Popen(
        command(folder, *arguments),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=WIDE,
    )


def stop_by_signal(folder: Path, number: signal.Signals, *arguments: str) -> str:
    """Train, and send `number` during the second step; what was printed after the first."""
    process = start(folder, *arguments)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    return output


def copy_of(finished: Path, folder: Path) -> Path:
    """A run of its own in `folder` that is where the run in `finished` has ended."""
    for name in ("run", "nvme"):
        shutil.copytree(finished / name, folder / name)
    return folder


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The records of `steps.jsonl`."""
    return [json.loads(line) for line in (folder / "run/steps.jsonl").read_text().splitlines()]


def numbers_of(folder: Path) -> list[list[Any]]:
    """Of every step what must be the same bit for bit however the run went."""
    keys = ("step", "loss_hex", "lr", "grad_norm")
    return [[row[key] for key in keys] for row in steps_of(folder)]


def report_of(folder: Path) -> dict[str, Any]:
    """`report.json`."""
    return json.loads((folder / "run/report.json").read_text())


ENGINE_META = {
    "ledger": {"step": 0, "rates": []},
    "loss_scale": {"scale": 1.0, "good_steps": 0},
}
"""What an engine that has nothing to replay says of itself in a commit."""
