import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ops.kernels.pool import KernelPool
from ops.kernels.split import (
    expand_bf16,
    expand_bf16_f64,
    join_master,
    narrow_f16,
    round_bf16,
    split_master,
)
from tests.ops.kernels import kernel_reference as ref

LOWER = np.array(
    [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
)


@pytest.fixture(scope="module")
def all_uppers():
    """Every sign, exponent and upper mantissa with the lower halves where rounding turns."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return ref.floats_of((upper[:, None] | LOWER[None, :]).reshape(-1))


def split(master, pool=None):
    weight, residual = np.empty(master.size, np.uint16), np.empty(master.size, np.int16)
    split_master(master, weight, residual, pool=pool)
    return weight, residual


def join(weight, residual, pool=None):
    master = np.empty(weight.size, np.float32)
    join_master(weight, residual, master, pool=pool)
    return master


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_split_then_join_gives_back_every_bit_of_every_master_within_the_clamp(all_uppers):
    inside = (ref.bits_of(all_uppers) & 0x7FFFFFFF) <= ref.CLAMP_BITS
    masters = all_uppers[inside]
    assert masters.size > 700_000
    assert same_bits(join(*split(masters)), masters)


def test_split_equals_the_documented_formula_everywhere_even_beyond_the_clamp(all_uppers):
    weight, residual = split(all_uppers)
    expected_weight, expected_residual = ref.split(all_uppers)
    assert same_bits(weight, expected_weight)
    assert same_bits(residual, expected_residual)
    assert same_bits(join(weight, residual), ref.clamp(all_uppers))


def test_the_weight_is_never_infinite_or_nan(all_uppers):
    weight, _ = split(all_uppers)
    assert ((weight & 0x7F80) != 0x7F80).all()


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F7FFFFF])
def test_what_lies_beyond_the_clamp_is_stored_as_the_clamp_with_its_sign(bits):
    stored = join(*split(ref.floats_of(np.array([bits], np.uint32))))
    assert ref.bits_of(stored)[0] == (bits & 0x80000000) | ref.CLAMP_BITS


def test_the_weight_is_the_master_rounded_half_up():
    bits = np.array([0x3F800000, 0x3F807FFF, 0x3F808000, 0xBF808000, 0x3F818000], np.uint32)
    weight, residual = split(ref.floats_of(bits))
    assert weight.tolist() == [0x3F80, 0x3F80, 0x3F81, 0xBF81, 0x3F82]
    assert residual.tolist() == [0, 0x7FFF, -0x8000, -0x8000, -0x8000]


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, ref.CLAMP_BITS)))
def test_any_length_of_any_bits_is_invertible_for_both_signs(magnitude):
    for sign in (0, 0x80000000):
        master = ref.floats_of(magnitude | np.uint32(sign))
        assert same_bits(join(*split(master)), master)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_expanding_bfloat16_is_exact_for_all_65536_values():
    source = np.arange(1 << 16, dtype=np.uint16)
    target = np.empty(source.size, np.float32)
    expand_bf16(source, target)
    assert same_bits(ref.bits_of(target), source.astype(np.uint32) << 16)
    wide = np.empty(source.size, np.float64)
    expand_bf16_f64(source, wide)
    np.testing.assert_array_equal(wide, target.astype(np.float64))
    assert (np.signbit(wide) == np.signbit(target)).all()


def test_gradients_round_half_up_and_keep_nan_and_infinity(all_uppers):
    target = np.empty(all_uppers.size, np.uint16)
    round_bf16(all_uppers, target)
    nan = np.isnan(all_uppers)
    bits = ref.bits_of(all_uppers)
    assert same_bits(target[~nan], ((bits[~nan] + 0x8000) >> 16).astype(np.uint16))
    assert ((target[nan] & 0x7FFF) > 0x7F80).all()
    assert ((target[nan] >> 15) == (bits[nan] >> 31)).all()
    assert (target[np.isposinf(all_uppers)] == 0x7F80).all()
    assert (target[np.isneginf(all_uppers)] == 0xFF80).all()


def test_a_gradient_beyond_the_largest_bfloat16_becomes_infinite_not_large():
    target = np.empty(1, np.uint16)
    round_bf16(np.array([np.finfo(np.float32).max], np.float32), target)
    assert target[0] == 0x7F80


def test_gradients_that_are_bfloat16_already_come_through_unchanged():
    source = np.arange(1 << 16, dtype=np.uint16)
    source = source[(source & 0x7FFF) <= 0x7F80]
    wide, back = np.empty(source.size, np.float32), np.empty(source.size, np.uint16)
    expand_bf16(source, wide)
    round_bf16(wide, back)
    assert same_bits(back, source)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_narrowing_to_float16_equals_numpy_bit_for_bit(all_uppers):
    target = np.empty(all_uppers.size, np.float16)
    narrow_f16(all_uppers, target)
    nan = np.isnan(all_uppers)
    assert same_bits(target[~nan], all_uppers[~nan].astype(np.float16))
    assert np.isnan(target[nan]).all()
    assert (np.signbit(target) == np.signbit(all_uppers)).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False)))
def test_narrowing_any_values_equals_numpy(values):
    target = np.empty(values.size, np.float16)
    narrow_f16(values, target)
    assert same_bits(target, values.astype(np.float16))


def test_threads_and_ragged_lengths_do_not_change_a_bit():
    rng = np.random.default_rng(1)
    master = ref.floats_of(rng.integers(0, 1 << 32, 200_003, dtype=np.uint32))
    whole = split(master)
    with KernelPool(3) as pool:
        assert all(same_bits(a, b) for a, b in zip(whole, split(master, pool), strict=True))
        assert same_bits(join(*whole, pool), ref.clamp(master))
    for length in (1, 7, 15, 17, 4095, 4097):
        assert same_bits(split(master[:length].copy())[0], whole[0][:length])


@pytest.mark.parametrize(
    ("weight", "residual", "words"),
    [
        (np.empty(4, np.uint16), np.empty(5, np.int16), "residual has 5 elements, 4"),
        (np.empty(4, np.int16), np.empty(4, np.int16), "weight is int16, uint16"),
        (np.empty((2, 2), np.uint16), np.empty(4, np.int16), "flat contiguous"),
        (np.empty(8, np.uint16)[::2], np.empty(4, np.int16), "flat contiguous"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_before_any_write(weight, residual, words):
    with pytest.raises(ValueError, match=words):
        split_master(np.ones(4, np.float32), weight, residual)


def test_a_read_only_target_is_refused_and_a_read_only_source_is_not():
    source = np.full(3, 0x3F80, np.uint16)
    source.flags.writeable = False
    target = np.zeros(3, np.float32)
    expand_bf16(source, target)
    assert target.tolist() == [1, 1, 1]
    target.flags.writeable = False
    with pytest.raises(ValueError, match="target is read-only"):
        expand_bf16(source, target)
