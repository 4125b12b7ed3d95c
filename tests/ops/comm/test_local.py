"""Ranks as threads: the whole conformance suite, and what a failing rank does to the others."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from ops.comm.base import World
from ops.comm.local import run_local
from ops.errors import CommError
from tests.ops.comm import comm_conformance


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in comm_conformance.CHECKS])
def test_conformance(size: int, name: str) -> None:
    run_local(size, getattr(comm_conformance, name))


def test_results_come_in_rank_order() -> None:
    assert run_local(3, lambda world, factor: world.rank * factor, 10) == [0, 10, 20]


def test_the_first_error_is_raised_and_the_others_are_released() -> None:
    broken: list[str] = []

    def work(world: World) -> None:
        if world.rank == 2:
            raise KeyError("rank 2 broke")
        with pytest.raises(CommError) as caught:
            world.barrier()
        broken.append(str(caught.value))

    with pytest.raises(KeyError, match="rank 2 broke"):
        run_local(3, work)
    assert len(broken) == 2 and all("rank 2 failed" in text for text in broken)


def test_abort_breaks_every_wait() -> None:
    def work(world: World) -> None:
        group = world.split([[0, 1], [2]], "pair")
        if world.rank == 2:
            world.abort(3)
        elif world.rank == 0:
            group.recv(np.empty(1), 1)
        else:
            world.barrier()

    with pytest.raises(CommError, match="rank 2 aborted with code 3"):
        run_local(3, work)


def test_a_wait_that_lasts_too_long_prints_all_stacks(tmp_path: Path) -> None:
    release = threading.Event()

    def stuck_elsewhere(world: World) -> None:
        if world.rank == 1:
            assert release.wait(60)
        else:
            try:
                world.all_reduce(np.zeros(3))
            finally:
                release.set()

    with (
        (tmp_path / "stacks").open("w+") as output,
        pytest.raises(CommError, match=r"all_reduce of group 'world' \(rank 0\) did not end"),
    ):
        run_local(2, stuck_elsewhere, timeout_seconds=0.3, output=output)
    stacks = (tmp_path / "stacks").read_text()
    assert (
        "all_reduce of group 'world' (rank 0) did not end within 0.3 s (runtime.collective_timeout)"
        in stacks
    )
    assert "in stuck_elsewhere" in stacks and stacks.count("Thread 0x") >= 2


def test_a_send_whose_messages_nobody_takes_expires() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            world.send(np.zeros(60, np.uint8), 1)
            with pytest.raises(CommError, match="send of group 'world'"):
                world.send(np.zeros(60, np.uint8), 1)

    with open("/dev/null", "w") as output:
        run_local(
            2, work, timeout_seconds=0.2, checked=False, outstanding_bytes_max=100, output=output
        )


def test_a_message_above_the_bound_is_lent_and_arrives() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            world.send(np.arange(100.0), 1)
        else:
            array = np.empty(100)
            world.recv(array, 0)
            assert (array == np.arange(100.0)).all()

    run_local(2, work, outstanding_bytes_max=100)


def test_a_message_of_another_size_is_an_error() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            world.send(np.zeros(3, np.uint8), 1)
        else:
            world.recv(np.zeros(4, np.uint8), 0)

    with pytest.raises(CommError, match="rank 0 sent 3 bytes, 4 were expected"):
        run_local(2, work, checked=False)


def test_a_checked_message_names_both_sides() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            world.send(np.zeros(3, np.float32), 1)
        else:
            world.recv(np.zeros(3, np.int32), 0)

    with pytest.raises(CommError, match="sent float32 x 3, the receiver waits for int32 x 3"):
        run_local(2, work)
