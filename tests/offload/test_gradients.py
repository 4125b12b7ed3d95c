"""Gradients: the order of sums, one rounding, the norm, clipping, tied units, spilling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offload.config import OptimizerConfig
from offload.device_copy import field_view
from offload.gradients import accumulator_bytes
from offload.testing import Toy, budgets, smallest_budgets, toy_run
from ops.comm.single import SingleRank
from ops.kernels.split import round_bf16

TOY = Toy(layers=1, experts=2, needed=lambda step, layer: [0, 1])


def rounded(total: np.ndarray) -> np.ndarray:
    out = np.empty(total.size, np.uint16)
    round_bf16(total, out)
    return out


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def normal(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def host_gradient(run, name: str) -> np.ndarray:
    unit = run.engine._shared.units[name]
    return field_view(unit.host_grad, unit.layout.field("grad", "grad")).copy()


def deposit(run, name: str, parts: list[np.ndarray], use: int = 0) -> None:
    """One use of a unit of one tensor: its micro-batches in order."""
    with run.engine.use(name, gradient=True, use=use) as held:
        tensor = held.lease.unit.layout.places[0].spec.name
        for part in parts:
            held.add(tensor, part)


def test_eight_micro_batches_are_summed_in_order_and_rounded_once(tmp_path):
    """C22: accumulated gradients are never dropped between micro-batches."""
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        parts = [normal(9001, 1, i) for i in range(8)]
        deposit(run, "l0.e0", parts)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        assert (host_gradient(run, "l0.e0") == rounded(total)).all()
        exact = np.sum(np.stack(parts).astype(np.float64), axis=0)
        np.testing.assert_allclose(widened(rounded(total)), exact, rtol=2**-8, atol=1e-5)


def test_both_halves_of_a_tied_unit_count_whichever_comes_first(tmp_path):
    """C22, C27: each use has its own sum; uses are added in schedule order, then rounded once."""
    halves = [[normal(3000, use, i) for i in range(3)] for use in range(2)]
    sums = [(parts[0] + parts[1]) + parts[2] for parts in halves]
    for order in ((0, 1), (1, 0)):
        with toy_run(TOY, budgets(tmp_path)) as run:
            run.engine.begin_gradients()
            for use in order:
                deposit(run, "embed", halves[use], use)
            assert "embed" not in run.engine.gradients.squares
            run.engine.gradients.finish()
            assert (host_gradient(run, "embed") == rounded(sums[0] + sums[1])).all()


def test_a_half_deposited_in_pieces_is_added_to_its_own_use(tmp_path):
    """Batch-major: a use comes back once per micro-batch, in turns with the other."""
    parts = [[normal(3000, use, i) for i in range(2)] for use in range(2)]
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        for micro in range(2):
            for use in range(2):
                deposit(run, "embed", [parts[use][micro]], use)
        run.engine.gradients.finish()
        expected = (parts[0][0] + parts[0][1]) + (parts[1][0] + parts[1][1])
        assert (host_gradient(run, "embed") == rounded(expected)).all()


def test_a_new_step_forgets_the_gradients_of_the_one_before(tmp_path):
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        deposit(run, "embed", [normal(3000, 1)], 0)
        run.engine.gradients.finish()
        run.engine.begin_gradients()
        assert run.engine.gradients.agree(SingleRank())[0] == 0.0
        deposit(run, "embed", [normal(3000, 2)], 0)
        run.engine.gradients.finish()
        assert (host_gradient(run, "embed") == rounded(normal(3000, 2))).all()


@pytest.mark.parametrize("grad_dtype", ["bfloat16", "float32"])
def test_the_norm_before_clipping_is_that_of_the_rounded_gradients(tmp_path, grad_dtype):
    """C24: within 1e-6 relative of fp64."""
    with toy_run(replace(TOY, grad_dtype=grad_dtype), budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        squares = 0.0
        for number, size in ((0, 9001), (1, 9001)):
            grad = normal(size, 5, number) * np.float32(10.0 ** (3 * number))
            deposit(run, f"l0.e{number}", [grad])
            kept = widened(rounded(grad)) if grad_dtype == "bfloat16" else grad
            squares += float(np.sum(kept.astype(np.float64) ** 2))
        assert run.engine.gradients.agree(SingleRank())[0] == pytest.approx(
            np.sqrt(squares), rel=1e-6
        )


def test_clipping_starts_exactly_above_the_threshold(tmp_path):
    """C24: a norm equal to the limit is not clipped."""

    def outcome(limit: float):
        with toy_run(TOY, budgets(tmp_path), OptimizerConfig(max_grad_norm=limit)) as run:
            run.step(1, 1e-3)
            return run.outcomes[0]

    norm = outcome(1e9).grad_norm
    assert outcome(norm).clip_factor == 1.0
    below = float(np.nextafter(norm, 0.0))
    assert outcome(below).clip_factor == below / norm < 1.0
    assert outcome(norm / 4).clip_factor == 0.25
    assert outcome(norm / 4).grad_norm == norm


def test_a_loss_scale_cancels_without_changing_a_bit(tmp_path):
    toy = replace(TOY, weight_dtype="float16", compute_dtype="float16")
    grad = normal(9001, 9)
    with toy_run(toy, budgets(tmp_path)) as run:
        scale = run.engine.scaler.scale
        assert scale == 65536.0
        run.engine.begin_gradients()
        deposit(run, "l0.e0", [grad * np.float32(scale)])
        assert (host_gradient(run, "l0.e0") == rounded(grad)).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
def test_one_element_that_is_not_finite_or_whose_square_is_not_marks_the_step(tmp_path, bad):
    grad = normal(9001, 3)
    grad[8999] = bad
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        deposit(run, "l0.e1", [normal(9001, 4)])
        assert run.engine.gradients.finite
        deposit(run, "l0.e1", [grad])
        assert not run.engine.gradients.finite


def test_a_tensor_without_gradient_is_our_own_error(tmp_path):
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        with (
            pytest.raises(AssertionError, match="l0: some tensors got no gradient"),
            run.engine.use("l0", gradient=True) as held,
        ):
            held.add("l0.w", normal(5000, 1))
        with pytest.raises(KeyError), run.engine.use("l0", gradient=True) as held:
            held.add("l1.w", normal(5000, 1))
        run.check_buffers()


def test_a_unit_without_tokens_on_this_rank_gets_zeros_and_what_was_added_stays(tmp_path):
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin_gradients()
        with run.engine.use("l0", gradient=True) as held:
            held.total[:] = np.nan  # what the accumulator's memory may hold
            held.add("l0.w", normal(5000, 1))
            held.add_nothing()
            assert held.complete
            for place in held.lease.unit.layout.gathered.places:
                values = held.total[place.start : place.start + place.spec.size]
                wanted = normal(5000, 1) if place.spec.name == "l0.w" else 0.0
                assert (values == wanted).all(), place.spec.name
        assert run.engine.gradients.finite
        run.check_buffers()


def test_spilled_gradients_give_their_slots_and_their_nvme_room_back(tmp_path):
    config = smallest_budgets(TOY, budgets(tmp_path, gradient_spill="always"))
    with toy_run(TOY, config) as run:
        run.engine.drain()
        before = run.engine.used_bytes()["nvme"]
        for number in range(1, 4):
            run.step(number, 1e-3)
            run.engine.drain()
            assert run.engine.used_bytes()["nvme"] == before
            run.check_buffers()
        spilled = run.store.stats().written.payload_bytes["spill"]
        grads = sum(layout.nbytes("grad") for layout in TOY.layouts())
        assert spilled == 3 * grads


def test_accumulators_are_kept_only_where_sums_meet():
    uses, sizes = {"embed": 2, "l0": 1}, {"embed": 100, "l0": 10}
    assert accumulator_bytes(uses, sizes, batch_major=False) == 200
    assert accumulator_bytes(uses, sizes, batch_major=True) == 210
