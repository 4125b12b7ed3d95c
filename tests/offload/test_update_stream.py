"""The streamed update: its memory, its order, held state, groups; AdamW in fp64 as reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from offload.arena import Buffer
from offload.config import OptimizerConfig, TierConfig
from offload.placement import Term
from offload.schedule import Stage
from offload.testing import Toy, ToyRun, budgets, smallest_budgets, toy_plan, toy_run
from offload.update_job import UpdateJob
from ops.errors import StorageError
from tests.offload.watch import drop_cached_weights, hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9, weight_decay=0.5)


def rate(step: int) -> float:
    return 1e-2 / step


def tight(tmp_path, toy: Toy, extra_host_bytes: int = 0, **options):
    config = smallest_budgets(toy, budgets(tmp_path, **options))
    return replace(config, host=TierConfig(config.host.capacity + extra_host_bytes))


def seen_gradients(run: ToyRun) -> dict[tuple[str, int], np.ndarray]:
    """The sum of the gradients the toy will give each tensor in each step, filled as it runs."""
    seen: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(1))
    original = run._gradient

    def spy(name: str, weight: np.ndarray, number: int, part: int) -> np.ndarray:
        grad = original(name, weight, number, part)
        seen[name, number] = seen[name, number] + grad.astype(np.float64)
        return grad

    run._gradient = spy  # type: ignore[method-assign]
    return seen


def adamw_in_fp64(tensor, start, seen, steps: int, config: OptimizerConfig) -> np.ndarray:
    p = start.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    decay = config.weight_decay if tensor.decay else 0.0
    for number in range(1, steps + 1):
        g = seen.get((tensor.name, number), np.zeros(1))
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        p -= rate(number) * decay * p
        bias1, bias2 = 1 - config.beta1**number, 1 - config.beta2**number
        p -= rate(number) / bias1 * m / (np.sqrt(v / bias2) + config.eps)
    return p


@pytest.mark.parametrize("policy", ["replay", "dense"])
def test_every_tensor_keeps_its_own_group_and_all_its_gradients(tmp_path, policy):
    """C31: decay and no decay interleaved in one unit; C27: both halves of the tied unit count.

    A decay of 0.5 for a norm, or half a gradient for the embedding, is far outside the tolerance.
    """
    toy = Toy(
        layers=2,
        experts=2,
        weight_dtype="float32",
        grad_dtype="float32",
        needed=lambda step, layer: [0] if step == 2 else [0, 1],
    )
    with toy_run(toy, tight(tmp_path, toy, idle_expert_policy=policy), OPTIMIZER) as run:
        seen = seen_gradients(run)
        for number in range(1, 5):
            run.step(number, rate(number))
        for tensor, values in run.engine.masters():
            expected = adamw_in_fp64(tensor, toy.values(tensor), seen, 4, OPTIMIZER)
            np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-6, err_msg=tensor.name)
        run.check_buffers()


def test_a_tied_unit_shows_the_same_weights_at_both_ends_of_the_step(tmp_path):
    """C27."""
    toy = Toy(layers=1, weight_dtype="float32", grad_dtype="float32")
    with toy_run(toy, tight(tmp_path, toy), OPTIMIZER) as run:
        run.step(1, rate(1))
        run.engine.begin(
            [Stage("front", ("embed",)), Stage("x", ("l0",)), Stage("back", ("embed",))]
        )
        found = []
        for stage, name in (("front", "embed"), ("x", "l0"), ("back", "embed")):
            run.engine.enter(stage)
            with run.engine.use(name) as held:
                found.append(np.array(held.weights[f"{name}.w"]))
        master = {t.name: v.copy() for t, v in run.engine.masters()}["embed.w"]
        assert (found[0] == master).all() and (found[2] == master).all()


def fill_stream(run: ToyRun) -> list[Buffer]:
    """Take all stream memory that is free (lock held)."""
    taken = []
    while (buffer := run.engine.host.allocate(4096)) is not None:
        taken.append(buffer)
    return taken


def cache_weight(run: ToyRun, name: str) -> None:
    """Make a cold unit's weights a clean cache in host, as a lease leaves them."""
    engine = run.engine
    unit = engine._shared.units[name]
    with engine._shared.changed:
        buffer = engine._memory.try_stream(unit.weight_bytes, 0)
        assert buffer is not None
        engine._memory.cache_weight(name, buffer)
    nbytes = unit.layout.nbytes("weight")
    run.store.read(unit.block("weight"), buffer.array, "weight", nbytes=nbytes).wait()
    unit.host_ready = True


