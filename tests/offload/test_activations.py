"""Activations: named arrays on the host, exact copies, counted in their lane."""

from __future__ import annotations

import numpy as np
import pytest

from offload.activations import ActivationSpec, ActivationStore, activation_bytes
from offload.arena import Arena
from offload.stats import Stats

SPECS = (
    ActivationSpec("h", (6, 5), "float32", 3),
    ActivationSpec("ids", (7,), "int32", 1),
)


@pytest.fixture
def lanes():
    return []


@pytest.fixture
def store(lanes):
    arena = Arena("host", activation_bytes(SPECS))
    store = ActivationStore(SPECS, arena, Stats(), lanes.append)
    assert arena.used_bytes == arena.capacity_bytes  # the plan's bytes are exact
    return store


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((6, 5), np.float32)


def test_copies_under_one_name_are_apart(store):
    for index in range(3):
        store.put("h", index, table(index))
    store.put("ids", 0, np.arange(7, dtype=np.int32))
    for index in range(3):
        assert (store.get("h", index) == table(index)).all()
    assert store.get("ids", 0).tolist() == list(range(7))
    assert "h" in store and "x" not in store


def test_what_get_returns_is_the_callers_own(store):
    store.put("h", 0, table(0))
    store.get("h", 0)[:] = 0
    assert (store.get("h", 0) == table(0)).all()


def test_rows_are_put_gathered_and_padded_with_zeros(store):
    store.put("h", 0, table(0))
    store.put_rows("h", 0, slice(1, 3), table(1)[:2])
    expected = table(0)
    expected[1:3] = table(1)[:2]
    found = store.get_rows("h", 0, slice(1, 4), 5)
    assert (found[:3] == expected[1:4]).all() and (found[3:] == 0).all()
    found = store.get_rows("h", 0, np.array([5, 0]), 2)
    assert (found == expected[[5, 0]]).all()


def test_rows_are_put_by_index_and_the_host_array_itself_can_be_used(store):
    store.put("h", 1, table(0))
    store.put_rows("h", 1, np.array([4, 0]), table(1)[:2])
    expected = table(0)
    expected[[4, 0]] = table(1)[:2]
    assert (store.host("h", 1) == expected).all()
    store.host("h", 1)[5] = 7
    assert (store.get("h", 1)[5] == 7).all()


def test_every_byte_is_counted_in_its_lane(store, lanes):
    store.put("h", 0, table(0))
    store.put_rows("h", 0, slice(0, 2), table(0)[:2])
    store.get("h", 0)
    store.get_rows("h", 0, slice(0, 2), 4)
    counts = store._stats.snapshot()
    assert (counts.d2h_bytes, counts.h2d_bytes) == (120 + 40, 120 + 80)
    assert lanes == ["d2h", "d2h", "h2d", "h2d"]


def test_another_dtype_or_shape_is_refused(store):
    with pytest.raises(TypeError):
        store.put("h", 0, np.zeros((6, 5), np.float64))
    with pytest.raises(ValueError):
        store.put("h", 0, np.zeros((6, 4), np.float32))
    with pytest.raises(AssertionError, match="h is float32, not float64"):
        store.put_rows("h", 0, slice(0, 2), np.zeros((2, 5)))
    with pytest.raises(KeyError):
        store.get("x", 0)


def test_too_small_an_arena_names_the_activation():
    with pytest.raises(MemoryError, match="activation ids"):
        ActivationStore(SPECS, Arena("host", 3 * 4096), Stats(), lambda lane: None)
