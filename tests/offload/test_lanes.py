"""Lanes that are late in any order (C25), asked twice for a block (C28), or far ahead (C46)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offload.config import OffloadConfig, OptimizerConfig, TierConfig
from offload.nvme.files import StorageFile, open_os_file
from offload.placement import block_bytes
from offload.residency import DeviceState
from offload.schedule import Stage
from offload.testing import RandomDelays, Toy, ToyRun, budgets, smallest_budgets, toy_run
from offload.testing_storage import FaultyStorage, Gate
from tests.offload.watch import drop_cached_weights, hang_guard, one_call_a_block  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=5.0)
SKEWED = Toy(needed=lambda step, layer: [0, 1, 2, 3][: 1 + (step + layer) % 4])
DISK = {"readv_into": "disk read", "writev_from": "disk write", "sync": "sync"}


class Delays:
    """Random delays that remember how often each lane was delayed."""

    def __init__(self, seed: int, seconds_max: float) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._delay = RandomDelays(seed, seconds_max)

    def __call__(self, lane: str) -> None:
        with self._lock:
            self.counts[lane] += 1
        self._delay(lane)


class SlowFile:
    """A data file whose transfers start and end late, each by its own random time.

    A read that ends late holds its target for longer than the engine may expect, a write its
    source; with several workers they also overtake one another.
    """

    def __init__(self, inner: StorageFile, delay: Callable[[str], None]) -> None:
        self._inner = inner
        self._delay = delay

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in DISK:
            return found

        def late(*args: Any) -> Any:
            self._delay(DISK[name])
            result = found(*args)
            self._delay(DISK[name])
            return result

        return late


def train(toy: Toy, config: OffloadConfig, **options: Any) -> tuple[list[int], int]:
    with toy_run(toy, config, OPTIMIZER, **options) as run:
        losses = [run.step(number, 1e-2 / number) for number in range(1, 6)]
        digest = run.digest()
        run.check_buffers()
        return losses, digest


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory) -> tuple[list[int], int]:
    return train(SKEWED, budgets(tmp_path_factory.mktemp("memory")))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spill", ["auto", "always"])
def test_delays_in_every_lane_and_on_the_drive_give_the_same_bits(tmp_path, in_memory, seed, spill):
    """C25: a lane that is never delayed would prove nothing, so all of them are counted."""
    room = (0, 200_000, 700_000)[seed % 3]
    config = budgets(tmp_path, gradient_spill=spill, io_workers=1 + seed)
    low = smallest_budgets(SKEWED, config)
    config = replace(
        low,
        device=TierConfig(low.device.capacity + room // 4),
        host=TierConfig(low.host.capacity + room),
    )
    delays = Delays(seed, 5e-4)
    found = train(
        SKEWED,
        config,
        delay=delays,
        verify_leases=True,
        open_file=lambda path, direct: SlowFile(open_os_file(path, direct), delays),
    )
    assert found == in_memory
    lanes = {"h2d", "d2h", "update", "nvme_write", "disk read", "disk write"}
    assert lanes <= {lane for lane, count in delays.counts.items() if count >= 10}


def wait_until(run: ToyRun, reached: Callable[[], bool]) -> None:
    shared = run.engine._shared
    with shared.changed:
        while not reached():
            shared.check()
            shared.changed.wait(5.0)


def is_ready(run: ToyRun, name: str) -> bool:
    return run.engine._shared.units[name].device_state is DeviceState.READY


def weight_reads(run: ToyRun) -> int:
    """Bytes of weights that were read from the drive."""
    return run.store.stats().read.payload_bytes["weight"]


DEEP = Toy(layers=16, experts=1, expert_size=64)
DENSE = DEEP.layouts()[1]


@contextmanager
def cold_run(directory, num_ahead: int, files: FaultyStorage, **options: Any) -> Iterator[ToyRun]:
    """DEEP at rest, with host room to read `num_ahead` dense units ahead, nothing of them cached.

    Half of what is added to the host is for homes, which the first layers' weights take.
    """
    room = 2 * (num_ahead + 1) * block_bytes(DENSE, "weight")
    options = {"io_workers": 8, "gradient_spill": "always", **options}
    low = smallest_budgets(DEEP, budgets(directory, **options))
    config = replace(
        low,
        device=TierConfig(low.device.capacity + 500_000),
        host=TierConfig(low.host.capacity + room),
    )
    with toy_run(DEEP, config, open_file=files) as run:
        run.engine.drain()
        run.engine.begin([])
        units = list(run.engine._shared.units.values())
        loading = DeviceState.LOADING
        wait_until(run, lambda: not any(u.host_reading or u.device_state is loading for u in units))
        with run.engine._shared.changed:
            for unit in units:
                run.engine._pipeline.drop_device(unit)
            drop_cached_weights(run)
        yield run


def cold_layers(run: ToyRun) -> list[str]:
    """The dense units whose weights are on the drive, in forward order."""
    units = run.engine._shared.units
    return [name for name in (f"l{i}" for i in range(16)) if units[name].weight_on_nvme]


@pytest.mark.parametrize("pipeline", ["overlap", "sync"])
def test_a_cold_unit_used_again_within_the_window_is_read_and_uploaded_once(tmp_path, pipeline):
    """C28: tied weights, and recompute right after the forward, on the way from the drive."""
    with cold_run(tmp_path, 2, FaultyStorage(), pipeline=pipeline) as run:
        name = cold_layers(run)[-1]
        before, uploads = weight_reads(run), run.engine.stats.snapshot().transfers
        uses = [Stage(use, (name,)) for use in ("forward", "recompute", "head", "backward")]
        run.engine.begin(uses)
        for stage in uses:
            run.engine.enter(stage.name)
            with run.engine.use(name), run.engine.use(name):
                pass
        assert weight_reads(run) - before == DENSE.nbytes("weight")
        assert run.engine.stats.snapshot().transfers - uploads == 1


@pytest.mark.usefixtures("one_call_a_block")
def test_a_lease_during_a_read_ahead_waits_for_it_and_reads_nothing_itself(tmp_path):
    """C28, in the middle of the read."""
    files = FaultyStorage()
    with cold_run(tmp_path, 2, files) as run:
        name = cold_layers(run)[-1]
        before, calls = weight_reads(run), files.file.num_calls["read"]
        gate = Gate("read", at_op=calls)
        files.faults.append(gate.fault)
        run.engine.begin([Stage("a", (name,))])
        gate.wait_entered()
        run.engine.enter("a")
        seen: list[np.ndarray] = []

        def lease() -> None:
            with run.engine.use(name) as held:
                seen.append(np.array(held.weights[f"{name}.w"]))

        compute = threading.Thread(target=lease)
        compute.start()
        wait_until(run, lambda: run.engine._pipeline._wanted == name)
        assert not seen
        gate.open()
        compute.join()
        assert len(seen) == 1
        assert weight_reads(run) - before == DENSE.nbytes("weight")
        assert files.file.num_calls["read"] == calls + 1


@pytest.mark.usefixtures("one_call_a_block")
@pytest.mark.parametrize("num_ahead", [2, 3, 5])
def test_a_run_of_cold_layers_is_read_ahead_as_far_as_the_window_has_bytes(tmp_path, num_ahead):
    """C46: the distance is bytes, so several cold layers in a row are on their way together.

    Prefetching one layer ahead, each of them would wait for the drive anew.
    """
    window = num_ahead * DENSE.device_nbytes + DENSE.device_nbytes // 2
    files = FaultyStorage()
    with cold_run(tmp_path, 8, files, prefetch_buffer_size=window) as run:
        names = cold_layers(run)
        assert len(names) > num_ahead
        units = run.engine._shared.units
        calls = files.file.num_calls["read"]
        gate = Gate("read", at_op=calls)
        files.faults.append(gate.fault)
        run.engine.begin([Stage(name, (name,)) for name in names])
        gate.wait_entered()  # the drive does not deliver the first, and yet
        wait_until(run, lambda: all(units[n].prefetched for n in names[:num_ahead]))
        assert not is_ready(run, names[0])
        gate.open()
        wait_until(run, lambda: all(is_ready(run, name) for name in names[:num_ahead]))
        assert files.file.num_calls["read"] == calls + num_ahead
        assert not units[names[num_ahead]].prefetched, "the window has no bytes for one more"


def test_the_host_holds_less_at_its_peak_when_state_lies_on_nvme(tmp_path):
    """C54, measured."""
    peaks = []
    for name in ("nvme", "host"):
        config = budgets(tmp_path / name)
        if name == "nvme":
            config = smallest_budgets(SKEWED, config)
        with toy_run(SKEWED, config, OPTIMIZER) as run:
            for number in (1, 2):
                run.step(number, 1e-2)
            run.engine.drain()
            peaks.append(run.engine.peak_bytes())
            in_host = {not u.state_on_nvme for u in run.engine._shared.units.values()}
            assert in_host == {name == "host"}
    assert peaks[0]["host"] < 0.5 * peaks[1]["host"]
