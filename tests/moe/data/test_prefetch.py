import threading

import numpy as np
import pytest

from moe.data.prefetch import PrefetchedBatches
from moe.data.source import TokenSource
from moe.data.split import whole_view
from moe.data.stream import BatchStream, Cursor
from ops.errors import DataError


def make_stream(vocab_size=None):
    tokens = np.arange(61, dtype="<u4")
    ends = np.array([61], dtype=np.uint64)
    view = whole_view(TokenSource("numbers", tokens, ends, 61, 0, "digest"))
    return BatchStream(view, 3, 2, Cursor(), vocab_size=vocab_size)


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_every_window_gives_the_same_batches_and_cursors(window):
    plain = make_stream()
    with PrefetchedBatches(make_stream(), window) as batches:
        for _ in range(30):
            expected, batch = plain.next(), batches.next()
            assert np.array_equal(expected.tokens, batch.tokens)
            assert expected.cursor_after == batch.cursor_after


@pytest.mark.parametrize("window", [0, 1, 4])
def test_an_error_arrives_where_the_plain_stream_raises_it(window):
    plain = make_stream(vocab_size=40)
    good = 0
    with pytest.raises(DataError) as expected:
        while True:
            plain.next()
            good += 1
    with PrefetchedBatches(make_stream(vocab_size=40), window) as batches:
        for _ in range(good):
            batches.next()
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                batches.next()
            assert str(caught.value) == str(expected.value)


def test_a_window_of_zero_starts_no_thread():
    before = threading.active_count()
    with PrefetchedBatches(make_stream(), 0) as batches:
        batches.next()
        assert threading.active_count() == before


@pytest.mark.parametrize("window", [0, 2])
def test_does_not_hang_after_close(window):
    batches = PrefetchedBatches(make_stream(), window)
    batches.next()
    before_close = threading.active_count()
    batches.close()
    batches.close()
    assert threading.active_count() == before_close - (window > 0)
    with pytest.raises(RuntimeError, match="after close"):
        batches.next()


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="-1"):
        PrefetchedBatches(make_stream(), -1)
