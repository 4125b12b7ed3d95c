import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.source import TokenSource, check_tokens, contents_digest, source_from_documents
from moe.data.split import TokenView, split_held_out, whole_view
from ops.errors import DataError

SEPARATOR = 256


def make_source(lengths, vocab_size=257):
    """Documents of the given lengths; token values cycle so that neighbours differ."""
    documents = [np.arange(length) % 251 for length in lengths]
    return source_from_documents("text", documents, vocab_size, SEPARATOR)


def numbered_source(num_tokens, num_documents):
    """Each token is its own position, so a view's contents say where they are from."""
    tokens = np.arange(num_tokens, dtype="<u4")
    borders = np.linspace(0, num_tokens, num_documents + 1).astype(np.uint64)[1:]
    digest = contents_digest(tokens, borders)
    return TokenSource("numbers", tokens, borders, num_tokens, 0, digest)


def all_tokens(view):
    return np.concatenate([*view.chunks(), np.array([], dtype=np.uint32)]).astype(int).tolist()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=80),
    fraction=st.floats(0.001, 0.5),
)
def test_train_and_held_out_are_disjoint_and_together_everything(lengths, fraction):
    source = make_source(lengths)
    numbers = TokenSource(
        "numbers",
        np.arange(source.num_tokens, dtype="<u4"),
        source.document_ends,
        source.num_tokens,
        0,
        "digest",
    )
    split = split_held_out(numbers, fraction)
    train, held_out = all_tokens(split.train), all_tokens(split.held_out)
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert sorted(train + held_out) == list(range(source.num_tokens))


def test_holds_out_whole_documents_of_about_the_asked_share():
    source = numbered_source(100_000, 1000)
    split = split_held_out(source, 0.05)
    held_out = all_tokens(split.held_out)
    assert split.whole_documents
    assert 0.025 <= len(held_out) / 100_000 <= 0.1
    borders = {0, *source.document_ends.tolist()}
    gaps = np.flatnonzero(np.diff(held_out) != 1)
    assert {held_out[0], held_out[-1] + 1} <= borders
    assert {held_out[i] + 1 for i in gaps} <= borders


def test_held_out_documents_come_from_everywhere():
    held_out = all_tokens(split_held_out(numbered_source(100_000, 1000), 0.05).held_out)
    assert held_out[0] < 20_000
    assert held_out[-1] > 80_000


def test_the_same_text_is_split_the_same_way_each_time():
    first, second = (split_held_out(numbered_source(9000, 90), 0.1) for _ in range(2))
    assert first.train.digest == second.train.digest
    assert all_tokens(first.held_out) == all_tokens(second.held_out)
    assert first.train.digest != first.held_out.digest


def test_one_long_document_holds_out_its_end():
    split = split_held_out(numbered_source(10_000, 1), 0.05)
    assert not split.whole_documents
    assert all_tokens(split.held_out) == list(range(9500, 10_000))


def test_a_border_near_the_cut_keeps_documents_whole():
    tokens = np.arange(1000, dtype="<u4")
    ends = np.array([930, 1000], dtype=np.uint64)
    source = TokenSource("two", tokens, ends, 1000, 0, "digest")
    split = split_held_out(source, 0.06)
    assert split.whole_documents
    assert split.held_out.num_tokens == 70


def test_one_giant_document_among_many_does_not_swallow_the_training_text():
    """A hash may choose the giant one; the share then is far off and the end is held out."""
    for giant in range(40):
        lengths = [10] * 40
        lengths[giant] = 5000
        split = split_held_out(make_source(lengths), 0.05)
        assert split.held_out.num_tokens <= 0.1 * split.train.source.num_tokens + 1


def test_reads_across_runs_as_one_text():
    source = numbered_source(100, 10)
    view = TokenView("odd", source, np.array([10, 40, 90]), np.array([20, 45, 100]))
    expected = [*range(10, 20), *range(40, 45), *range(90, 100)]
    assert view.num_tokens == 25
    for start in range(26):
        for stop in range(start, 26):
            assert view.read(start, stop).tolist() == expected[start:stop]
    assert [view.source_position(i) for i in range(25)] == expected
    assert all_tokens(view) == expected
    assert [len(chunk) for chunk in view.chunks(7)] == [7, 7, 7, 4]


def test_reading_inside_of_one_run_copies_nothing():
    source = numbered_source(100, 1)
    assert np.shares_memory(whole_view(source).read(5, 50), source.tokens)


@pytest.mark.parametrize("start, stop", [(-1, 3), (0, 101), (5, 4)])
def test_refuses_to_read_outside_of_the_view(start, stop):
    with pytest.raises(ValueError, match="view of 100"):
        whole_view(numbered_source(100, 1)).read(start, stop)


def test_documents_are_joined_by_separators():
    source = source_from_documents("ab", [np.array([1, 2]), np.array([3])], 257, SEPARATOR)
    assert source.tokens.tolist() == [1, 2, SEPARATOR, 3, SEPARATOR]
    assert source.document_ends.tolist() == [3, 5]
    assert source.tokens.dtype == np.dtype("<u2")
    assert "2 documents, 5 tokens" in source.describe()


def test_no_documents_is_an_error():
    with pytest.raises(DataError, match="nothing holds no documents"):
        source_from_documents("nothing", [], 257, SEPARATOR)


def test_names_the_first_token_outside_of_the_vocabulary():
    source = make_source([2_000_000])
    tokens = source.tokens.copy()
    tokens[1_500_003] = 255
    tokens[1_700_000] = 254
    bad = TokenSource("bad text", tokens, source.document_ends, 257, 256, "digest")
    with pytest.raises(DataError) as caught:
        check_tokens(bad, 252)
    message = str(caught.value)
    assert "bad text" in message
    assert "token 255 at position 1500003" in message
    assert "model.vocab_size is 252" in message
    assert "257" in message


def test_a_vocabulary_that_just_fits_is_accepted():
    check_tokens(make_source([10]), 257)
