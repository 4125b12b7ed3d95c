"""A run that begins with somebody's weights, in a store where another run has left its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.config import load_config
from tests.launch.helpers import call_each, command, numbers_of, report_of
from tests.moe.weights.weight_files import random_weights, save_shards

IN_MEMORY = ("offload.host.capacity=64MiB", "offload.pipeline=sync", "train.recompute=full")
MIXED = ("offload.idle_expert_policy=dense", "offload.host.capacity=3MiB")


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """(store of an old run, a fresh one): what was printed in each life, by its name."""
    old, fresh, weights = (tmp_path_factory.mktemp(name) for name in ("old", "fresh", "weights"))
    model = load_config(command(old)[4], []).model
    rows = {
        name: array * np.float32(0.02) if array.ndim == 2 else np.ones_like(array)
        for name, array in random_weights(model).items()
    }
    save_shards(weights, rows, 2)
    start = ("--set", f"train.init_from={weights}")

    def options(*settings: str) -> list[str]:
        return [argument for item in settings for argument in ("--set", item)]

    commands = {
        "random": command(old, "--steps", "3"),
        "begun": command(old, "--steps", "2", *start),
        "resumed": command(old, *start, *options(*MIXED), "--resume", "latest"),
        "whole": command(fresh, *start, *options(*IN_MEMORY)),
    }
    # A run that goes on needs its weights no more.
    before = {2: f"os.rename({str(weights)!r}, {str(weights) + '.gone'!r})"}
    before[3] = f"os.rename({str(weights) + '.gone'!r}, {str(weights)!r})"
    before[1] = f"import os; os.renames({str(old / 'run')!r}, {str(old / 'random/run')!r})"
    said = call_each(tmp_path_factory.mktemp("said") / "said", list(commands.values()), before)
    return old, fresh, dict(zip(commands, said, strict=True))


def test_masters_and_moments_are_those_of_the_weights_in_every_tier(lives):
    """C65: stale copies, of a run that had trained in the same store, are never written back."""
    old, fresh, said = lives
    assert {name: x.returncode for name, x in said.items()} == dict.fromkeys(said, 0), said
    assert numbers_of(old) == numbers_of(fresh)
    assert report_of(old)["weights_digest"] == report_of(fresh)["weights_digest"]


def test_it_is_not_what_the_old_run_was(lives):
    old, fresh, _ = lives
    random = Path(old / "random")
    assert report_of(random)["weights_digest"] != report_of(fresh)["weights_digest"]
    assert numbers_of(random)[0] != numbers_of(fresh)[0]


def test_it_goes_on_with_what_it_has_learnt_since_and_without_the_files(lives):
    assert report_of(lives[0])["resumed_from"] == 2
