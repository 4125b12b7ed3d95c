"""What the bytes of a block are, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.blocks import PARTS, TensorSpec, UnitLayout, UnitSpec
from offload.runs import GAP, Piece, Run, checked_runs, pieces_of, runs_of, untyped


def layout(weight_dtype="bfloat16", frozen=False):
    tensors = (
        TensorSpec("norm", (33,), True, False, None),
        TensorSpec("w", (7, 11), False, True, 0.02),
    )
    return UnitLayout(UnitSpec("u", 0, None, tensors, frozen), weight_dtype, "bfloat16", "float32")


def test_runs_of_a_state_block_name_its_components_and_item_sizes():
    # C03
    runs = runs_of(layout(), "state")
    assert [(run.component, run.item_bytes, run.stop - run.start) for run in runs] == [
        ("residual", 2, 2 * 77),
        ("exp_avg", 4, 4 * 110),
        ("exp_avg_sq", 4, 4 * 110),
    ]
    assert all(run.start % 64 == 0 for run in runs)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("frozen", [False, True])
def test_runs_of_every_block_lie_inside_it(weight_dtype, part, frozen):
    unit = layout(weight_dtype, frozen)
    runs = runs_of(unit, part)
    assert checked_runs(runs, unit.nbytes(part)) == runs
    assert all(run.start < run.stop for run in runs)


def test_pieces_name_the_gaps_between_runs():
    runs = (Run("a", 2, 0, 10), Run("b", 4, 64, 128))
    assert pieces_of(runs, 0, 192) == [
        Piece("a", 2, 10),
        Piece(GAP, 1, 54),
        Piece("b", 4, 64),
        Piece(GAP, 1, 64),
    ]
    assert pieces_of(runs, 4, 8) == [Piece("a", 2, 4)]
    assert pieces_of(runs, 20, 30) == [Piece(GAP, 1, 10)]
    assert pieces_of(runs, 8, 65) == [Piece("a", 2, 2), Piece(GAP, 1, 54), Piece("b", 4, 1)]
    assert pieces_of((), 0, 5) == [Piece(GAP, 1, 5)]
    assert pieces_of(untyped(9), 0, 9) == [Piece("bytes", 1, 9)]
    assert untyped(0) == checked_runs(None, 0) == ()
    assert checked_runs(None, 9) == untyped(9)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=6),
    start=st.integers(0, 300),
    nbytes=st.integers(0, 300),
)
def test_pieces_cover_what_was_asked_for_in_order(lengths, start, nbytes):
    runs, end = [], 0
    for index, (gap, length) in enumerate(lengths):
        runs.append(Run(f"c{index}", 1, end + gap, end + gap + length))
        end += gap + length
    expected = [GAP] * 700
    for run in runs:
        expected[run.start : run.stop] = [run.component] * (run.stop - run.start)
    pieces = pieces_of(runs, start, start + nbytes)
    found = [piece.component for piece in pieces for _ in range(piece.nbytes)]
    assert found == expected[start : start + nbytes]
    assert all(piece.nbytes for piece in pieces)


@pytest.mark.parametrize(
    "runs",
    [
        (Run("a", 1, 0, 11),),
        (Run("a", 1, 5, 4),),
        (Run("a", 1, 0, 6), Run("b", 1, 5, 8)),
        (Run("a", 1, -1, 6),),
        (Run("a", 8, 0, 8),),
    ],
)
def test_runs_that_make_no_sense_are_refused(runs):
    with pytest.raises(ValueError, match="Run"):
        checked_runs(runs, 10)
