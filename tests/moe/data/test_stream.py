import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.source import TokenSource
from moe.data.split import split_held_out, whole_view
from moe.data.stream import BatchStream, Cursor, evaluation_batches, num_sequences
from ops.errors import DataError


def numbered_view(num_tokens, digest="digest"):
    """A view whose tokens are their positions."""
    tokens = np.arange(num_tokens, dtype="<u4")
    ends = np.array([num_tokens], dtype=np.uint64)
    return whole_view(TokenSource("numbers", tokens, ends, num_tokens, 0, digest))


def take(stream, count):
    return [stream.next() for _ in range(count)]


def same(left, right):
    return (
        np.array_equal(left.tokens, right.tokens)
        and np.array_equal(left.targets, right.targets)
        and left.cursor_after == right.cursor_after
    )


@settings(deadline=None, max_examples=60)
@given(num_tokens=st.integers(2, 400), seq_len=st.integers(1, 40))
def test_packing_covers_every_token_once(num_tokens, seq_len):
    view = numbered_view(num_tokens)
    total = num_sequences(view, seq_len)
    if total == 0:
        assert num_tokens <= seq_len
        return
    stream = BatchStream(view, seq_len, total, Cursor())
    batch = stream.next()
    covered = total * seq_len
    assert sorted(batch.tokens.ravel().tolist()) == list(range(covered))
    assert sorted(batch.targets.ravel().tolist()) == list(range(1, covered + 1))
    assert num_tokens - 1 - covered < seq_len


def test_targets_are_inputs_shifted_by_one_and_i32():
    batch = BatchStream(numbered_view(101), 10, 4, Cursor()).next()
    assert batch.tokens.shape == batch.targets.shape == (4, 10)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    assert batch.tokens.flags.c_contiguous
    assert batch.targets.flags.c_contiguous
    assert np.array_equal(batch.targets, batch.tokens + 1)


@settings(deadline=None, max_examples=50)
@given(
    total=st.integers(1, 30),
    data=st.data(),
    seed=st.integers(0, 2**63 - 1),
    stop=st.integers(0, 25),
)
def test_a_saved_cursor_continues_with_the_same_batches(total, data, seed, stop):
    batch_sequences = data.draw(st.integers(1, total))
    view = numbered_view(total * 3 + 1)
    uninterrupted = take(BatchStream(view, 3, batch_sequences, Cursor(seed=seed)), stop + 6)
    stream = BatchStream(view, 3, batch_sequences, Cursor(seed=seed))
    cursor = stream.cursor
    for batch in take(stream, stop):
        cursor = batch.cursor_after
    saved = json.loads(json.dumps(cursor.to_json()))
    resumed = BatchStream(view, 3, batch_sequences, Cursor.from_json(saved))
    for expected, batch in zip(uninterrupted[stop:], take(resumed, 6)):
        assert same(expected, batch)


