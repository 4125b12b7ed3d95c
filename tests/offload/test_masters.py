"""Masters in and out, whatever their home and storage form."""

from __future__ import annotations

import numpy as np
import pytest

from offload.testing import Toy, budgets, smallest_budgets, toy_run

FORMS = [("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]


def toy_of(form, **options) -> Toy:
    return Toy(layers=2, weight_dtype=form[0], compute_dtype=form[1], **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["memory", "tight"])
def test_initial_masters_come_back_bit_for_bit(tmp_path, form, place):
    toy = toy_of(form)
    config = budgets(tmp_path)
    if place == "tight":
        config = smallest_budgets(toy, config)
    with toy_run(toy, config) as run:
        found = [(tensor, values.copy()) for tensor, values in run.engine.masters()]
        assert len(found) == sum(len(unit.tensors) for unit in toy.units())
        for tensor, values in found:
            assert values.dtype == np.float32
            assert values.tobytes() == toy.values(tensor).tobytes()
        run.check_buffers()


def test_they_come_sorted_by_name_as_utf8(tmp_path):
    toy = toy_of(FORMS[0], experts=12, needed=lambda step, layer: [0])
    with toy_run(toy, smallest_budgets(toy, budgets(tmp_path))) as run:
        names = [tensor.name.encode() for tensor, _ in run.engine.masters()]
        assert names == sorted(names) and len(set(names)) == len(names)
        assert names.index(b"l0.e10.w") < names.index(b"l0.e2.w")


def test_a_tied_unit_is_one_tensor_after_steps_that_evicted_it(tmp_path):
    """C27."""
    toy = toy_of(FORMS[0])
    with toy_run(toy, smallest_budgets(toy, budgets(tmp_path))) as run:
        for number in (1, 2):
            run.step(number, 1e-2)
        names = [tensor.name for tensor, _ in run.engine.masters()]
        assert names.count("embed.w") == 1


def test_reading_them_replays_idle_units_and_changes_nothing(tmp_path):
    toy = toy_of(FORMS[0], needed=lambda step, layer: [0] if step > 1 else [0, 1, 2, 3])
    results = []
    for reads in (False, True):
        config = smallest_budgets(toy, budgets(tmp_path / str(reads)))
        with toy_run(toy, config) as run:
            losses = []
            for number in range(1, 5):
                losses.append(run.step(number, 1e-2 / number))
                if reads:
                    assert run.digest() == run.digest()
                    run.check_buffers()
            results.append((losses, run.digest()))
    assert results[0] == results[1]


@pytest.mark.parametrize("form", FORMS)
def test_moments_start_at_zero_whatever_the_memory_held(tmp_path, form):
    toy = toy_of(form)
    with toy_run(toy, budgets(tmp_path)) as run:
        units = run.engine._shared.units.values()
        for unit in units:
            unit.host_state.array[:] = 0xFF
            unit.host_weight.array[:] = 0xFF
        run.engine.initialize(toy.values)
        fresh = run.step(1, 1e-2), run.digest()
    with toy_run(toy, budgets(tmp_path)) as run:
        assert fresh == (run.step(1, 1e-2), run.digest())
