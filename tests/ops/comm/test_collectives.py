"""The algorithms apart from a transport: one rank alone, memory bounds, misuse by threads."""

from __future__ import annotations

import numpy as np
import pytest

from ops.comm.base import MAX, PIECE_BYTES, U8, World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.comm.stats import CommStats
from ops.errors import CommError


def one_rank() -> World:
    return SingleRank()


def test_one_rank_gets_what_it_gives() -> None:
    world = one_rank()
    array = np.arange(5, dtype=np.float32)
    world.all_reduce(array)
    world.all_reduce(array, MAX)
    world.broadcast(array, 0)
    assert array.tolist() == [0, 1, 2, 3, 4]
    for call in (world.all_gather, world.reduce_scatter):
        out = np.zeros(5, np.float32)
        call(array, out)
        assert (out == array).all()
    out = np.zeros(5, np.float32)
    world.all_to_all(array, [5], out, [5])
    assert (out == array).all()
    assert world.all_gather_object({"a": [1]}) == [{"a": [1]}]
    world.barrier()
    group = world.split([[0]], "data")
    assert (group.rank, group.size, group.ranks, group.name) == (0, 1, (0,), "data")
    assert group.stats is world.stats
    group.free()


def test_one_rank_sends_no_bytes_and_ends_with_its_code() -> None:
    world = one_rank()
    world.all_reduce(np.zeros(100))
    assert world.stats.snapshot()["all_reduce"].bytes == 0
    with pytest.raises(ValueError, match="itself"):
        world.send(np.zeros(1), 0)
    with pytest.raises(ValueError, match="partition"):
        world.split([[0], [1]], "none")
    with pytest.raises(SystemExit) as ended:
        world.abort(5)
    assert ended.value.code == 5


class Reentrant(SingleRank):
    """A group of two whose transport shows what a second thread would meet during a call."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks = (0, 1)

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        self.barrier()


def test_a_second_call_while_one_is_inside_is_refused() -> None:
    group = Reentrant()
    with pytest.raises(CommError, match=r"barrier of group 'world' .* another thread"):
        group.recv(np.empty(1), 1)
    with pytest.raises(CommError, match="no other rank"):
        group.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_scratch_memory_does_not_grow_with_the_array(size: int) -> None:
    def work(world: World) -> int:
        array = np.ones(3 * PIECE_BYTES // 4 + 7, np.float32)
        world.all_reduce(array)
        assert (array == size).all()
        world.reduce_scatter(np.ones((size, 2 * PIECE_BYTES // 4)), np.empty(2 * PIECE_BYTES // 4))
        return getattr(world, "_scratch").nbytes  # noqa: B009

    assert max(run_local(size, work, checked=False)) <= PIECE_BYTES + 8 * size


def test_bytes_are_those_sent_to_other_ranks() -> None:
    def work(world: World) -> CommStats:
        world.all_reduce(np.zeros(4 << 10, np.float32))
        world.all_to_all(np.zeros(8, np.uint8), [2] * 4, np.zeros(8, np.uint8), [2] * 4)
        world.broadcast(np.zeros(10, np.uint8), 1)
        return world.stats

    counts = [stats.snapshot() for stats in run_local(4, work, checked=False)]
    # Three quarters of 16 KiB out to be reduced, the reduced quarter to three ranks.
    assert [count["all_reduce"].bytes for count in counts] == [2 * 12 << 10] * 4
    assert [count["all_to_all"].bytes for count in counts] == [6] * 4
    assert [count["broadcast"].bytes for count in counts] == [0, 30, 0, 0]
    assert all(count["all_reduce"].calls == 1 for count in counts)


def test_stats_add_up() -> None:
    stats = CommStats()
    stats.add("send", 10, 0.5)
    before = stats.snapshot()
    stats.add("send", 5, 0.25)
    stats.add("barrier", 0, 1.0)
    assert list(stats.snapshot()) == ["barrier", "send"]
    assert stats.snapshot()["send"] == type(before["send"])(2, 15, 0.75, 0.75)
    assert before["send"].calls == 1 and stats.seconds() == stats.waited_seconds() == 1.75
