"""Units of one mesh put together on another one, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.checkpoint.layout import UnitSources, copies
from offload.checkpoint.units import UnitReader
from offload.ledger import Ledger
from ops.checksum import CHUNK_BYTES
from ops.errors import StorageError
from ops.kernels.adamw import AdamW
from ops.kernels.pool import KernelPool
from tests.offload.checkpoint.saved_units import (
    Whole,
    blocks_of,
    mesh_layouts,
    part_of,
    whole_index,
)

KINDS = [
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float32", "float16"),
    ("float32", "float32", "float32"),
]
wholes = st.builds(
    Whole,
    rows=st.integers(1, 6).map(lambda n: 8 * n),
    cols=st.integers(1, 5).map(lambda n: 8 * n),
    kept=st.booleans(),
    decay=st.booleans(),
    cut=st.sampled_from(["rows", "columns", "none"]),
)
tensor_lists = st.lists(wholes, min_size=1, max_size=5)
meshes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))  # operator, data parallel


@pytest.fixture(scope="module")
def pool():
    with KernelPool(1) as made:
        yield made


def ledger_of(steps: int) -> Ledger:
    ledger = Ledger(AdamW(0.9, 0.95, 1e-8))
    for step in range(steps):
        ledger.add(1e-3 * (1 + step))
    return ledger


def reader(layouts, parts, pool, steps=3, **options):
    return UnitReader(
        dict(enumerate(parts)),
        {rank: {"u": layout} for rank, layout in enumerate(layouts)},
        ledger_of(steps),
        0.1,
        pool,
        **options,
    )


def filled(read: UnitReader, target, until=None):
    weight = np.full(target.nbytes("weight"), 0xAA, np.uint8)
    state = None if target.frozen else np.full(target.nbytes("state"), 0xAA, np.uint8)
    version = read.fill(target, weight, state, until)
    return version, weight, state


@settings(deadline=None, max_examples=60)
@given(tensor_lists, st.sampled_from(KINDS), meshes, meshes, st.booleans())
def test_any_mesh_from_any_mesh(tensors, kinds, saved, wanted, frozen):
    """The arithmetic beside whole_index, which lists every element one by one."""
    sources = mesh_layouts(tensors, *saved, kinds, frozen)
    parts = [part_of(layout) for layout in sources]
    with KernelPool(1) as pool:
        read = reader(sources, parts, pool)
        for target in mesh_layouts(tensors, *wanted, kinds, frozen):
            version, weight, state = filled(read, target)
            expected = blocks_of(target)
            empty = not any(place.spec.name for place in target.places)
            assert version == (0 if empty else 3)
            np.testing.assert_array_equal(weight, expected["weight"])
            if state is not None:
                np.testing.assert_array_equal(state, expected["state"])


@settings(deadline=None, max_examples=40)
@given(tensor_lists, meshes, meshes)
def test_every_element_comes_once_and_from_where_it_is(tensors, saved, wanted):
    kinds = KINDS[0]
    sources = mesh_layouts(tensors, *saved, kinds)
    for target in mesh_layouts(tensors, *wanted, kinds):
        found = UnitSources(target, sources)
        assert not found.missing
        came = np.zeros(target.size, np.int64)
        where = elements(target)
        for source, runs in zip(sources, found.runs):
            there = elements(source)
            for to, at, length in zip(runs.target, runs.source, runs.length):
                came[to : to + length] += 1
                assert where[to : to + length] == there[at : at + length]
        named = np.array([x is not None for x in where])
        assert (came == named).all()


def elements(layout):
    """(tensor, index) of each element of a flat order; None where it is padding."""
    found = [None] * layout.size
    for place in layout.places:
        if place.spec.name:
            for i, index in enumerate(whole_index(place.spec).tolist()):
                found[place.start + i] = (place.spec.name, index)
    return found


def test_what_no_rank_has_is_named(pool):
    tensors = [Whole(8, 8, False, True, "rows"), Whole(8, 16, False, True, "columns")]
    sources = mesh_layouts(tensors, 4, 1, KINDS[0])
    (target,) = mesh_layouts(tensors, 1, 1, KINDS[0])
    some = [0, 1, 3]
    assert UnitSources(target, [sources[i] for i in some]).missing == {"t0": 16, "t1": 32}
    read = reader([sources[i] for i in some], [part_of(sources[i]) for i in some], pool)
    with pytest.raises(StorageError, match="no rank of the commit has 16 elements of t0"):
        filled(read, target)


def test_a_block_of_another_length_is_another_model(pool):
    (layout,) = mesh_layouts([Whole(8, 8, False, True, "rows")], 1, 1, KINDS[0])
    part = part_of(layout)
    part.blocks["u/state"].data = part.blocks["u/state"].data[:-64]
    with pytest.raises(StorageError, match="another model"):
        filled(reader([layout], [part], pool), layout)


def test_other_dtypes_do_not_mix():
    tensors = [Whole(8, 8, False, True, "rows")]
    (target,), (source,) = (mesh_layouts(tensors, 1, 1, kinds) for kinds in (KINDS[0], KINDS[2]))
    with pytest.raises(ValueError, match="other dtypes"):
        UnitSources(target, [source])


def test_only_needed_chunks_are_read_and_none_twice(pool):
    """A quarter of the rows needs about a quarter of the chunks."""
    tensors = [Whole(1024, 1024, False, True, "rows"), Whole(512, 2048, False, True, "columns")]
    sources = mesh_layouts(tensors, 1, 2, KINDS[0])
    targets = mesh_layouts(tensors, 1, 8, KINDS[0])
    for target in targets:
        parts = [part_of(layout) for layout in sources]
        read = reader(sources, parts, pool)
        filled(read, target)
        assert all(count == 1 for part in parts for count in part.reads.values())
        seen = {(rank, *key) for rank, part in enumerate(parts) for key in part.reads}
        asked = {
            (rank, block, chunk)
            for (rank, block), chunks in read.needed(target).items()
            for chunk in chunks
        }
        assert seen == asked
        wanted = (target.nbytes("weight") + target.nbytes("state")) / CHUNK_BYTES
        # A run of a component begins and ends inside a chunk.
        assert len(seen) <= wanted + 2 * 4


@pytest.mark.parametrize("kinds", KINDS)
def test_pieces_that_are_behind_catch_up_like_the_others(kinds, pool):
    """One rank replayed what the idle unit missed, the other had not; the result is one version."""
    tensors = [
        Whole(16, 24, False, True, "rows"),
        Whole(8, 8, True, False, "none"),
        Whole(16, 16, False, False, "columns"),
    ]
    layouts = mesh_layouts(tensors, 2, 2, kinds)
    old = [part_of(layout, version=3) for layout in layouts]
    read = reader(layouts, old, pool, steps=7)
    caught_up = []
    for layout in layouts:
        version, weight, state = filled(read, layout, until=6)
        assert version == 6
        part = part_of(layout, version=6)
        part.blocks["u/weight"].data, part.blocks["u/state"].data = weight, state
        caught_up.append(part)
    mixed = reader(layouts, [old[0], caught_up[1], old[2], caught_up[3]], pool, steps=7)
    for target in mesh_layouts(tensors, 1, 3, kinds):
        expected = filled(read, target, until=6)
        assert expected[0] == 6
        found = filled(mixed, target)
        assert found[0] == 6
        for one, other in zip(found[1:], expected[1:]):
            np.testing.assert_array_equal(one, other)
        untouched = filled(read, target)
        assert untouched[0] == 3 and (untouched[1] != found[1]).any()


def test_without_replays_pieces_stay_as_they_are(pool):
    (layout,) = mesh_layouts([Whole(8, 8, False, True, "rows")], 1, 1, KINDS[0])
    read = reader([layout], [part_of(layout, version=2)], pool, steps=7, replays=False)
    version, weight, _ = filled(read, layout, until=7)
    assert version == 2
    np.testing.assert_array_equal(weight, blocks_of(layout)["weight"])


def test_a_run_may_go_on_from_split_to_kept_elements(pool):
    """The same mesh again: all of the unit is one run."""
    tensors = [Whole(8, 8, False, True, "rows"), Whole(1, 8, True, False, "none")]
    (layout,) = mesh_layouts(tensors, 1, 1, KINDS[0])
    assert len(UnitSources(layout, [layout]).runs[0].target) == 1
    _, weight, state = filled(reader([layout], [part_of(layout)], pool), layout)
    np.testing.assert_array_equal(weight, blocks_of(layout)["weight"])
    np.testing.assert_array_equal(state, blocks_of(layout)["state"])


def test_copies_list_the_chunks_they_touch():
    tensors = [Whole(1024, 1024, False, True, "rows")]
    (whole,) = mesh_layouts(tensors, 1, 1, KINDS[0])
    last = mesh_layouts(tensors, 1, 8, KINDS[0])[7]
    runs = UnitSources(last, [whole]).runs[0]
    table = copies(runs, last, whole, "state")
    # residual: 2 of 2 MiB; moments: 4 MiB each, behind it.
    assert table.chunks() == [1, 5, 9]
    assert [piece for chunk in (0, 1, 2) for piece in table.in_chunk(chunk)] == [
        (0, 3 << 18, 1 << 18)
    ]
