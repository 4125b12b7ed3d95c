"""Arenas: a hard capacity, one owner per buffer, no rounding to powers of two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.arena import ALIGN_BYTES, Arena

PAGE = ALIGN_BYTES


def test_a_buffer_is_aligned_and_holds_what_is_written():
    arena = Arena("host", 8 * PAGE)
    first, second = arena.require(3 * PAGE, "a"), arena.require(PAGE + 1, "b")
    first.array[:] = 1
    second.array[:] = 2
    assert first.array.ctypes.data % PAGE == second.array.ctypes.data % PAGE == 0
    assert (first.array == 1).all() and second.nbytes == 2 * PAGE


def test_views_have_the_dtype_offset_and_count_asked_for():
    buffer = Arena("host", PAGE).require(PAGE, "a")
    buffer.array[:] = 0
    buffer.view("float32", 64, 10)[:] = 1.5
    assert buffer.view("float32", 64, 10).shape == (10,)
    assert np.count_nonzero(buffer.array.view("float32")) == 10
    assert buffer.slice(64, 40).view("float32", 0, 10).tolist() == [1.5] * 10


def test_the_capacity_is_hard_and_a_refusal_changes_nothing():
    arena = Arena("host", 4 * PAGE)
    kept = arena.allocate(3 * PAGE)
    assert arena.allocate(PAGE + 1) is None
    assert (arena.used_bytes, arena.num_buffers) == (3 * PAGE, 1)
    assert arena.allocate(PAGE) is not None
    assert arena.allocate(1) is None
    arena.free(kept)
    assert (arena.used_bytes, arena.peak_bytes) == (PAGE, 4 * PAGE)


def test_a_capacity_that_is_no_multiple_of_a_page_is_not_exceeded():
    arena = Arena("host", 2 * PAGE + 17)
    assert arena.allocate(2 * PAGE) is not None and arena.allocate(1) is None
    assert arena.peak_bytes <= arena.capacity_bytes


def test_a_promise_that_cannot_be_kept_names_what_and_how_much():
    with pytest.raises(MemoryError, match=r"device arena: no 8192 bytes for the lease slot .*4096"):
        Arena("device", PAGE).require(2 * PAGE, "the lease slot")


def test_a_buffer_freed_twice_is_an_error_and_frees_nothing_else():
    arena = Arena("host", 4 * PAGE)
    buffer = arena.require(PAGE, "a")
    arena.free(buffer)
    with pytest.raises(ValueError, match="not allocated"):
        arena.free(buffer)
    other = arena.require(2 * PAGE, "b")  # takes the place of the first
    with pytest.raises(ValueError):
        arena.free(buffer)
    assert (arena.used_bytes, arena.num_buffers) == (other.nbytes, 1)


def test_a_borrowed_part_cannot_be_freed():
    arena = Arena("host", 4 * PAGE)
    whole = arena.require(2 * PAGE, "a")
    with pytest.raises(ValueError):
        arena.free(whole.slice(0, PAGE))
    assert arena.used_bytes == 2 * PAGE


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_buffer_is_refused(nbytes):
    with pytest.raises(ValueError):
        Arena("host", PAGE).allocate(nbytes)


@pytest.mark.parametrize("nbytes", [2**20 + 1, 3 * 2**20 - 5, 12_345_678, 2**24 + 4097])
def test_odd_sizes_cost_less_than_five_percent(nbytes):
    """C51: an allocator that rounds to powers of two loses up to half of the memory."""
    arena = Arena("host", 4 * nbytes + 4 * PAGE)
    for _ in range(4):
        arena.require(nbytes, "a")
    assert arena.used_bytes <= 1.05 * 4 * nbytes


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=60))
def test_any_sequence_of_calls_keeps_buffers_apart_and_counts_right(calls):
    arena = Arena("host", 16 * PAGE)
    live = {}
    for number, (take, value) in enumerate(calls):
        if take:
            buffer = arena.allocate(value)
            if buffer is not None:
                buffer.array[:] = number % 251
                live[number] = buffer
        elif live:
            arena.free(live.pop(sorted(live)[value % len(live)]))
        assert arena.used_bytes == sum(b.nbytes for b in live.values()) <= arena.capacity_bytes
        assert arena.num_buffers == len(live)
    for number, buffer in live.items():
        assert (buffer.array == number % 251).all()
