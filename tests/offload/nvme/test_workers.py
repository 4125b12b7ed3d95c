"""A worker that fails outside its requests ends everything in flight, and hangs nobody."""

from __future__ import annotations

import sys
import threading

import pytest

from offload.nvme.store import NvmeStore
from offload.testing_storage import BUFFERED, FaultyStorage, Gate, filled_buffer
from ops.errors import StorageError
from ops.trace import NoTrace

MIB = 1 << 20
WAIT_S_MAX = 20.0


class BrokenTracer(NoTrace):
    """A tracer that cannot draw the requests of one block."""

    def __init__(self, block):
        self._block = block

    def complete(self, track, name, *rest, **args):
        if name == self._block:
            raise RuntimeError("the trace is broken")


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(*faults, **options):
        options.setdefault("workers", 1)
        storage = FaultyStorage(*faults)
        store = NvmeStore(str(tmp_path), 32 * MIB, open_file=storage, access=BUFFERED, **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close(delete=True)


def _ends_with_the_failure(handle, message):
    with pytest.raises(StorageError, match=message) as caught:
        handle.wait(WAIT_S_MAX)
    return caught.value


def test_what_it_held_and_what_is_queued_finish_with_the_failure(open_store):
    # A tracer that raised in a worker ended the thread silently; all handles hung.
    gate = Gate("write")
    store = open_store(gate.fault, trace=BrokenTracer("a"))
    held = store.write("a", filled_buffer(100), "update")
    gate.wait_entered()
    behind = [
        store.write("a", filled_buffer(100), "update"),
        store.read("a", filled_buffer(100), "update"),
        store.write("b", filled_buffer(6 * MIB), "update"),
    ]
    gate.open()
    failure = _ends_with_the_failure(held, "an I/O worker failed.*the trace is broken")
    assert [_ends_with_the_failure(handle, "worker failed") for handle in behind] == [failure] * 3
    assert isinstance(failure.__cause__, RuntimeError)
    for call in (
        store.drain,
        lambda: store.delete("a"),
        lambda: store.write("c", filled_buffer(100), "update"),
    ):
        with pytest.raises(StorageError) as later:
            call()
        assert later.value is failure
    assert store.used_bytes == 0 and store.stats().num_transfers == 0


def test_what_another_worker_holds_finishes_when_that_one_lets_go(open_store):
    gate = Gate("write")
    store = open_store(gate.fault, workers=2, trace=BrokenTracer("broken"))
    slow = store.write("slow", filled_buffer(100), "update")
    behind = store.read("slow", filled_buffer(100), "update")
    gate.wait_entered()
    failure = _ends_with_the_failure(
        store.write("broken", filled_buffer(100), "update"), "worker failed"
    )
    assert not slow.done() and not behind.done()  # its buffer is still in use
    gate.open()
    assert _ends_with_the_failure(slow, "worker failed") is failure
    assert _ends_with_the_failure(behind, "worker failed") is failure


@pytest.mark.parametrize("step", ["take", "settle"])
def test_a_fault_in_the_bookkeeping_hangs_nobody(open_store, monkeypatch, step):
    gate = Gate("write")
    store = open_store(gate.fault)
    first = store.write("first", filled_buffer(100), "update")
    gate.wait_entered()
    second = store.write("second", filled_buffer(100), "update")
    owner, name = (store._queue, "_next") if step == "take" else (store._order, "settle")
    real = getattr(owner, name)

    def fail(*arguments):
        monkeypatch.setattr(owner, name, real)
        raise AssertionError("broken")

    monkeypatch.setattr(owner, name, fail)
    gate.open()
    if step == "take":
        first.wait(WAIT_S_MAX)  # was settled before
    else:
        _ends_with_the_failure(first, "broken")
    _ends_with_the_failure(second, "broken")


def test_a_callback_that_exits_neither_ends_the_worker_nor_hides_other_handles(open_store):
    store = open_store()
    gone = store.write("a", filled_buffer(100), "update")
    gone.add_done_callback(lambda handle: sys.exit(1))
    gone.wait(WAIT_S_MAX)
    store.write("b", filled_buffer(100), "update").wait(WAIT_S_MAX)


def test_closing_ends_all_threads_and_puts_the_switch_interval_back(open_store):
    num_threads, interval_s = threading.active_count(), sys.getswitchinterval()
    store = open_store(workers=8)
    assert sys.getswitchinterval() < interval_s
    store.close()
    store.close()
    assert threading.active_count() == num_threads
    assert sys.getswitchinterval() == pytest.approx(interval_s)
