"""Storage failures reach compute at its next wait; nothing hangs, nothing wrong is trained on.

The reference is the in-memory run: with a fault the same losses come out as far as it got.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import replace

import numpy as np
import pytest

from offload.config import NvmeConfig, OptimizerConfig, TierConfig
from offload.nvme.files import open_os_file
from offload.testing import RandomDelays, Toy, budgets, smallest_budgets, toy_plan, toy_run
from offload.testing_storage import BUFFERED, Fault, FaultyStorage, Gate
from ops.errors import StorageError
from tests.offload.watch import hang_guard, one_call_a_block  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard")

STEPS = 4
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=5.0)
TOY = Toy(
    layers=2,
    experts=3,
    needed=lambda step, layer: [0, 1, 2] if (step + layer) % 3 == 0 else [step % 3],
)


def config_of(tmp_path, **options):
    return smallest_budgets(TOY, budgets(tmp_path, **options))


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    with toy_run(TOY, budgets(tmp_path_factory.mktemp("none")), OPTIMIZER) as run:
        losses = [run.step(number, 1e-2 / number) for number in range(1, STEPS + 1)]
        return [*losses, run.digest()]


@pytest.fixture(scope="module")
def num_calls(tmp_path_factory, one_call_a_block):  # noqa: F811
    """How many reads and writes the initial values and the whole run make."""
    files = FaultyStorage()
    config = config_of(tmp_path_factory.mktemp("count"), gradient_spill="always")
    with toy_run(TOY, config, OPTIMIZER, open_file=files, access=BUFFERED) as run:
        start = dict(files.file.num_calls)
        for number in range(1, STEPS + 1):
            run.step(number, 1e-2 / number)
        run.digest()
        return {verb: (start[verb], files.file.num_calls[verb]) for verb in ("read", "write")}


def train(config, files: FaultyStorage, found: list[int], **options) -> None:
    """Train and append what came out; StorageError as soon as a wait notices the fault."""
    with toy_run(TOY, config, OPTIMIZER, open_file=files, access=BUFFERED, **options) as run:
        try:
            for number in range(1, STEPS + 1):
                found.append(run.step(number, 1e-2 / number))
            found.append(run.digest())
        except StorageError:
            # Every later call says so too, and none hangs.
            for call in (run.engine.drain, run.digest, lambda: run.step(STEPS + 1, 1e-3)):
                with pytest.raises(StorageError):
                    call()
            raise
        finally:
            run.engine.close()
            assert not any(t.name in ("mover", "updater") for t in threading.enumerate())


FAULTS = {
    "read error": ("read", "error", errno.EIO),
    "read flip": ("read", "flip", 0),
    "write error": ("write", "error", errno.EIO),
    "disk full": ("write", "error", errno.ENOSPC),
    "write flip": ("write", "flip", 0),
}


@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.77, 0.9])
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("pipeline", ["overlap", "sync"])
def test_a_fault_at_any_operation_is_reported_and_never_trained_on(
    tmp_path, in_memory, num_calls, name, share, pipeline
):
    """C04, C05: reads, writes and spills alike; path, block and offset are named."""
    verb, kind, code = FAULTS[name]
    first, last = num_calls[verb]
    fault = Fault(kind, verb, at_op=first + int(share * (last - first)), code=code or errno.EIO)
    config = config_of(tmp_path, gradient_spill="always", pipeline=pipeline)
    found: list[int] = []
    if name == "write flip":
        # What is written wrong is noticed when, and only if, it is read again.
        try:
            train(config, FaultyStorage(fault), found)
        except StorageError as error:
            assert "checksum" in str(error)
        assert fault.num_hits and found == in_memory[: len(found)]
        return
    with pytest.raises(StorageError) as caught:
        train(config, FaultyStorage(fault), found)
    assert fault.num_hits and found == in_memory[: len(found)]
    error = caught.value
    assert error.path is not None and str(tmp_path) in error.path
    assert error.block is not None and error.block.split("/")[1] in ("weight", "state", "grad")
    assert error.offset is not None and error.wanted_bytes is not None
    if kind == "error":
        assert error.__cause__ is None or isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_short_transfer_is_completed(tmp_path, in_memory, num_calls, verb, share):
    first, last = num_calls[verb]
    fault = Fault("short", verb, at_op=first + int(share * (last - first)))
    found: list[int] = []
    train(config_of(tmp_path, gradient_spill="always"), FaultyStorage(fault), found)
    assert fault.num_hits and found == in_memory


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_fault_while_the_initial_values_are_written_stops_the_start(tmp_path, code):
    """Regression of the harness: the threads of an engine that never started stayed behind."""
    fault = Fault("error", "write", at_op=2, code=code)
    with pytest.raises(StorageError):
        train(config_of(tmp_path), FaultyStorage(fault), [])
    assert not any(t.name in ("mover", "updater") for t in threading.enumerate())


def test_a_failed_last_write_is_not_lost_when_nobody_waits_for_it(tmp_path, num_calls):
    """Regression: drain found nothing in flight any more and returned as if all were well."""
    files = FaultyStorage()
    config = config_of(tmp_path, io_workers=1)
    # Room for updated weights, which otherwise wait in the update slots for a lease.
    config = replace(config, host=TierConfig(config.host.capacity + 200_000))
    with toy_run(TOY, config, OPTIMIZER, open_file=files, access=BUFFERED) as run:
        run.step(1, 1e-2)
        run.engine.drain()
    files.faults.append(Fault("error", "write", at_op=files.file.num_calls["write"] - 1))
    with toy_run(TOY, config, OPTIMIZER, open_file=files, access=BUFFERED) as run:
        run.step(1, 1e-2)
        shared = run.engine._shared
        with shared.changed:
            while not shared.failed:
                shared.changed.wait(5)
        with pytest.raises(StorageError):
            run.store.drain()  # nothing is in flight any more
        with pytest.raises(StorageError):
            run.engine.drain()
        with pytest.raises(StorageError):
            run.engine.finish_step(1e-2)


def test_an_nvme_tier_that_is_full_says_so_and_how_much_is_missing(tmp_path):
    """A plan that was wrong: the store has no room for the block beside the old version."""
    config = config_of(tmp_path)
    plan = toy_plan(TOY, config)
    cold = {term.name: term.nbytes for term in plan.tiers["nvme"].terms}["cold state"]
    with toy_run(TOY, config, OPTIMIZER) as run:
        run.engine.drain()
        run.store._table.allocator.allocate(config.nvme.capacity - cold - 8192)
        with pytest.raises(StorageError, match=r"offload\.nvme\.capacity"):
            for number in range(1, STEPS + 1):
                run.step(number, 1e-2)
            run.engine.drain()
        run.engine.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_closing_while_transfers_are_in_flight_does_not_hang(tmp_path, verb):
    """C12: the engine ends at once; the store finishes what is in flight."""
    files = FaultyStorage()
    with toy_run(TOY, config_of(tmp_path), OPTIMIZER, open_file=files, access=BUFFERED) as run:
        run.engine.drain()
        gate = Gate(verb, at_op=files.file.num_calls[verb])
        files.faults.append(gate.fault)
        compute_errors: list[BaseException] = []

        def compute() -> None:
            try:
                for number in range(1, STEPS + 1):
                    run.step(number, 1e-2)
            except BaseException as error:
                compute_errors.append(error)

        thread = threading.Thread(target=compute)
        thread.start()
        gate.wait_entered()
        run.engine.close()
        gate.open()
        thread.join()
        assert len(compute_errors) == 1 and "closed" in str(compute_errors[0])
        run.engine.close()


def test_a_kernel_that_fails_reaches_compute(tmp_path):
    with toy_run(TOY, config_of(tmp_path), OPTIMIZER) as run:

        def broken(*args: object) -> None:
            raise MemoryError("no memory for a table")

        run.engine._ledger.table = broken  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="no memory for a table"):
            for number in range(1, 4):
                run.step(number, 1e-2)
            run.engine.drain()


def test_a_callback_that_fails_reaches_compute(tmp_path):
    """Regression: the store only logs what a callback raises, so the wait for it never ended."""
    with toy_run(TOY, config_of(tmp_path), OPTIMIZER) as run:

        def broken(*args: object) -> None:
            raise ValueError("freed twice")

        run.engine.drain()
        run.engine._updates._writes.end = broken  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="freed twice"):
            for number in range(1, 4):
                run.step(number, 1e-2)
            run.engine.drain()


def test_a_lease_without_room_is_a_memory_error_with_the_name(tmp_path):
    config = config_of(tmp_path)
    with toy_run(TOY, config, OPTIMIZER) as run:
        run.engine.begin(TOY.stages())
        run.engine.enter("fwd embed")
        with (
            pytest.raises(MemoryError, match=r"no room .* l1\.e2"),
            run.engine.use("l0.e0"),
            run.engine.use("l0.e1"),
            run.engine.use("l1.e2", gradient=True),
        ):
            pass


def check_random_fault(seed: int, directory, expected: list[int]) -> bool:
    """A random fault anywhere: the right bits or a StorageError; True if it struck."""
    rng = np.random.default_rng([seed, 5])
    verb = str(rng.choice(["read", "write"]))
    kind = str(rng.choice(["error", "error", "short", "flip"]))
    fault = Fault(kind, verb, at_op=int(rng.integers(0, 900)), code=errno.EIO)  # type: ignore[arg-type]
    config = config_of(
        directory / f"{seed}",
        gradient_spill=str(rng.choice(["auto", "always"])),
        pipeline=str(rng.choice(["overlap", "sync"])),
        io_workers=int(rng.integers(1, 5)),
        prefetch_buffer_size=int(rng.choice([1 << 15, 1 << 18])),
    )
    extra = int(rng.choice([0, 0, 200_000, 600_000]))
    config = replace(config, host=TierConfig(config.host.capacity + extra))
    nvme_bytes = max(toy_plan(TOY, config).tiers["nvme"].minimum_bytes, 4096)
    config = replace(config, nvme=NvmeConfig(nvme_bytes, config.nvme.path))
    options = {"delay": RandomDelays(seed, 3e-4)} if rng.random() < 0.5 else {}
    found: list[int] = []
    files = FaultyStorage(fault, open_file=open_os_file)
    try:
        train(config, files, found, **options)
        assert found == expected and (kind != "error" or not fault.num_hits)
    except StorageError:
        assert fault.num_hits and found == expected[: len(found)]
    return bool(fault.num_hits)


def test_random_faults_give_the_right_bits_or_an_error(tmp_path, in_memory):
    struck = sum(check_random_fault(seed, tmp_path, in_memory) for seed in range(25))
    assert struck >= 5


@pytest.mark.long
def test_many_random_faults_give_the_right_bits_or_an_error(tmp_path, in_memory):
    for seed in range(1000, 1400):
        check_random_fault(seed, tmp_path, in_memory)
