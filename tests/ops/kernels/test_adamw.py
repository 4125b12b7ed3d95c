import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ops.errors import ConfigError
from ops.kernels.adamw import AdamW, update_master, update_master_f16, update_split
from ops.kernels.intrinsics import _DIGEST
from ops.kernels.pool import KernelPool
from ops.kernels.split import join_master, round_bf16, split_master
from tests.ops.kernels import kernel_reference as ref

HYPER = AdamW()
SIZE = 10_007


def same_bits(*pairs):
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def to_bf16(values):
    bits = np.empty(values.size, np.uint16)
    round_bf16(values, bits)
    return bits


class Split:
    """bfloat16 weight and int16 residual, stepped on any slice."""

    def __init__(self, master, exp_avg, exp_avg_sq):
        self.weight = np.empty(master.size, np.uint16)
        self.residual = np.empty(master.size, np.int16)
        split_master(master, self.weight, self.residual)
        self.exp_avg, self.exp_avg_sq = exp_avg.copy(), exp_avg_sq.copy()

    def step(self, grad, grad_scale, scalars, where=slice(None), pool=None):
        arrays = (self.weight, self.residual, self.exp_avg, self.exp_avg_sq, grad)
        update_split(*(array[where] for array in arrays), grad_scale, scalars, pool=pool)

    @property
    def bits(self):
        master = np.empty(self.weight.size, np.float32)
        join_master(self.weight, self.residual, master)
        return master, self.exp_avg, self.exp_avg_sq


class Master:
    """float32 master, stepped on any slice."""

    def __init__(self, master, exp_avg, exp_avg_sq):
        self.master = master.copy()
        self.exp_avg, self.exp_avg_sq = exp_avg.copy(), exp_avg_sq.copy()

    def step(self, grad, grad_scale, scalars, where=slice(None), pool=None):
        arrays = (self.master, self.exp_avg, self.exp_avg_sq, grad)
        update_master(*(array[where] for array in arrays), grad_scale, scalars, pool=pool)

    @property
    def bits(self):
        return self.master, self.exp_avg, self.exp_avg_sq


class MasterF16(Master):
    """float32 master with a derived float16 weight."""

    def __init__(self, master, exp_avg, exp_avg_sq):
        super().__init__(master, exp_avg, exp_avg_sq)
        self.weight = np.zeros(master.size, np.float16)

    def step(self, grad, grad_scale, scalars, where=slice(None), pool=None):
        arrays = (self.master, self.weight, self.exp_avg, self.exp_avg_sq, grad)
        update_master_f16(*(array[where] for array in arrays), grad_scale, scalars, pool=pool)


FORMS = [Split, Master, MasterF16]
SCHEDULE = [(step, 1e-3 / step, 0.1) for step in range(1, 5)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad_dtype", ["bfloat16", "float32"])
def test_steps_equal_the_reference_loop_bit_for_bit(form, grad_dtype):
    master, exp_avg, exp_avg_sq, _ = expected = ref.random_state(SIZE)
    state = form(master, exp_avg, exp_avg_sq)
    expected = expected[:3]
    for step, lr, weight_decay in SCHEDULE:
        grad = ref.random_state(SIZE, seed=step)[3]
        grad = to_bf16(grad) if grad_dtype == "bfloat16" else grad
        scalars = HYPER.scalars(step, lr, weight_decay)
        state.step(grad, 0.37, scalars)
        expected = ref.adamw(*expected, grad, 0.37, scalars)
        assert same_bits(*zip(state.bits, expected, strict=True)), step
    if form is MasterF16:
        with np.errstate(over="ignore"):
            assert same_bits((state.weight, state.master.astype(np.float16)))


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.uint32, (4, 19), elements=st.integers(0, 0x7F7FFFFF)),
    st.integers(0, 2**19 - 1),
    st.sampled_from([1.0, 2.0**-16, 0.3, 1e-30]),
    st.integers(1, 10**6),
)
def test_any_finite_state_equals_the_reference_in_every_form(magnitudes, signs, scale, step):
    master, exp_avg, exp_avg_sq, grad = ref.floats_of(magnitudes)
    sign = np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(19)], np.float32)
    master, grad = ref.clamp(master * sign), grad * -sign
    scalars = HYPER.scalars(step, 1e-2, 0.1)
    with np.errstate(all="ignore"):
        expected = ref.adamw(master, exp_avg, exp_avg_sq, grad, scale, scalars)
    if not all(np.isfinite(array).all() for array in expected):
        return  # the finite check stops such gradients before any update
    for form in FORMS:
        state = form(master, exp_avg, exp_avg_sq)
        state.step(grad, scale, scalars)
        assert same_bits(*zip(state.bits, expected, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 1001, 4096, SIZE])
