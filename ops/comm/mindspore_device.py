"""Ranks as processes under `msrun`, each with an Ascend card, through MindSpore and HCCL.

Never run on a card: written from the documentation and the installed sources of MindSpore 2.10, and
tested against a fake of the functions in `Library`. `docs/ascend.md` says what to check first.

- A round of messages is `all_to_all_single` of bytes, which every rank of the group enters. More
  than `_STAGE_BYTES` go in several; each part begins with the number of rounds its sender needs, so
  that all enter equally many, and so that no part is empty.
- Every communicator has a stream of its own, so that none waits behind another. But MindSpore's
  current stream is one for the whole process, not one a thread: work is launched under a lock, and
  whatever else launches work on the card in this process has to hold the same one.
- Waiting for other ranks is polling an event, and raises. Calls that may block inside the library
  are under a timer of their own that ends the process with all stacks, with status 1: nothing can
  be raised in them, and it works even if they keep the interpreter's lock.
- `send` and `recv` go over MindSpore's `TCPStore` on rank 0's machine. HCCL matches messages by
  order alone, and one that is sent blocks the group's stream until it is received, so ranks that
  send in a ring, or before a collective, would wait in a circle.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, runtime
from mindspore._c_expression import GroupOptions  # where create_group's example imports it
from mindspore.communication import (
    GlobalComm,
    create_group,
    destroy_group,
    get_group_size,
    get_rank,
    init,
)
from mindspore.mint.distributed import TCPStore, all_to_all_single

from ops.backend import tensor_on
from ops.comm.base import (
    OUTSTANDING_BYTES_MAX,
    TIMEOUT_SECONDS,
    U8,
    check_partition,
    group_of,
)
from ops.comm.collectives import Collectives, Messages
from ops.comm.mindspore import end_process, free_port
from ops.comm.mux import Mux
from ops.comm.stats import CommStats
from ops.comm.watchdog import Watchdog
from ops.errors import CommError

TARGET = "Ascend"
_STAGE_BYTES = 32 << 20
_HEAD_BYTES = 8
# HCCL takes twice this of the card for each group; its default is 200 MB.
_HCCL_BUFFER_MB = 32
# The store takes values below 1 GiB, and answers nobody else meanwhile.
_STORE_PIECE_BYTES = 16 << 20
_STDERR = 2
_NOTHING: U8 = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Library:
    """What of MindSpore this file calls that needs a card; a test checks calls by signature."""

    set_device: Callable[..., Any]
    init: Callable[..., Any]
    get_rank: Callable[..., int]
    get_group_size: Callable[..., int]
    world_group: Callable[[], str]
    create_group: Callable[..., Any]
    destroy_group: Callable[..., Any]
    all_to_all_single: Callable[..., Any]
    empty: Callable[..., Any]
    Stream: Callable[..., Any]
    StreamCtx: Callable[..., Any]


MINDSPORE = Library(
    set_device=ms.set_device,
    init=init,
    get_rank=get_rank,
    get_group_size=get_group_size,
    world_group=lambda: GlobalComm.WORLD_COMM_GROUP,
    create_group=create_group,
    destroy_group=destroy_group,
    all_to_all_single=all_to_all_single,
    empty=mint.empty,
    Stream=runtime.Stream,
    StreamCtx=runtime.StreamCtx,
)


class _Device:
    """The card of this process, and the right to launch work on it."""

    def __init__(self, library: Library, watchdog: Watchdog, launches: threading.Lock) -> None:
        self.library = library
        self.watchdog = watchdog
        self._launches = launches
        self._call_seconds_max = watchdog.timeout_seconds

    @contextmanager
    def calls(self, what: str, stream: Any = None) -> Iterator[None]:
        """Call the library alone, with `stream` as the current one; its errors are `CommError`.

        Ends the process when the calls inside do not return in time.
        """
        seconds = self._call_seconds_max
        if not self._launches.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise self.watchdog.expire(f"{what}: waiting for another thread's calls")
        try:
            # The only timer that fires while a call keeps the interpreter's lock. There is one a
            # process, which is enough because the calls are made one at a time.
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
            with self.library.StreamCtx(stream):
                yield
        except RuntimeError as error:
            raise CommError(f"{what}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._launches.release()


class _Lane:
    """Rounds of messages between the ranks of one group; `group` is MindSpore's name of it."""

    def __init__(self, device: _Device, group: str, rank: int, ranks: tuple[int, ...]) -> None:
        """`rank` is the number in the group, `ranks` are the members' world ranks."""
        self._device = device
        self._group = group
        self._rank = rank
        # MindSpore numbers the members of a group by world rank: our number of each of them.
        self._peers = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._piece_bytes = max(_STAGE_BYTES // len(ranks), 1)
        self._stage = _NOTHING
        with device.calls(f"stream of group {group!r}"):
            self._stream = device.library.Stream()

    def exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        """See `Collectives._exchange`; the group has at least two ranks."""
        outgoing, incoming = dict(sends), dict(receives)
        longest = max((len(message) for _, message in (*sends, *receives)), default=1)
        rounds = -(-longest // self._piece_bytes)
        done = 0
        while done < rounds:
            span = slice(done * self._piece_bytes, (done + 1) * self._piece_bytes)
            pieces = {peer: outgoing.get(peer, _NOTHING)[span] for peer in self._peers}
            targets = {peer: incoming.get(peer, _NOTHING)[span] for peer in self._peers}
            rounds = max(rounds, self._round(pieces, targets, rounds, what))
            done += 1

    def _round(
        self, pieces: Mapping[int, U8], targets: Mapping[int, U8], rounds: int, what: str
    ) -> int:
        """Send each peer its piece and fill its target; the most rounds that anybody needs."""
        head = np.array([rounds], np.int64).view(np.uint8)
        others = [peer for peer in self._peers if peer != self._rank]
        chunks = [chunk for peer in others for chunk in (head, pieces[peer])]
        received = self._all_to_all(
            self._packed(chunks), self._sizes(pieces), self._sizes(targets), what
        )
        at = 0
        for peer in others:
            said = received[at : at + _HEAD_BYTES].copy().view(np.int64)
            rounds = max(rounds, int(said[0]))
            at += _HEAD_BYTES
            np.copyto(targets[peer], received[at : at + targets[peer].size])
            at += targets[peer].size
        return rounds

    def _sizes(self, parts: Mapping[int, U8]) -> list[int]:
        """Bytes of each rank's part, in MindSpore's order."""
        return [0 if i == self._rank else _HEAD_BYTES + parts[i].size for i in self._peers]

    def _packed(self, chunks: Sequence[U8]) -> U8:
        num_bytes = sum(chunk.size for chunk in chunks)
        if self._stage.size < num_bytes:
            self._stage = np.empty(num_bytes, np.uint8)
        return np.concatenate(chunks, out=self._stage[:num_bytes])

    def _all_to_all(
        self, packed: U8, send_sizes: list[int], recv_sizes: list[int], what: str
    ) -> U8:
        device, library = self._device, self._device.library
        with device.calls(what, self._stream):
            source = tensor_on(packed)
            target = library.empty(sum(recv_sizes), dtype=ms.uint8)
            library.all_to_all_single(target, source, recv_sizes, send_sizes, group=self._group)
            event = self._stream.record_event()
        try:
            device.watchdog.poll(event.query, what)
        except RuntimeError as error:
            raise CommError(f"{what}: {error}") from error
        # `packed` may be used again from here on: the copy to the card is behind the event, too.
        with device.calls(what, self._stream):
            received: U8 = target.asnumpy()
        return received


class _StoreLine:
    """`Line` on a `TCPStore` of rank 0; a message is a key that the receiver deletes."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._sent = [0] * size
        self._taken = [0] * size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def put(self, message: U8, to: int) -> None:
        for lo in range(0, message.size, _STORE_PIECE_BYTES):
            piece = message[lo : lo + _STORE_PIECE_BYTES].tobytes()
            key = f"{self._rank}>{to}#{self._sent[to]}"
            self._call(self._store.set, key, piece)
            self._sent[to] += 1

    def flush(self) -> None:
        return None  # what `set` was given lies in the store when it returns

    def take(self, message: U8, source: int) -> None:
        for lo in range(0, message.size, _STORE_PIECE_BYTES):
            key = f"{source}>{self._rank}#{self._taken[source]}"
            piece = np.frombuffer(self._call(self._store.get, key), np.uint8)
            self._call(self._store.delete_key, key)
            np.copyto(message[lo : lo + _STORE_PIECE_BYTES], piece)
            self._taken[source] += 1

    def add(self, counter: str, amount: int) -> int:
        return int(self._call(self._store.add, counter, amount))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise CommError(f"the store of rank 0 cannot be reached: {error}") from error


class _DeviceCommunicator(Collectives):
    """A group of processes; `number` tells groups apart in messages of `send`."""

    def __init__(
        self,
        lane: _Lane,
        mux: Mux,
        number: int,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        stats: CommStats,
        checked: bool,
        give_up: Callable[[], None],
    ) -> None:
        super().__init__(name, rank, ranks, stats, checked=checked)
        self._lane = lane
        self._mux = mux
        self._number = number
        self._give_up = give_up

    def free(self) -> None:
        self.barrier()
        self._give_up()

    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        self._lane.exchange(sends, receives, what)

    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        self._mux.post(message, self._ranks[to], self._number, tag, what)

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        self._mux.receive(message, self._ranks[source], self._number, tag, what)


class MindSporeDeviceWorld(_DeviceCommunicator):
    """`World` of the processes that `msrun` started on Ascend cards; make one a process, on all.

    Make it before the first tensor: it sets the device and initialises MindSpore's communication,
    and `msrun` gives each process its card. msrun's scheduler calls it too and ends inside.
    `store_host` is the address of rank 0's machine as the others reach it. `launches` is the lock
    that everything in this process holds while it launches work on the card.

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
        launches: threading.Lock | None = None,
        library: Library = MINDSPORE,
    ) -> None:
        library.set_device(TARGET)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        library.init()
        rank, ranks = library.get_rank(), tuple(range(library.get_group_size()))
        watchdog = Watchdog(timeout_seconds)
        self._device = _Device(library, watchdog, launches or threading.Lock())
        lane = _Lane(self._device, library.world_group(), rank, ranks)
        store = _open_store(lane, rank, len(ranks), store_host, timeout_seconds)
        mux = Mux(_StoreLine(store, rank, len(ranks)), watchdog, outstanding_bytes_max)
        watchdog.tell_others = mux.tell_others
        self._num_splits = 0
        super().__init__(
            lane,
            mux,
            0,
            "world",
            rank,
            ranks,
            CommStats(),
            checked,
            lambda: mux.close("free of group 'world'"),
        )

    def split(self, groups: Sequence[Sequence[int]], name: str) -> _DeviceCommunicator:
        check_partition(groups, self.size)
        index, members = group_of(groups, self.rank)
        self._num_splits += 1
        group = f"headrace-{self._num_splits}-{index}"
        what = f"split {name!r} (rank {self.rank})"
        # Making a group blocks, with the right to launch: enter it when everybody is there.
        self.barrier()
        alone = len(members) == 1
        if not alone:
            options = GroupOptions()
            options.hccl_config = {"hccl_buffer_size": _HCCL_BUFFER_MB}
            with self._device.calls(what):
                self._device.library.create_group(group, sorted(members), options)
        lane = _Lane(self._device, group, members.index(self.rank), members)
        if not alone:
            # Connections are made by the first call, which blocks until all have entered it. Later,
            # two threads of two ranks could be in the first calls of different groups.
            lane.exchange([], [], what)
        return _DeviceCommunicator(
            lane,
            self._mux,
            self._num_splits,
            name,
            members.index(self.rank),
            members,
            self.stats,
            self._checked,
            lambda: None if alone else self._destroy(group, name),
        )

    def abort(self, code: int) -> None:
        end_process(code)

    def _destroy(self, group: str, name: str) -> None:
        with self._device.calls(f"free of group {name!r} (rank {self.rank})"):
            self._device.library.destroy_group(group)


def _open_store(lane: _Lane, rank: int, size: int, host: str, timeout_seconds: float) -> Any:
    """Open the store, of which rank 0 is the server and tells the others its port."""
    timeout, port = timedelta(seconds=timeout_seconds), np.zeros(1, np.int64)
    what = f"opening the store of rank 0 (rank {rank})"
    store = None
    if rank == 0:
        port[0] = free_port()
        store = TCPStore(host, int(port[0]), size, True, timeout, wait_for_workers=False)
        if size > 1:
            lane.exchange([(to, port.view(np.uint8)) for to in range(1, size)], [], what)
    else:
        lane.exchange([], [(0, port.view(np.uint8))], what)
        store = TCPStore(host, int(port[0]), size, False, timeout, wait_for_workers=False)
    return store
