import math

import numpy as np
import pytest

from moe.data import bigram
from moe.data.bigram import bigram_nats_per_token
from moe.data.source import source_from_documents
from moe.data.split import split_held_out
from ops.errors import DataError


def markov_text(seed, length, chances_VV):
    rng = np.random.default_rng(seed)
    draws = rng.random(length)
    cumulated = np.cumsum(chances_VV, axis=1)
    tokens = [0]
    for draw in draws:
        tokens.append(int(np.searchsorted(cumulated[tokens[-1]], draw)))
    return np.minimum(np.array(tokens), len(chances_VV) - 1)


def test_reaches_the_entropy_of_a_markov_source():
    chances = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.45, 0.1, 0.45]])
    stationary = np.linalg.matrix_power(chances, 200)[0]
    entropy = -(stationary[:, None] * chances * np.log(chances)).sum()
    found = bigram_nats_per_token(
        markov_text(1, 60_000, chances), markov_text(2, 60_000, chances), 3
    )
    assert found == pytest.approx(entropy, abs=0.01)


def test_random_tokens_cost_the_logarithm_of_the_vocabulary():
    tokens = np.random.default_rng(1).integers(0, 16, 40_000)
    found = bigram_nats_per_token(tokens[:30_000], tokens[30_000:], 16)
    assert found == pytest.approx(math.log(16), abs=0.02)


def test_tokens_never_seen_in_training_cost_a_finite_amount():
    found = bigram_nats_per_token(np.array([1, 2] * 50), np.array([200, 201, 1, 2]), 257)
    assert math.isfinite(found)
    assert found > 1


def test_chunks_do_not_change_the_value(monkeypatch):
    tokens = np.random.default_rng(3).integers(0, 9, 5000) ** 2 // 9
    whole = bigram_nats_per_token(tokens[:4000], tokens[4000:], 9)
    monkeypatch.setattr(bigram, "CHUNK_TOKENS", 7)
    assert bigram_nats_per_token(tokens[:4000], tokens[4000:], 9) == pytest.approx(whole)


def test_views_and_arrays_agree():
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 200, rng.integers(5, 60)) for _ in range(300)]
    split = split_held_out(source_from_documents("text", documents, 257, 256), 0.1)
    train, held_out = (
        np.concatenate(list(view.chunks())) for view in (split.train, split.held_out)
    )
    assert bigram_nats_per_token(split.train, split.held_out, 257) == bigram_nats_per_token(
        train, held_out, 257
    )


def test_a_large_vocabulary_has_no_table():
    assert bigram_nats_per_token(np.array([1, 2]), np.array([1, 2]), 4097) is None


@pytest.mark.parametrize("train, held_out", [([1], [1, 2]), ([1, 2], [])])
def test_less_than_a_pair_is_refused(train, held_out):
    with pytest.raises(DataError, match="needs 2"):
        bigram_nats_per_token(np.array(train), np.array(held_out), 10)


def test_a_token_outside_of_the_table_is_refused():
    with pytest.raises(DataError, match="token 10"):
        bigram_nats_per_token(np.array([1, 10, 1]), np.array([1, 2]), 10)


def test_the_shortest_texts_work():
    assert math.isfinite(bigram_nats_per_token(np.array([1, 2]), np.array([1, 2]), 10))
