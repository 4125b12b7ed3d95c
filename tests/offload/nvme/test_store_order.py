"""Who goes first, who waits for whom, and that nobody waits for ever (C12, C13, C29)."""

from __future__ import annotations

import threading

import pytest

from offload.nvme.handle import Handle, wait_all
from offload.nvme.store import NvmeStore
from offload.testing_storage import BUFFERED, FaultyStorage, Gate, filled_buffer
from ops.errors import StorageError

MIB = 1 << 20
UNIT = 4096
WAIT_S = 20  # a bound for broken code; working code never waits that long


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def make(*gates, workers=1, **options):
        storage = FaultyStorage(*(gate.fault for gate in gates))
        options.setdefault("access", BUFFERED)
        store = NvmeStore(str(tmp_path), 64 * MIB, workers=workers, open_file=storage, **options)
        opened.append((store, gates))
        return store, storage.file

    yield make
    for store, gates in opened:
        for gate in gates:
            gate.open()
        store.close(delete=True)


def _write(store, block, nbytes=UNIT, seed=0, **options):
    return store.write(block, filled_buffer(nbytes, seed=seed), "update", **options)


def _write_apart(store, block, nbytes, **options):
    """A write whose place on the disk has no neighbour: it is moved alone."""
    handle = _write(store, block, nbytes, **options)
    store._table.allocator.allocate(UNIT)
    return handle


def _moved_bytes(file, skip):
    """(verb, bytes) of each call: blocks of these tests differ in size."""
    return [(verb, nbytes) for verb, _, nbytes in file.ranges if verb in ("read", "write")][skip:]


def test_smaller_deadlines_first_and_reads_before_writes_on_ties(open_store):
    gate = Gate("write", at_op=1)
    store, file = open_store(gate)
    _write(store, "stored", 10).wait()
    plug = _write(store, "plug", 11)
    gate.wait_entered()
    handles = [plug]
    handles.append(_write_apart(store, "w", 100, deadline=5))
    handles.append(store.read("stored", filled_buffer(10), "update", deadline=5))
    handles.append(_write_apart(store, "x", 200, deadline=9))
    handles.append(_write_apart(store, "y", 300, deadline=1))
    handles.append(_write_apart(store, "z", 400, deadline=5))
    gate.open()
    wait_all(handles)
    expected = [("write", 300), ("read", 10), ("write", 100), ("write", 400), ("write", 200)]
    assert _moved_bytes(file, skip=2) == expected


def test_a_more_urgent_transfer_overtakes_between_the_requests_of_a_large_one(open_store):
    gate = Gate("write")
    store, file = open_store(gate, request_bytes=MIB)
    large = _write(store, "large", 3 * MIB, deadline=7)
    gate.wait_entered()
    urgent = _write(store, "urgent", 50, deadline=1)
    gate.open()
    wait_all([large, urgent])
    assert [nbytes for _, nbytes in _moved_bytes(file, skip=0)] == [MIB, 50, MIB, MIB]


def test_a_read_lends_its_urgency_to_the_writes_it_waits_for(open_store):
    gate = Gate("write")
    store, file = open_store(gate)
    handles = [_write(store, "plug", 1)]
    gate.wait_entered()
    handles.append(_write_apart(store, "other", 100, deadline=5))
    handles.append(_write_apart(store, "a", 200, seed=1, deadline=9))
    handles.append(_write_apart(store, "a", 300, seed=2, deadline=9))
    read = filled_buffer(300)
    handles.append(store.read("a", read, "update", deadline=0))
    gate.open()
    wait_all(handles)
    expected = [("write", 200), ("write", 300), ("read", 300), ("write", 100)]
    assert _moved_bytes(file, skip=1) == expected
    assert (read == filled_buffer(300, seed=2)).all()


@pytest.mark.parametrize("bulk", ["read", "write"])
def test_an_urgent_read_overtakes_queued_bulk_at_the_next_request(open_store, bulk):
    gate = Gate(bulk, at_op=0 if bulk == "read" else 5)
    store, file = open_store(gate, request_bytes=MIB)
    _write(store, "large", 4 * MIB).wait()
    _write(store, "needed", 100).wait()
    move = store.read if bulk == "read" else store.write
    handles = [
        move("large", filled_buffer(4 * MIB), "update", deadline=deadline) for deadline in (50, 51)
    ]
    gate.wait_entered()
    handles.append(store.read("needed", filled_buffer(100), "update", deadline=3))
    gate.open()
    wait_all(handles)
    expected = [(bulk, MIB), ("read", 100)] + [(bulk, MIB)] * 7
    assert _moved_bytes(file, skip=5) == expected


