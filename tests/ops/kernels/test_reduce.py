import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ops.kernels.pool import BLOCK, KernelPool
from ops.kernels.reduce import (
    SquareSum,
    accumulate,
    all_finite,
    block_square_sums,
    sum_squares,
    tree_sum,
)
from ops.kernels.split import round_bf16
from tests.ops.kernels import kernel_reference as ref


def gradient(size, seed=0):
    return ref.random_state(size, seed)[3]


def to_bf16(values):
    bits = np.empty(values.size, np.uint16)
    round_bf16(values, bits)
    return bits


def exact(values):
    return math.fsum(np.square(values.astype(np.float64)))


def documented_tree(values):
    """The summation order of the module's first paragraph, one addition at a time."""
    values = values.astype(np.float64)
    padded = np.concatenate((values, np.zeros(-values.size % BLOCK)))
    lanes = np.zeros((padded.size // BLOCK, 64))
    for row in np.moveaxis(padded.reshape(-1, BLOCK // 64, 64), 1, 0):
        lanes += row * row
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    level = lanes[:, 0].tolist()
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = [a + b for a, b in zip(level[::2], level[1::2])] + odd
    return level[0]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 4096, 4097, 12_289, 100_003])
@pytest.mark.parametrize("narrow", [True, False])
def test_c24_the_norm_is_within_1e_6_of_float64_and_follows_the_documented_tree(size, narrow):
    """A norm summed in the training dtype was off by percents on long gradients."""
    x = to_bf16(gradient(size)) if narrow else gradient(size)
    result = sum_squares(x)
    assert result.finite
    assert result.total == pytest.approx(exact(ref.widen(x)), rel=1e-12)
    assert result.total == documented_tree(ref.widen(x))


def test_c24_long_sums_of_equal_values_do_not_stall():
    x = np.full(3_000_000, 1e-3, np.float32)
    assert sum_squares(x).total == pytest.approx(x.size * float(x[0]) ** 2, rel=1e-12)


def test_tiny_gradients_whose_squares_vanish_in_float32_still_count():
    assert sum_squares(np.full(100, 1e-30, np.float32)) == SquareSum(
        pytest.approx(1e-58, rel=1e-6), True
    )


def test_nothing_to_sum_is_zero_and_finite():
    assert sum_squares(np.empty(0, np.float32)) == SquareSum(0.0, True)
    assert tree_sum(np.empty(0)) == 0.0
    assert all_finite(np.empty(0, np.uint16))


def test_threads_do_not_change_a_bit_of_the_sum():
    x = gradient(1_000_001)
    with KernelPool(3) as pool:
        assert sum_squares(x, pool=pool) == sum_squares(x)
        assert sum_squares(to_bf16(x), pool=pool) == sum_squares(to_bf16(x))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=6), st.integers(1, 30 * BLOCK))
def test_pieces_cut_at_multiples_of_4096_give_the_same_bits_as_the_whole(cuts, size):
    x = gradient(size, seed=1)
    sums = np.empty(-(-size // BLOCK))
    borders = sorted({0, size, *(cut * BLOCK for cut in cuts if cut * BLOCK < size)})
    for lo, hi in itertools.pairwise(borders):
        assert block_square_sums(x[lo:hi], sums[lo // BLOCK : -(-hi // BLOCK)])
    assert tree_sum(sums) == sum_squares(x).total


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("where", [0, 63, 4095, 4096, 8_200, 9_999])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
def test_an_infinity_or_nan_anywhere_is_seen(narrow, where, value):
    x = gradient(10_000)
    x[where] = value
    x = to_bf16(x) if narrow else x
    assert not sum_squares(x).finite
    assert not all_finite(x)


def test_every_nan_and_infinity_pattern_of_bfloat16_is_seen_and_no_other():
    for bits in range(0x7F70, 0x7F90):
        for sign in (0, 0x8000):
            x = np.array([bits | sign], np.uint16)
            assert all_finite(x) == (bits < 0x7F80)


@pytest.mark.parametrize("size", [1, 5_000])
def test_a_finite_gradient_whose_square_overflows_float32_is_not_finite(size):
    """The second moment would become infinite although every gradient is a number."""
    limit = np.float32(1.8446743e19)
    x = np.zeros(size, np.float32)
    x[-1] = -limit
    assert sum_squares(x).finite
    x[-1] = np.nextafter(limit, np.float32(np.inf)) * np.float32(1.0001)
    assert not sum_squares(x).finite
    assert all_finite(x)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.uint32, st.integers(0, 200), elements=st.integers(0, 0xFFFFFFFF)))
def test_finiteness_of_any_bits_equals_numpy(bits):
    x = ref.floats_of(bits)
    with np.errstate(all="ignore"):
        assert all_finite(x) == bool(np.isfinite(x).all())
        assert sum_squares(x).finite == bool(np.isfinite(x * x).all())


@pytest.mark.parametrize("narrow", [True, False])
def test_accumulation_adds_in_float32_on_any_number_of_threads(narrow):
    total, x = gradient(200_001, seed=2), gradient(200_001, seed=3)
    x = to_bf16(x) if narrow else x
    expected = total + ref.widen(x)
    shared = total.copy()
    accumulate(total, x)
    with KernelPool(2) as pool:
        accumulate(shared, x, pool=pool)
    assert total.tobytes() == shared.tobytes() == expected.tobytes()


def test_wrong_arguments_are_refused_by_name():
    x = gradient(5_000)
    with pytest.raises(ValueError, match="sums has 1 elements, 2"):
        block_square_sums(x, np.empty(1))
    with pytest.raises(ValueError, match="x is float64"):
        sum_squares(x.astype(np.float64))
    with pytest.raises(ValueError, match="total has 4999"):
        accumulate(x[1:].copy(), x)
