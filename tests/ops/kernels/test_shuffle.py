"""Byte planes are sorted apart and back, for any length, address and item size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.kernels.shuffle import ITEM_BYTES, shuffle, unshuffle


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, nbytes]).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 64, 1023, 4096])
def test_planes_are_those_of_a_transpose_most_significant_first(nbytes, item_bytes):
    source, target = noise(nbytes), noise(nbytes, seed=1)
    shuffle(source, target, item_bytes)
    whole = nbytes - nbytes % item_bytes
    expected = source[:whole].reshape(-1, item_bytes)[:, ::-1].T.ravel()
    assert (target[:whole] == expected).all()
    assert (target[whole:] == source[whole:]).all()


def test_the_first_plane_holds_sign_and_exponent():
    numbers = np.float32([1.5, -2.0, 0.0, 3e38])
    target = np.zeros(16, np.uint8)
    shuffle(numbers.view(np.uint8), target, 4)
    assert (target[:4] == numbers.view(np.uint32) >> 24).all()


@settings(deadline=None, max_examples=60)
@given(
    nbytes=st.integers(0, 5000),
    skew=st.integers(0, 7),
    item_bytes=st.sampled_from(ITEM_BYTES),
)
def test_round_trip_at_any_address(nbytes, skew, item_bytes):
    source = noise(nbytes + skew)[skew:]
    planes, back = noise(nbytes, seed=1), noise(nbytes + skew, seed=2)[skew:]
    shuffle(source, planes, item_bytes)
    unshuffle(planes, back, item_bytes)
    assert (back == source).all()


def test_read_only_sources_are_accepted():
    source = np.frombuffer(noise(64).tobytes(), np.uint8)
    target = np.zeros(64, np.uint8)
    shuffle(source, target, 4)
    back = np.zeros(64, np.uint8)
    unshuffle(np.frombuffer(target.tobytes(), np.uint8), back, 4)
    assert (back == source).all()


@pytest.mark.parametrize("function", [shuffle, unshuffle])
def test_wrong_arguments_are_refused(function):
    good = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="items of 3 bytes"):
        function(good, good.copy(), 3)
    with pytest.raises(ValueError, match="target has 7 elements, 8"):
        function(good, good[:7].copy(), 4)
    with pytest.raises(ValueError, match="source is float32"):
        function(np.zeros(8, np.float32), good, 4)
    read_only = np.frombuffer(bytes(8), np.uint8)
    with pytest.raises(ValueError, match="target is read-only"):
        function(good, read_only, 4)
