"""Ranks as processes under `msrun`, through MindSpore's own collective library.

On CPU (MCCL) a message is `isend` and `irecv`, and all else is composed of them: its all-reduce
knows only sums of float32 and float16, and adds in an order of its own; there is no
reduce-scatter and no all-to-all. It knows neither tags nor groups when it matches messages, which
`ops/comm/mux.py` makes up for. Large messages get slow faster than they get large (64 MiB in one
piece take 5 s, in pieces of 1 MiB about 2 s), so they are cut.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.communication import get_group_size, get_rank, init
from mindspore.graph.api import _pynative_executor
from mindspore.mint.distributed import TCPStore
from mindspore.ops.function import comm_func

from ops.backend import tensor_on
from ops.comm.base import (
    OUTSTANDING_BYTES_MAX,
    TIMEOUT_SECONDS,
    U8,
    check_partition,
    group_of,
)
from ops.comm.collectives import Collectives, Messages
from ops.comm.mux import COLLECTIVE, Mux
from ops.comm.stats import CommStats
from ops.comm.watchdog import Watchdog
from ops.errors import CommError

_CPU_GROUP = "mccl_world_group"
_PIECE_BYTES = 1 << 20
# Helpers that bound the default group of Ascend when MindSpore was imported; with these the
# functions of `comm_func` work on CPU. A test tells when that is no longer needed.
_HELPERS = ("_get_group_size", "_get_rank_helper", "get_cache_group_size", "get_cache_group_rank")


def _use_cpu_group() -> None:
    """Let `comm_func` find the CPU's world group; call before `init`."""
    for name in _HELPERS:
        helper = getattr(comm_func, name, None)
        function = getattr(helper, "fn", helper)
        if function is None or len(function.__defaults__ or ()) != 1:
            raise CommError(
                f"MindSpore {ms.__version__} has no mindspore.ops.function.comm_func.{name} of "
                "the known form; collectives on CPU are known to work with 2.10.0"
            )
        function.__defaults__ = (_CPU_GROUP,)


class _CpuLine:
    """`Line` on MCCL's messages and a `TCPStore` of rank 0."""

    def __init__(self, store_host: str, timeout_seconds: float) -> None:
        # MindSpore's own 15 s are short for a rank whose machine is busy.
        self._timeout = timedelta(seconds=timeout_seconds)
        self._rank, self._size = get_rank(), get_group_size()
        port = np.zeros(1, np.int64)
        if self._rank == 0:
            port[0] = free_port()
            self._store = self._open_store(store_host, int(port[0]))
            for to in range(1, self._size):
                self.put(port.view(np.uint8), to)
            self.flush()
        else:
            self.take(port.view(np.uint8), 0)
            self._store = self._open_store(store_host, int(port[0]))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def put(self, message: U8, to: int) -> None:
        for lo in range(0, message.size, _PIECE_BYTES):
            piece = tensor_on(message[lo : lo + _PIECE_BYTES])
            comm_func.isend(piece, to, group=_CPU_GROUP)

    def flush(self) -> None:
        _pynative_executor.sync()

    def take(self, message: U8, source: int) -> None:
        for lo in range(0, message.size, _PIECE_BYTES):
            piece = tensor_on(message[lo : lo + _PIECE_BYTES])
            comm_func.irecv(piece, source, group=_CPU_GROUP)
        _pynative_executor.sync()

    def add(self, counter: str, amount: int) -> int:
        try:
            return int(self._store.add(counter, amount))
        except RuntimeError as error:
            raise CommError("rank 0, which keeps the counters, cannot be reached") from error

    def _open_store(self, host: str, port: int) -> Any:
        return TCPStore(
            host, port, self._size, self._rank == 0, self._timeout, wait_for_workers=False
        )


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class _CpuCommunicator(Collectives):
    """A group of processes; `number` tells groups apart on the wire."""

    def __init__(
        self,
        mux: Mux,
        number: int,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        stats: CommStats,
        checked: bool,
    ) -> None:
        super().__init__(name, rank, ranks, stats, checked=checked)
        self._mux = mux
        self._number = number

    def free(self) -> None:
        return None

    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        messages = [(self._ranks[to], message) for to, message in sends]
        self._mux.send(messages, self._number, COLLECTIVE)
        for source, message in receives:
            self._mux.receive(message, self._ranks[source], self._number, COLLECTIVE, what)

    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        self._mux.post(message, self._ranks[to], self._number, tag, what)

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        self._mux.receive(message, self._ranks[source], self._number, tag, what)


class MindSporeCpuWorld(_CpuCommunicator):
    """`World` of the processes that `msrun` started on CPUs; make one a process, on all ranks.

    Make it before the first computation: it initialises MindSpore's communication. `store_host`
    is the address of rank 0's machine as the others reach it (`msrun`'s master address).
    A rank that fails must call `abort`; `msrun --join True` then ends the others.
    """

    kind = "mindspore"

    def __init__(
        self,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        checked: bool = False,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
        store_host: str = "127.0.0.1",
    ) -> None:
        _use_cpu_group()
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        init()
        line = _CpuLine(store_host, timeout_seconds)
        watchdog = Watchdog(timeout_seconds)
        mux = Mux(line, watchdog, outstanding_bytes_max)
        watchdog.tell_others = mux.tell_others
        ranks = tuple(range(line.size))
        super().__init__(mux, 0, "world", line.rank, ranks, CommStats(), checked)
        self._num_splits = 0

    def split(self, groups: Sequence[Sequence[int]], name: str) -> _CpuCommunicator:
        check_partition(groups, self.size)
        _, members = group_of(groups, self.rank)
        self._num_splits += 1
        return _CpuCommunicator(
            self._mux,
            self._num_splits,
            name,
            members.index(self.rank),
            members,
            self.stats,
            self._checked,
        )

    def abort(self, code: int) -> None:
        end_process(code)

    def free(self) -> None:
        self.barrier()
        self._mux.close("free of group 'world'")


def end_process(code: int) -> None:
    """End this process at once; whoever started the ranks sees the code and ends the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
