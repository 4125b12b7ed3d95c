"""What the ranks of a pipeline tell each other in a step, in the order each of them does. Pure.

A pipeline is the `pipe` group: one rank of each pipeline stage, in order. The layer chunks go
round: chunk c lives on stage c % pp. Four kinds of message pass between them:

- FORWARD: the residual stream of a micro-batch, into the first layer of a layer chunk. Received
  in that layer's dense stage just before it is used, sent when the layer before has combined it.
- BACKWARD: its gradient, the other way. All of a layer chunk's are received before the experts of
  its last layer run backward (and after what is recomputed), each is sent as soon as it is made.
- TIED, once a pass that begins a step or an evaluation: the slices of a tied embedding, from the
  first stage to the last, whose head uses them.
- TIED_GRAD, once a step: the sums of the head's gradients of each slice, back to the first stage.

Nobody waits in a circle, however little memory there is for messages on their way
(`OUTSTANDING_BYTES_MAX` of `ops/comm/base.py`; a message above it makes `send` wait for its
receiver). Waiting depends on others in one direction only: what a rank waits for (a message sent,
a message received, others entering a collective) stays true once it is. So if the steps of all
ranks can be put in one row in which everything comes after what it waits for, every run gets
through. Such a row, in which each message is received right after it is sent:

- breadth-first: the layers in forward order, then the head, then the layers in backward order,
  each with what its stage's ranks do there, their leases and other collectives included. At the
  border of two layer chunks what both sides do is taken in turns, micro-batch by micro-batch
  (combine and send m, receive m and attention of m). A rank's own steps are in this order.
- 1f1b: a rank in its steady state has to send the stream forward before it receives a gradient,
  and the next rank sends that gradient before it receives the stream: with no room for
  messages, both would wait. So a rank receives the stream of its next forward pass before it
  sends the gradient of the backward pass that ends (`Message.ahead`), into the lane which that
  pass leaves: it has used its checkpoint by then. Then both sides exchange first the stream, then
  the gradient; `tests/moe/test_pipeline_messages.py` walks through every such pipeline.
- TIED messages are received before anything else, when the first stage does not wait for
  anybody yet; TIED_GRAD ones are sent after everything else and received in the last stages.

All ranks of a pipeline stage follow the same row, and none of their collectives crosses stages
within a step, so this holds for each pipeline of a mesh, for leases and for experts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe.config import ModelConfig, TrainConfig
from moe.mesh import Share
from moe.params import embedding_units, frozen_units, unit_names
from moe.schedule import Pass, num_chunks, num_lanes, training_passes


class Tag(enum.IntEnum):
    """Kinds of message; messages of one kind arrive in the order they were sent."""

    FORWARD = 0
    BACKWARD = 1
    TIED = 2
    TIED_GRAD = 3


@dataclass(frozen=True)
class Message:
    """One message as one of its two ranks sees it. `peer` is the other one's pipeline stage.

    `place` is the layer whose input (FORWARD) or whose input's gradient (BACKWARD) is meant, or
    the number of the vocabulary slice; `m` the micro-batch within `chunk`, 0 for slices. `ahead`:
    received before its pass begins.
    """

    sends: bool
    peer: int
    tag: Tag
    chunk: int
    place: int
    m: int = 0
    ahead: bool = False


def training_messages(
    model: ModelConfig, train: TrainConfig, share: Share, counts: Sequence[int]
) -> list[Message]:
    """The messages of a rank in one step whose chunks have so many micro-batches (`counts`)."""
    plan = _Plan(model, train, share, counts)
    return [message for step in training_passes(train, share) for message in plan.of(step)]


def evaluation_messages(
    model: ModelConfig, train: TrainConfig, share: Share, count: int
) -> list[Message]:
    """The messages of a rank in one evaluation pass of `count` micro-batches."""
    return list(_Plan(model, train, share, [count]).of(Pass("forward", 0)))


def is_received_ahead(train: TrainConfig, share: Share, chunk: int) -> bool:
    """Whether the stream of `chunk` is received before the forward pass of it begins."""
    is_1f1b = share.mesh.config.pipeline_schedule == "1f1b"
    return is_1f1b and not share.has_embedding and chunk >= num_lanes(train, share)


def received_with(train: TrainConfig, share: Share, chunk: int) -> int | None:
    """The chunk whose stream is received while the backward pass of `chunk` ends, if any."""
    following = chunk + num_lanes(train, share)
    if following < num_chunks(train) and is_received_ahead(train, share, following):
        return following
    return None


def ends_step(train: TrainConfig, chunk: int) -> bool:
    """Whether the backward pass of `chunk` is the last of the step."""
    return chunk == num_chunks(train) - 1


class _Plan:
    """Writes down the messages of a rank's passes."""

    def __init__(
        self, model: ModelConfig, train: TrainConfig, share: Share, counts: Sequence[int]
    ) -> None:
        self._train, self._share, self._counts = train, share, counts
        self._last = share.mesh.pp - 1
        self._before = (share.at.pp - 1) % share.mesh.pp
        self._after = (share.at.pp + 1) % share.mesh.pp
        self._layers = model.num_hidden_layers
        self._slices: list[int] = []
        self._trained_slices: list[int] = []
        if model.tie_word_embeddings and share.mesh.pp > 1:
            frozen = frozen_units(unit_names(model), train.freeze)
            units = embedding_units(model)
            self._slices = list(range(len(units)))
            self._trained_slices = [k for k in self._slices if units[k] not in frozen]

    def of(self, step: Pass) -> Iterator[Message]:
        """The messages of one pass."""
        if step.kind == "forward":
            yield from self._forward(step.chunk)
        else:
            yield from self._backward(step.chunk)

    def _forward(self, chunk: int) -> Iterator[Message]:
        share = self._share
        if chunk == 0:
            yield from self._tied(self._slices, Tag.TIED, chunk, sends=share.has_embedding)
        is_there = is_received_ahead(self._train, share, chunk)
        for layers in share.layer_chunks:
            if layers.start > 0 and not is_there:
                yield from self._each(False, self._before, Tag.FORWARD, chunk, layers.start)
            if layers.stop < self._layers:
                yield from self._each(True, self._after, Tag.FORWARD, chunk, layers.stop)

    def _backward(self, chunk: int) -> Iterator[Message]:
        share = self._share
        for layers in reversed(share.layer_chunks):
            if layers.stop < self._layers:
                yield from self._each(False, self._after, Tag.BACKWARD, chunk, layers.stop)
            if layers.start > 0:
                yield from self._leave_backward(chunk, layers.start)
        if ends_step(self._train, chunk):
            slices = self._trained_slices
            yield from self._tied(slices, Tag.TIED_GRAD, chunk, sends=share.has_head)

    def _leave_backward(self, chunk: int, layer: int) -> Iterator[Message]:
        following = received_with(self._train, self._share, chunk)
        for m in range(self._counts[chunk]):
            if following is not None and m < self._counts[following]:
                yield Message(False, self._before, Tag.FORWARD, following, layer, m, ahead=True)
            yield Message(True, self._before, Tag.BACKWARD, chunk, layer, m)

    def _tied(
        self, slices: Sequence[int], tag: Tag, chunk: int, *, sends: bool
    ) -> Iterator[Message]:
        share = self._share
        if share.has_embedding or share.has_head:
            peer = self._last if share.has_embedding else 0
            for number in slices:
                yield Message(sends, peer, tag, chunk, number)

    def _each(self, sends: bool, peer: int, tag: Tag, chunk: int, layer: int) -> Iterator[Message]:
        for m in range(self._counts[chunk]):
            yield Message(sends, peer, tag, chunk, layer, m)
