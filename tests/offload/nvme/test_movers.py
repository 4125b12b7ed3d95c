"""Calls are made in order, at most so many at once, and what they raise reaches their owner."""

from __future__ import annotations

import threading

import pytest

from offload.nvme.movers import Movers

WAIT_S_MAX = 20.0


@pytest.fixture
def start():
    opened = []

    def make(calls_max):
        opened.append(Movers(calls_max))
        return opened[-1]

    yield make
    for movers in opened:
        movers.stop()


def test_calls_begin_in_the_order_they_were_left(start):
    movers, order, gate = start(1), [], threading.Event()
    calls = [movers.start(lambda: gate.wait(WAIT_S_MAX))]
    calls += [movers.start(lambda n=n: order.append(n)) for n in range(20)]
    assert order == []
    gate.set()
    for call in calls:
        call.wait()
    assert order == list(range(20))


def test_so_many_calls_run_at_once_and_no_more(start):
    movers, lock, together = start(3), threading.Lock(), threading.Barrier(3)
    running = peak = 0

    def work():
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        together.wait(WAIT_S_MAX)  # nobody leaves before three are inside
        with lock:
            running -= 1

    for call in [movers.start(work) for _ in range(9)]:
        call.wait()
    assert peak == 3


@pytest.mark.parametrize("error", [OSError(5, "EIO"), KeyboardInterrupt(), SystemExit(1)])
def test_what_a_call_raises_reaches_its_owner_and_nobody_else(start, error):
    movers, done = start(1), []

    def fail():
        raise error

    failed, good = movers.start(fail), movers.start(lambda: done.append(1))
    with pytest.raises(type(error)) as caught:
        failed.wait()
    good.wait()
    assert caught.value is error and done == [1]


def test_stopping_makes_the_calls_left_and_ends_the_threads():
    before, done = threading.active_count(), []
    movers = Movers(2)
    calls = [movers.start(lambda n=n: done.append(n)) for n in range(10)]
    movers.stop()
    for call in calls:
        call.wait()
    assert sorted(done) == list(range(10)) and threading.active_count() == before
