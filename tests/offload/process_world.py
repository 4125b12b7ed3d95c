"""Ranks as processes of one machine that a test starts itself, connected by socket pairs.

Any of them may be killed without the others, which no launcher of MPI allows: whoever waits for a
rank that is gone gets a `CommError` at once.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from ops.comm.base import U8, check_partition, group_of
from ops.comm.collectives import Collectives, Messages
from ops.comm.stats import CommStats
from ops.errors import CommError

WAIT_S_MAX = 120.0
_COLLECTIVE = -1
_HEADER = struct.Struct("<qqq")  # group, tag, bytes


def socket_pairs(size: int) -> list[dict[int, socket.socket]]:
    """For each rank, its ends of the sockets to the others."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for a, b in combinations(range(size), 2):
        ends[a][b], ends[b][a] = socket.socketpair()
    return ends


class _Wires:
    """The sockets of a rank, and what has come over them."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        self._sending = {rank: threading.Lock() for rank in sockets}
        self._changed = threading.Condition()
        self._inbox: defaultdict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self._gone: set[int] = set()
        for rank in sockets:
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def send(self, to: int, group: int, tag: int, message: U8) -> None:
        try:
            with self._sending[to]:
                self._sockets[to].sendall(_HEADER.pack(group, tag, message.size))
                self._sockets[to].sendall(message.tobytes())
        except OSError as error:
            raise CommError(f"rank {to} is gone: {error}") from error

    def receive(self, source: int, group: int, tag: int, out: U8, what: str) -> None:
        waiting = self._inbox[source, group, tag]
        with self._changed:
            self._changed.wait_for(lambda: waiting or source in self._gone, WAIT_S_MAX)
            if not waiting:
                raise CommError(f"{what}: nothing comes from rank {source}")
            message = waiting.popleft()
        assert len(message) == out.size, what
        np.copyto(out, np.frombuffer(message, np.uint8))

    def _read(self, source: int) -> None:
        file = self._sockets[source].makefile("rb")
        try:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                group, tag, nbytes = _HEADER.unpack(header)
                message = file.read(nbytes)
                if len(message) < nbytes:
                    break
                with self._changed:
                    self._inbox[source, group, tag].append(message)
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self._gone.add(source)
            self._changed.notify_all()


class _ProcessCommunicator(Collectives):
    """A group of processes; `number` tells groups apart on the wires."""

    def __init__(
        self, wires: _Wires, number: int, name: str, rank: int, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(name, rank, ranks, CommStats(), checked=False)
        self._wires = wires
        self._number = number

    def free(self) -> None:
        return None

    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        for to, message in sends:
            self._wires.send(self._ranks[to], self._number, _COLLECTIVE, message)
        for source, message in receives:
            self._take(message, source, _COLLECTIVE, what)

    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        self._wires.send(self._ranks[to], self._number, tag, message)

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        self._wires.receive(self._ranks[source], self._number, tag, message, what)


class ProcessWorld(_ProcessCommunicator):
    """`World` of rank `rank`, whose ends of `socket_pairs` are `sockets`."""

    kind = "processes"

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        super().__init__(_Wires(sockets), 0, "world", rank, tuple(range(len(sockets) + 1)))
        self._num_splits = 0

    def split(self, groups: Sequence[Sequence[int]], name: str) -> _ProcessCommunicator:
        check_partition(groups, self.size)
        _, members = group_of(groups, self.rank)
        self._num_splits += 1
        place = members.index(self.rank)
        return _ProcessCommunicator(self._wires, self._num_splits, name, place, members)

    def abort(self, code: int) -> None:
        raise SystemExit(code)