def test_taking_memory_for_a_job_never_evicts_the_weights_it_is_about_to_update(tmp_path):
    """Regression: the dense update of an idle expert lost its own cached weights.

    An expert that this step does not need is the first victim; the job had counted on its cached
    weights and then evicted them to make room for its state.
    """
    toy = Toy(layers=3)
    config = tight(tmp_path, toy, 100_000, pipeline="sync", gradient_spill="always")
    with toy_run(toy, config, OPTIMIZER) as run:
        engine = run.engine
        unit = engine._shared.units["l2.e3"]
        assert unit.weight_on_nvme and unit.state_on_nvme
        engine.begin([])  # nobody is expected
        cache_weight(run, unit.name)
        with engine._shared.changed:
            taken = fill_stream(run)
            job = UpdateJob(unit, 0, None, 1.0)
            reads = engine._updates._memory.prepare(job)
            assert reads is not None and [part for _, part, _ in reads] == ["state"]
            assert job.weight is unit.host_weight is not None
            assert job.slot is not None
            for piece in taken:
                engine.host.free(piece)


def test_a_job_that_gets_no_memory_holds_nothing(tmp_path):
    toy = Toy(layers=3)
    with toy_run(toy, tight(tmp_path, toy, pipeline="sync"), OPTIMIZER) as run:
        engine = run.engine
        unit = engine._shared.units["l2.e3"]
        with engine._shared.changed:
            taken = fill_stream(run)
            slots, engine._memory.update_slots = engine._memory.update_slots, []
            assert engine._updates._memory.prepare(UpdateJob(unit, 0, None, 1.0)) is None
            assert unit.host_holds == 0
            engine._memory.update_slots = slots
            for piece in taken:
                engine.host.free(piece)
        run.check_buffers()


def test_what_a_job_holds_stays_until_it_is_published_even_if_its_writes_are_faster(tmp_path):
    """Regression: writes done before the publishing let the unit's cached weights be evicted.

    The publishing then declared host weights ready that were gone. Here it comes late, and
    everything that may be evicted is.
    """
    toy = Toy(layers=3)
    config = tight(tmp_path, toy, 100_000, pipeline="sync", gradient_spill="always")
    with toy_run(toy, config, OPTIMIZER) as run:
        engine = run.engine
        unit = engine._shared.units["l2.e3"]
        engine.begin([])
        cache_weight(run, unit.name)
        publish = engine._updates._publish

        def publish_late(job: UpdateJob, hold: bool) -> None:
            with engine._shared.changed:
                while engine._updates._writes.in_flight:
                    engine._shared.changed.wait()
                drop_cached_weights(run)
            assert unit.host_weight is not None
            publish(job, hold)

        engine._updates._publish = publish_late  # type: ignore[method-assign]
        engine._memory._held_bytes_max = 0
        engine._updates.submit([UpdateJob(unit, 0, None, 1.0)])
        engine.drain()
        assert unit.host_ready and unit.host_holds == 0
        run.check_buffers()