def test_a_queued_read_can_be_hurried(open_store):
    """Prefetched for later, and now compute waits for it."""
    gate = Gate("read")
    store, file = open_store(gate)
    for number in range(4):
        _write_apart(store, f"b{number}", 100 + number).wait()
    handles = [
        store.read(f"b{n}", filled_buffer(100 + n), "update", deadline=n) for n in (0, 1, 2, 3)
    ]
    gate.wait_entered()
    store.hurry(handles[3], 0)
    store.hurry(handles[2], 9)  # never less urgent than it was
    gate.open()
    wait_all(handles)
    store.drain()
    store.hurry(handles[1], -5)  # finished long ago
    assert _moved_bytes(file, skip=4) == [("read", 100 + n) for n in (0, 3, 1, 2)]


def test_hurrying_a_read_hurries_the_writes_it_waits_for(open_store):
    gate = Gate("write")
    store, file = open_store(gate)
    handles = [_write(store, "plug", 1)]
    gate.wait_entered()
    handles.append(_write_apart(store, "other", 100, deadline=5))
    handles.append(_write_apart(store, "a", 200, deadline=9))
    handles.append(store.read("a", filled_buffer(200), "update", deadline=9))
    store.hurry(handles[-1], 1)
    gate.open()
    wait_all(handles)
    assert _moved_bytes(file, skip=1) == [("write", 200), ("read", 200), ("write", 100)]


def test_lending_urgency_many_times_keeps_the_queue_bounded(open_store):
    gate = Gate("write")
    store, _ = open_store(gate, transfers_max=40)
    handles = [_write(store, "plug", 1)]
    gate.wait_entered()
    handles.append(_write(store, "a", 10, deadline=1000))
    handles.append(_write(store, "b", 10, deadline=1000))
    for deadline in range(37):
        block = "ab"[deadline % 2]
        handles.append(store.read(block, filled_buffer(10), "update", deadline=900 - deadline))
    assert len(store._queue._ready) <= 81
    gate.open()
    wait_all(handles)


def test_a_read_sees_the_write_before_it_and_not_the_one_after(open_store):
    gate = Gate("write")
    store, _ = open_store(gate, workers=4)
    handles = [_write(store, "a", seed=1)]
    gate.wait_entered()
    first, second = filled_buffer(UNIT, seed=8), filled_buffer(UNIT, seed=9)
    handles.append(store.read("a", first, "update"))
    handles.append(_write(store, "a", seed=2))
    handles.append(store.read("a", second, "update"))
    assert not any(handle.done() for handle in handles)
    gate.open()
    wait_all(handles)
    assert (first == filled_buffer(UNIT, seed=1)).all()
    assert (second == filled_buffer(UNIT, seed=2)).all()


def test_a_read_in_flight_keeps_its_extent_from_being_reused(open_store):
    gate = Gate("read")
    store, _ = open_store(gate, workers=2)
    _write(store, "a", seed=1).wait()
    read = filled_buffer(UNIT, seed=9)
    handle = store.read("a", read, "update")
    gate.wait_entered()
    for seed in range(2, 6):
        _write(store, "a", seed=seed).wait()
    store.delete("a")
    assert store.used_bytes == UNIT
    gate.open()
    handle.wait()
    store.drain()
    assert (read == filled_buffer(UNIT, seed=1)).all() and store.used_bytes == 0


def test_many_threads_on_few_blocks_see_only_whole_versions(open_store):
    store, _ = open_store(workers=4, access=None, request_bytes=MIB)
    nbytes = MIB + 4096
    for block in "ab":
        store.write(block, filled_buffer(nbytes), "update").wait()
    errors = []

    def work(number):
        try:
            for step in range(12):
                buffer = filled_buffer(nbytes)
                if (number + step) % 2:
                    buffer[:] = number * 16 + step
                    store.write("ab"[step % 2], buffer, "update", deadline=step).wait()
                else:
                    store.read("ab"[step % 2], buffer, "update", deadline=step).wait()
                    uniform = (buffer == buffer[0]).all()
                    assert uniform or (buffer == filled_buffer(nbytes)).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    store.drain()
    assert store.used_bytes == 2 * nbytes and store.stats().num_transfers == 0


def test_transfers_in_flight_are_bounded(open_store):
    store, _ = open_store(transfers_max=3)
    for index in range(50):
        _write(store, f"b{index % 5}", 100)
    store.drain()
    assert store.stats().num_transfers_max <= 3


