"""What a commit says of its run against the configuration that goes on; a real store, no model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.config import RunConfig, load_config
from launch.origin import find_origin
from launch.resume import StartingPoint, save_plan, starting_point
from moe.data.stream import Cursor
from offload.nvme.store import NvmeStore
from ops.comm.single import SingleRank
from ops.errors import ConfigError, StorageError
from tests.launch.helpers import ENGINE_META

CURSOR = Cursor(epoch=1, position=8, seed=1, stream="x")


def configured(*overrides: str) -> RunConfig:
    return load_config("tiny-moe", overrides)


def begun(folder: Path, config: RunConfig) -> StartingPoint:
    """Where a run of `config` whose store is in `folder` begins with `--resume latest`."""
    config = replace(
        config, offload=replace(config.offload, nvme=replace(config.offload.nvme, path=str(folder)))
    )
    return starting_point(config, find_origin(config, "latest", SingleRank()), resume=True)


def publish(store: NvmeStore, config: RunConfig, step: int) -> None:
    """Commit `step` of the run of `config`."""
    run = {"step": step, "cursor": CURSOR.to_json(), **save_plan(config).facts}
    meta = {"step": step, "engine": ENGINE_META, "run": json.loads(json.dumps(run))}
    store.publish(store.cut(meta))


def going_on(folder: Path, was: RunConfig, now: RunConfig) -> StartingPoint:
    """Commit step 3 of the run `was`; where the run `now` begins after it."""
    with NvmeStore(str(folder), 1 << 20, workers=1) as store:
        publish(store, was, 3)
    return begun(folder, now)


def test_the_same_run_goes_on_at_its_place_in_the_data(tmp_path: Path) -> None:
    config = configured("train.freeze=[embed.*]")
    start = going_on(tmp_path, config, config)
    assert start == StartingPoint(3, CURSOR, True, "resuming after step 3 (commit 1)")


def test_without_a_commit_it_starts_at_0_and_says_so(tmp_path: Path) -> None:
    start = begun(tmp_path, configured())
    cursor = Cursor(seed=configured().data.seed)
    message = f"starting at step 0: no commit in {tmp_path / 'rank-00000'}"
    assert start == StartingPoint(0, cursor, False, message)


@pytest.fixture
def superseded(tmp_path: Path) -> Path:
    """A store whose commit 2 has superseded commit 1; both manifests are still there."""
    with NvmeStore(str(tmp_path), 1 << 20, workers=1) as store:
        for step in (3, 6):
            publish(store, configured(), step)
    return tmp_path


def test_a_superseded_commit_is_not_worth_a_word(superseded: Path) -> None:
    """It read as if something had been lost."""
    message = begun(superseded, configured()).message
    assert message == "resuming after step 6 (commit 2)"


def test_a_damaged_commit_is_told_beside_the_one_that_is_taken(superseded: Path) -> None:
    """Steps are made again; the user must know why."""
    newest = superseded / "rank-00000/manifest.0"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    message = begun(superseded, configured()).message
    taken, told = message.split("; ")
    assert taken == "resuming after step 3 (commit 1)"
    assert told.startswith("it is the newest that is whole: manifest.0: ")
    assert "superseded" not in told


def test_budgets_and_pipeline_are_nobodys_business(tmp_path: Path) -> None:
    other = configured("offload.host.capacity=1GiB", "offload.pipeline=sync", "offload.codec=lz4")
    assert "changed" not in going_on(tmp_path, configured(), other).message


def test_what_may_change_numbers_is_told_with_both_values(tmp_path: Path) -> None:
    other = configured(
        "name=mine", "train.steps=200", "offload.idle_expert_policy=dense", "runtime.threads=77"
    )
    message = going_on(tmp_path, configured(), other).message
    assert "(commit 1 of tiny-moe)" in message
    assert "offload.idle_expert_policy = dense (was replay)" in message
    assert "train.steps = 200 (was 120)" in message
    assert "runtime.threads = 77 (was " in message


@pytest.mark.parametrize(
    ("override", "was"),
    [
        ("model.norm_topk_prob=false", "True"),
        ("optimizer.beta1=0.8", "0.9"),
        ("optimizer.weight_decay=0.0", "0.1"),
        ("train.freeze=[norm]", r"\[\]"),
        ("train.seed=2", "1"),
        ("train.seq_len=32", "64"),
        ("data.held_out_fraction=0.2", "0.05"),
        ("data.seed=2", "1"),
        ("offload.idle_expert_policy=skip", "replay"),
    ],
)
def test_what_the_state_depends_on_is_refused_with_key_and_both_values(
    tmp_path: Path, override: str, was: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"--resume: {key} = .* allowed is {was} \(differing"):
        going_on(tmp_path, configured(), configured(override))


def test_idle_experts_that_were_skipped_are_not_replayed(tmp_path: Path) -> None:
    """The ledger does not have the steps that a skipped unit never made."""
    skipping = configured("offload.idle_expert_policy=skip")
    with pytest.raises(ConfigError, match="was made with skip"):
        going_on(tmp_path, skipping, configured())


def test_a_commit_of_something_else_is_no_starting_point(tmp_path: Path) -> None:
    with NvmeStore(str(tmp_path), 1 << 20, workers=1) as store:
        store.publish(store.cut({"other": 1}))
    with pytest.raises(StorageError, match="the commit says nothing usable of its run"):
        begun(tmp_path, configured())
