"""What runs after what: the order of the transfers of one block.

A read sees the writes submitted before it, two writes of a block happen in the order of the calls,
and a read does not mind a later write, because that one goes to another place. A failed write fails
everything that was submitted behind it.

The queue's lock is held in every call. No I/O.
"""

from __future__ import annotations

from offload.nvme.handle import Handle
from offload.nvme.table import BlockTable, HeldVersion, StoredBlock
from offload.nvme.transfers import Direction, Transfer, TransferQueue
from ops.errors import StorageError


class TransferOrder:
    """Starts and settles transfers in the table."""

    def __init__(self, table: BlockTable, queue: TransferQueue) -> None:
        self.num_submitted = 0
        self._table = table
        self._queue = queue
        self._last_write: dict[str, Transfer] = {}  # of each block that has a write in flight

    def is_being_written(self, block: str) -> bool:
        """Whether a write of `block` is in flight."""
        return block in self._last_write

    def latest_of(self, block: str) -> StoredBlock | None:
        """The version of the last submitted write of `block`, finished or not; None if unknown."""
        pending = self._last_write.get(block)
        return self._table.get(block) if pending is None else pending.stored

    def length_of(self, block: str) -> int | None:
        """The logical length of `block` after the writes in flight; None if unknown."""
        stored = self.latest_of(block)
        return None if stored is None else stored.nbytes

    def latest(self) -> tuple[dict[str, StoredBlock], dict[str, Handle]]:
        """`latest_of` every block, and the handles of those that are in flight; O(blocks)."""
        blocks, in_flight = self._table.blocks(), {}
        for name, transfer in self._last_write.items():
            assert transfer.stored is not None
            blocks[name] = transfer.stored
            in_flight[name] = transfer.handle
        return blocks, in_flight

    def hold(self, block: str) -> HeldVersion:
        """Pin the current version of `block`; see `NvmeStore.hold`."""
        self._queue.check()
        self._refuse_while_written(block)
        stored = self._table.get(block)
        if stored is None:
            raise StorageError("no such block", block=block)
        self._table.pin(stored)
        return HeldVersion(block, stored)

    def restore(self, held: HeldVersion) -> None:
        """Make a held version current again; see `NvmeStore.restore`."""
        self._refuse_while_written(held.block)
        if held.done:
            raise RuntimeError(f"the hold of block {held.block!r} has ended")
        held.done = True
        self._table.publish(held.block, held.stored)

    def let_go(self, held: HeldVersion) -> None:
        """Unpin a held version."""
        if not held.done:
            held.done = True
            self._table.unpin(held.stored)

    def _refuse_while_written(self, block: str) -> None:
        if self.is_being_written(block):
            raise RuntimeError(f"a write of block {block!r} is in flight")

    def start(self, transfer: Transfer) -> None:
        """Queue an admitted transfer: a write that has its `stored`, a read of a known block."""
        transfer.runs_after = self._last_write.get(transfer.block)
        if transfer.direction is Direction.WRITE:
            self._last_write[transfer.block] = transfer
        elif transfer.runs_after is None:
            transfer.stored = self._table.get(transfer.block)
            assert transfer.stored is not None
            self._table.pin(transfer.stored)
        self.num_submitted += 1
        self._queue.add(transfer)

    def settle(self, transfer: Transfer) -> list[Transfer]:
        """Enter a finished transfer in the table and ready those behind it.

        Returns all that finished by it, whose handles the caller completes: `transfer` and, if it
        failed, everything behind it.
        """
        finished = [transfer]
        for done in finished:  # grows while it runs
            if self._last_write.get(done.block) is done:
                del self._last_write[done.block]
            if done.direction is Direction.WRITE and done.error is None:
                assert done.stored is not None
                self._table.publish(done.block, done.stored)
            elif done.stored is not None:
                self._table.unpin(done.stored)
            for behind in done.dependents:
                if done.error is not None:
                    behind.error = done.error
                    finished.append(behind)
                    continue
                if behind.direction is Direction.READ:
                    assert done.stored is not None
                    self._table.pin(done.stored)
                    behind.stored = done.stored
                self._queue.make_ready(behind)
            self._queue.settled(done)
            done.data = memoryview(b"")  # the buffer is the caller's again
        return finished

    def leave(self, num_finished: int) -> None:
        """Give up the places of finished transfers, once their handles are complete."""
        self.num_submitted -= num_finished
        self._queue.leave(num_finished)