def test_waiting_twice_and_waiting_for_nothing_are_fine(open_store):
    # C13, C29
    store, file = open_store()
    store.drain()
    wait_all([])
    handle = _write(store, "a")
    for _ in range(3):
        handle.wait()
    assert handle.done() and handle.error() is None
    read = store.read("a", filled_buffer(UNIT), "update")
    read.wait()
    store.delete("a")
    calls = len(file.ranges)
    read.wait()  # a late wait brings nothing back
    handle.wait()
    assert "a" not in store.blocks() and len(file.ranges) == calls


def test_a_wait_with_a_timeout_says_so_and_may_be_repeated(open_store):
    gate = Gate("write")
    store, _ = open_store(gate)
    handle = _write(store, "slow")
    with pytest.raises(TimeoutError, match="'slow'"):
        handle.wait(timeout=0)
    gate.open()
    handle.wait(timeout=WAIT_S)


def test_waiting_while_callbacks_run_does_not_deadlock(open_store):
    # C13
    store, _ = open_store()
    inside, leave, seen = threading.Event(), threading.Event(), []

    def callback(handle):
        inside.set()
        assert leave.wait(WAIT_S)
        handle.wait()  # its own handle is done
        seen.append((handle.block, handle.done()))

    gate_handle = _write(store, "a")
    gate_handle.add_done_callback(callback)
    gate_handle.wait()
    leave.set()
    store.drain()  # callbacks are part of a transfer
    assert seen == [("a", True)]
    gate_handle.add_done_callback(lambda handle: seen.append("late"))
    assert seen[-1] == "late"


def test_a_callback_that_would_wait_for_its_own_store_is_refused(open_store):
    gate = Gate("write")
    store, _ = open_store(gate)
    refused = []
    first = _write(store, "a")
    second = _write(store, "b")

    def callback(handle):
        for call in (
            second.wait,
            store.drain,
            store.close,
            lambda: store.delete("a"),
            lambda: _write(store, "c"),
            lambda: store.read("a", filled_buffer(UNIT), "update"),
        ):
            try:
                call()
            except RuntimeError:
                refused.append(call)

    gate.wait_entered()
    first.add_done_callback(callback)
    gate.open()
    store.drain()
    assert len(refused) == 6


def test_a_failing_callback_is_logged_and_harms_nobody(open_store, caplog):
    store, _ = open_store()
    handle = _write(store, "a")
    handle.add_done_callback(lambda handle: 1 // 0)
    handle.wait()
    store.drain()
    _write(store, "b").wait()
    assert "callback of the transfer of block 'a' failed" in caplog.text


def test_wait_all_waits_for_the_rest_before_it_raises():
    handles = [Handle(name, lambda: None) for name in "abc"]
    handles[0].complete(None)
    handles[1].complete(StorageError("first"))
    handles[2].complete(StorageError("second"))
    with pytest.raises(StorageError, match="first"):
        wait_all(handles)


def test_closing_finishes_what_is_in_flight(open_store):
    # C12
    gate = Gate("write")
    store, _ = open_store(gate, workers=2)
    handles = [_write(store, f"b{index}") for index in range(10)]
    gate.wait_entered()
    closing = threading.Thread(target=store.close)
    closing.start()
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    wait_all(handles)
    store.close()
    with pytest.raises(StorageError, match="closed"):
        _write(store, "late")
    with pytest.raises(StorageError, match="closed"):
        store.read("b0", filled_buffer(UNIT), "update")


def test_closing_releases_those_who_wait_for_room(open_store):
    # C12
    gate = Gate("write")
    store, _ = open_store(gate, transfers_max=1)
    first = _write(store, "a")
    outcome = []

    def submit():
        try:
            _write(store, "b").wait()
            outcome.append("written")
        except StorageError:
            outcome.append("refused")

    gate.wait_entered()
    waiting = threading.Thread(target=submit)
    waiting.start()
    closing = threading.Thread(target=store.close)
    closing.start()
    gate.open()
    for thread in (waiting, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    first.wait()
    assert outcome in (["written"], ["refused"])


def test_system_calls_in_flight_are_bounded_by_the_workers(tmp_path):
    """More threads than workers hash, but the depth at the drive is what was asked for."""
    lock, now, most = threading.Lock(), [0], [0]
    together = threading.Barrier(4)

    class Counting:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def writev_from(self, buffers, offset):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            together.wait(WAIT_S)  # four at a time, so four have to be in flight together
            with lock:
                now[0] -= 1
            return self.inner.writev_from(buffers, offset)

    def open_file(path, direct):
        return Counting(FaultyStorage()(path, direct))

    with NvmeStore(str(tmp_path), 64 * MIB, workers=4, open_file=open_file) as store:
        wait_all([_write(store, f"b{number}", 4 * MIB) for number in range(12)])
        store.close(delete=True)
    assert most == [4]
