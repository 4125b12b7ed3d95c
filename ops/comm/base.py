"""What ranks can do together: the protocols `Communicator` and `World`, and checks of buffers.

Code above this package talks to the protocols only; which transport is behind them (threads of one
process, MPI, MindSpore) is decided in `launch/`.

Rules of every communicator:

- Ranks are numbered in the group (0 to size - 1); `ranks` says which world rank each one is.
- A collective is entered by all ranks of the group, in the same order, from one thread at a time
  (two threads at once raise `CommError`). Different communicators are independent: a second thread
  uses one of its own, made by `World.split`.
- Sums are the same bits on every rank and in every run of the same mesh: they are added in
  rank order, never in the order of arrival.
- Arrays are C-contiguous and their shape is ignored. Bytes travel as they are, so bfloat16 is
  sent as its bits in `uint16` (and cannot be summed). Nothing is pickled.
- Every call but `send` blocks until this rank's part is done. A wait of more than
  `timeout_seconds` prints the stacks of all threads and raises `CommError`.
- After any `CommError` the communicator is unusable: call `World.abort`, enter nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ops.comm.stats import CommStats
from ops.errors import CommError

U8 = np.ndarray[Any, np.dtype[np.uint8]]

TIMEOUT_SECONDS = 600.0
"""The longest wait for other ranks unless the caller says otherwise; a run has a key for it."""

PIECE_BYTES = 4 << 20
"""Large reductions go in pieces of this size; it bounds a communicator's scratch memory."""

OUTSTANDING_BYTES_MAX = 64 << 20
"""Bytes of messages that a rank keeps for receivers who have not come yet."""

REDUCIBLE = tuple(np.dtype(kind) for kind in (np.float32, np.float64, np.int32, np.int64, np.uint8))
"""What can be reduced. Half precision cannot: one rounding per rank would be lost silently."""


class ReduceOp(enum.Enum):
    """How the values of all ranks become one; integer sums wrap as NumPy's do."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


SUM, MAX, MIN = ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN


class Communicator(Protocol):
    """The ranks of one group, in order; see the module for the rules of all calls."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks of the members, in group order."""

    @property
    def name(self) -> str:
        """What `split` was told; messages and stacks show it."""

    @property
    def stats(self) -> CommStats:
        """Calls, bytes and seconds by kind, of all communicators of this rank's world together."""

    def all_reduce(self, array: np.ndarray, op: ReduceOp = SUM) -> None:
        """Replace `array` on every rank by the reduction over all ranks, added in rank order.

        float32, float64, int32, int64 or uint8, the same size on all. Scratch memory is at most
        `PIECE_BYTES` plus one element a rank, kept by the communicator.
        """

    def all_gather(self, shard: np.ndarray, out: np.ndarray) -> None:
        """Put every rank's `shard` [n] into `out` [size * n] in group order; one dtype.

        `shard` may be this rank's own part of `out`.
        """

    def reduce_scatter(self, array: np.ndarray, out: np.ndarray) -> None:
        """Sum `array` [size * n] over all ranks; part i goes to `out` [n] of rank i.

        Dtypes and scratch memory as in `all_reduce`. `out` may be this rank's own part of
        `array`, which is otherwise unchanged.
        """

    def all_to_all(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        recv: np.ndarray,
        recv_counts: Sequence[int],
    ) -> None:
        """Send part i of `send` to rank i and receive its part for us; one dtype.

        Counts are elements of the flat arrays, in group order, without gaps; they may be uneven
        and zero, and cover both arrays exactly. What rank i sends to j must be what j expects.
        The arrays must not overlap.
        """

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy `array` of group rank `root` into `array` of all others."""

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """Send `array` to group rank `to`; it can be reused at once.

        The message is copied and sent in the background, so the call does not wait for the
        receiver unless this rank's unreceived messages exceed `OUTSTANDING_BYTES_MAX`; a longer
        message than that is not copied, and the call returns when it is received. Messages of one
        (source, to, tag) arrive in order. Tags are 0 to 999.
        """

    def recv(self, array: np.ndarray, source: int, tag: int = 0) -> None:
        """Receive the next message of `source` with `tag` into `array`, of exactly its size."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Small values of all ranks in group order. They travel as JSON: a tuple comes as a list.

        Raises TypeError for what JSON cannot say.
        """

    def barrier(self) -> None:
        """Return when every rank has entered."""

    def free(self) -> None:
        """Give the communicator up; entered by all ranks of the group, not after a failure."""


class World(Communicator, Protocol):
    """All ranks of the run. Its number of a rank is the world rank."""

    @property
    def kind(self) -> str:
        """`single`, `local`, `mpi` or `mindspore`."""

    def split(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        """A new communicator for the one of `groups` that holds this rank.

        `groups` is a partition of all world ranks, the same on every rank, each group in the order
        its members shall have. Every rank calls it, in the same order as its other collectives.
        Two calls give two independent communicators even for the same groups. Raises ValueError
        when `groups` is no partition.
        """

    def abort(self, code: int) -> None:
        """End all ranks after a failure, with exit status `code`; enters no collective.

        May be called from any thread and does not return when ranks are processes. With `local`
        it breaks the waits of the other ranks, and they raise `CommError`.
        """


def as_bytes(name: str, array: np.ndarray, *, writes: bool = False) -> U8:
    """The memory of `array` as flat bytes, without a copy.

    Raises ValueError naming the argument when it is not C-contiguous, holds Python objects, or is
    read-only and `writes` is set.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} has shape {array.shape} and strides {array.strides}; "
            "a C-contiguous array is needed (np.ascontiguousarray makes one)"
        )
    if array.dtype.hasobject:
        raise ValueError(f"{name} is {array.dtype}; Python objects cannot be sent")
    if writes and not array.flags.writeable:
        raise ValueError(f"{name} is read-only and would be written")
    return array.reshape(-1).view(np.uint8)


def check_same_dtype(first: np.ndarray, second: np.ndarray, names: str) -> None:
    """Raise ValueError unless both arrays have one dtype."""
    if first.dtype != second.dtype:
        raise ValueError(f"{names} are {first.dtype} and {second.dtype}; one dtype is needed")


def check_reducible(array: np.ndarray) -> None:
    """Raise ValueError unless values of this dtype can be reduced."""
    if array.dtype not in REDUCIBLE:
        raise ValueError(
            f"{array.dtype} cannot be reduced, only "
            + ", ".join(kind.name for kind in REDUCIBLE)
            + " (uint16 holds the bits of bfloat16: widen it first)"
        )


def check_partition(groups: Sequence[Sequence[int]], size: int) -> None:
    """Raise ValueError unless every rank below `size` is in exactly one group."""
    members = [rank for group in groups for rank in group]
    if sorted(members) != list(range(size)):
        raise ValueError(
            f"the groups {[list(group) for group in groups]} are no partition of "
            f"the ranks 0 to {size - 1}"
        )


def group_of(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, tuple[int, ...]]:
    """Number and members of the group that holds world rank `rank`."""
    for number, group in enumerate(groups):
        if rank in group:
            return number, tuple(group)
    raise CommError(f"no group holds rank {rank}")
