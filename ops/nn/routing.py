"""Which tokens go to which expert: host arithmetic on small arrays, NumPy only.

The choice is a pure, stable function of the router's logits, so that forward, recomputation and
every rank agree on it. Shape suffixes: see `ops/nn/dims.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIRST_BUCKET = 16


def choose_experts(logits_TE: NDArray, k: int) -> NDArray[np.int32]:
    """Return idx_TK i32: each token's k largest logits, best first, ties to the lower expert."""
    order = np.argsort(-logits_TE, axis=1, kind="stable")
    return np.ascontiguousarray(order[:, :k], dtype=np.int32)


def bucket_sizes(num_tokens: int) -> tuple[int, ...]:
    """Return the row counts experts are padded to: multiples of 16, four to a doubling from 64.

    16, 32, 48, 64, 80, 96, 112, 128, 160, ...: at most a quarter of the rows is padding. The
    last is `num_tokens` itself (an expert gets a token at most once). A pure function of the
    micro-batch's tokens, so padding never depends on budgets or timing, and the number of jit
    shapes is bounded by about 4*log2(num_tokens / 16).
    """
    sizes, size, step = [], _FIRST_BUCKET, _FIRST_BUCKET
    while size < num_tokens:
        sizes.append(size)
        if size >= 8 * step:
            step *= 2
        size += step
    return (*sizes, num_tokens)


def bucket(count: int, num_tokens: int) -> int:
    """Return the smallest bucket that holds `count` rows of a micro-batch of `num_tokens`."""
    return next(size for size in bucket_sizes(num_tokens) if size >= count)


@dataclass(frozen=True)
class SlotPlan:
    """The T*K (token, choice) pairs of a micro-batch, sorted by expert, then token.

    A slot is a position in that order. `counts_E` i64 rows of each expert; `starts_E` i64 its
    first slot; `token_of_slot_P` i32; `pos_TK` i32 the slot of (token, choice), `choice_P` i64
    the flat index t*K + k of each slot.
    """

    num_tokens: int
    counts_E: NDArray[np.int64]
    starts_E: NDArray[np.int64]
    token_of_slot_P: NDArray[np.int32]
    pos_TK: NDArray[np.int32]
    choice_P: NDArray[np.int64]

    @classmethod
    def of(cls, idx_TK: NDArray[np.int32], num_experts: int) -> SlotPlan:
        """Build the plan of the choices idx_TK."""
        num_tokens, k = idx_TK.shape
        flat = idx_TK.reshape(-1)
        choice = np.argsort(flat, kind="stable")
        pos = np.empty(flat.size, np.int32)
        pos[choice] = np.arange(flat.size, dtype=np.int32)
        counts = np.bincount(flat, minlength=num_experts).astype(np.int64)
        return cls(
            num_tokens=num_tokens,
            counts_E=counts,
            starts_E=np.cumsum(counts) - counts,
            token_of_slot_P=(choice // k).astype(np.int32),
            pos_TK=pos.reshape(num_tokens, k),
            choice_P=choice,
        )

    def slots(self, expert: int) -> slice:
        """Return the slots of `expert` (its rows in any [P, ...] array)."""
        start = int(self.starts_E[expert])
        return slice(start, start + int(self.counts_E[expert]))

    def bucket_of(self, expert: int) -> int:
        """Return N, the padded number of rows of `expert`."""
        return bucket(int(self.counts_E[expert]), self.num_tokens)

    def rows(self, expert: int) -> NDArray[np.int32]:
        """Return idx_N i32: the tokens of `expert`, padded with token 0 to its bucket."""
        padded = np.zeros(self.bucket_of(expert), np.int32)
        tokens = self.token_of_slot_P[self.slots(expert)]
        padded[: tokens.size] = tokens
        return padded

    def weights(self, expert: int, w_TK: NDArray) -> NDArray:
        """Return w_N, the combine weights of the rows of `expert`, padded with zeros."""
        padded = np.zeros(self.bucket_of(expert), w_TK.dtype)
        chosen = w_TK.reshape(-1)[self.choice_P[self.slots(expert)]]
        padded[: chosen.size] = chosen
        return padded

    def by_token(self, x_P: NDArray) -> NDArray:
        """Return x_TK: one number a slot, put back in (token, choice) order."""
        return x_P[self.pos_TK]
