"""Channels over one stream a pair: nothing is taken that was not delivered, whoever asks first."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.comm.base import U8
from ops.comm.mux import COLLECTIVE, Mux
from ops.comm.watchdog import Watchdog
from ops.errors import CommError

JOIN_SECONDS = 60


class Wires:
    """What all ranks share: bytes delivered from rank to rank, and counters."""

    def __init__(self) -> None:
        self.delivered: defaultdict[tuple[int, int], deque[U8]] = defaultdict(deque)
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.lock = threading.Lock()


class FakeLine:
    """A `Line` that delivers at `flush` and fails when asked for what was not delivered."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.wires = wires
        self._put: list[tuple[int, U8]] = []

    def put(self, message: U8, to: int) -> None:
        self._put.append((to, message))

    def flush(self) -> None:
        with self.wires.lock:
            for to, message in self._put:
                self.wires.delivered[self.rank, to].append(message.copy())
        self._put.clear()

    def take(self, message: U8, source: int) -> None:
        with self.wires.lock:
            np.copyto(message, self.wires.delivered[source, self.rank].popleft())

    def add(self, counter: str, amount: int) -> int:
        with self.wires.lock:
            self.wires.counters[counter] += amount
            return self.wires.counters[counter]


def muxes(size: int = 2, timeout_seconds: float = 30, **options: Any) -> list[Mux]:
    wires = Wires()
    made = []
    for rank in range(size):
        watchdog = Watchdog(timeout_seconds, output=options.get("output"))
        mux = Mux(FakeLine(wires, rank, size), watchdog, options.get("bytes_max", 1 << 20))
        watchdog.tell_others = mux.tell_others
        made.append(mux)
    return made


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def close(*all_of_them: Mux) -> None:
    threads = [in_thread(lambda mux=mux: mux.close("close")) for mux in all_of_them]  # type: ignore[misc]
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive()


def message(text: bytes) -> U8:
    return np.frombuffer(text, np.uint8)


def received(mux: Mux, num_bytes: int, source: int, group: int, tag: int) -> bytes:
    out = np.empty(num_bytes, np.uint8)
    mux.receive(out, source, group, tag, "test")
    return out.tobytes()


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 1001, 5000])
def test_channels_are_told_apart_whatever_the_order(num_bytes: int) -> None:
    a, b = muxes()
    texts = {key: bytes([key[0] * 10 + key[1]]) * num_bytes for key in ((1, 0), (1, 5), (2, 5))}
    for (group, tag), text in texts.items():
        a.send([(1, message(text))], group, tag)
    for (group, tag), text in reversed(texts.items()):
        assert received(b, num_bytes, 0, group, tag) == text
    close(a, b)


def test_a_receiver_waits_until_the_message_comes() -> None:
    a, b = muxes()
    got: list[bytes] = []
    thread = in_thread(lambda: got.append(received(b, 3, 0, 0, COLLECTIVE)))
    a.send([(1, message(b"abc"))], 0, COLLECTIVE)
    thread.join(JOIN_SECONDS)
    assert got == [b"abc"]
    close(a, b)


def test_two_threads_that_wait_for_different_groups_both_get_theirs() -> None:
    a, b = muxes()
    got: dict[int, bytes] = {}

    def receive(group: int) -> None:
        got[group] = received(b, 2000, 0, group, COLLECTIVE)

    threads = [in_thread(lambda group=group: receive(group)) for group in (1, 2)]  # type: ignore[misc]
    for group in (2, 1):
        a.send([(1, message(bytes([group]) * 2000))], group, COLLECTIVE)
    for thread in threads:
        thread.join(JOIN_SECONDS)
    assert got == {1: b"\1" * 2000, 2: b"\2" * 2000}
    close(a, b)


def test_posts_above_the_bound_wait_for_the_receiver() -> None:
    a, b = muxes(bytes_max=100)
    a.post(message(b"x" * 60), 1, 0, 0, "test")
    second = in_thread(lambda: a.post(message(b"y" * 60), 1, 0, 0, "test"))
    assert received(b, 60, 0, 0, 0) == b"x" * 60
    second.join(JOIN_SECONDS)
    assert received(b, 60, 0, 0, 0) == b"y" * 60
    third = in_thread(lambda: a.post(message(b"z" * 200), 1, 0, 0, "test"))
    assert received(b, 200, 0, 0, 0) == b"z" * 200
    third.join(JOIN_SECONDS)
    assert not second.is_alive() and not third.is_alive()
    close(a, b)


def test_a_message_of_another_size_is_an_error() -> None:
    a, b = muxes()
    a.send([(1, message(b"abc"))], 0, 0)
    with pytest.raises(CommError, match="rank 0 sent 3 bytes, 4 were expected"):
        received(b, 4, 0, 0, 0)
    close(a, b)


def test_a_wait_that_lasts_too_long_has_all_ranks_print_their_stacks(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w+") as output:
        a, b, c = muxes(3, timeout_seconds=0.2, output=output)
        with pytest.raises(CommError, match=r"did not end within 0\.2 s"):
            received(a, 1, 1, 0, 0)
        for mux in (a, b, c):
            mux.watchdog.timeout_seconds = 30
        close(a, b, c)
    said = (tmp_path / "stacks").read_text()
    assert said.count("another rank waited too long; stacks of all threads") == 2
    assert "in receive" in said
