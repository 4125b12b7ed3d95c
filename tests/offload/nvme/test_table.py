"""Shadow paging: an extent goes back only when nobody needs it any more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.nvme.extents import ExtentAllocator
from offload.nvme.store import NvmeStore
from offload.nvme.table import BlockTable
from offload.testing_storage import filled_buffer
from ops.errors import StorageError
from ops.units import round_up

UNIT = 4096


def _table(num_units):
    return BlockTable(ExtentAllocator(num_units * UNIT, UNIT))


def _put(table, block, nbytes=UNIT):
    stored = table.reserve(nbytes)
    assert stored is not None
    table.publish(block, stored)
    return stored


def test_a_new_version_frees_the_old_one():
    table = _table(3)
    old = _put(table, "a")
    new = _put(table, "a")
    assert table.get("a") is new and old.pins == 0
    assert table.allocator.used_bytes == UNIT and len(table) == 1


def test_an_abandoned_write_gives_its_room_back():
    table = _table(1)
    table.unpin(table.reserve(UNIT))
    assert table.allocator.used_bytes == 0 and table.get("a") is None


def test_a_failed_reservation_changes_nothing():
    table = _table(1)
    _put(table, "a")
    assert table.reserve(1) is None
    assert table.allocator.used_bytes == UNIT


def test_readers_keep_a_version_that_was_replaced_or_removed():
    table = _table(3)
    first = _put(table, "a")
    table.pin(first)
    second = _put(table, "a")
    table.pin(second)
    table.remove("a")
    assert table.allocator.used_bytes == 2 * UNIT
    table.unpin(first)
    table.unpin(second)
    assert table.allocator.used_bytes == 0


def test_a_snapshot_keeps_every_version_of_its_moment():
    table = _table(8)
    before = {name: _put(table, name) for name in "abc"}
    retained = table.retain(table.blocks())
    _put(table, "a")
    table.remove("b")
    _put(table, "d")
    assert dict(retained.blocks) == before
    assert table.allocator.used_bytes == 5 * UNIT
    table.release(retained)
    table.release(retained)
    assert table.allocator.used_bytes == 3 * UNIT  # a's new version, c, d


def test_a_snapshot_cannot_be_changed_from_outside():
    retained = _table(1).retain({})
    with pytest.raises(TypeError):
        retained.blocks["a"] = None


def test_every_byte_of_a_scattered_block_has_its_place():
    table = _table(6)
    for name in "abcdef":
        _put(table, name)
    for name in "bdf":
        table.remove(name)
    stored = table.reserve(2 * UNIT + 5)
    assert stored is not None and len(stored.extents) == 3
    for start in (0, 5, UNIT - 1, UNIT, 2 * UNIT, 2 * UNIT + 4):
        extent = stored.extents[start // UNIT]
        assert stored.locate(start) == (0, extent.offset + start % UNIT, UNIT - start % UNIT)
    with pytest.raises(ValueError):
        stored.locate(3 * UNIT)
    table.unpin(stored)
    assert table.allocator.used_bytes == 3 * UNIT


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "delete", "retain", "release"]),
        st.sampled_from("abc"),
        st.integers(0, 3 * UNIT),
        st.integers(0, 3),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS, workers=st.integers(1, 3))
def test_a_store_under_any_sequence_of_calls_agrees_with_a_dictionary(
    tmp_path_factory, operations, workers
):
    """Nothing is waited for between the calls: a read must see what was written before it."""
    directory = str(tmp_path_factory.mktemp("store"))
    model: dict[str, bytes] = {}
    snapshots = []
    reads = []
    with NvmeStore(directory, 200 * UNIT, workers=workers) as store:
        for number, (verb, block, nbytes, deadline) in enumerate(operations):
            if verb == "write":
                buffer = filled_buffer(nbytes, seed=number)
                store.write(block, buffer, "update", deadline=deadline)
                model[block] = buffer.tobytes()
            elif verb == "read" and block in model:
                buffer = filled_buffer(len(model[block]), seed=99)
                handle = store.read(block, buffer, "update", deadline=deadline)
                reads.append((handle, buffer, model[block]))
            elif verb == "read":
                with pytest.raises(StorageError, match="no such block"):
                    store.read(block, filled_buffer(1), "update")
            elif verb == "delete":
                store.delete(block)
                model.pop(block, None)
            elif verb == "retain":
                snapshots.append(store.cut({}))
            elif snapshots:
                store.abandon(snapshots.pop(0))
        for handle, buffer, expected in reads:
            handle.wait()
            assert buffer.tobytes() == expected
        store.drain()
        for snapshot in snapshots:
            store.abandon(snapshot)
        assert {block: store.nbytes(block) for block in model} == {
            block: len(data) for block, data in model.items()
        }
        live = sum(round_up(len(data), store.alignment_bytes) for data in model.values())
        assert store.used_bytes == live
        store.close(delete=True)
