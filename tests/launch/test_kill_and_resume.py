"""The real command, killed and stopped by a full disk in mid-training, resumed to the same run.

Every loss, rate and norm in `steps.jsonl` and the digest of the weights must be those of the run
that nobody interrupted, bit for bit.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from offload.nvme.inspect import InspectedStore, find_stores
from tests.launch.helpers import call, numbers_of, report_of, start

STEPS = 12
SETTINGS = ("--set", "offload.durability=step", "--set", f"train.steps={STEPS}")
WAIT_S = 0.01
FILE_BYTES_MAX = 1 << 20  # the store's file is longer, all others are shorter


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = call(folder, "--set", f"train.steps={STEPS}")
    assert result.returncode == 0, result.stderr
    return folder


def start_until(folder: Path, step: int) -> subprocess.Popen[str]:
    """Begin or go on, and return as soon as the record of `step` is there."""
    process = start(folder, *SETTINGS, "--resume", "latest")
    while steps_done(folder) < step:
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"it ended: {process.communicate()[0]}")
    return process


def steps_done(folder: Path) -> int:
    """The last step whose record is whole."""
    path = folder / "run/steps.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def committed_step(folder: Path) -> int:
    """The step of the newest commit, all of whose blocks verify."""
    (directories,) = find_stores([str(folder / "nvme")])
    store = InspectedStore(directories)
    try:
        assert not store.is_owned and not store.damaged
        assert not any(damage for _, _, damage in store.verify())
        return store.commits[0].meta["step"]
    finally:
        store.close()


def kill_after(folder: Path, step: int, wait_s: float) -> None:
    """Kill -9 some time after `step`; at most the step being committed is lost."""
    process = start_until(folder, step)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert committed_step(folder) >= steps_done(folder) - 2


def fill_disk_after(folder: Path, step: int) -> None:
    """Begin; from `step` on the kernel refuses writes beyond a part of the store's file."""
    process = start_until(folder, step)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 3, output
    assert "starting at step 0: no commit in" in output
    assert "EFBIG" in output and "data.bin" in output and "Traceback" not in output
    assert committed_step(folder) >= steps_done(folder) - 2


def check_end(folder: Path, uninterrupted: Path) -> None:
    """Go on to the end: the same run as the one that nobody interrupted."""
    step = committed_step(folder)
    result = call(folder, *SETTINGS, "--resume", "latest")
    assert result.returncode == 0, result.stderr
    assert f"resuming after step {step} " in result.stdout
    assert numbers_of(folder) == numbers_of(uninterrupted)
    assert report_of(folder)["weights_digest"] == report_of(uninterrupted)["weights_digest"]


def test_a_full_disk_and_a_kill_change_nothing(tmp_path, uninterrupted, rotating_seed):
    """C04, C28: each time the run goes on after the last step that was committed."""
    rng = np.random.default_rng([rotating_seed, 6])
    fill_disk_after(tmp_path, 2)
    kill_after(tmp_path, 5, float(rng.random()) * 0.2)
    check_end(tmp_path, uninterrupted)


@pytest.mark.long
def test_a_run_killed_at_every_other_step_is_the_same_run(tmp_path, uninterrupted, rotating_seed):
    rng = np.random.default_rng([rotating_seed, 7])
    for step in range(1, STEPS - 1, 2):
        kill_after(tmp_path, max(step, 1), float(rng.random()) * 0.2)
    check_end(tmp_path, uninterrupted)
