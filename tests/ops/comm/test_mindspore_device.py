"""Collectives on Ascend, with a strict fake in place of cards (`fake_ascend.py`).

Messages of `send` travel through MindSpore's real `TCPStore`, which works without cards.
"""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import runtime
from mindspore.mint.distributed import TCPStore, distributed

from ops.comm import mindspore_device
from ops.comm.base import World
from ops.comm.mindspore import free_port
from ops.comm.mindspore_device import MINDSPORE, MindSporeDeviceWorld, _StoreLine
from ops.errors import CommError
from tests.ops.comm import comm_conformance, fake_ascend
from tests.ops.comm.fake_ascend import FakeCards

ROOT = Path(__file__).parents[3]
SECONDS_MAX = 300


def open_store(*arguments: Any, **options: Any) -> TCPStore:
    """Open a store that is never dropped.

    MindSpore 2.10 dies of SIGSEGV when a server is dropped before a client of its own process: half
    of the runs of this file, whose ranks are threads. Ranks that are processes do not meet it, for
    a client lives on when the server's process drops it or ends.
    """
    store = TCPStore(*arguments, **options)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


@pytest.fixture(autouse=True)
def stores_outlive_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_device, "TCPStore", open_store)


def run_ranks(size: int, work: Callable[[World], Any], **options: Any) -> list[Any]:
    """Run `work` on `size` ranks, each a thread with a card; raises the first error."""
    cards = FakeCards(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            world = MindSporeDeviceWorld(library=cards.library(rank), **options)
            results[rank] = work(world)
            world.free()
        except BaseException as error:
            errors.append(error)
            cards.break_all(f"rank {rank} failed")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("name", [name for name in vars(MINDSPORE) if name != "world_group"])
def test_the_fake_takes_what_mindspore_takes(name: str) -> None:
    """So a call with a wrong or missing argument fails here as it would on a card."""
    fake = getattr(FakeCards(2).library(0), name)
    ours, theirs = inspect.signature(fake), inspect.signature(getattr(MINDSPORE, name))
    assert _shape(ours) == _shape(theirs)


def test_streams_and_events_of_the_fake_are_called_like_mindspores() -> None:
    for ours, theirs in (
        (fake_ascend._Stream.record_event, runtime.Stream.record_event),
        (fake_ascend._Event.query, runtime.Event.query),
    ):
        assert _shape(inspect.signature(ours)) == _shape(inspect.signature(theirs))
    assert {"__enter__", "__exit__"} <= set(dir(runtime.StreamCtx))


def test_mindspore_hands_our_arguments_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real function up to the kernel, which needs a card; the output is written in place."""
    given: list[Any] = []

    def kernel(*arguments: Any) -> tuple[None, None]:
        given.extend(arguments)
        return None, None

    monkeypatch.setattr(distributed, "dist_comm_all_to_all_v_single_op", kernel)
    monkeypatch.setattr(distributed, "get_cache_group_size", lambda group: 2)
    output, source = MINDSPORE.empty(9, dtype=ms.uint8), MINDSPORE.empty(12, dtype=ms.uint8)
    MINDSPORE.all_to_all_single(output, source, [0, 9], [12, 0], group="headrace-1-0")
    assert given[0] is output and given[1].shape == (12,) and given[1].dtype == ms.uint8
    sends, receives, asynchronous = given[3], given[4], given[7]
    assert (given[2], sends, receives) == ("headrace-1-0", [12, 0], [0, 9])
    assert given[5] == 2 and not asynchronous


def _shape(signature: inspect.Signature) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("size", [2, 3])
def test_conformance(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_device, "_STAGE_BYTES", 100_000)
    monkeypatch.setattr(comm_conformance, "MESSAGE_BYTES", 1 << 20)
    monkeypatch.setattr(comm_conformance, "OUTSTANDING", 4 << 20)
    monkeypatch.setattr(comm_conformance, "SUMMED", ("float32", "int64"))
    monkeypatch.setattr(comm_conformance, "CARRIED", ("float32", "uint16", "uint8"))
    passed = run_ranks(
        size,
        lambda world: comm_conformance.run_all(world, skip=comm_conformance.LONG),
        checked=True,
        timeout_seconds=600,
        outstanding_bytes_max=4 << 20,
    )
    wanted = [check.__name__ for check in comm_conformance.CHECKS]
    assert passed == [[name for name in wanted if name not in comm_conformance.LONG]] * size


def test_ranks_that_need_fewer_rounds_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 10 bytes: rank 0 sends one of 95 to rank 1 alone, rank 2 nothing."""
    monkeypatch.setattr(mindspore_device, "_STAGE_BYTES", 30)
    calls: list[int] = []

    def work(world: World) -> None:
        message = np.arange(95, dtype=np.uint8)
        send = message if world.rank == 0 else message[:0]
        recv = np.zeros(95 if world.rank == 1 else 0, np.uint8)
        lane = world._lane  # type: ignore[attr-defined]
        count = lane._round
        monkeypatch.setattr(lane, "_round", lambda *a: calls.append(world.rank) or count(*a))
        world.all_to_all(
            send,
            [0, send.size, 0],
            recv,
            [recv.size, 0, 0],
        )
        if world.rank == 1:
            assert (recv == message).all()

    run_ranks(3, work)
    # The barrier of `free` adds one.
    assert [calls.count(rank) for rank in range(3)] == [11, 11, 11]


def test_a_rank_alone_needs_no_card_for_its_collectives() -> None:
    def work(world: World) -> None:
        array = np.ones(3)
        world.all_reduce(array)
        world.split([[0]], "alone").free()
        assert (array == 1).all()

    run_ranks(1, work)


def test_a_rank_that_never_comes_is_an_error_with_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    def work(world: World) -> None:
        if world.rank == 1:
            assert release.wait(60)
            return
        # Of waits only: the limit of a call, which would end this process, stays long.
        world._device.watchdog.timeout_seconds = 0.3  # type: ignore[attr-defined]
        try:
            world.all_reduce(np.zeros(3))
        finally:
            release.set()

    with pytest.raises(CommError, match=r"all_reduce of group 'world' \(rank 0\) did not end"):
        run_ranks(2, work)
    assert (
        "did not end within 0.3 s (runtime.collective_timeout); stacks of all threads"
        in capfd.readouterr().err
    )


def test_an_error_of_the_library_names_the_call() -> None:
    def work(world: World) -> None:
        if world.rank == 1:
            raise KeyError("rank 1 broke")
        with pytest.raises(CommError, match=r"barrier of group 'world' \(rank 0\): rank 1 failed"):
            world.barrier()

    with pytest.raises(KeyError, match="rank 1 broke"):
        run_ranks(2, work)


def test_work_is_launched_only_under_the_lock_that_others_hold(
    capfd: pytest.CaptureFixture[str],
) -> None:
    launches = threading.Lock()
    with launches, pytest.raises(CommError, match="waiting for another thread's calls"):
        MindSporeDeviceWorld(
            library=FakeCards(1).library(0), launches=launches, timeout_seconds=0.2
        )
    assert "stacks of all threads" in capfd.readouterr().err
    MindSporeDeviceWorld(library=FakeCards(1).library(0), launches=launches).free()
    assert not launches.locked()


def test_a_call_that_blocks_inside_the_library_ends_the_process() -> None:
    """Even one that keeps the interpreter's lock, so no Python thread could do it."""
    program = """
        import ctypes, dataclasses
        from ops.comm.mindspore_device import MindSporeDeviceWorld
        from tests.ops.comm.fake_ascend import FakeCards
        def block(*args, **kwargs):
            ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock
        library = dataclasses.replace(FakeCards(1).library(0), Stream=block)
        MindSporeDeviceWorld(library=library, timeout_seconds=1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Timeout (0:00:01)!" in done.stderr and "in block" in done.stderr


def test_the_store_carries_long_messages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_device, "_STORE_PIECE_BYTES", 1000)
    port, timeout = free_port(), timedelta(seconds=60)
    lines = [
        _StoreLine(
            open_store("127.0.0.1", port, 2, first, timeout, wait_for_workers=False), rank, 2
        )
        for rank, first in ((0, True), (1, False))
    ]
    sent = [np.arange(count, dtype=np.int16).view(np.uint8) for count in (1750, 2, 500)]
    for message in sent:
        lines[1].put(message, 0)
    lines[1].flush()
    for message in sent:
        got = np.empty_like(message)
        lines[0].take(got, 1)
        assert (got == message).all()
    assert lines[0].add("counter", 3) == 3 and lines[1].add("counter", 0) == 3