def test_c21_one_tile_and_ragged_tiles_give_the_same_bits(form, chunk):
    """A tiled engine advanced its step counter per tile, so results depended on the tiling."""
    size = min(SIZE, 600 * chunk)
    master, exp_avg, exp_avg_sq, grad = (array[:size] for array in ref.random_state(SIZE))
    whole, tiled = form(master, exp_avg, exp_avg_sq), form(master, exp_avg, exp_avg_sq)
    scalars = HYPER.scalars(3, 1e-3, 0.1)
    whole.step(grad, 0.5, scalars)
    for start in range(0, size, chunk):
        tiled.step(grad, 0.5, scalars, slice(start, start + chunk))
    assert same_bits(*zip(whole.bits, tiled.bits, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_c21_five_tiles_on_three_threads_give_the_same_bits(form):
    size = 5 * 65_536 - 13
    master, exp_avg, exp_avg_sq, grad = ref.random_state(size)
    alone, shared = form(master, exp_avg, exp_avg_sq), form(master, exp_avg, exp_avg_sq)
    with KernelPool(3) as pool:
        for step, lr, weight_decay in SCHEDULE:
            scalars = HYPER.scalars(step, lr, weight_decay)
            alone.step(to_bf16(grad), 1.0, scalars)
            shared.step(to_bf16(grad), 1.0, scalars, pool=pool)
    assert same_bits(*zip(alone.bits, shared.bits, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_c20_three_parameters_in_one_bucket_equal_each_one_alone(form):
    """Parameters sharing a transfer bucket were updated with a neighbour's state."""
    master, exp_avg, exp_avg_sq, grad = ref.random_state(9_000)
    bucket = form(master, exp_avg, exp_avg_sq)
    ranges = [(slice(0, 3_001), 0.1), (slice(3_001, 3_010), 0.0), (slice(3_010, 9_000), 0.01)]
    alone = [form(master[r], exp_avg[r], exp_avg_sq[r]) for r, _ in ranges]
    for step in (1, 2, 3):
        for part, (where, weight_decay) in zip(alone, ranges, strict=True):
            scalars = HYPER.scalars(step, 1e-2, weight_decay)
            bucket.step(grad, 1.0, scalars, where)
            part.step(grad[where], 1.0, scalars)
    for part, (where, _) in zip(alone, ranges, strict=True):
        assert same_bits(*((a[where], b) for a, b in zip(bucket.bits, part.bits, strict=True)))


def test_a_step_touches_nothing_outside_its_range():
    master, exp_avg, exp_avg_sq, grad = ref.random_state(1_000)
    state = Split(master, exp_avg, exp_avg_sq)
    before = [array.copy() for array in state.bits]
    state.step(grad, 1.0, HYPER.scalars(1, 1e-2, 0.1), slice(333, 600))
    for array, old in zip(state.bits, before, strict=True):
        assert same_bits((array[:333], old[:333]), (array[600:], old[600:]))
        assert not same_bits((array[333:600], old[333:600]))


def test_both_gradient_dtypes_give_the_same_bits_for_the_same_values():
    master, exp_avg, exp_avg_sq, grad = ref.random_state(SIZE)
    narrow = to_bf16(grad)
    a, b = Split(master, exp_avg, exp_avg_sq), Split(master, exp_avg, exp_avg_sq)
    a.step(narrow, 0.1, HYPER.scalars(2, 1e-3, 0.1))
    b.step(ref.widen(narrow), 0.1, HYPER.scalars(2, 1e-3, 0.1))
    assert same_bits(*zip(a.bits, b.bits, strict=True))


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize(("step", "lr"), [(1, 1e-3), (2, 1e-5), (1000, 3e-4), (10**6, 1e-2)])
def test_a_step_is_within_two_ulp_of_float64(step, lr, beta2):
    """Ulp of the larger of the old and new value: where they cancel, no format does better.

    A weight that moves by more than a quarter of itself shows the update's own error too.
    """
    hyper = AdamW(beta2=beta2)
    rng = np.random.default_rng(step)
    grad = rng.standard_normal(SIZE).astype(np.float32) * np.float32(1e-3)
    master = rng.standard_normal(SIZE).astype(np.float32) * np.float32(0.02)
    exp_avg = rng.standard_normal(SIZE).astype(np.float32) * np.float32(1e-4)
    exp_avg_sq = np.square(rng.standard_normal(SIZE).astype(np.float32) * np.float32(1e-3))
    if step == 1:
        exp_avg[:], exp_avg_sq[:] = 0, 0
    state = Master(master, exp_avg, exp_avg_sq)
    state.step(grad, 1.0, hyper.scalars(step, lr, 0.1))
    exact = ref.adamw_f64(master, exp_avg, exp_avg_sq, grad, hyper, step, lr, 0.1)
    olds = (master, exp_avg, exp_avg_sq)
    worst = [ulps(got, want, old) for got, want, old in zip(state.bits, exact, olds)]
    assert worst[1].max() <= 2.0 and worst[2].max() <= 2.0
    moderate = 4 * np.abs(exact[0] - master) <= np.abs(master)
    assert worst[0][moderate].max() <= 2.0
    assert worst[0].max() <= 8.0


def ulps(got, want, *scales):
    """Error in units of the last place of the largest of `want` and `scales`."""
    largest = np.max([np.abs(value) for value in (want, *scales)], axis=0)
    return np.abs(got - want) / np.spacing(largest.astype(np.float32))


def test_an_average_that_the_gradient_cancels_costs_no_accuracy():
    """The difference form lost a hundred ulp of the weight where m came out near zero."""
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(SIZE).astype(np.float32)
    exp_avg = (grad * (-1 / 9 + rng.standard_normal(SIZE) * 1e-6)).astype(np.float32)
    exp_avg_sq = np.full(SIZE, 1e-12, np.float32)
    state = Master(np.ones(SIZE, np.float32), exp_avg, exp_avg_sq)
    state.step(grad, 1.0, HYPER.scalars(1000, 1e-3, 0.1))
    moment = ref.adamw_f64(state.master, exp_avg, exp_avg_sq, grad, HYPER, 1, 0, 0)[1]
    assert (np.abs(moment) < 1e-5 * np.abs(grad)).mean() > 0.9
    assert ulps(state.exp_avg, moment, 1e-6 * grad).max() <= 2.0


def test_a_step_from_zero_weights_is_within_four_ulp_of_the_update_itself():
    """Nothing hides the update's own error when the weight starts at zero."""
    zeros = np.zeros(SIZE, np.float32)
    grad = ref.random_state(SIZE)[3]
    state = Master(zeros, zeros, zeros)
    state.step(grad, 1.0, HYPER.scalars(1, 1e-3, 0.0))
    exact = ref.adamw_f64(zeros, zeros, zeros, grad, HYPER, 1, 1e-3, 0.0)[0]
    assert ulps(state.master, exact)[grad != 0].max() <= 4.0


def test_moments_below_1e38th_are_flushed_to_positive_zero():
    tiny = np.array([1e-39, -1e-39, -0.0, 1.01e-38, -1.3e-38, 1e-45], np.float32)
    state = Split(np.ones(6, np.float32), tiny, np.abs(tiny))
    state.step(np.zeros(6, np.float32), 1.0, HYPER.scalars(5, 1e-3, 0.0))
    assert ref.bits_of(state.exp_avg).tolist()[:4] == [0, 0, 0, 0]
    assert state.exp_avg[4] == pytest.approx(-1.17e-38, rel=1e-6)
    assert (state.exp_avg_sq[[3, 4]] > 1e-38).all()
    assert ref.bits_of(state.exp_avg_sq)[[0, 1, 2, 5]].tolist() == [0, 0, 0, 0]


def test_a_master_never_passes_the_clamp_and_its_weight_stays_finite():
    limit = ref.floats_of(np.array([ref.CLAMP_BITS, ref.CLAMP_BITS | 0x80000000], np.uint32))
    state = Split(limit, np.zeros(2, np.float32), np.zeros(2, np.float32))
    grad = np.array([-1.0, 1.0], np.float32)
    scalars = HYPER.scalars(1, 1e36, 0.0)
    scalars[1] = 1e38
    for _ in range(3):
        state.step(grad, 1.0, scalars)
    assert state.weight.tolist() == [0x7F7F, 0xFF7F]


def test_scalars_follow_the_formula_in_double_precision():
    row = AdamW(0.9, 0.95, 1e-6).scalars(7, 3e-4, 0.1)
    root = (1 - 0.95**7) ** 0.5
    want = [3e-5, 3e-4 * root / (1 - 0.9**7), 1e-6 * root, 0.95]
    for value in (1 - 0.95, 0.9, 1 - 0.9):
        want += [value, value - float(np.float32(value))]
    np.testing.assert_array_equal(row, np.array(want, np.float64).astype(np.float32))
    table = AdamW(0.9, 0.95, 1e-6).table([(6, 1e-4, 0.0), (7, 3e-4, 0.1)])
    assert table.shape == (2, 10) and same_bits((table[1].copy(), row))
    assert HYPER.table([]).shape == (0, 10)


@pytest.mark.parametrize("bad", [{"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0.0}, {"eps": 1e-40}])
def test_hyperparameters_out_of_range_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        AdamW(**bad)


@pytest.mark.parametrize("args", [(0, 1e-3, 0.1), (1, -1e-3, 0.1), (1, 1e-3, float("nan"))])
def test_a_step_number_or_rate_out_of_range_is_refused(args):
    with pytest.raises(ValueError):
        HYPER.scalars(*args)


def test_wrong_arguments_are_refused_before_any_write():
    master, exp_avg, exp_avg_sq, grad = ref.random_state(16)
    row = HYPER.scalars(1, 1e-3, 0.1)
    good = {
        "master": master,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "grad": grad,
        "grad_scale": 1.0,
        "scalars": row,
    }
    before = master.copy()
    for bad, words in [
        ({"grad": grad[:15]}, "grad has 15"),
        ({"grad": grad.astype(np.float64)}, "uint16 or float32"),
        ({"exp_avg": exp_avg.astype(np.float16)}, "exp_avg is float16"),
        ({"grad_scale": 0.0}, "grad_scale"),
        ({"grad_scale": float("nan")}, "grad_scale"),
        ({"scalars": row[:8]}, "scalars has 8"),
    ]:
        with pytest.raises(ValueError, match=words):
            update_master(**{**good, **bad})
    assert same_bits((master, before))


def test_an_edit_of_any_file_of_the_package_invalidates_the_compiled_cache():
    """Numba's cache watches one file, but kernels inline functions of others: old bits survived."""
    from ops.kernels import adamw

    assert _DIGEST in adamw._split._cache._cache_file._source_stamp
