"""Cards and HCCL as `ops/comm/mindspore_device.py` sees them, with threads of one process as ranks.

Strict where documentation and sources of MindSpore 2.10 say what holds: work runs in the order of
its stream and completes when all members of the group have come to it; making a group and its first
call block until all are there; the current stream belongs to the whole rank. Tensors are real ones
on CPU; an input is read, and an output written, only when the work completes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms

from ops.comm.mindspore_device import MINDSPORE, Library

WORLD = "hccl_world_group"
SECONDS_MAX = 60.0
HCCL_BUFFER_MB_MAX = 200


@dataclass
class _Work:
    """One all-to-all of a group; parts by world rank."""

    members: list[int]
    parts: dict[int, tuple[Any, Any, list[int], list[int]]] = field(default_factory=dict)
    streams: dict[int, _Stream] = field(default_factory=dict)
    done: bool = False


class _Event:
    def __init__(self, cards: FakeCards, works: list[_Work]) -> None:
        self._cards = cards
        self._works = works

    def query(self) -> bool:
        self._cards.raise_if_broken()
        return all(work.done for work in self._works)


class _Stream:
    def __init__(self, cards: FakeCards) -> None:
        self._cards = cards
        self.queue: list[_Work] = []

    def record_event(self, event: Any = None) -> _Event:
        with self._cards.changed:
            return _Event(self._cards, list(self.queue))


class _StreamCtx:
    """Sets the stream of the whole rank; None changes nothing, but is noticed all the same."""

    def __init__(self, card: _Card, stream: _Stream | None) -> None:
        self._card = card
        self._stream = stream

    def __enter__(self) -> None:
        if self._card.busy is not None:
            raise AssertionError(f"{self._card.busy} is launching work at the same time")
        self._card.busy = threading.current_thread().name
        self._card.current = self._stream

    def __exit__(self, *error: object) -> None:
        self._card.current = self._card.busy = None


class FakeCards:
    """The cards of `size` ranks, and the groups between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.groups: dict[str, list[int]] = {WORLD: list(range(size))}
        self.created: defaultdict[str, set[int]] = defaultdict(set)
        self.works: dict[tuple[str, int], _Work] = {}
        self.broken = ""

    def library(self, rank: int) -> Library:
        """What rank `rank` calls in place of MindSpore."""
        card = _Card(self, rank)
        return Library(
            set_device=card.set_device,
            init=card.init,
            get_rank=card.get_rank,
            get_group_size=card.get_group_size,
            world_group=lambda: WORLD,
            create_group=card.create_group,
            destroy_group=card.destroy_group,
            all_to_all_single=card.all_to_all_single,
            empty=MINDSPORE.empty,
            Stream=card.stream,
            StreamCtx=card.stream_context,
        )

    def break_all(self, why: str) -> None:
        """Let every wait of every rank fail."""
        with self.changed:
            self.broken = why
            self.changed.notify_all()

    def raise_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def wait_for(self, condition: Any) -> None:
        """Wait as a library does that blocks; `changed` is held."""
        if not self.changed.wait_for(lambda: self.broken or condition(), SECONDS_MAX):
            raise AssertionError("the other ranks did not come")
        self.raise_if_broken()

    def advance(self) -> None:
        """Complete all work that is at the front of its stream on every member."""
        ready = True
        while ready:
            ready = [
                work
                for work in self.works.values()
                if not work.done
                and len(work.parts) == len(work.members)
                and all(stream.queue[0] is work for stream in work.streams.values())
            ]
            for work in ready:
                _move(work)
                work.done = True
                for stream in work.streams.values():
                    stream.queue.pop(0)
        self.changed.notify_all()


