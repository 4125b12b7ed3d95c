"""What every `World` must do, as functions that each rank calls with its world, made `checked`.

The three transports run the same list: `test_local.py` with threads, `test_mpi.py` under
`mpirun` and `test_mindspore.py` under `msrun`. A function is entered by all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from ops.comm.base import MAX, MIN, OUTSTANDING_BYTES_MAX, PIECE_BYTES, Communicator, World
from ops.errors import CommError

SUMMED = ("float32", "float64", "int32", "int64", "uint8")
CARRIED = (*SUMMED, "uint16", "float16")
PERIOD = 4099
# A transport that is slow, or was made with another bound, sets these before it runs the suite.
MESSAGE_BYTES = 8 << 20
OUTSTANDING = OUTSTANDING_BYTES_MAX
# Many MiB to check what does not depend on the transport.
LONG = (
    "all_reduce_around_the_border_of_a_piece",
    "reduce_scatter_gives_each_rank_its_part_of_the_sum",
)
CHECKS: list[Callable[[World], None]] = []


def check(function: Callable[[World], None]) -> Callable[[World], None]:
    """Make a function part of the suite."""
    CHECKS.append(function)
    return function


def values(rank: int, size: int, dtype: str) -> np.ndarray:
    """Values of `rank`, any bit pattern for integers; floats of very different sizes.

    They repeat after a prime number of elements, so that parts of an array differ.
    """
    rng = np.random.default_rng([rank, size])
    count = min(size, PERIOD)
    if np.dtype(dtype).kind == "f":
        scale = 10.0 ** rng.integers(-3, 3, count)
        return np.resize((rng.standard_normal(count) * scale).astype(dtype), size)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.resize(rng.integers(low, high, count, dtype, endpoint=True), size)


def in_rank_order(rows: list[np.ndarray]) -> np.ndarray:
    """The sum whose bits everybody must get."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


@check
def ranks_are_numbered(world: World) -> None:
    assert world.ranks == tuple(range(world.size)) and world.ranks[world.rank] == world.rank
    assert world.kind in ("single", "local", "mpi", "mindspore") and world.name == "world"


@check
def all_reduce_adds_in_rank_order(world: World) -> None:
    for dtype in SUMMED:
        for size in (0, 1, 5, 1023, 1025, 4097):
            array = values(world.rank, size, dtype)
            world.all_reduce(array)
            wanted = in_rank_order([values(rank, size, dtype) for rank in range(world.size)])
            assert same_bits(array, wanted), (dtype, size)


@check
def all_reduce_around_the_border_of_a_piece(world: World) -> None:
    piece = PIECE_BYTES // 4
    for size in (piece - 1, piece, piece + 1, 2 * piece + 3):
        array = values(world.rank, size, "float32")
        world.all_reduce(array)
        wanted = in_rank_order([values(rank, size, "float32") for rank in range(world.size)])
        assert same_bits(array, wanted), size


@check
def all_reduce_finds_extremes(world: World) -> None:
    for dtype in SUMMED:
        for size in (3, 5000):
            rows = np.array([values(rank, size, dtype) for rank in range(world.size)])
            for op, wanted in ((MAX, rows.max(0)), (MIN, rows.min(0))):
                array = rows[world.rank].copy()
                world.all_reduce(array, op)
                assert same_bits(array, wanted), (dtype, size, op)


