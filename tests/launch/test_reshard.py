"""A run goes on on any mesh: real ranks, real stores, the same weights."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launch.reshard_ranks import CHAINS
from tests.mpirun import run_ranks

Rows = dict[str, list[dict[str, object]]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    out = tmp_path_factory.mktemp("reshard")
    done = run_ranks(2, "tests.launch.reshard_ranks", str(out), seconds_max=900)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((Path(out) / f"{name}.json").read_text()) for name in CHAINS}


@pytest.mark.parametrize("chain", CHAINS)
def test_every_life_begins_with_the_weights_that_the_one_before_left(lives: Rows, chain: str):
    """C60, C61: masters whatever mesh and tiers; what idle experts missed is replayed on the way.

    `apart`: no rank sees the other's directory, so parts travel between ranks.
    """
    rows = lives[chain]
    for before, now in pairwise(rows):
        assert now["before"] == before["after"], now["message"]
    assert len({row["after"] for row in rows}) == len(rows), "each life trains"
    assert rows[0]["in_place"] is None


def test_moments_go_along(lives: Rows):
    """A pipeline computes what one rank does, bit for bit; so must one that changes its mesh."""
    changed, alone = lives["pipeline"], lives["alone"]
    assert [row["after"] for row in changed] == [row["after"] for row in alone]
    assert [row["loss"] for row in changed] == [row["loss"] for row in alone]


def test_only_the_same_mesh_goes_on_in_place(lives: Rows):
    assert [row["in_place"] for row in lives["pipeline"]] == [None, False, True, False]
    assert [row["in_place"] for row in lives["alone"]] == [None, True, True, True]


def test_what_changed_is_told(lives: Rows):
    message = str(lives["shared"][2]["message"])
    assert message.startswith("resuming after step 2 (commit 1 of 2 ranks)")
    assert "parallel.pipeline_stage = 2 (was 1)" in message
