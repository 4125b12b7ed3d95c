"""`--resume` never discards commits that it does not go on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.config import RunConfig
from launch.origin import find_origin
from launch.own_path import require_nothing_lost
from offload.checkpoint.catalog import find_checkpoints
from offload.nvme.store import NvmeStore
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import ConfigError
from tests.launch.test_resume import configured, publish


def store_at(paths: list[str], step: int = 3) -> None:
    with NvmeStore(paths, 1 << 20, workers=1) as store:
        publish(store, configured(), step)


def in_paths(*paths: Path) -> RunConfig:
    config = configured()
    told = str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]
    return replace(
        config, offload=replace(config.offload, nvme=replace(config.offload.nvme, path=told))
    )


def begin(config: RunConfig, resume: str | None, world: World | None = None) -> int | None:
    """What a run asks before it opens anything; the step it would go on after."""
    world = world or SingleRank()
    origin = find_origin(config, resume, world)
    require_nothing_lost(config, origin, resume, world)
    return None if origin is None else origin.meta["step"]


def steps_in(path: Path) -> list[int]:
    return [checkpoint.meta["step"] for checkpoint in find_checkpoints([str(path)])]


def test_going_on_from_elsewhere_over_ones_own_commits_is_refused(tmp_path):
    """Its own were discarded first; then the other was damaged, of another text, or too large."""
    own, other = tmp_path / "own", tmp_path / "other"
    store_at([str(own)], 5)
    store_at([str(other)], 3)
    with pytest.raises(ConfigError, match=r"own/rank-00000.*would discard; .*--resume latest"):
        begin(in_paths(own), str(other))
    assert steps_in(own) == [5]
    assert begin(in_paths(own), "latest") == 5
    assert begin(in_paths(tmp_path / "new"), str(other)) == 3
    assert begin(in_paths(own), None) is None, "who does not go on is told what is discarded"


def test_every_rank_is_told_what_one_of_them_would_lose(tmp_path):
    """Machines may have drives of their own: the path of one rank is free, another's is not."""
    own, other = tmp_path / "own", tmp_path / "other"
    store_at([str(own)], 5)
    store_at([str(other)], 3)
    said = []

    def of_rank(world: World) -> None:
        config = in_paths(own if world.rank == 1 else tmp_path / "free")
        with pytest.raises(ConfigError) as caught:
            begin(config, str(other), world)
        said.append(str(caught.value))

    run_local(2, of_rank)
    assert len(said) == 2 and said[0] == said[1] and "rank 1: " in said[0]
    assert steps_in(own) == [5]


@pytest.mark.parametrize("order", [["new", "a"], ["b", "a"], ["new", "b", "a"]], ids="-".join)
def test_other_paths_than_the_stores_are_refused_and_not_begun_anew_in(tmp_path, order):
    """A drive was put in front, or two were swapped: it began at step 0 and discarded all."""
    names = ("a", "b") if "b" in order else ("a",)
    store_at([str(tmp_path / name) for name in names])
    with pytest.raises(ConfigError):
        begin(in_paths(*(tmp_path / name for name in order)), "latest")


@pytest.mark.parametrize(
    ("saved", "now"), [(["a"], ["a", "b"]), (["a", "b"], ["a"]), (["a", "b"], ["b", "a"])]
)
def test_a_store_is_not_gone_on_from_into_some_of_its_own_paths(tmp_path, saved, now):
    """The commit was discarded before it was read: adding a drive this way lost everything."""
    store_at([str(tmp_path / name) for name in saved])
    resume = ":".join(str(tmp_path / name) for name in saved)
    with pytest.raises(ConfigError, match="its own paths"):
        begin(in_paths(*(tmp_path / name for name in now)), resume)
    (checkpoint,) = find_checkpoints([str(tmp_path / name) for name in saved])
    assert checkpoint.meta["step"] == 3


def test_a_path_where_nothing_is_committed_is_free(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    NvmeStore(str(own), 1 << 20, workers=1).close()
    store_at([str(other)])
    assert begin(in_paths(own), str(other)) == 3
    assert begin(in_paths(own), "latest") is None
