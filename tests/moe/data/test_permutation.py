import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.permutation import LENGTH_MAX, Permutation, mix64, mix64_array

PINNED_10 = [6, 8, 2, 1, 3, 7, 9, 5, 0, 4]
PINNED_LARGE = [736565049362, 373402086850, 157470171694]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 3000),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**40),
)
def test_is_a_bijection(length, seed, epoch):
    image = Permutation(length, seed, epoch)(np.arange(length))
    assert sorted(image.tolist()) == list(range(length))


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, LENGTH_MAX), data=st.data())
def test_images_of_any_length_lie_inside_and_differ(length, data):
    positions = data.draw(
        st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True)
    )
    image = Permutation(length, 3, 5)(positions)
    assert image.min() >= 0
    assert image.max() < length
    assert len(set(image.tolist())) == len(positions)


def test_an_image_does_not_depend_on_what_is_asked_with_it():
    permutation = Permutation(1000, 7, 2)
    together = permutation(np.arange(1000))
    assert [int(permutation(i)[0]) for i in range(0, 1000, 37)] == together[::37].tolist()


def test_seed_and_epoch_both_change_the_order():
    orders = [
        Permutation(500, seed, epoch)(np.arange(500)).tolist()
        for seed, epoch in [(1, 0), (1, 1), (2, 0), (0, 1), (2**63 - 1, 0)]
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_order_is_pinned_because_runs_must_repeat():
    assert Permutation(10, 1, 0)(np.arange(10)).tolist() == PINNED_10
    assert Permutation(10**12, 5, 3)([0, 1, 10**12 - 1]).tolist() == PINNED_LARGE


def test_scatters_neighbours():
    """The mean distance of neighbours is a third of the length when the order is random."""
    image = Permutation(100_000, 1, 0)(np.arange(100_000))
    distance = np.abs(np.diff(image)).mean() / 100_000
    assert abs(distance - 1 / 3) < 0.01
    assert abs(np.corrcoef(np.arange(100_000), image)[0, 1]) < 0.02


@pytest.mark.parametrize("length", [0, -1, LENGTH_MAX + 1])
def test_refuses_a_length_outside_of_its_range(length):
    with pytest.raises(ValueError, match=str(LENGTH_MAX)):
        Permutation(length, 1, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_refuses_a_position_outside_of_its_length(position):
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        Permutation(10, 1, 0)([3, position])


@given(st.integers(0, 2**64 - 1))
def test_scalar_and_array_mixers_agree(value):
    assert int(mix64_array(np.array([value], dtype=np.uint64))[0]) == mix64(value)
