"""What a rank exchanges with other pipeline stages: the residual stream and a tied embedding.

`moe/pipeline_messages.py` says which messages there are, in which order, and why nobody waits in a
circle; every call here is checked against that plan. Messages are received into the host's
activation arrays: what a layer chunk receives is its checkpoint. What is sent has no copy but the
communicator's.

A tied embedding belongs to the first stage, with its optimizer state. The last stage has a copy of
its weights on the host ("tied"), taken anew in each step and evaluation pass, because an update
lies between them; and fp32 sums of the head's gradients ("tied_grad") over all micro-batches,
which the first stage adds to the gradient of its own use, once, so that the norm sees their sum.
With a vocabulary of V rows on this rank and D columns, a step moves V * D values of the compute
dtype to the last stage and V * D * 4 bytes back; the last stage keeps both on its host. With data
parallelism every pipeline moves its own, because a lease has the whole slice on each rank.

Compute calls everything here from one thread. Calls block while a message is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe.context import StepContext
from moe.params import EMBEDDING, embedding_units, rank_slice_rows
from moe.pipeline_messages import Message, Tag, ends_step, is_received_ahead, received_with
from moe.schedule import uses_tied_copy
from offload.parts import UnitUse


class Mailbox:
    """Sends and receives what the plan of the step says, in its order."""

    def __init__(self, context: StepContext) -> None:
        self._c = context
        self._plan: deque[Message] = deque()

    def follow(self, messages: Sequence[Message]) -> None:
        """Expect these messages next; those of the step before must all have passed."""
        assert not self._plan, f"{self._plan[0]} was neither sent nor received"
        self._plan.extend(messages)

    def send(self, tag: Tag, chunk: int, place: int, m: int, tensor: Any) -> None:
        """Send a device tensor; it may be changed afterwards."""
        message = self._take(True, tag, chunk, place, m)
        array = self._c.backend.to_numpy(tensor)
        self._c.engine.stats.add(d2h_bytes=array.nbytes)
        self._c.groups.pipe.send(array, message.peer, tag)

    def send_host(self, tag: Tag, chunk: int, place: int, array: np.ndarray) -> None:
        """Send a host array; it may be changed afterwards."""
        message = self._take(True, tag, chunk, place, 0)
        self._c.groups.pipe.send(array, message.peer, tag)

    def receive(self, tag: Tag, chunk: int, place: int, m: int, array: np.ndarray) -> None:
        """Fill a host array; blocks until the message is there."""
        message = self._take(False, tag, chunk, place, m)
        self._c.groups.pipe.recv(array, message.peer, tag)

    def _take(self, sends: bool, tag: Tag, chunk: int, place: int, m: int) -> Message:
        message = self._plan.popleft() if self._plan else None
        found = (sends, tag, chunk, place, m)
        if message is None or found != (
            message.sends,
            message.tag,
            message.chunk,
            message.place,
            message.m,
        ):
            raise RuntimeError(f"the step comes to message {found}, its plan expects {message}")
        return message


class StreamLinks:
    """The residual stream at the borders of a rank's layer chunks; elsewhere it only saves it."""

    def __init__(self, context: StepContext, mail: Mailbox) -> None:
        self._c, self._mail = context, mail
        chunks = context.groups.share.layer_chunks
        self._entries = {layers.start for layers in chunks} - {0}
        self._exits = {layers.stop for layers in chunks} - {context.model.num_hidden_layers}

    def receive(self, layer: int, m: int) -> None:
        """Have the input of `layer` on the host: waits for it in the first layer of a chunk."""
        c = self._c
        if layer in self._entries and not is_received_ahead(c.train, c.groups.share, c.chunk):
            self._receive(layer, m, c.chunk)

    def put(self, layer: int, m: int, tensor: Any) -> None:
        """Save the input of `layer` (that many layers: the output), or send it to its rank."""
        if layer in self._exits:
            self._mail.send(Tag.FORWARD, self._c.chunk, layer, m, tensor)
        else:
            self._c.put(*self._c.stream_in(layer, m), tensor)

    def receive_gradients(self, layer: int) -> None:
        """Have the gradient of the input of `layer` in "dh", for all micro-batches."""
        c = self._c
        if layer in self._exits:
            for m in range(c.micro):
                array = c.engine.activations.host("dh", m)
                self._mail.receive(Tag.BACKWARD, c.chunk, layer, m, array)

    def put_gradient(self, layer: int, m: int, tensor: Any) -> None:
        """Save the gradient of the input of `layer` in "dh", or send it to its rank."""
        c = self._c
        if layer not in self._entries:
            c.put("dh", m, tensor)
            return
        following = received_with(c.train, c.groups.share, c.chunk)
        if following is not None and m < c.counts[following]:
            self._receive(layer, m, following)
        self._mail.send(Tag.BACKWARD, c.chunk, layer, m, tensor)

    def _receive(self, layer: int, m: int, chunk: int) -> None:
        c = self._c
        array = c.engine.activations.host(*c.places.stream_in(layer, m, chunk))
        self._mail.receive(Tag.FORWARD, chunk, layer, m, array)


