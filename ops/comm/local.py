"""Ranks as threads of one process: the transport of tests, and of trying a mesh without MPI.

A message is a view of the sender's memory in a queue; the receiver copies it out. One lock and one
condition guard all queues, and nobody holds the lock while copying. The first failure of any rank
breaks every wait of the others.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ops.comm.base import OUTSTANDING_BYTES_MAX, U8, check_partition, group_of
from ops.comm.collectives import Collectives, Messages
from ops.comm.stats import CommStats
from ops.comm.watchdog import Watchdog
from ops.errors import CommError

T = TypeVar("T")

# Group (its name and which split made it), source, receiver, tag; collectives have tag -1.
_Key = tuple[tuple[str, int], int, int, int]
_COLLECTIVE = -1
_JOIN_SECONDS = 60.0


class _Message:
    """Bytes that wait for their receiver. `copied` messages belong to the queue."""

    def __init__(self, content: U8, *, copied: bool) -> None:
        self.content = content
        self.copied = copied
        self.taken = False


class _Post:
    """The queues between all ranks, and the first failure."""

    def __init__(self, size: int, outstanding_bytes_max: int) -> None:
        self.changed = threading.Condition()
        self.queues: defaultdict[_Key, deque[_Message]] = defaultdict(deque)
        self.outstanding_bytes = [0] * size
        self.outstanding_bytes_max = outstanding_bytes_max
        self.failure: str | None = None

    def fail(self, why: str) -> None:
        """Latch the first failure and wake everybody."""
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()


class _LocalCommunicator(Collectives):
    """A group of threads; `World` when it holds all of them."""

    def __init__(
        self,
        post: _Post,
        watchdog: Watchdog,
        name: tuple[str, int],
        rank: int,
        ranks: tuple[int, ...],
        stats: CommStats,
        checked: bool,
    ) -> None:
        super().__init__(name[0], rank, ranks, stats, checked=checked)
        self._post_office = post
        self._watchdog = watchdog
        self._key_name = name

    def free(self) -> None:
        return None

    def _key(self, source: int, to: int, tag: int) -> _Key:
        return self._key_name, self._ranks[source], self._ranks[to], tag

    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        messages = [(to, _Message(content, copied=False)) for to, content in sends]
        for to, message in messages:
            self._put(self._key(self._rank, to, _COLLECTIVE), message)
        for source, target in receives:
            self._get(self._key(source, self._rank, _COLLECTIVE), target, what)
        self._wait(lambda: all(message.taken for _, message in messages), what)

    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        post, me = self._post_office, self._ranks[self._rank]
        key = self._key(self._rank, to, tag)
        if message.size > post.outstanding_bytes_max:
            lent = _Message(message, copied=False)
            self._put(key, lent)
            self._wait(lambda: lent.taken, what)
            return

        def fits() -> bool:
            return post.outstanding_bytes[me] + message.size <= post.outstanding_bytes_max

        with post.changed:
            self._wait(fits, what)
            post.outstanding_bytes[me] += message.size
        self._put(key, _Message(message.copy(), copied=True))

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        self._get(self._key(source, self._rank, tag), message, what)

    def _put(self, key: _Key, message: _Message) -> None:
        post = self._post_office
        with post.changed:
            post.queues[key].append(message)
            post.changed.notify_all()

    def _get(self, key: _Key, target: U8, what: str) -> None:
        post = self._post_office
        with post.changed:
            self._wait(lambda: bool(post.queues[key]), what)
            message = post.queues[key].popleft()
        if message.content.size != target.size:
            raise CommError(
                f"{what}: rank {key[1]} sent {message.content.size} bytes, "
                f"{target.size} were expected"
            )
        np.copyto(target, message.content)
        with post.changed:
            message.taken = True
            if message.copied:
                post.outstanding_bytes[key[1]] -= message.content.size
            post.changed.notify_all()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait under the lock until `done()`; raises on any rank's failure, or after too long."""
        post = self._post_office
        wait = self._watchdog.wait(what)
        with post.changed:
            while not done():
                if post.failure is not None:
                    raise CommError(f"{what} was broken off: {post.failure}")
                wait.check()
                post.changed.wait(wait.left_seconds())


class LocalWorld(_LocalCommunicator):
    """One rank's `World` among the threads of this process; made by `run_local`."""

    kind = "local"

    def __init__(self, post: _Post, watchdog: Watchdog, rank: int, size: int, checked: bool):
        super().__init__(
            post, watchdog, ("world", 0), rank, tuple(range(size)), CommStats(), checked
        )
        self._num_splits = 0

    def split(self, groups: Sequence[Sequence[int]], name: str) -> _LocalCommunicator:
        check_partition(groups, self.size)
        _, members = group_of(groups, self.rank)
        self._num_splits += 1
        self.barrier()
        return _LocalCommunicator(
            self._post_office,
            self._watchdog,
            (name, self._num_splits),
            members.index(self.rank),
            members,
            self.stats,
            self._checked,
        )

    def abort(self, code: int) -> None:
        self._post_office.fail(f"rank {self.rank} aborted with code {code}")


def run_local(
    size: int,
    function: Callable[..., T],
    *args: Any,
    timeout_seconds: float = 60.0,
    checked: bool = True,
    outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
    output: Any = None,
) -> list[T]:
    """Call `function(world, *args)` on `size` ranks, each a thread; the results in rank order.

    When a rank raises, the waits of the others are broken, and the first exception is raised here
    once all threads ended. A thread that goes on for `timeout_seconds` and a minute after that
    raises `CommError`. `output` is the file that stacks are printed to.
    """
    post = _Post(size, outstanding_bytes_max)
    watchdog = Watchdog(timeout_seconds, output=output)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            world = LocalWorld(post, watchdog, rank, size, checked)
            results[rank] = function(world, *args)
        except BaseException as error:
            with post.changed:
                errors.append(error)
                post.fail(f"rank {rank} failed: {error}")

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            # A rank may compute for as long as it likes while none has failed.
            thread.join(_JOIN_SECONDS)
            if errors and thread.is_alive():
                thread.join(timeout_seconds)
                break
    if errors:
        raise errors[0]
    return results
