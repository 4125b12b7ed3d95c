"""A keyed permutation of [0, n) with constant state: shuffling without an index table.

A balanced Feistel network over the smallest 2k-bit domain that holds n, with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a value that falls
outside of [0, n) is sent through the network again until it falls inside. The domain is smaller
than 4n (or 4, for n = 1), so the expected number of passes is below 4.

The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). This is
for shuffling, not for secrecy. The order is part of what makes runs repeatable: a change here
changes every run, so a test pins some values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 8
LENGTH_MAX = 2**62
_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The SplitMix64 finaliser of a 64-bit integer: a bijection that scatters nearby values."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix64_array(values_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix64` of every element, u64 [N] -> u64 [N]; wraps on overflow as u64 arithmetic does."""
    mixed_N = values_N + np.uint64(_GOLDEN)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))


class Permutation:
    """A bijection of [0, `length`) that depends on (`seed`, `epoch`) and holds a few integers."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        """`length` from 1 to 2**62; raises ValueError outside of that."""
        if not 1 <= length <= LENGTH_MAX:
            raise ValueError(f"a permutation of {length} elements; allowed: 1 to {LENGTH_MAX}")
        self.length = length
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        state = mix64(mix64(seed & _MASK64) ^ (epoch & _MASK64))
        keys = []
        for _ in range(NUM_ROUNDS):
            state = mix64(state)
            keys.append(np.uint64(state))
        self._keys = tuple(keys)

    def __call__(self, positions_N: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Images of positions [N] (integers in [0, length)) as i64 [N]; raises ValueError."""
        asked_N = np.atleast_1d(np.asarray(positions_N, dtype=np.int64))
        if asked_N.size and (asked_N.min() < 0 or asked_N.max() >= self.length):
            raise ValueError(f"positions must lie in [0, {self.length})")
        values_N = self._network(asked_N.astype(np.uint64))
        outside_N = values_N >= np.uint64(self.length)
        while outside_N.any():
            values_N[outside_N] = self._network(values_N[outside_N])
            outside_N = values_N >= np.uint64(self.length)
        return values_N.astype(np.int64)

    def _network(self, values_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left_N, right_N = values_N >> bits, values_N & mask
        for key in self._keys:
            left_N, right_N = right_N, left_N ^ (mix64_array(right_N ^ key) & mask)
        return (left_N << bits) | right_N
