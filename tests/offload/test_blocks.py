"""Layouts: every component of every tensor has its own aligned place, sizes never mixed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.blocks import FIELD_ALIGN_BYTES, PARTS, TensorSpec, UnitLayout, UnitSpec

UNIT = UnitSpec(
    "l0",
    0,
    None,
    (
        TensorSpec("norm", (7,), True, False, None),
        TensorSpec("w", (10, 5), False, True, 0.02),
        TensorSpec("router", (3, 3), True, True, 0.02),
        TensorSpec("b", (11,), False, False, 0.02),
    ),
)

units = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=6).map(
    lambda rows: UnitSpec(
        "u",
        0,
        None,
        tuple(TensorSpec(f"t{i}", (n,), k, True, 0.1) for i, (n, k) in enumerate(rows)),
    )
)
formats = st.sampled_from([("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")])


def test_split_tensors_come_first_and_keep_their_order():
    layout = UnitLayout(UNIT, "bfloat16", "bfloat16", "float32")
    assert [p.spec.name for p in layout.places] == ["w", "b", "norm", "router"]
    assert [p.start for p in layout.places] == [0, 50, 61, 68]
    assert (layout.num_split, layout.num_kept, layout.size) == (61, 16, 77)


def test_components_follow_the_weight_format():
    """C32: fp32 parameters among 16-bit ones keep their dtype."""
    bf16 = UnitLayout(UNIT, "bfloat16", "bfloat16", "float32")
    assert bf16.component_bytes() == {
        "weight": 122,
        "master": 64,
        "residual": 122,
        "exp_avg": 308,
        "exp_avg_sq": 308,
        "grad": 154,
    }
    fp16 = UnitLayout(UNIT, "float16", "float32", "float16").component_bytes()
    assert (fp16["weight"], fp16["master"], fp16["grad"]) == (122, 64 + 244, 308)
    fp32 = UnitLayout(UNIT, "float32", "float32", "float32")
    assert fp32.num_split == 0 and fp32.component_bytes()["master"] == 308
    assert all(place.kept for place in fp32.places)


def test_sixteen_bit_training_state_is_twelve_bytes_per_parameter():
    unit = UnitSpec("u", 0, None, (TensorSpec("w", (64_000,), False, True, 0.02),))
    layout = UnitLayout(unit, "bfloat16", "bfloat16", "float32")
    assert layout.nbytes("weight") + layout.nbytes("state") == 12 * 64_000
    assert layout.nbytes("grad") == 2 * 64_000


def test_an_unknown_component_is_named():
    with pytest.raises(KeyError, match="l0 has no residual"):
        UnitLayout(UNIT, "float16", "float32", "float16").field("state", "residual")


@given(units, formats)
def test_fields_never_overlap_and_are_aligned(unit, form):
    layout = UnitLayout(unit, form[0], "float32", form[1])
    for fields in (*(layout.fields[part] for part in PARTS), layout.device_fields):
        end = 0
        for item in fields:
            assert item.offset >= end and item.offset % FIELD_ALIGN_BYTES == 0
            end = item.offset + item.nbytes
    for part in PARTS:
        last = layout.fields[part][-1]
        assert 0 <= layout.nbytes(part) - (last.offset + last.nbytes) < FIELD_ALIGN_BYTES


@given(units, formats)
def test_places_tile_the_flat_order(unit, form):
    layout = UnitLayout(unit, form[0], "bfloat16", form[1])
    start = 0
    for place in layout.places:
        assert place.start == start
        start += place.spec.size
    assert start == layout.size == unit.size == layout.num_split + layout.num_kept
    assert layout.accumulator_nbytes >= 4 * layout.size