@check
def integers_beyond_the_mantissa_are_exact(world: World) -> None:
    array = np.array([2**62 // world.size + world.rank, -(2**53) - 1], np.int64)
    world.all_reduce(array)
    offsets = sum(range(world.size))
    assert array.tolist() == [
        2**62 // world.size * world.size + offsets,
        (-(2**53) - 1) * world.size,
    ]


@check
def infinities_and_nans_arrive(world: World) -> None:
    array = np.array([np.inf, np.nan] if world.rank == 0 else [1.0, 1.0])
    world.all_reduce(array)
    assert array[0] == np.inf and np.isnan(array[1])


@check
def reduce_scatter_gives_each_rank_its_part_of_the_sum(world: World) -> None:
    border = PIECE_BYTES // 4 // world.size
    for dtype, counts in [(dtype, (0, 1, 7)) for dtype in SUMMED] + [
        ("float32", (border - 1, border, border + 1, 2 * border + 5))
    ]:
        for count in counts:
            rows = [values(rank, count * world.size, dtype) for rank in range(world.size)]
            wanted = in_rank_order(rows).reshape(world.size, count)[world.rank]
            array, out = rows[world.rank].copy(), np.empty(count, dtype)
            world.reduce_scatter(array, out)
            assert same_bits(out, wanted) and same_bits(array, rows[world.rank])
            own = array.reshape(world.size, count)[world.rank]
            world.reduce_scatter(array, own)
            assert same_bits(own, wanted), "in place"


@check
def all_gather_keeps_every_bit(world: World) -> None:
    for dtype in CARRIED:
        for count in (0, 1, 13, 70_000):
            wanted = np.concatenate([values(rank, count, dtype) for rank in range(world.size)])
            out = np.zeros_like(wanted)
            world.all_gather(values(world.rank, count, dtype), out)
            assert same_bits(out, wanted), (dtype, count)
            in_place = np.zeros((world.size, count), dtype)
            in_place[world.rank] = values(world.rank, count, dtype)
            world.all_gather(in_place[world.rank], in_place)
            assert same_bits(in_place, wanted), "in place"


def _part(sender: int, receiver: int, count: int, dtype: str) -> np.ndarray:
    return values(100 * sender + receiver, count, dtype)


@check
def all_to_all_with_uneven_and_zero_counts(world: World) -> None:
    def uneven(i: int, j: int) -> int:
        return 0 if (i + j) % 3 == 0 else 17 * i + 5 * j

    def only_one_sends(i: int, j: int) -> int:
        return 1000 * (j + 1) if i == world.size - 1 else 0

    def nothing(i: int, j: int) -> int:
        return 0

    def large(i: int, j: int) -> int:
        return 70_000 + i - j

    for count in (uneven, only_one_sends, nothing, large):
        for dtype in ("uint16", "float32", "int64", "uint8"):
            me, ranks = world.rank, range(world.size)
            send = np.concatenate([_part(me, j, count(me, j), dtype) for j in ranks])
            wanted = np.concatenate([_part(i, me, count(i, me), dtype) for i in ranks])
            recv = np.zeros_like(wanted)
            world.all_to_all(
                send, [count(me, j) for j in ranks], recv, [count(i, me) for i in ranks]
            )
            assert same_bits(recv, wanted), (count.__name__, dtype)


@check
def broadcast_from_every_root(world: World) -> None:
    for dtype in CARRIED:
        for count in (0, 1, 3, 5001):
            for root in range(world.size):
                array = values(world.rank, count, dtype)
                world.broadcast(array, root)
                assert same_bits(array, values(root, count, dtype)), (dtype, count, root)


@check
def messages_of_one_tag_keep_their_order(world: World) -> None:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for dtype in CARRIED:
        for i in range(4):
            world.send(values(10 * i + world.rank, 50, dtype), right, tag=i % 2)
        for i in (1, 3, 0, 2):
            array = np.empty(50, dtype)
            world.recv(array, left, tag=i % 2)
            assert same_bits(array, values(10 * i + left, 50, dtype)), (dtype, i)
    world.send(np.empty(0, np.float32), right)
    world.recv(np.empty(0, np.float32), left)


@check
def send_does_not_wait_for_the_receiver(world: World) -> None:
    """Everybody sends three long messages, changes the array, and only then anybody receives."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    array = np.full(MESSAGE_BYTES // 4, float(world.rank), np.float32)
    for _ in range(3):
        world.send(array, right)
        array += world.size
    for i in range(3):
        world.recv(array, left)
        assert (array == left + i * world.size).all()


@check
def send_waits_once_too_much_is_outstanding(world: World) -> None:
    """More than the bound passes when the receiver takes it; nothing is lost."""
    count = OUTSTANDING // 3 // 8
    if world.rank == 0:
        for i in range(5):
            world.send(np.full(count, i, np.int64), 1)
    if world.rank == 1:
        for i in range(5):
            array = np.empty(count, np.int64)
            world.recv(array, 0)
            assert (array == i).all()
    world.barrier()


@check
def objects_travel_as_json(world: World) -> None:
    value = {"rank": world.rank, "text": "ä" * world.rank, "list": [None, 1.5, True]}
    got = world.all_gather_object(value)
    assert [item["rank"] for item in got] == list(range(world.size))
    assert got[world.rank] == value and len(got[-1]["text"]) == world.size - 1


@check
def groups_work_side_by_side(world: World) -> None:
    """Pairs in reversed order, one group of all but the last rank, and groups of one."""
    size = world.size
    pairs = [[i + 1, i] for i in range(0, size - 1, 2)] + [[size - 1]] * (size % 2)
    for groups in (pairs, [list(range(size - 1)), [size - 1]], [[i] for i in range(size)]):
        group = world.split(groups, "groups")
        (members,) = [tuple(members) for members in groups if world.rank in members]
        assert group.ranks == members and group.ranks[group.rank] == world.rank
        assert group.size == len(members) and group.name == "groups"
        for count in (10, 5000):
            array = values(world.rank, count, "float32")
            group.all_reduce(array)
            wanted = in_rank_order([values(rank, count, "float32") for rank in members])
            assert same_bits(array, wanted)
        assert group.all_gather_object(world.rank) == list(members)
        part = np.empty(3, np.float64)
        group.reduce_scatter(np.ones(3 * group.size), part)
        assert (part == group.size).all()
        group.barrier()
        group.free()


@check
def two_communicators_in_two_threads(world: World) -> None:
    """As prefetch and compute do it: each thread has its own communicator of the same ranks."""
    everyone = [list(range(world.size))]
    groups = [world.split(everyone, "prefetch"), world.split(everyone, "compute")]
    wrong: list[object] = []

    def work(group: Communicator, number: int) -> None:
        try:
            for step in range(6):
                count = 1 + 7000 * ((step + number) % 3)
                out = np.empty(count * group.size, np.float32)
                shard = np.full(count, group.rank + step + number, np.float32)
                group.all_gather(shard, out)
                expected = np.repeat(np.arange(group.size) + step + number, count)
                total = np.full(2000, number + step, np.int64)
                group.all_reduce(total)
                if (out != expected).any() or (total != group.size * (number + step)).any():
                    wrong.append((number, step))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=item) for item in zip(groups, (0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    for group in groups:
        group.free()


@check
def sums_repeat_bit_for_bit(world: World) -> None:
    digests = []
    for _ in range(3):
        array = values(world.rank, 100_003, "float32")
        world.all_reduce(array)
        digests.append(array.tobytes())
    assert len(set(digests)) == 1


@check
def calls_are_counted(world: World) -> None:
    world.all_gather(np.zeros(1, np.uint8), np.empty(world.size, np.uint8))
    before = world.stats.snapshot()["all_gather"]
    world.all_gather(np.zeros(10, np.float32), np.empty(10 * world.size, np.float32))
    after = world.stats.snapshot()["all_gather"]
    assert after.calls == before.calls + 1 and after.seconds > before.seconds
    checks = 64 * (world.size - 1)  # what `checked` adds
    assert after.bytes == before.bytes + 40 * (world.size - 1) + checks


@check
def bad_arguments_are_refused_before_anything_is_sent(world: World) -> None:
    good = np.zeros(4 * world.size, np.float32)
    strided = np.zeros((4, 2 * world.size), np.float32)[:, ::2]
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    bad: list[tuple[str, Callable[[], object]]] = [
        ("C-contiguous", lambda: world.all_reduce(strided)),
        ("C-contiguous", lambda: world.all_gather(good[::4], good)),
        ("read-only", lambda: world.all_reduce(frozen)),
        ("read-only", lambda: world.broadcast(frozen, (world.rank + 1) % world.size)),
        ("widen it", lambda: world.all_reduce(np.zeros(4, np.uint16))),
        ("float16 cannot be", lambda: world.reduce_scatter(good.astype(np.float16), frozen)),
        ("elements", lambda: world.all_gather(good, good)),
        ("elements", lambda: world.reduce_scatter(good, good)),
        ("one dtype", lambda: world.all_gather(np.zeros(4), good)),
        ("send_counts", lambda: world.all_to_all(good, [1] * world.size, good, [4] * world.size)),
        ("recv_counts", lambda: world.all_to_all(good, [4] * world.size, good, [4])),
        ("root", lambda: world.broadcast(good, world.size)),
        ("itself", lambda: world.send(good, world.rank)),
        ("tag", lambda: world.send(good, (world.rank + 1) % world.size, tag=1000)),
        ("partition", lambda: world.split([[0]], "part")),
    ]
    for words, call in bad:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError):
        world.all_gather_object(object())
    world.barrier()


@check
def another_order_is_named(world: World) -> None:
    """Only with `checked`: the error names what each rank entered, on every rank."""
    array = np.zeros(3, np.float32)
    with pytest.raises(CommError) as caught:
        if world.rank == 1:
            world.broadcast(array, 0)
        else:
            world.all_reduce(array)
    others = ", ".join(str(rank) for rank in range(world.size) if rank != 1)
    assert f"rank{'s' * (world.size > 2)} {others}: all_reduce sum float32 x 3" in str(caught.value)
    assert "rank 1: broadcast float32 x 3 of 0" in str(caught.value)
    with pytest.raises(CommError, match=r"float32 x 3.*float32 x 4|float32 x 4.*float32 x 3"):
        world.all_reduce(np.zeros(4 if world.rank == 1 else 3, np.float32))
    with pytest.raises(CommError, match="sends 2 elements to rank 0, which expects 1"):
        me, size = world.rank, world.size
        send_counts = [2 if (me, j) == (1, 0) else 1 for j in range(size)]
        send = np.zeros(sum(send_counts), np.float32)
        world.all_to_all(send, send_counts, np.zeros(size, np.float32), [1] * size)
    world.barrier()


def run_all(world: World, *, skip: tuple[str, ...] = ()) -> list[str]:
    """Run the suite; the names of what passed. The first failure is raised with its name."""
    passed = []
    for function in CHECKS:
        if function.__name__ in skip:
            continue
        try:
            function(world)
        except BaseException as error:
            raise AssertionError(f"{function.__name__} on rank {world.rank}: {error}") from error
        passed.append(function.__name__)
    return passed