@settings(deadline=None, max_examples=40)
@given(total=st.integers(1, 30), data=st.data())
def test_each_epoch_visits_every_sequence_once(total, data):
    """Batches that cross an epoch's end are completed from the next epoch, nothing is dropped."""
    batch_sequences = data.draw(st.integers(1, total))
    stream = BatchStream(numbered_view(total * 2 + 1), 2, batch_sequences, Cursor())
    batches = take(stream, 3 * total)
    firsts = np.concatenate([batch.tokens[:, 0] // 2 for batch in batches]).tolist()
    for epoch in range(3 * batch_sequences):
        visited = firsts[epoch * total : (epoch + 1) * total]
        assert sorted(visited) == list(range(total))


def test_the_batch_size_may_change_at_a_cursor():
    view = numbered_view(61)
    by_one = np.concatenate([batch.tokens for batch in take(BatchStream(view, 3, 1, Cursor()), 50)])
    stream = BatchStream(view, 3, 4, Cursor())
    head = take(stream, 3)
    tail = take(BatchStream(view, 3, 6, head[-1].cursor_after), 6)
    mixed = np.concatenate([batch.tokens for batch in head + tail])
    assert np.array_equal(mixed, by_one[: len(mixed)])


def test_epochs_and_seeds_are_ordered_differently():
    view = numbered_view(301)
    first, second = take(BatchStream(view, 3, 100, Cursor(seed=1)), 2)
    other = BatchStream(view, 3, 100, Cursor(seed=2)).next()
    assert first.cursor_after.epoch == 1
    assert first.cursor_after.position == 0
    assert not np.array_equal(first.tokens, second.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_ranks_read_their_rows_of_one_global_batch():
    view = numbered_view(301)
    whole = take(BatchStream(view, 3, 8, Cursor()), 20)
    parts = [
        take(BatchStream(view, 3, 8, Cursor(), rows=slice(r * 2, r * 2 + 2)), 20) for r in range(4)
    ]
    for step, batch in enumerate(whole):
        joined = np.concatenate([part[step].tokens for part in parts])
        assert np.array_equal(joined, batch.tokens)
        assert all(part[step].cursor_after == batch.cursor_after for part in parts)


def test_iterates():
    stream = BatchStream(numbered_view(31), 3, 2, Cursor())
    expected = take(BatchStream(numbered_view(31), 3, 2, Cursor()), 3)
    assert all(same(left, right) for left, right in zip(expected, stream))


def test_a_batch_larger_than_the_data_is_refused_with_the_numbers():
    with pytest.raises(DataError) as caught:
        BatchStream(numbered_view(31), 3, 11, Cursor())
    message = str(caught.value)
    for number in ("31 tokens", "10 sequences of 3", "batch needs 11"):
        assert number in message


def test_a_cursor_of_another_text_or_length_is_refused():
    view = numbered_view(61)
    cursor = BatchStream(view, 3, 2, Cursor()).next().cursor_after
    with pytest.raises(DataError, match="another text"):
        BatchStream(numbered_view(61, "other digest"), 3, 2, cursor)
    with pytest.raises(DataError, match="sequence length"):
        BatchStream(view, 4, 2, cursor)


def test_a_cursor_of_another_held_out_share_is_refused():
    source = numbered_view(5000).source
    cursor = BatchStream(split_held_out(source, 0.1).train, 3, 2, Cursor()).next().cursor_after
    with pytest.raises(DataError, match="held-out share"):
        BatchStream(split_held_out(source, 0.2).train, 3, 2, cursor)


def test_a_position_behind_the_end_is_refused():
    with pytest.raises(DataError, match="sequence 20, numbers holds 20"):
        BatchStream(numbered_view(61), 3, 2, Cursor(position=20))


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"epoch": 0, "position": 0},
        {"epoch": -1, "position": 0, "seed": 1},
        {"epoch": 0, "position": 1.5, "seed": 1},
        {"epoch": 0, "position": 0, "seed": True},
        {"epoch": "0", "position": 0, "seed": 1},
        {"epoch": 0, "position": 0, "seed": 1, "stream": None},
    ],
)
def test_a_damaged_cursor_is_refused(saved):
    with pytest.raises(DataError, match="data position"):
        Cursor.from_json(saved)


def test_a_token_outside_of_the_vocabulary_is_named_and_does_not_move_the_cursor():
    stream = BatchStream(numbered_view(61), 3, 20, Cursor(), vocab_size=50)
    before = stream.cursor
    with pytest.raises(DataError, match=r"token 5\d at position 5\d .*vocab_size is 50"):
        stream.next()
    assert stream.cursor == before


def test_evaluation_reads_in_order_without_touching_a_cursor():
    batches = list(evaluation_batches(numbered_view(61), 3, 4, 3))
    assert len(batches) == 3
    joined = np.concatenate([batch.tokens for batch in batches])
    assert np.array_equal(joined.ravel(), np.arange(36))
    assert np.array_equal(batches[0].targets, batches[0].tokens + 1)


def test_evaluation_ends_with_a_short_text():
    """It was completed with the text's first sequences, which then counted twice."""
    batches = list(evaluation_batches(numbered_view(31), 3, 4, 100))
    assert [batch.tokens.shape for batch in batches] == [(4, 3), (4, 3), (2, 3)]
    assert [batch.num_tokens for batch in batches] == [12, 12, 6]
    firsts = np.concatenate([batch.tokens[:, 0] // 3 for batch in batches]).tolist()
    assert firsts == list(range(10))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 8), st.integers(1, 20))
def test_ranks_evaluate_each_sequence_once_and_enter_as_many_batches(total, each, ranks, limit):
    """10 sequences, 4 a rank: 2 ranks counted six of them twice, 8 ranks two four times."""
    view = numbered_view(3 * total + 1)
    parts = [
        list(
            evaluation_batches(
                view, 3, each * ranks, limit, rows=slice(rank * each, (rank + 1) * each)
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in parts}) == 1
    counted = min(total, limit * each * ranks)
    for batches in zip(*parts):
        tokens = sum(batch.tokens.size for batch in batches)
        assert {batch.num_tokens for batch in batches} == {tokens}
        assert all(len(batch.tokens) == len(batch.targets) <= each for batch in batches)
    firsts = [int(row[0]) // 3 for batches in parts for batch in batches for row in batch.tokens]
    assert sorted(firsts) == list(range(counted))
    if total >= limit * each * ranks:  # then all are of the shape they always had
        assert all(len(batch.tokens) == each for batches in parts for batch in batches)


def test_evaluation_of_less_than_a_sequence_is_refused():
    with pytest.raises(DataError, match="3 tokens, one sequence needs 4"):
        next(evaluation_batches(numbered_view(3), 3, 4, 1))