@dataclass(frozen=True)
class TiedUse:
    """A slice of the tied embedding on the last stage, used as `UnitUse` is."""

    weights: dict[str, Any]
    add: Callable[[str, np.ndarray], None]


class TiedEmbedding:
    """Both ends of a tied embedding that two stages use; idle in all other cases."""

    def __init__(self, context: StepContext, mail: Mailbox) -> None:
        share = context.groups.share
        self._c, self._mail = context, mail
        self._units = embedding_units(context.model)
        self._rows = [rows for _, rows in rank_slice_rows(context.model, share)]
        self._is_user = uses_tied_copy(context.model, share)
        tied = context.model.tie_word_embeddings and share.mesh.pp > 1
        self._is_owner = tied and share.has_embedding
        self._summed: set[int] = set()

    # ---- the first stage

    def send_weights(self, number: int, weight: Any) -> None:
        """Send a leased slice in the forward pass that begins a step or an evaluation."""
        if self._is_owner and self._c.chunk == 0:
            self._mail.send(Tag.TIED, 0, number, 0, weight)

    def add_gradient(self, number: int, use: UnitUse) -> None:
        """Add the head's gradient of a slice in the last backward pass of a step."""
        c = self._c
        ends = ends_step(c.train, c.chunk)
        if self._is_owner and ends and c.trains(self._units[number]):
            total = self._host("tied_grad", 0, self._rows[number])
            self._mail.receive(Tag.TIED_GRAD, c.chunk, number, 0, total)
            use.add(EMBEDDING, total)

    # ---- the last stage

    def receive_weights(self) -> None:
        """Take the copy, before anything else in the pass that begins a step or an evaluation."""
        if self._is_user and self._c.chunk == 0:
            self._summed.clear()
            for number, rows in enumerate(self._rows):
                self._mail.receive(Tag.TIED, 0, number, 0, self._host("tied", number, rows))

    @property
    def is_copied(self) -> bool:
        """Whether this rank's head works with the copy and leases nothing."""
        return self._is_user

    @contextmanager
    def use(self, number: int) -> Iterator[TiedUse]:
        """The copy of a slice on the device, and the sum of its gradients."""
        c, rows = self._c, self._rows[number]
        weight = c.rows("tied", number, slice(0, rows), rows)

        def add(name: str, gradient: np.ndarray) -> None:
            assert name == EMBEDDING
            if not c.trains(self._units[number]):
                return
            c.engine.stats.add(d2h_bytes=gradient.nbytes)
            total = self._host("tied_grad", number, rows)
            if number in self._summed:
                total += gradient
            else:
                np.copyto(total, gradient, casting="no")
                self._summed.add(number)

        try:
            yield TiedUse({EMBEDDING: weight}, add)
        finally:
            c.backend.sync()

    def send_gradients(self) -> None:
        """Send the sums, after everything else in the last backward pass of a step."""
        c = self._c
        if not self._is_user or not ends_step(c.train, c.chunk):
            return
        for number, rows in enumerate(self._rows):
            if c.trains(self._units[number]):
                total = self._host("tied_grad", number, rows)
                if number not in self._summed:  # this rank had no micro-batch
                    total[...] = 0
                self._mail.send_host(Tag.TIED_GRAD, c.chunk, number, total)

    def _host(self, name: str, index: int, rows: int) -> np.ndarray:
        return self._c.engine.activations.host(name, index)[:rows]
