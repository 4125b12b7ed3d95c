"""Messages between pipeline stages: every one has a receiver, and nobody waits in a circle.

All ranks of a pipeline are walked through their messages with less and less room for those on
their way, down to none, when a message is received before its sender goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise

import pytest

from moe.config import ModelConfig, TrainConfig
from moe.mesh import Mesh, ParallelConfig, Share
from moe.pipeline_messages import Message, Tag, evaluation_messages, training_messages
from moe.schedule import num_lanes, training_passes
from tests.moe.pipeline_cases import LAYERS, MESHES, model_of, train_of

ROOMS = (0, 1, 2, 3, 1000)


def walk(programs: Sequence[Sequence[Message]], room: int) -> None:
    """Let every rank go on until all have ended; fails when nobody can.

    A rank has `room` messages on their way at most; one more, and it waits for receivers.
    """
    at = [0] * len(programs)
    waiting: defaultdict[tuple[int, int, Tag], deque[Message]] = defaultdict(deque)
    posted = [False] * len(programs)  # whether the message `at` points to is on its way
    outstanding = [0] * len(programs)

    def advance(rank: int) -> bool:
        message = programs[rank][at[rank]]
        if message.sends:
            if not posted[rank]:
                waiting[rank, message.peer, message.tag].append(message)
                outstanding[rank] += 1
                posted[rank] = True
            if outstanding[rank] > room:
                return False
        else:
            queue = waiting[message.peer, rank, message.tag]
            if not queue:
                return False
            sent = queue.popleft()
            outstanding[message.peer] -= 1
            assert key(sent) == key(message), f"{sent} was received as {message}"
        at[rank] += 1
        posted[rank] = False
        return True

    def key(message: Message) -> tuple[int, int, int]:
        return message.chunk, message.place, message.m

    progress = True
    while progress:
        progress = False
        for rank in range(len(programs)):
            while at[rank] < len(programs[rank]) and advance(rank):
                progress = True
    for rank, program in enumerate(programs):
        assert at[rank] == len(program), f"rank {rank} waits for ever at {program[at[rank]]}"
    assert not any(waiting.values()), "a message was not received"


def shares_of(config: ParallelConfig, model: ModelConfig) -> list[Share]:
    mesh = Mesh(config)
    return [mesh.share(model, rank) for rank in range(mesh.num_ranks)]


def counts_of(train: TrainConfig, micro_batches: int) -> list[int]:
    """Micro-batches of each chunk when a rank has so many of them."""
    if train.micro_batch_order == "layer_major":
        return [micro_batches]
    steps = train.gradient_accumulation_steps
    return [int(chunk < micro_batches) for chunk in range(steps)]


@pytest.mark.parametrize("config", MESHES, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_step_gets_through_with_any_room(config, tied):
    model = model_of(tie_word_embeddings=tied)
    shares = shares_of(config, model)
    for steps in (1, 2, 3, 5, 8):
        train = train_of(config, gradient_accumulation_steps=steps)
        for micro_batches in {steps, steps - 1, 1, 0}:
            counts = counts_of(train, micro_batches)
            programs = [training_messages(model, train, share, counts) for share in shares]
            for room in ROOMS:
                walk(programs, room)


def test_batch_major_gets_through_breadth_first():
    for config in MESHES:
        if config.pipeline_schedule == "breadth_first":
            model = model_of()
            train = train_of(config, gradient_accumulation_steps=3, micro_batch_order="batch_major")
            shares = shares_of(config, model)
            programs = [training_messages(model, train, share, [1, 1, 1]) for share in shares]
            for room in ROOMS:
                walk(programs, room)


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_evaluation_gets_through_with_any_room(config):
    model = model_of()
    train = train_of(config, gradient_accumulation_steps=4)
    shares = shares_of(config, model)
    programs = [2 * evaluation_messages(model, train, share, 4) for share in shares]
    for room in ROOMS:
        walk(programs, room)


def test_the_walk_finds_a_circle():
    """Without receiving ahead, two neighbours of `1f1b` wait for each other."""
    config = ParallelConfig(pipeline_stage=4, pipeline_schedule="1f1b")
    model = model_of()
    train = train_of(config, gradient_accumulation_steps=8)
    programs = []
    for share in shares_of(config, model):
        program = training_messages(model, train, share, [1] * 8)
        for index in [k for k, message in enumerate(program) if message.ahead]:
            # As if it were received where it is used.
            program[index : index + 2] = reversed(program[index : index + 2])
        programs.append(program)
    with pytest.raises(AssertionError, match="waits for ever"):
        walk(programs, 0)


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_a_stream_crosses_every_border_once_each_way(config):
    model = model_of(tie_word_embeddings=False)
    train = train_of(config, gradient_accumulation_steps=3)
    counts = counts_of(train, 3)
    borders = {chunk.start for chunk in Mesh(config).layer_chunks(LAYERS)} - {0}
    for tag in (Tag.FORWARD, Tag.BACKWARD):
        found = [
            (message.sends, message.place, message.chunk, message.m)
            for share in shares_of(config, model)
            for message in training_messages(model, train, share, counts)
            if message.tag == tag
        ]
        assert len(found) == len(set(found)) == 2 * 3 * len(borders)
        assert {place for _, place, _, _ in found} == borders


def test_a_frozen_embedding_sends_no_gradient():
    config = ParallelConfig(pipeline_stage=2)
    model = model_of(vocab_slice_rows=8)
    train = train_of(config, freeze=["embed.1"])
    for share in shares_of(config, model):
        messages = training_messages(model, train, share, [1])
        assert [x.place for x in messages if x.tag == Tag.TIED] == [0, 1, 2]
        assert [x.place for x in messages if x.tag == Tag.TIED_GRAD] == [0, 2]


def test_what_is_received_ahead_finds_its_lane_free():
    """A lane's backward pass is the one that ends when the stream of its next chunk arrives."""
    config = ParallelConfig(pipeline_stage=4, pipeline_schedule="1f1b")
    model = model_of()
    train = train_of(config, gradient_accumulation_steps=7)
    ahead = 0
    for share in shares_of(config, model):
        messages = training_messages(model, train, share, [1] * 7)
        lanes = num_lanes(train, share)
        for message, following in pairwise(messages):
            if message.ahead:
                ahead += 1
                assert following.tag == Tag.BACKWARD and following.sends
                assert message.chunk == following.chunk + lanes
        assert len(training_passes(train, share)) == 14
    assert ahead == sum(7 - lanes for lanes in (3, 2, 1))