def _move(work: _Work) -> None:
    members = work.members
    for to in members:
        target, _, receives, _ = work.parts[to]
        out, at = target.asnumpy(), 0
        for place, source in enumerate(members):
            _, tensor, _, sends = work.parts[source]
            if sends[members.index(to)] != receives[place]:
                raise AssertionError(
                    f"rank {source} sends {sends} and rank {to} expects {receives}"
                )
            lo = sum(sends[: members.index(to)])
            out[at : at + receives[place]] = tensor.asnumpy()[lo : lo + receives[place]]
            at += receives[place]


class _Card:
    """One rank's view; signatures are MindSpore's, which a test compares."""

    def __init__(self, cards: FakeCards, rank: int) -> None:
        self._cards = cards
        self._rank = rank
        self._target = ""
        self._ready = False
        self._num_calls: defaultdict[str, int] = defaultdict(int)
        self.current: _Stream | None = None
        self.busy: str | None = None

    def set_device(self, device_target: str, device_id: int | None = None) -> None:
        if self._ready or device_target != "Ascend" or device_id is not None:
            raise AssertionError(f"set_device({device_target!r}, {device_id}) in this place")
        self._target = device_target

    def init(self, backend_name: str | None = None) -> None:
        if self._target != "Ascend" or backend_name not in (None, "hccl"):
            raise AssertionError("init without a device")
        self._ready = True

    def get_rank(self, group: str = WORLD) -> int:
        return self._cards.groups[group].index(self._rank)

    def get_group_size(self, group: str = WORLD) -> int:
        return len(self._cards.groups[group])

    def create_group(self, group: str, rank_ids: list[int], options: Any = None) -> None:
        if type(rank_ids) is not list or sorted(set(rank_ids)) != rank_ids or len(rank_ids) < 2:
            raise AssertionError(f"create_group of {rank_ids}")
        if not 0 < options.hccl_config["hccl_buffer_size"] <= HCCL_BUFFER_MB_MAX:
            raise AssertionError(f"HCCL options {options.hccl_config}")
        cards = self._cards
        with cards.changed:
            if cards.groups.setdefault(group, rank_ids) != rank_ids or (
                self._rank in cards.created[group] or self._rank not in rank_ids
            ):
                raise AssertionError(f"group {group} of {rank_ids} on rank {self._rank}")
            cards.created[group].add(self._rank)
            cards.changed.notify_all()
            cards.wait_for(lambda: len(cards.created[group]) == len(rank_ids))

    def destroy_group(self, group: str) -> None:
        with self._cards.changed:
            self._cards.created[group].remove(self._rank)

    def stream(self, priority: int = 0, **kwargs: Any) -> _Stream:
        return _Stream(self._cards)

    def stream_context(self, ctx_stream: _Stream | None) -> _StreamCtx:
        return _StreamCtx(self, ctx_stream)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: str | None = None,
        async_op: bool = False,
    ) -> None:
        cards, stream = self._cards, self.current
        if stream is None or async_op or group is None or not self._ready:
            raise AssertionError("work on the default stream, or that the stream does not wait for")
        members = cards.groups[group]
        if group != WORLD and self._rank not in cards.created[group]:
            raise AssertionError(f"{group} does not exist on rank {self._rank}")
        for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes)):
            if tensor.dtype != ms.uint8 or tensor.shape != (sum(sizes),) or not sum(sizes):
                raise AssertionError(f"{tensor.dtype} {tensor.shape} in parts of {sizes}")
            if len(sizes) != len(members) or sizes[members.index(self._rank)] != 0:
                raise AssertionError(f"parts {sizes} for {members} on rank {self._rank}")
        output.asnumpy()[:] = 0xA5
        with cards.changed:
            number = self._num_calls[group]
            self._num_calls[group] += 1
            work = cards.works.setdefault((group, number), _Work(members))
            work.parts[self._rank] = (output, input, output_split_sizes, input_split_sizes)
            work.streams[self._rank] = stream
            stream.queue.append(work)
            cards.advance()
            if number == 0:
                cards.wait_for(lambda: len(work.parts) == len(members))
