"""Commits: what is in one, what it keeps, when its room comes back, and what opens afterwards."""

from __future__ import annotations

import logging
import threading

import pytest

from offload.nvme.store import NvmeStore
from offload.testing_storage import BUFFERED, FaultyStorage, Gate, filled_buffer
from ops.errors import StorageError

MIB = 1 << 20
UNIT = 4096


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(capacity_bytes=64 * MIB, **options):
        options.setdefault("workers", 2)
        if stores:
            stores[-1].close()
        stores.append(NvmeStore(str(tmp_path), capacity_bytes, **options))
        return stores[-1]

    yield make
    if stores:
        stores[-1].close(delete=True)


def read(store, block):
    buffer = filled_buffer(store.nbytes(block), seed=999)
    store.read(block, buffer, "update").wait()
    return buffer


def holds(store, expected):
    """Whether the store holds exactly these blocks: name to (nbytes, seed)."""
    assert set(store.blocks()) == set(expected)
    for block, (nbytes, seed) in expected.items():
        assert (read(store, block) == filled_buffer(nbytes, seed=seed)).all(), block
    return True


@pytest.mark.parametrize("nbytes", [0, 1, UNIT, 3 * MIB + 7])
def test_a_commit_opens_with_its_blocks_versions_and_meta(open_store, nbytes):
    # C11: a path that is resumed has what was committed, and nothing else
    store = open_store()
    assert store.recovered is None
    store.write("a", filled_buffer(nbytes, seed=1), "update", version=7)
    store.write("grad", filled_buffer(99), "spill", transient=True)
    assert store.blocks() == {"a": (nbytes, 7)}
    meta = {"step": 3, "deep": {"list": [1.5, None, "x"]}}
    record = store.publish(store.cut(meta))
    assert (record.generation, record.meta, record.num_blocks) == (1, meta, 1)
    store.write("a", filled_buffer(nbytes, seed=2), "update", version=8).wait()
    store.write("b", filled_buffer(5), "update").wait()
    store = open_store(resume=True)
    assert store.recovered == record
    assert store.blocks() == {"a": (nbytes, 7)}
    assert holds(store, {"a": (nbytes, 1)})
    assert store.used_bytes == -(-nbytes // UNIT) * UNIT
    assert store.publish(store.cut({})).generation == 2


def test_resuming_an_empty_directory_gives_an_empty_store(open_store):
    store = open_store(resume=True)
    assert store.recovered is None and store.blocks() == {}
    store.publish(store.cut({"step": 0}))
    assert open_store(resume=True).recovered.num_blocks == 0


def test_opening_afresh_discards_the_commit_and_says_which(open_store, caplog):
    # C11: never read as live by accident
    store = open_store()
    store.write("a", filled_buffer(UNIT), "update")
    store.publish(store.cut({"step": 12}))
    with caplog.at_level(logging.WARNING):
        store = open_store()
    assert "discarded commit 1 (step 12)" in caplog.text
    assert store.recovered is None and store.blocks() == {} and store.used_bytes == 0
    assert open_store(resume=True).recovered is None


def test_a_cut_holds_the_writes_in_flight_and_none_that_come_later(open_store):
    gate = Gate("write", at_op=1)
    storage = FaultyStorage(gate.fault)
    store = open_store(open_file=storage, access=BUFFERED, workers=1)
    store.write("a", filled_buffer(100, seed=1), "update", version=1).wait()
    store.write("a", filled_buffer(100, seed=2), "update", version=2)
    gate.wait_entered()
    store.write("b", filled_buffer(100, seed=3), "update", version=3)
    cut = store.cut({"step": 1})
    store.write("a", filled_buffer(100, seed=4), "update", version=4)
    store.write("c", filled_buffer(100, seed=5), "update", version=5)
    records = []
    publisher = threading.Thread(target=lambda: records.append(store.publish(cut)))
    publisher.start()
    assert store.blocks()["a"][1] == 4 and not records
    gate.open()
    publisher.join()
    assert records[0].num_blocks == 2
    store.drain()
    assert holds(store, {"a": (100, 4), "b": (100, 3), "c": (100, 5)})
    store = open_store(resume=True, access=BUFFERED)
    assert holds(store, {"a": (100, 2), "b": (100, 3)})
    assert (store.blocks()["a"][1], store.blocks()["b"][1]) == (2, 3)


def test_an_abandoned_cut_gives_its_room_back(open_store):
    store = open_store()
    store.write("a", filled_buffer(UNIT), "update").wait()
    cut = store.cut({})
    store.write("a", filled_buffer(UNIT), "update").wait()
    store.drain()
    assert store.used_bytes == 2 * UNIT
    store.abandon(cut)
    store.abandon(cut)
    assert store.used_bytes == UNIT
    with pytest.raises(ValueError, match="abandoned already"):
        store.publish(cut)


def test_cuts_are_published_in_order_whoever_comes_first(open_store):
    store = open_store(keep_commits=3)
    cuts = []
    for step in range(3):
        store.write("a", filled_buffer(10, seed=step), "update", version=step)
        cuts.append(store.cut({"step": step}))
    records = {}

    def publish(step):
        records[step] = store.publish(cuts[step])

    later = [threading.Thread(target=publish, args=(step,)) for step in (2, 1)]
    for thread in later:
        thread.start()
    publish(0)
    for thread in later:
        thread.join()
    assert [records[step].generation for step in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="published already"):
        store.publish(cuts[0])
    assert open_store(resume=True).recovered.meta == {"step": 2}


def test_closing_waits_for_the_publish_in_flight(open_store):
    # C12
    gate = Gate("sync")
    store = open_store(open_file=FaultyStorage(gate.fault), access=BUFFERED)
    store.write("a", filled_buffer(UNIT, seed=1), "update")
    cut, records = store.cut({"step": 5}), []
    publisher = threading.Thread(target=lambda: records.append(store.publish(cut)))
    publisher.start()
    gate.wait_entered()
    closer = threading.Thread(target=store.close)
    closer.start()
    gate.open()
    closer.join()
    publisher.join()
    assert records[0].generation == 1
    assert open_store(resume=True).recovered.meta == {"step": 5}


def test_a_callback_may_cut_but_not_publish(open_store):
    # C13: a worker that waited for writes would wait for itself
    gate = Gate("write")
    store = open_store(open_file=FaultyStorage(gate.fault), access=BUFFERED, workers=1)
    found = []

    def call(handle):
        cut = store.cut({})
        try:
            store.publish(cut)
        except RuntimeError as error:
            found.append(error)
        store.abandon(cut)

    handle = store.write("a", filled_buffer(UNIT), "update")
    gate.wait_entered()
    handle.add_done_callback(call)
    gate.open()
    store.drain()
    assert len(found) == 1
    store.publish(store.cut({}))


def test_no_cut_can_be_published_once_the_store_is_closing(open_store):
    store = open_store()
    cut = store.cut({})
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.publish(cut)
    with pytest.raises(StorageError, match="closed"):
        store.cut({})


@pytest.mark.parametrize("keep_commits", [1, 3])
def test_room_of_released_commits_is_reused_over_200_commits(open_store, keep_commits):
    """Exactly (keep + 1) states and one block on its way; nothing is allowed to leak."""
    state = {f"b{index}": UNIT * (1 + index % 3) + 5 for index in range(6)}
    state_bytes = sum(-(-nbytes // UNIT) * UNIT for nbytes in state.values())
    capacity = (keep_commits + 1) * state_bytes + 4 * UNIT
    store = open_store(capacity, keep_commits=keep_commits, required_bytes=0)
    for step in range(200):
        for block, nbytes in state.items():
            store.write(block, filled_buffer(nbytes, seed=step), "update", version=step).wait()
        store.publish(store.cut({"step": step}))
    store.drain()
    assert store.used_bytes == keep_commits * state_bytes
    store = open_store(capacity, keep_commits=keep_commits, resume=True, required_bytes=0)
    assert store.recovered.generation == 200 and store.used_bytes == keep_commits * state_bytes
    assert holds(store, {block: (nbytes, 199) for block, nbytes in state.items()})


def test_unchanged_blocks_are_shared_by_all_commits(open_store):
    store = open_store(keep_commits=3)
    store.write("same", filled_buffer(8 * UNIT, seed=1), "update")
    for step in range(5):
        store.write("new", filled_buffer(UNIT, seed=step), "update")
        store.publish(store.cut({"step": step}))
    assert store.used_bytes == 8 * UNIT + 3 * UNIT
    store = open_store(keep_commits=3, resume=True)
    assert store.used_bytes == 8 * UNIT + 3 * UNIT
    store.publish(store.cut({}))
    assert store.used_bytes == 8 * UNIT + 2 * UNIT
    store = open_store(keep_commits=1, resume=True)
    assert store.used_bytes == 9 * UNIT and holds(store, {"same": (8 * UNIT, 1), "new": (UNIT, 4)})


def test_a_write_without_room_waits_for_the_publish_that_frees_it(open_store):
    gate = Gate("sync", at_op=1)
    storage = FaultyStorage(gate.fault)
    store = open_store(2 * UNIT, open_file=storage, access=BUFFERED)
    store.write("a", filled_buffer(UNIT, seed=1), "update")
    store.publish(store.cut({"step": 1}))
    store.write("a", filled_buffer(UNIT, seed=2), "update").wait()
    cut = store.cut({"step": 2})
    publisher = threading.Thread(target=store.publish, args=(cut,))
    publisher.start()
    gate.wait_entered()
    handles = []
    writer = threading.Thread(
        target=lambda: handles.append(store.write("a", filled_buffer(UNIT, seed=3), "update"))
    )
    writer.start()
    assert store.stats().used_bytes == 2 * UNIT
    gate.open()
    publisher.join()
    writer.join()
    handles[0].wait()
    assert holds(store, {"a": (UNIT, 3)})


def test_a_write_without_room_waits_for_a_cut_that_is_certain_to_be_published(open_store):
    store = open_store(2 * UNIT)
    store.write("a", filled_buffer(UNIT, seed=1), "update")
    store.publish(store.cut({"step": 1}))
    store.write("a", filled_buffer(UNIT, seed=2), "update").wait()
    cut = store.cut({"step": 2}, awaited=True)
    writer = threading.Thread(target=store.write, args=("a", filled_buffer(UNIT, 3), "update"))
    writer.start()
    store.publish(cut)
    writer.join()
    store.drain()
    assert holds(store, {"a": (UNIT, 3)})


def test_a_store_that_is_really_full_names_who_holds_its_bytes(open_store):
    store = open_store(4 * UNIT, keep_commits=2)
    for _ in range(2):
        store.write("a", filled_buffer(UNIT), "update")
        store.publish(store.cut({}))
    store.write("a", filled_buffer(UNIT), "update").wait()
    cut = store.cut({})
    store.write("a", filled_buffer(UNIT), "update").wait()
    with pytest.raises(StorageError) as caught:
        store.write("a", filled_buffer(UNIT), "update")
    assert (
        f"{4 * UNIT} are in use ({UNIT} current, {UNIT} more in retained commit 2, {UNIT} more in "
        f"retained commit 1, {UNIT} more in 1 unpublished cuts)"
    ) in str(caught.value)
    store.abandon(cut)
    store.write("a", filled_buffer(UNIT), "update").wait()


def test_a_held_version_can_be_restored_or_let_go(open_store):
    """The speculative update: redone from the old bytes when the norm says so."""
    store = open_store()
    store.write("a", filled_buffer(UNIT, seed=1), "update", version=1).wait()
    for keep_old in (True, False):
        held = store.hold("a")
        store.write("a", filled_buffer(UNIT, seed=2), "update", version=2).wait()
        store.drain()
        assert store.used_bytes == 2 * UNIT and store.blocks()["a"][1] == 2
        if keep_old:
            store.restore(held)
            with pytest.raises(RuntimeError, match="ended"):
                store.restore(held)
        store.let_go(held)
        assert store.used_bytes == UNIT
        assert store.blocks()["a"][1] == (1 if keep_old else 2)
        assert holds(store, {"a": (UNIT, 1 if keep_old else 2)})
    with pytest.raises(StorageError, match="no such block"):
        store.hold("b")


def test_a_block_that_is_being_written_is_neither_held_nor_restored(open_store):
    gate = Gate("write", at_op=1)
    store = open_store(open_file=FaultyStorage(gate.fault), access=BUFFERED)
    store.write("a", filled_buffer(UNIT, seed=1), "update").wait()
    held = store.hold("a")
    handle = store.write("a", filled_buffer(UNIT, seed=2), "update")
    gate.wait_entered()
    for call in (lambda: store.hold("a"), lambda: store.restore(held)):
        with pytest.raises(RuntimeError, match="in flight"):
            call()
    gate.open()
    handle.wait()
    store.restore(held)
    assert holds(store, {"a": (UNIT, 1)})


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": object()}, {1: 2}, {"x": {2: 1}}])
def test_meta_that_is_no_json_is_refused_at_the_cut(open_store, meta):
    store = open_store()
    with pytest.raises(ValueError, match=r"JSON"):
        store.cut(meta)
    store.publish(store.cut({}))


def test_meta_is_copied(open_store):
    store, meta = open_store(), {"list": [1]}
    cut = store.cut(meta)
    meta["list"].append(2)
    assert store.publish(cut).meta == {"list": [1]}


def test_a_store_over_three_paths_resumes_from_all_of_them(tmp_path):
    paths = [str(tmp_path / name) for name in "abc"]
    with NvmeStore(paths, 48 * MIB, workers=2) as store:
        for index in range(6):
            nbytes = (index + 1) * MIB + 13
            store.write(f"b{index}", filled_buffer(nbytes, seed=index), "update")
        store.publish(store.cut({"step": 1}))
        drives = {x.drive for stored in store.cut({}).blocks.values() for x in stored.extents}
        assert drives == {0, 1, 2}
    with NvmeStore(paths, 48 * MIB, workers=2, resume=True) as store:
        assert holds(store, {f"b{index}": ((index + 1) * MIB + 13, index) for index in range(6)})
        store.close(delete=True)
    assert [list((tmp_path / name).iterdir()) for name in "abc"] == [[], [], []]