def traffic_of(tmp_path, extra: int) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Replay and update bytes (read, written) of expert 1 coming back after an idle step."""

    def needed(step: int, layer: int) -> list[int]:
        return [0] if (step, layer) == (2, 3) else [0, 1]

    toy = Toy(layers=4, experts=2, needed=needed)
    with toy_run(toy, tight(tmp_path, toy, extra, gradient_spill="always"), OPTIMIZER) as run:
        losses = [run.step(number, rate(number)) for number in range(1, 4)]
        run.engine.drain()
        stats = run.store.stats()
        run.check_buffers()
        return stats.read.payload_bytes, stats.written.payload_bytes, [*losses, run.digest()]


def test_caught_up_state_waits_in_host_for_its_update_when_there_is_room(tmp_path):
    """With room the replay costs no extra write; without, one extra read and write; same bits."""
    read, written, bits = traffic_of(tmp_path / "room", 600_000)
    assert read["replay"] > 0 and written["replay"] == 0
    tight_read, tight_written, tight_bits = traffic_of(tmp_path / "tight", 0)
    assert tight_written["replay"] > 0 and tight_read["update"] > read["update"]
    assert bits == tight_bits


def test_held_state_is_written_by_a_drain(tmp_path):
    """An evaluation replays idle experts; draining may not lose what they hold."""
    toy = Toy(layers=4, experts=2, needed=lambda step, layer: [0] if step > 1 else [0, 1])
    results = []
    for extra in (None, 600_000):
        config = budgets(tmp_path / str(extra))
        if extra is not None:
            config = tight(tmp_path / str(extra), toy, extra)
        with toy_run(toy, config, OPTIMIZER) as run:
            values = []
            for number in range(1, 5):
                values.append(run.step(number, rate(number)))
                values.append(run.evaluate())
                if extra is not None and number > 1:
                    assert any(u.state_dirty for u in run.engine._shared.units.values())
                run.engine.drain()
                run.check_buffers()
            results.append([*values, run.digest()])
    assert results[0] == results[1]


def test_a_flush_that_cannot_write_fails_every_later_wait_instead_of_hanging(tmp_path):
    """Regression: a write refused at once was never counted down, so the next drain hung."""
    toy = Toy(layers=4, experts=2, needed=lambda step, layer: [0] if step > 1 else [0, 1])
    with toy_run(toy, tight(tmp_path, toy, 600_000), OPTIMIZER) as run:
        run.step(1, rate(1))
        run.step(2, rate(2))
        run.evaluate()
        run.engine._updates.wait_border()
        assert any(u.state_dirty for u in run.engine._shared.units.values())

        def refuse(*args: object, **kwargs: object) -> None:
            raise StorageError("no room")

        run.store.write = refuse
        for wait in (run.engine.drain, run.engine.drain, run.digest, lambda: run.step(3, rate(3))):
            with pytest.raises(StorageError, match="no room"):
                wait()
        run.engine.close()


def test_replays_of_a_layer_run_in_the_order_of_their_leases(tmp_path):
    """Regression: each went first in line, so the expert leased first was replayed last."""
    toy = Toy(layers=1, experts=4, needed=lambda step, layer: [0] if step > 1 else [0, 1, 2, 3])
    with toy_run(toy, tight(tmp_path, toy, pipeline="sync"), OPTIMIZER) as run:
        run.step(1, rate(1))
        run.step(2, rate(2))
        run.engine.drain()
        run.engine.begin(toy.stages(), training=False)
        with run.engine._shared.changed:
            run.engine.resolve("experts 0", [f"l0.e{e}" for e in range(4)])
            queued = [job.unit.name for job in run.engine._updates._queue]
        assert queued == ["l0.e1", "l0.e2", "l0.e3"]


def test_the_backlog_of_an_idle_expert_is_bounded(tmp_path):
    toy = Toy(layers=1, experts=2, needed=lambda step, layer: [0])
    with toy_run(toy, tight(tmp_path, toy, replay_lag_max=3), OPTIMIZER) as run:
        for number in range(1, 12):
            run.step(number, rate(number))
            assert len(run.engine._ledger) <= 4
        run.engine.catch_up()
        run.step(12, rate(12))
        run.engine.drain()
        assert run.engine.optimizer_step == 12


def test_a_state_of_four_times_the_host_budget_trains(tmp_path):
    toy = Toy(layers=8, experts=8, expert_size=4000, needed=lambda step, layer: [step % 8, 1])
    config = budgets(tmp_path / "small")
    state_bytes = toy_plan(toy, config).state_bytes
    config = budgets(tmp_path / "small", host=state_bytes // 4)
    plan = toy_plan(toy, config)
    assert plan.fits and isinstance(plan.tiers["host"].terms[0], Term)
    results = []
    for each in (budgets(tmp_path / "ample"), config):
        with toy_run(toy, each, OPTIMIZER) as run:
            results.append([run.step(n, rate(n)) for n in range(1, 4)] + [run.digest()])
            assert run.engine.peak_bytes()["host"] <= each.host.capacity
    assert results[0] == results[1]


def run_after_close(call: Callable[[ToyRun], object], tmp_path) -> None:
    toy = Toy(layers=1)
    with toy_run(toy, tight(tmp_path, toy), OPTIMIZER) as run:
        run.step(1, rate(1))
        run.engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            call(run)


def test_using_a_closed_engine_is_an_error_not_a_hang(tmp_path):
    """Regression: a lease of a unit with a pending update waited for a thread that had ended."""
    run_after_close(lambda run: run.engine.drain(), tmp_path)
    run_after_close(lambda run: run.step(2, rate(2)), tmp_path)
    run_after_close(lambda run: run.digest(), tmp_path)
