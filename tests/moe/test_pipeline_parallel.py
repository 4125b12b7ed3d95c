"""The mailbox of a step: messages pass as planned, anything else is an error at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe.mesh import Mesh, ParallelConfig
from moe.pipeline_messages import Message, Tag, training_messages
from moe.pipeline_parallel import Mailbox
from offload.stats import Stats
from ops.comm.base import World
from ops.comm.local import run_local
from ops.device import NumpyBackend
from tests.moe.pipeline_cases import model_of, train_of


def context_of(pipe: Any) -> Any:
    """As much of a `StepContext` as the mailbox looks at."""
    return SimpleNamespace(
        backend=NumpyBackend(),
        engine=SimpleNamespace(stats=Stats()),
        groups=SimpleNamespace(pipe=pipe),
    )


def test_a_planned_step_passes_and_counts_what_leaves_the_device():
    config = ParallelConfig(pipeline_stage=2)
    model = model_of()
    train = train_of(config, gradient_accumulation_steps=3)

    def step(world: World) -> tuple[list[float], int]:
        mail, context = _mailbox(world)
        messages = training_messages(model, train, Mesh(config).share(model, world.rank), [3])
        for _ in range(2):
            mail.follow(messages)
            received = []
            for x in messages:
                if x.sends:
                    value = np.full(4, 10 * x.place + x.m, np.float32)
                    mail.send(x.tag, x.chunk, x.place, x.m, value)
                else:
                    array = np.empty(4, np.float32)
                    mail.receive(x.tag, x.chunk, x.place, x.m, array)
                    received.append(float(array[0]))
        return received, context.engine.stats.snapshot().d2h_bytes

    first, last = run_local(2, step, outstanding_bytes_max=1)
    border, micro_batches, slices = 40, [0, 1, 2], [0, 10]
    assert first[0] == [*(border + m for m in micro_batches), *slices]
    assert last[0] == [*slices, *(border + m for m in micro_batches)]
    assert first[1] == last[1] == 2 * 5 * 4 * 4


def test_a_message_out_of_turn_is_refused():
    mail, _ = _mailbox(None)
    mail.follow([Message(True, 1, Tag.FORWARD, 0, 4, 0), Message(True, 1, Tag.FORWARD, 0, 4, 1)])
    with pytest.raises(RuntimeError, match="its plan expects"):
        mail.send(Tag.FORWARD, 0, 4, 1, np.zeros(1))


def test_a_message_too_many_is_refused():
    mail, _ = _mailbox(None)
    with pytest.raises(RuntimeError, match="its plan expects None"):
        mail.receive(Tag.BACKWARD, 0, 4, 0, np.zeros(1))


def test_a_step_that_left_messages_out_is_noticed():
    mail, _ = _mailbox(None)
    mail.follow([Message(True, 1, Tag.FORWARD, 0, 4)])
    with pytest.raises(AssertionError, match="neither sent nor received"):
        mail.follow([])


def _mailbox(pipe: Any) -> tuple[Mailbox, Any]:
    context = context_of(pipe)
    return Mailbox(context), context
