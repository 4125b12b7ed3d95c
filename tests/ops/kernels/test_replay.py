import numpy as np
import pytest

from ops.kernels.adamw import (
    AdamW,
    replay_master,
    replay_master_f16,
    replay_split,
    update_master,
    update_master_f16,
    update_split,
)
from ops.kernels.pool import KernelPool
from ops.kernels.split import split_master
from tests.ops.kernels import kernel_reference as ref

HYPER = AdamW(beta2=0.95)
SIZE = 3_019


def rows(first, count):
    """Scalars of steps with a learning rate that changes and sometimes no weight decay."""
    steps = range(first, first + count)
    return HYPER.table([(s, 1e-2 * (1 + s % 7) / (s + 3), 0.1 * (s % 3)) for s in steps])


def split_state(seed=0, size=SIZE):
    master, exp_avg, exp_avg_sq, _ = ref.random_state(size, seed)
    # Moments close to the flush threshold cross it at different steps; -0 must become +0.
    exp_avg[20:400] = np.geomspace(1e-45, 1e-30, 380).astype(np.float32)
    exp_avg[20:400:3] *= -1
    exp_avg[400:410] = -0.0
    exp_avg_sq[20:400] = np.geomspace(1e-30, 1e-45, 380).astype(np.float32)
    weight, residual = np.empty(size, np.uint16), np.empty(size, np.int16)
    split_master(master, weight, residual)
    return [weight, residual, exp_avg, exp_avg_sq]


def master_state(seed=0, size=SIZE):
    _, _, exp_avg, exp_avg_sq = split_state(seed, size)
    return [ref.random_state(size, seed)[0], exp_avg, exp_avg_sq]


def f16_state(seed=0, size=SIZE):
    master, exp_avg, exp_avg_sq = master_state(seed, size)
    return [master, np.zeros(size, np.float16), exp_avg, exp_avg_sq]


FORMS = [
    pytest.param(split_state, update_split, replay_split, id="split"),
    pytest.param(master_state, update_master, replay_master, id="master"),
    pytest.param(f16_state, update_master_f16, replay_master_f16, id="f16"),
]


def same_bits(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("make", "update", "replay"), FORMS)
@pytest.mark.parametrize("grad_dtype", [np.uint16, np.float32])
def test_replaying_200_steps_equals_200_dense_steps_of_zero_gradient(
    make, update, replay, grad_dtype
):
    dense, replayed = make(), make()
    table = rows(5, 200)
    idle = np.zeros(SIZE, grad_dtype)
    for row in table:
        update(*dense, idle, 1.0, row)
    replay(*replayed, table)
    assert same_bits(dense, replayed)
    assert not same_bits(dense, make())


@pytest.mark.parametrize(("make", "update", "replay"), FORMS)
def test_the_grad_scale_of_a_dense_idle_step_does_not_matter(make, update, replay):
    dense, replayed = make(), make()
    table = rows(9, 5)
    for scale, row in zip((1.0, 0.1, 2.0**-16, 1e-30, 3.0), table, strict=True):
        update(*dense, np.zeros(SIZE, np.uint16), scale, row)
    replay(*replayed, table)
    assert same_bits(dense, replayed)


@pytest.mark.parametrize(("make", "update", "replay"), FORMS)
@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 2049])
def test_replay_of_any_length_in_one_piece_or_ragged_pieces_gives_the_same_bits(
    make, update, replay, size
):
    whole, pieces = ([a[:size].copy() for a in make()] for _ in range(2))
    table = rows(1, 6)
    replay(*whole, table)
    for start in range(0, size, 257):
        replay(*(array[start : start + 257] for array in pieces), table)
    assert same_bits(whole, pieces)


def test_replay_in_two_parts_equals_replay_at_once():
    once, parts = split_state(), split_state()
    table = rows(3, 64)
    replay_split(*once, table)
    replay_split(*parts, table[:17])
    replay_split(*parts, table[17:])
    assert same_bits(once, parts)


def test_replay_on_several_threads_gives_the_same_bits():
    alone, shared = split_state(size=200_001), split_state(size=200_001)
    table = rows(1, 8)
    replay_split(*alone, table)
    with KernelPool(3) as pool:
        replay_split(*shared, table, pool=pool)
    assert same_bits(alone, shared)


@pytest.mark.parametrize(("make", "update", "replay"), FORMS)
def test_replay_of_no_step_changes_nothing(make, update, replay):
    state = make()
    replay(*state, rows(1, 0))
    assert same_bits(state, make())


@pytest.mark.parametrize("policy", ["dense", "replay", "skip"])
def test_c23_a_tensor_without_gradient_in_steps_2_and_4_never_sees_an_old_gradient(policy):
    """An expert nobody routed to was stepped with the gradient left in its buffer."""
    state, buffer = split_state(), np.empty(SIZE, np.uint16)
    expected = [ref.join(*state[:2]), state[2].copy(), state[3].copy()]
    table = rows(1, 5)
    for step, row in enumerate(table, start=1):
        idle = step in (2, 4)
        if not idle:
            buffer[:] = ref.bits_of(ref.random_state(SIZE, step)[3]) >> 16
            update_split(*state, buffer, 1.0, row)
        elif policy == "dense":
            update_split(*state, np.zeros(SIZE, np.uint16), 1.0, row)
        elif policy == "replay":
            replay_split(*state, table[step - 1 : step])
        grad = np.zeros(SIZE, np.uint16) if idle else buffer
        if not (idle and policy == "skip"):
            expected = list(ref.adamw(*expected, grad, 1.0, row))
    assert same_bits([ref.join(*state[:2]), *state[2:]], expected)


def test_an_idle_weight_still_moves_and_its_moments_decay():
    state = split_state()
    before = ref.join(*state[:2]), state[2].copy()
    replay_split(*state, rows(2, 3))
    assert (ref.join(*state[:2])[500:] != before[0][500:]).mean() > 0.9
    assert (np.abs(state[2][500:]) < np.abs(before[1][500:])).all()


def test_a_table_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"table has shape \(10,\)"):
        replay_split(*split_state(), rows(1, 1)[0])
    with pytest.raises(ValueError, match="table"):
        replay_split(*split_state(), rows(1, 4)[::2])
    with pytest.raises(ValueError, match="table is float64"):
        replay_split(*split_state(), rows(1, 4).astype(np.float64))
