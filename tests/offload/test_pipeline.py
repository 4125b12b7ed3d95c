"""Leases, the window, wrong guesses, eviction; who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from offload.config import TierConfig
from offload.nvme.handle import Handle
from offload.residency import DeviceState
from offload.schedule import Stage
from offload.testing import RandomDelays, Toy, ToyRun, budgets, smallest_budgets, toy_run
from offload.testing_storage import BUFFERED, FaultyStorage, Gate
from tests.offload.watch import drop_cached_weights, hang_guard  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

TOY = Toy(layers=2, experts=3, needed=lambda step, layer: [0, 1, 2])
RATE = 1e-3


def wait_until(run: ToyRun, reached: Callable[[], bool]) -> None:
    """Block until something of the engine has changed so that `reached`."""
    shared = run.engine._shared
    with shared.changed:
        while not reached():
            shared.check()
            shared.changed.wait(5.0)


def unit_of(run: ToyRun, name: str):
    return run.engine._shared.units[name]


def is_ready(run: ToyRun, name: str) -> bool:
    return unit_of(run, name).device_state is DeviceState.READY


def is_at_rest(run: ToyRun) -> bool:
    units = run.engine._shared.units.values()
    return not any(u.host_reading or u.device_state is DeviceState.LOADING for u in units)


def tight(tmp_path, toy: Toy = TOY, **options):
    return smallest_budgets(toy, budgets(tmp_path, **options))


@pytest.mark.parametrize("pipeline", ["overlap", "sync"])
def test_a_unit_asked_for_twice_within_a_window_is_one_transfer(tmp_path, pipeline):
    """C28: recompute and tied weights ask again for what is on its way or there."""
    with toy_run(TOY, budgets(tmp_path, pipeline=pipeline)) as run:
        run.engine.begin([Stage(name, ("l0",)) for name in ("a", "b", "c")])
        for name in ("a", "b", "c"):
            run.engine.enter(name)
            with run.engine.use("l0"), run.engine.use("l0"):
                pass
        assert run.engine.stats.snapshot().transfers == 1


def test_a_lease_of_a_unit_the_mover_is_loading_waits_for_that_transfer(tmp_path):
    """C28, in the middle of the transfer."""
    entered, leave = threading.Event(), threading.Event()

    def hold_mover(lane: str) -> None:
        if lane == "h2d" and threading.current_thread().name == "mover":
            entered.set()
            assert leave.wait(20)

    with toy_run(TOY, budgets(tmp_path), delay=hold_mover) as run:
        run.engine.begin([Stage("a", ("l0",))])
        assert entered.wait(20)
        done: list[object] = []

        def lease() -> None:
            run.engine.enter("a")
            with run.engine.use("l0") as held:
                done.append(np.array(held.weights["l0.w"]))

        compute = threading.Thread(target=lease)
        compute.start()
        wait_until(run, lambda: run.engine._pipeline._wanted == "l0")
        assert not done
        leave.set()
        compute.join()
        assert len(done) == 1 and run.engine.stats.snapshot().transfers == 1


def test_with_a_window_of_zero_nothing_moves_before_its_lease(tmp_path):
    with toy_run(TOY, budgets(tmp_path, pipeline="sync")) as run:
        assert run.engine._pipeline._mover is None
        run.engine.begin(TOY.stages())
        run.engine.enter("fwd embed")
        assert run.engine.stats.snapshot().transfers == 0
        with run.engine.use("embed"):
            assert run.engine.stats.snapshot().transfers == 1


def test_the_mover_stays_inside_the_window(tmp_path):
    """Three units fit the window, the fourth waits until one has been leased."""
    one = unit_bytes = Toy(layers=4).layouts()[2].device_nbytes
    toy = Toy(layers=1, experts=8, needed=lambda step, layer: list(range(8)))
    config = budgets(tmp_path, prefetch_buffer_size=3 * one + one // 2)
    names = [f"l0.e{e}" for e in range(8)]
    with toy_run(toy, config) as run:
        run.engine.begin([Stage(name, (name,)) for name in names])
        for index, name in enumerate(names):
            ahead = names[index : index + 3]
            wait_until(run, lambda ahead=ahead: all(is_ready(run, n) for n in ahead))
            loaded = run.engine.stats.snapshot().h2d_bytes // unit_bytes
            assert loaded == min(index + 3, 8)
            run.engine.enter(name)
            with run.engine.use(name):
                pass


def test_a_wrong_guess_is_counted_and_gives_its_room_back(tmp_path):
    """C44: the prefetched expert is not needed after all."""
    wanted = {1: [0, 1], 2: [1, 2]}
    toy = Toy(layers=1, experts=3, needed=lambda step, layer: wanted[step])
    config = budgets(tmp_path, prefetch_buffer_size=1 << 20)
    with toy_run(toy, config) as run:
        run.step(1, RATE)
        run.engine.drain()
        wait_until(run, lambda: is_ready(run, "l0.e0") and is_ready(run, "l0.e1"))
        assert unit_of(run, "l0.e0").prefetched
        assert run.engine.stats.snapshot().wrong_guess_bytes == 0
        run.engine.begin(toy.stages())
        run.engine.resolve("experts 0", ["l0.e1", "l0.e2"])
        nbytes = unit_of(run, "l0.e0").layout.device_nbytes
        assert run.engine.stats.snapshot().wrong_guess_bytes == nbytes
        assert not unit_of(run, "l0.e0").prefetched
        run.step(2, RATE)
        run.engine.drain()
        run.check_buffers()


def test_a_read_that_arrives_after_its_guess_was_refused_resurrects_nothing(tmp_path):
    """C29, C44: a late transfer is a cache like any other, and evicted like any other."""
    wanted = {1: [0], 2: [1], 3: [0]}
    toy = Toy(layers=1, experts=2, needed=lambda step, layer: wanted[step])
    config = tight(tmp_path / "a", toy, prefetch_buffer_size=1 << 20)
    # Room for one expert's weights in the stream, too little to home them in host.
    config = replace(config, host=TierConfig(config.host.capacity + 49_152))
    files = FaultyStorage()
    with toy_run(toy, config, open_file=files, access=BUFFERED) as run:
        assert unit_of(run, "l0.e0").weight_on_nvme
        run.step(1, RATE)
        run.engine.drain()
        run.engine.begin([])  # nothing is expected: the mover comes to rest
        wait_until(run, lambda: is_at_rest(run))
        with run.engine._shared.changed:
            run.engine._pipeline.drop_device(unit_of(run, "l0.e0"))
            drop_cached_weights(run)
        assert unit_of(run, "l0.e0").host_weight is None
        gate = Gate("read", at_op=files.file.num_calls["read"])
        files.faults.append(gate.fault)
        # The first unit the new schedule expects is the guess.
        run.engine.begin([Stage("x", ("l0.e0", "l0.e1"), "experts 0")])
        gate.wait_entered()
        assert unit_of(run, "l0.e0").host_reading
        run.engine.resolve("experts 0", [])
        assert run.engine.stats.snapshot().wrong_guess_bytes > 0
        gate.open()
        wait_until(run, lambda: unit_of(run, "l0.e0").host_ready)
        with run.engine._shared.changed:
            drop_cached_weights(run)
        assert unit_of(run, "l0.e0").host_weight is None and not unit_of(run, "l0.e0").host_ready
        run.check_buffers()
        losses = [run.step(number, RATE) for number in (2, 3)]
    with toy_run(toy, budgets(tmp_path / "b")) as run:
        run.step(1, RATE)
        assert losses == [run.step(number, RATE) for number in (2, 3)]


def test_waiting_twice_on_one_handle_returns_twice_and_moves_once(tmp_path):
    """C29."""
    with toy_run(TOY, tight(tmp_path)) as run:
        buffer = np.zeros(unit_of(run, "l0.e0").weight_bytes, np.uint8)
        nbytes = unit_of(run, "l0.e0").layout.nbytes("weight")
        handle: Handle = run.store.read("l0.e0/weight", buffer, "weight", nbytes=nbytes)
        handle.wait()
        before = run.store.stats().read.payload_bytes["weight"]
        buffer[:] = 0
        handle.wait()
        assert not buffer.any()
        assert run.store.stats().read.payload_bytes["weight"] == before


def test_a_schedule_that_does_not_expect_a_guess_takes_it_out_of_the_window(tmp_path):
    """Regression: guesses prefetched for training stayed flagged when an evaluation came first.

    It knows no guesses, so nobody gave them back; each such unit narrowed the window until the
    mover stood still.
    """
    toy = Toy(layers=1, experts=3, needed=lambda step, layer: [0, 1, 2])
    with toy_run(toy, budgets(tmp_path, prefetch_buffer_size=1 << 20)) as run:
        run.step(1, RATE)
        names = [f"l0.e{e}" for e in range(3)]
        wait_until(run, lambda: all(unit_of(run, name).prefetched for name in names))
        run.engine.begin(toy.stages())  # the same step again: still expected
        assert all(unit_of(run, name).prefetched for name in names)
        run.engine.begin(toy.stages(), training=False)
        assert not any(unit_of(run, name).prefetched for name in names)
        assert run.engine.stats.snapshot().wrong_guess_bytes == 0


def test_the_mover_takes_no_memory_that_compute_waits_for(tmp_path):
    """Regression: compute evicted prefetched units to make room while the mover loaded them again.

    The lock is not fair, so the mover won every time it had just finished a transfer, and a lease
    at the smallest device budget could wait without end.
    """
    toy = Toy(layers=1, experts=2, needed=lambda step, layer: [0])
    holder: list[ToyRun] = []
    loads: list[int] = []
    entered = threading.Event()

    def hold_second_load(lane: str) -> None:
        if lane != "h2d" or threading.current_thread().name != "mover":
            return
        loads.append(1)
        if len(loads) == 2:
            entered.set()
            wait_until(holder[0], lambda: holder[0].engine._pipeline._starved)

    low = smallest_budgets(toy, budgets(tmp_path))
    config = budgets(tmp_path, device=low.device.capacity, prefetch_buffer_size=1 << 20)
    with toy_run(toy, config, delay=hold_second_load) as run:
        holder.append(run)
        shared = run.engine._shared
        waiting = shared.changed.wait

        def poll(timeout: float | None = None) -> bool:
            return waiting(0.01 if timeout else None)  # nobody notifies that compute starves

        shared.changed.wait = poll  # type: ignore[method-assign]
        others = [Stage(name, (name,)) for name in ("norm", "embed", "l0", "l0.e1")]
        run.engine.begin([Stage("big", ("l0.e0",), None, True), *others])
        assert entered.wait(20)  # l0.e0 is loaded, norm is on its way
        run.engine.enter("big")
        run.engine.begin_gradients()
        with run.engine.use("l0.e0", gradient=True) as held:
            held.add("l0.e0.w", np.zeros(9001, np.float32))
            assert len(loads) == 2
            assert not run.engine._pipeline._starved


def test_compute_evicts_its_own_unit_only_when_nothing_else_is_left(tmp_path):
    """Regression: among experts of one stage the name decided, so the wanted one could go first."""
    toy = Toy(layers=1, experts=2, needed=lambda step, layer: [0, 1])
    low = smallest_budgets(toy, budgets(tmp_path))
    config = budgets(tmp_path, device=low.device.capacity, pipeline="sync")
    with toy_run(toy, config) as run:
        run.engine.begin([Stage("x", ("l0.e0", "l0.e1"))])
        run.engine.enter("x")
        run.engine.begin_gradients()
        for name in ("l0.e0", "l0.e1"):
            with run.engine.use(name):
                pass
        transfers = run.engine.stats.snapshot().transfers
        with run.engine.use("l0.e1", gradient=True) as held:
            held.add("l0.e1.w", np.zeros(9001, np.float32))
        assert run.engine.stats.snapshot().transfers == transfers


ROUTES = {
    "all tokens to one expert": lambda step, layer: [2],
    "none to any expert": lambda step, layer: [],
    "another one every step": lambda step, layer: [(step + layer) % 3],
    "none every other step": lambda step, layer: [0, 1, 2] if step % 2 else [],
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("policy", ["replay", "dense", "skip"])
def test_any_routing_gives_the_bits_of_memory_and_leaks_nothing(tmp_path, route, policy):
    """C43, C44."""
    toy = replace(TOY, needed=ROUTES[route])
    results = []
    for name in ("memory", "tight"):
        config = budgets(tmp_path / name, idle_expert_policy=policy)
        if name == "tight":
            config = smallest_budgets(toy, config)
        with toy_run(toy, config, delay=RandomDelays(7, 2e-4)) as run:
            losses = [run.step(number, 1e-2 / number) for number in range(1, 5)]
            results.append((losses, run.digest()))
            run.check_buffers()
    assert results[0] == results[1]


def test_entering_another_stage_than_the_schedule_expects_is_an_error(tmp_path):
    with toy_run(TOY, budgets(tmp_path)) as run:
        run.engine.begin(TOY.stages())
        with pytest.raises(RuntimeError, match="the step entered bwd head"):
            run.engine.enter("bwd head")


def test_a_lease_that_was_overwritten_is_noticed(tmp_path):
    """C25's own check, checked."""
    with toy_run(TOY, budgets(tmp_path), verify_leases=True) as run:
        run.engine.begin([Stage("a", ("l0",))])
        run.engine.enter("a")
        with pytest.raises(AssertionError, match="l0 was overwritten"), run.engine.use("l0"):
            unit_of(run, "l0").device.array[0] ^= 1
