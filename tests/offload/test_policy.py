"""Eviction gives up what is needed farthest away, and nothing that is needed sooner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.policy import NEVER, choose_victim


def test_the_farthest_next_use_goes_first():
    assert choose_victim([("a", 3), ("b", 9), ("c", 5)], -1) == "b"


def test_what_is_never_used_again_goes_before_everything():
    assert choose_victim([("a", 3), ("b", NEVER), ("c", 10**9)], -1) == "b"


def test_a_prefetch_evicts_only_what_is_needed_after_it():
    candidates = [("a", 3), ("b", 5)]
    assert choose_victim(candidates, 4) == "b"
    assert choose_victim(candidates, 5) is None


def test_equal_distances_are_settled_by_name_whatever_the_order():
    assert choose_victim([("a", 3), ("b", 3)], -1) == choose_victim([("b", 3), ("a", 3)], -1)


def test_without_candidates_there_is_no_victim():
    assert choose_victim([], -1) is None


def _misses(sequence: list[int], capacity: int, farthest: bool) -> int:
    """Loads a cache of `capacity` needs; farthest next use, or least recently used."""
    cache: list[str] = []
    misses = 0
    for index, item in enumerate(sequence):
        name = str(item)
        if name in cache:
            cache.remove(name)
        else:
            misses += 1
            if len(cache) == capacity:
                if farthest:
                    rest = [str(x) for x in sequence[index:]]
                    uses = [(c, rest.index(c) if c in rest else NEVER) for c in cache]
                    victim = choose_victim(uses, -1)
                    assert victim is not None
                else:
                    victim = cache[0]
                cache.remove(victim)
        cache.append(name)
    return misses


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 5))
def test_it_never_loads_more_than_least_recently_used(sequence, capacity):
    assert _misses(sequence, capacity, True) <= _misses(sequence, capacity, False)
