"""What checkpoints of one store take, and what they share."""

from offload.checkpoint.catalog import find_checkpoints
from offload.checkpoint.sizes import Size, sizes_of
from offload.nvme.store import NvmeStore
from offload.testing_storage import filled_buffer
from ops.checksum import CHUNK_BYTES

MIB = CHUNK_BYTES


def test_what_did_not_change_is_shared_with_the_newest(tmp_path):
    for rank in (0, 1):
        with NvmeStore(str(tmp_path), 64 * MIB, rank=rank, workers=1, keep_commits=3) as store:
            store.write("empty", filled_buffer(0), "update")
            store.write("frozen", filled_buffer(5 * MIB), "update")
            for step in (1, 2, 3):
                store.write("block", filled_buffer(MIB + 1, seed=step), "update")
                if step < 3:
                    store.write("slow", filled_buffer(2 * MIB), "update")
                store.publish(store.cut({"step": step}))
    found = find_checkpoints([str(tmp_path)])
    whole = 8 * MIB + 4096
    # Rank 1 has no part in what rank 0 committed alone.
    assert sizes_of(found) == [
        Size(whole, whole),
        Size(whole, 7 * MIB),
        Size(whole, 5 * MIB),
    ]
