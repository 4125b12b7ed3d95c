"""Shares of a unit: together they are the whole, of equal size, padded with nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.blocks import PARTS, TensorSpec, UnitSpec
from offload.shards import piece, share_of

KINDS = [
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "float32", "float32"),
    ("float16", "float32", "float16"),
    ("float32", "float32", "float32"),
]

tensors = st.tuples(
    st.integers(1, 40), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(1, 4)
)
units = st.tuples(st.lists(tensors, min_size=1, max_size=6), st.booleans()).map(
    lambda case: UnitSpec(
        "u",
        3,
        1,
        tuple(
            TensorSpec(f"t{i}", (rows, cols), kept, decay, 0.1, replicas=replicas)
            for i, (rows, cols, kept, decay, replicas) in enumerate(case[0])
        ),
        case[1],
    )
)
kinds, sizes = st.sampled_from(KINDS), st.integers(1, 9)


def values_of(unit):
    """Distinct values for every element of every tensor of a unit, never zero."""
    values, start = {}, 1
    for tensor in unit.tensors:
        values[tensor.name] = np.arange(start, start + tensor.size)
        start += tensor.size
    return values


def filled(layout, values):
    """The flat order of a share, filled from whole tensors; -1 where no place is."""
    flat = np.full(layout.size, -1)
    for place in layout.places:
        spec = place.spec
        end = place.start + spec.size
        if spec.name:
            flat[place.start : end] = values[spec.name][spec.flat0 : spec.flat0 + spec.size]
        else:
            flat[place.start : end] = 0
    return flat


@settings(deadline=None, max_examples=50)
@given(units, kinds, sizes)
def test_shares_put_together_are_the_whole_unit_then_zeros(unit, kind, size):
    shares = [share_of(unit, *kind, rank=rank, size=size) for rank in range(size)]
    whole, values = shares[0].gathered, values_of(unit)
    wanted = np.zeros(whole.size, np.int64)  # what is outside every place is padding
    for place in whole.places:
        wanted[place.start : place.start + place.spec.size] = values[place.spec.name]
    flats = [filled(share, values) for share in shares]
    split = np.concatenate([f[: s.num_split] for f, s in zip(flats, shares, strict=True)])
    kept = np.concatenate([f[s.num_split :] for f, s in zip(flats, shares, strict=True)])
    assert np.array_equal(np.concatenate([split, kept]), wanted)


@settings(deadline=None, max_examples=50)
@given(units, kinds, sizes)
def test_all_shares_have_the_same_sizes_and_waste_less_than_a_rank_has_elements(unit, kind, size):
    shares = [share_of(unit, *kind, rank=rank, size=size) for rank in range(size)]
    assert len({(x.num_split, x.num_kept) for x in shares}) == 1
    for part in PARTS:
        assert len({x.nbytes(part) for x in shares}) == 1
    assert 0 <= size * shares[0].num_split - whole_sizes(unit, kind)[0] < size
    assert 0 <= size * shares[0].num_kept - whole_sizes(unit, kind)[1] < size


def whole_sizes(unit, kind):
    """Split and kept elements of an undivided unit."""
    layout = share_of(unit, *kind)
    return layout.num_split, layout.num_kept


@settings(deadline=None, max_examples=50)
@given(units, kinds, sizes)
def test_a_piece_says_all_that_its_tensor_says(unit, kind, size):
    for rank in range(size):
        share = share_of(unit, *kind, rank=rank, size=size)
        assert (share.name, share.frozen) == (unit.name, unit.frozen)
        assert (share.unit.layer, share.unit.expert) == (unit.layer, unit.expert)
        assert (share.weight_dtype, share.grad_dtype, share.compute_dtype) == kind
        assert share.gathered.unit is unit and share.gathered.gathered is share.gathered
        for place in share.places:
            spec = place.spec
            if not spec.name:
                assert (spec.decay, spec.replicas, spec.piece_of) == (False, 1, None)
                assert spec.init_std == 0.0, "padding starts at zero"
                continue
            if size == 1:
                assert spec in unit.tensors
                continue
            source = spec.piece_of
            assert source in unit.tensors
            assert spec.name == source.name and spec.init_std == source.init_std
            assert (spec.decay, spec.replicas) == (source.decay, source.replicas)
            assert place.kept == (source.kept or kind[0] == "float32")


@settings(deadline=None, max_examples=50)
@given(units, kinds)
def test_one_rank_stores_the_unit_as_it_is(unit, kind):
    share = share_of(unit, *kind)
    assert share.gathered is share and share.unit is unit
    assert share.size == unit.size


@settings(deadline=None, max_examples=50)
@given(units, kinds, sizes)
def test_every_rank_knows_the_replicas_of_each_element(unit, kind, size):
    wanted = sum(x.size / x.replicas for x in unit.tensors)
    found, padded = 0.0, 0
    for rank in range(size):
        share = share_of(unit, *kind, rank=rank, size=size)
        runs = share.runs_by_replicas()
        assert [lo for lo, _, _ in runs] == [0, *(hi for _, hi, _ in runs[:-1])][: len(runs)]
        assert not runs or runs[-1][1] == share.size
        found += sum((hi - lo) / replicas for lo, hi, replicas in runs)
        padded += share.size
    padding = padded - unit.size
    assert np.isclose(found, wanted + padding), "padding counts once, and is zero"


def test_a_rank_may_hold_nothing_but_padding():
    unit = UnitSpec("u", 0, None, (TensorSpec("a", (2,), True, True, 0.1),))
    last = share_of(unit, "bfloat16", "bfloat16", "float32", rank=3, size=4)
    assert [place.spec.name for place in last.places] == [""]
    assert (last.num_split, last.num_kept) == (0, 1)


def test_a_piece_of_a_block_of_columns_keeps_its_place():
    block = TensorSpec("a", (4, 3), False, True, 0.1, row0=2, col0=5, num_cols=9, replicas=2)
    part = piece(block, 4, 5)
    assert (part.shape, part.flat0, part.piece_of) == ((5,), 4, block)
    assert (part.row0, part.col0, part.num_cols, part.replicas) == (2, 5, 9, 2)
