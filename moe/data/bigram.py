"""The loss of a bigram model: what a Transformer has to beat to have used any context.

P(b | a) = (c(a, b) + k · u(b)) / (c(a) + k), with c the counts of the training text and
u(b) = (c(b) + 1) / (N + V) its unigram with add-one smoothing: a Dirichlet prior with mean u
(MacKay and Peto, "A hierarchical Dirichlet language model", 1995). The weight k is the best of
a small grid on the last tenth of the training text after counting the first nine; then all of it
is counted. The held-out text has no part in the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from moe.data.source import CHUNK_TOKENS
from moe.data.split import TokenView
from ops.errors import DataError

VOCAB_SIZE_MAX = 4096
_PRIOR_WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_FITTED_FRACTION = 0.9

Tokens = TokenView | npt.NDArray[np.integer[Any]]


def bigram_nats_per_token(
    train_tokens: Tokens, held_out_tokens: Tokens, vocab_size: int
) -> float | None:
    """Cross-entropy of the held-out tokens under a bigram model of the training tokens, in nats.

    Both are views or integers [N]. None when `vocab_size` is above 4096, where the table of
    counts (8·V² bytes) would no longer be small. Raises `DataError` when either has fewer than
    two tokens or a token outside of the vocabulary. Blocks for one pass over each.
    """
    if vocab_size > VOCAB_SIZE_MAX:
        return None
    for name, tokens in (("training", train_tokens), ("held-out", held_out_tokens)):
        if _length(tokens) < 2:
            raise DataError(f"the {name} text has {_length(tokens)} tokens, a bigram model needs 2")
    table = _BigramTable(vocab_size)
    cut = max(2, int(_length(train_tokens) * _FITTED_FRACTION))
    table.count(train_tokens, 0, cut)
    prior_weight = 1.0
    if _length(train_tokens) - cut >= 2:
        losses = table.nats_per_token(train_tokens, cut, _length(train_tokens), _PRIOR_WEIGHTS)
        prior_weight = _PRIOR_WEIGHTS[int(np.argmin(losses))]
    table.count(train_tokens, cut - 1, _length(train_tokens))
    losses = table.nats_per_token(held_out_tokens, 0, _length(held_out_tokens), (prior_weight,))
    return float(losses[0])


class _BigramTable:
    """Counts of pairs, i64 [V, V]: row = token, column = the one after it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pairs_VV = np.zeros((vocab_size, vocab_size), dtype=np.int64)

    def count(self, tokens: Tokens, start: int, stop: int) -> None:
        """Add the pairs inside of [start, stop)."""
        flat = self._pairs_VV.reshape(-1)
        for before_N, after_N in self._pair_chunks(tokens, start, stop):
            pairs, times = np.unique(before_N * self._vocab_size + after_N, return_counts=True)
            flat[pairs] += times

    def nats_per_token(
        self, tokens: Tokens, start: int, stop: int, prior_weights: tuple[float, ...]
    ) -> npt.NDArray[np.float64]:
        """Mean of -log P over the pairs inside of [start, stop), one for each weight, f64 [K]."""
        context_V = self._pairs_VV.sum(axis=1)
        follower_V = self._pairs_VV.sum(axis=0)
        unigram_V = (follower_V + 1) / (follower_V.sum() + self._vocab_size)
        sums_K = np.zeros(len(prior_weights))
        num_pairs = 0
        for before_N, after_N in self._pair_chunks(tokens, start, stop):
            seen_N = self._pairs_VV[before_N, after_N]
            for index, weight in enumerate(prior_weights):
                chance_N = (seen_N + weight * unigram_V[after_N]) / (context_V[before_N] + weight)
                sums_K[index] -= np.log(chance_N).sum()
            num_pairs += len(before_N)
        return sums_K / num_pairs

    def _pair_chunks(
        self, tokens: Tokens, start: int, stop: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        for first in range(start, stop - 1, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS + 1, stop)
            chunk = (
                tokens.read(first, last) if isinstance(tokens, TokenView) else tokens[first:last]
            )
            if int(chunk.max()) >= self._vocab_size or int(chunk.min()) < 0:
                raise DataError(
                    f"the text holds token {int(chunk.max())}, a bigram table of "
                    f"{self._vocab_size} tokens does not"
                )
            wide = chunk.astype(np.int64)
            yield wide[:-1], wide[1:]


def _length(tokens: Tokens) -> int:
    return tokens.num_tokens if isinstance(tokens, TokenView) else len(tokens)
