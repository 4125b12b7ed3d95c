"""Going on where every machine has a drive of its own, and what one sees no other does.

A rank is a thread, a machine a directory; `order[rank]` is the machine that a rank runs on.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.build import make_plan
from launch.config import RunConfig
from launch.origin import Origin, find_origin
from launch.rank_store import RankStore, open_rank_store
from launch.resume import starting_point
from offload.checkpoint.catalog import find_checkpoints
from offload.nvme.directory import PUBLISHED_FILE_NAME, ranks_under
from offload.rank_commits import RECORD_NAME
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import ConfigError, HeadraceError, StorageError
from tests.launch.test_rank_store import commit, configured, step_found

AS_WAS, SWAPPED = (0, 1), (1, 0)


class Machines:
    """Drives of machines under one directory; `keep` commits are retained."""

    def __init__(self, path: Path, keep: int = 1) -> None:
        self.path, self.keep = path, keep

    def drive(self, machine: int) -> Path:
        return self.path / f"machine-{machine}"

    def config(self, order: Sequence[int], rank: int) -> RunConfig:
        config = configured(self.drive(order[rank]), len(order))
        return replace(config, offload=replace(config.offload, keep_in_store=self.keep))

    def on_ranks(self, order: Sequence[int], work: Any) -> list[Any]:
        """`work(world, config)` of every rank."""

        def rank(world: World) -> Any:
            return work(world, self.config(order, world.rank))

        return [rank(SingleRank())] if len(order) == 1 else run_local(len(order), rank)

    def live(self, order: Sequence[int], work: Any, resume: str | None = "latest") -> list[Any]:
        """`work(world, opened, config)` of every rank, with its store."""

        def rank(world: World, config: RunConfig) -> Any:
            origin = find_origin(config, resume, world)
            plan = make_plan(config, rank=world.rank)
            opened = open_rank_store(config, plan, origin, world)
            try:
                return work(world, opened, config)
            finally:
                opened.store.close()

        return self.on_ranks(order, rank)

    def train(
        self, order: Sequence[int], *steps: int, resume: str | None = "latest", until="published"
    ) -> None:
        def work(world: World, opened: RankStore, config: RunConfig) -> None:
            for step in steps:
                commit(config, opened, step, until=until)

        self.live(order, work, resume)

    def origins(self, order: Sequence[int], resume: str = "latest") -> list[Origin | None]:
        return self.on_ranks(order, lambda world, config: find_origin(config, resume, world))

    def step_of(self, order: Sequence[int]) -> int | None:
        """The step that all ranks would go on after."""

        def step(world: World, config: RunConfig) -> int | None:
            origin = find_origin(config, "latest", world)
            return None if origin is None else starting_point(config, origin, True).step

        (found,) = set(self.on_ranks(order, step))
        return found

    def refusal(self, order: Sequence[int], resume: str = "latest") -> str:
        """What all ranks say when they are refused with exit status 2, and nothing changes."""
        before = self.files()

        def rank(world: World, config: RunConfig) -> HeadraceError:
            with pytest.raises(HeadraceError) as caught:
                find_origin(config, resume, world)
            return caught.value

        errors = self.on_ranks(order, rank)
        assert {type(error) for error in errors} == {ConfigError}, errors
        assert self.files() == before
        (message,) = {str(error).replace(str(self.path), "") for error in errors}
        return message

    def files(self) -> dict[str, bytes]:
        return {
            str(x.relative_to(self.path)): x.read_bytes()
            for x in self.path.rglob("*")
            if x.is_file() and x.name != "data.bin"
        }


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_a_commit_is_found_when_the_order_of_machines_is_another(machines):
    """Rank 0 saw only its new machine, which has no record: the run began at step 0, and both
    parts of the commit were removed."""
    machines.train(AS_WAS, 3, 4, resume=None)
    assert machines.step_of(SWAPPED) == 4
    origins = machines.origins(SWAPPED)
    assert all(x is not None and not x.in_place for x in origins)
    assert [dict(x.readers) for x in origins if x] == [{0: 1, 1: 0}] * 2
    machines.live(SWAPPED, lambda world, opened, config: None)
    assert machines.step_of(AS_WAS) == 4, "nothing is given up before there is a newer commit"
    assert all(x is not None and x.in_place for x in machines.origins(AS_WAS))


def test_an_older_record_does_not_win_over_newer_parts(machines):
    """The record of the order before stayed where rank 0 had been; going back to that order would
    have gone on after the older commit."""
    machines.keep = 2
    machines.train(AS_WAS, 3, 4, resume=None)
    machines.train(SWAPPED, 5)
    assert (machines.drive(0) / RECORD_NAME).exists(), "two commits are kept"
    assert machines.step_of(AS_WAS) == machines.step_of(SWAPPED) == 5
    machines.train(AS_WAS, 6)
    assert machines.step_of(AS_WAS) == machines.step_of(SWAPPED) == 6


@pytest.mark.parametrize("keep", [1, 2])
def test_what_the_order_before_left_is_given_up_in_time(tmp_path, keep):
    machines = Machines(tmp_path, keep)
    machines.train(AS_WAS, 3, 4, resume=None)
    machines.train(SWAPPED, *range(5, 5 + keep))
    assert ranks_under(str(machines.drive(0))) == [1]
    assert ranks_under(str(machines.drive(1))) == [0]
    assert not (machines.drive(0) / RECORD_NAME).exists()
    assert machines.step_of(SWAPPED) == 4 + keep
    assert machines.step_of(AS_WAS) == 4 + keep


def test_a_part_whose_record_is_lost_is_not_discarded(machines):
    """Rank 0's machine was replaced: the run began at step 0 and removed rank 1's part, so that
    the commit was lost although the old machine still had the rest of it."""
    machines.train(AS_WAS, 3, resume=None)
    machines.drive(0).rename(machines.path / "away")
    for order in (AS_WAS, SWAPPED):
        message = machines.refusal(order)
        assert "commit 1 of 2 ranks is not usable: no rank can read the part of rank 0" in message
        assert "`headrace checkpoint copy`" in message
        assert "start without --resume, which discards" in message
    (machines.path / "away").rename(machines.drive(0))
    assert machines.live(AS_WAS, lambda world, opened, _: step_found(world, opened)) == [3, 3]


def test_a_machine_that_holds_something_else_is_none_that_is_broken(machines):
    machines.train(AS_WAS, 3, resume=None)
    shutil.move(machines.drive(0), machines.path / "away")
    machines.train(AS_WAS[:1], 1, resume=None)
    assert "are not of one run" in machines.refusal(AS_WAS)
    shutil.rmtree(machines.drive(0))
    machines.train(AS_WAS[:1], 1, resume=None, until="prepared")
    for slot in machines.drive(0).glob("rank-00000/manifest.*"):
        slot.unlink()
    assert "holds no commit 1" in machines.refusal(AS_WAS)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_machine_that_is_away_does_not_cost_the_newest_commit(tmp_path, keep):
    """Of two commits that are kept the older one was whole without it: it would have been taken,
    and what is here of the newer one written over."""
    machines = Machines(tmp_path, keep)
    machines.train(AS_WAS, 3, resume=None)
    machines.train((0, 1, 2, 2), 4)
    machines.drive(2).rename(machines.path / "away")
    message = machines.refusal(AS_WAS)
    assert "commit 2 of 4 ranks is not usable: no rank can read the parts of ranks 2, 3" in message
    assert machines.refusal((0, 1, 2, 2)) != ""
    (machines.path / "away").rename(machines.drive(2))
    assert machines.step_of((0, 1, 2, 2)) == 4


@pytest.mark.parametrize("steps", [(3,), (3, 4)])
def test_a_record_that_is_lost_is_with_the_parts_as_well(tmp_path, steps):
    """One machine, `commits.json` gone: `checkpoint list` called the commit incomplete, and
    `--resume latest` saw none and removed it."""
    machines = Machines(tmp_path)
    machines.train((0, 0), *steps, resume=None)
    (machines.drive(0) / RECORD_NAME).unlink()
    (found,) = find_checkpoints([str(machines.drive(0))])
    assert found.is_complete and found.step == steps[-1]
    live = machines.live((0, 0), lambda world, opened, _: step_found(world, opened))
    assert live == [steps[-1]] * 2
    machines.train((0, 0), 9)
    assert machines.step_of((0, 0)) == 9


@pytest.mark.parametrize("order", [AS_WAS, (0, 0)])
def test_parts_of_an_older_version_without_a_record_are_not_discarded(machines, order):
    """It kept no copies of the record; only a store's first commit may be one that was merely
    prepared."""
    machines.train(order, 3, 4, resume=None)
    for path in machines.path.rglob("*"):
        if path.name in (PUBLISHED_FILE_NAME, RECORD_NAME):
            path.unlink()
    message = machines.refusal(order)
    assert "no record" in message and "start without --resume, which discards" in message


@pytest.mark.parametrize("order", [AS_WAS, SWAPPED, (0, 0)])
def test_what_was_only_prepared_is_discarded_on_any_machine(machines, order):
    machines.train(order, 3, resume=None, until="prepared")
    assert machines.step_of(AS_WAS) is None
    machines.train(AS_WAS, 1)
    assert machines.step_of(AS_WAS) == 1


def test_a_run_that_begins_anew_leaves_nothing_that_looks_newer(machines):
    """The record of another order lies where rank 0 is not, and its commits have larger numbers."""
    machines.train(SWAPPED, 3, 4, 5, resume=None)
    machines.train(AS_WAS, 1, resume=None)
    assert machines.step_of(AS_WAS) == machines.step_of(SWAPPED) == 1
    assert not (machines.drive(1) / RECORD_NAME).exists()


def test_a_commit_of_one_rank_is_found_on_the_machine_of_another(machines):
    machines.train((0,), 3, resume=None)
    assert machines.step_of(SWAPPED) == 3
    machines.keep = 2
    machines.train(SWAPPED, 4)
    assert ranks_under(str(machines.drive(0))) == [0, 1], "two commits are kept"
    assert machines.step_of(AS_WAS) == machines.step_of(SWAPPED) == 4


def test_commits_that_are_not_of_one_run_are_not_chosen_from(machines):
    """Which of them is the newer nobody can tell; going on with one would discard the other."""
    machines.train(AS_WAS, 3, 4, resume=None)
    shutil.rmtree(machines.drive(0))
    machines.train((0, 2), 7, resume=None)
    message = machines.refusal(AS_WAS)
    assert "are not of one run" in message
    assert "rank 0: commit 1 of 2 ranks in /machine-0" in message
    assert "rank 1: commit 2 of 2 ranks in /machine-1" in message


def test_all_commits_of_one_rank_come_in_their_order(tmp_path):
    """A retained commit of one rank was listed, and taken, before the newer one of several."""
    machines = Machines(tmp_path, keep=2)
    machines.train((0,), 3, resume=None)
    machines.train((0, 0), 4)
    assert [x.step for x in find_checkpoints([str(machines.drive(0))])] == [4, 3]
    assert machines.step_of((0, 0)) == 4
    machines.train((0, 0), 5)
    assert machines.step_of((0, 0)) == 5


def test_a_link_that_leads_elsewhere_on_one_machine_is_told_by_all(machines):
    """Whether the path is the run's own store was decided by each rank alone, though it fixes how
    many collectives opening the stores takes: the ranks got out of step."""
    machines.train(AS_WAS, 3, resume=None)
    link = machines.path / "link"
    link.symlink_to(machines.drive(0))
    message = machines.refusal(AS_WAS, resume=str(link))
    assert "the run's own store (offload.nvme.path) on rank 0 alone" in message
    assert "a link leads elsewhere" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_copy_of_the_record_costs_nothing_beside_the_record(tmp_path, rank):
    machines = Machines(tmp_path)
    machines.train((0, 0), 3, resume=None)
    copy = machines.drive(0) / f"rank-{rank:05d}" / PUBLISHED_FILE_NAME
    copy.write_bytes(copy.read_bytes()[:-1])
    (found,) = find_checkpoints([str(machines.drive(0))])
    assert found.is_complete and len(found.notes) == 1 and str(copy) in found.notes[0]
    assert machines.step_of((0, 0)) == 3


def test_copies_that_are_all_damaged_are_a_storage_fault(tmp_path):
    """Without the record nothing says what was published, so nothing may be discarded."""
    machines = Machines(tmp_path)
    machines.train((0, 0), 3, resume=None)
    for path in machines.path.rglob("*.json"):
        if path.name in (PUBLISHED_FILE_NAME, RECORD_NAME):
            path.unlink() if path.name == RECORD_NAME else path.write_text("{}")

    def rank(world: World, config: RunConfig) -> str:
        with pytest.raises(StorageError) as caught:
            find_origin(config, "latest", world)
        return str(caught.value)

    (message,) = set(machines.on_ranks((0, 0), rank))
    assert "rank-00000/published.json" in message and "rank-00001/published.json" in message


def test_a_run_that_goes_on_from_another_store_begins_its_own_record(machines):
    """Commits of what its path held before do not count among its own."""
    machines.train(AS_WAS, 3, 4, resume=None)
    copy = machines.path / "kept"
    shutil.copytree(machines.drive(0), copy)
    shutil.copytree(machines.drive(1), copy, dirs_exist_ok=True)
    machines.train(SWAPPED, 1, 2, resume=None)
    machines.train(AS_WAS, 5, resume=str(copy))
    assert machines.step_of(AS_WAS) == machines.step_of(SWAPPED) == 5
    assert ranks_under(str(machines.drive(0))) == [0]


def test_a_start_anew_that_was_killed_half_way_is_told_and_can_be_repeated(tmp_path):
    """Rank 0's store was emptied, rank 1's was not: what is left is no commit any more."""
    machines = Machines(tmp_path)
    machines.train((0, 0), 3, 4, resume=None)
    (machines.drive(0) / RECORD_NAME).unlink()
    for path in machines.drive(0).glob("rank-00000/*"):
        if path.name.startswith(("manifest", "published")):
            path.unlink()
    message = machines.refusal((0, 0))
    assert "no rank can read the part of rank 0" in message and "which discards" in message
    machines.train((0, 0), 1, resume=None)
    assert machines.step_of((0, 0)) == 1
