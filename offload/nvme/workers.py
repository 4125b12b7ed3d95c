"""The threads that draw requests from the queue and settle what they have done.

Invariants: a bounded number of threads, each with its own memory, taken at start; a transfer
completes its handle without any lock held, so callbacks may take their own. Bytes are counted when
a request has succeeded.
"""

from __future__ import annotations

import threading

from offload.nvme.frame_io import FrameIo, WorkerMemory
from offload.nvme.ordering import TransferOrder
from offload.nvme.request_io import CorruptBlock, Outcome
from offload.nvme.stats import LaneStats
from offload.nvme.transfers import Direction, Request, Transfer, TransferQueue
from ops.clock import seconds
from ops.trace import NO_TRACE, Tracer

_TRACKS = {Direction.READ: "nvme read", Direction.WRITE: "nvme write"}


def num_threads(num_workers: int) -> int:
    """How many threads keep `num_workers` system calls in flight while others compute checksums.

    At most that many calls are in flight (`RequestIo`). Half as many threads again made writes 21 %
    and reads 7 % faster with 8 workers on two busy cores; fewer than 4 get no others beside them.
    """
    return num_workers + num_workers // 4 * 2


class Workers:
    """The workers of one store; started on construction."""

    def __init__(
        self,
        num_workers: int,
        queue: TransferQueue,
        order: TransferOrder,
        io: FrameIo,
        trace: Tracer = NO_TRACE,
    ) -> None:
        self._trace = trace
        self.lanes = {direction: LaneStats() for direction in Direction}
        memories = [io.new_memory() for _ in range(num_threads(num_workers))]
        self.memory_bytes = sum(memory.nbytes for memory in memories)
        self._queue = queue
        self._order = order
        self._io = io
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(memory,),
                name=f"nvme-{index}",
                daemon=True,  # an owner that forgot to close must not keep the process from ending
            )
            for index, memory in enumerate(memories)
        ]
        for thread in self._threads:
            thread.start()

    def refuse_on_worker(self) -> None:
        """Raise RuntimeError on a worker's own thread: what waits there waits for itself."""
        if threading.current_thread() in self._threads:
            raise RuntimeError("a callback must not wait for, or call, the store that runs it")

    def join(self) -> None:
        """Wait until the workers have ended; the queue has been stopped before."""
        for thread in self._threads:
            thread.join()

    def _complete(self, requests: list[Request], outcomes: list[Outcome]) -> None:
        finished: list[Transfer] = []
        with self._queue.lock:
            lane = self.lanes[requests[0].transfer.direction]
            lane.num_requests += not requests[0].skip
            for request, outcome in zip(requests, outcomes):
                transfer, error = request.transfer, outcome.error
                transfer.running -= 1
                if error is not None:
                    transfer.error = transfer.error or error
                    if not isinstance(error, CorruptBlock):
                        self._queue.latch(error)
                elif not request.skip:
                    logical_bytes = request.stop - request.start
                    moved = (outcome.payload_bytes, outcome.padding_bytes)
                    lane.count(transfer.cause, logical_bytes, *moved)
                if transfer.running == 0 and (transfer.exhausted or transfer.error is not None):
                    finished += self._order.settle(transfer)
        if not finished:
            return
        for done in finished:
            done.handle.complete(done.error)
        with self._queue.lock:
            self._order.leave(len(finished))

    def _work(self, memory: WorkerMemory) -> None:
        while (requests := self._queue.take()) is not None:
            skip = requests[0].skip
            started_s = seconds()
            outcomes = [Outcome()] if skip else self._io.run(requests, memory)
            if self._trace is not NO_TRACE and not skip:
                self._draw(requests, outcomes, started_s)
            self._complete(requests, outcomes)  # an error reaches the caller at its next wait
            del requests, outcomes  # no buffer is kept while waiting for work

    def _draw(self, requests: list[Request], outcomes: list[Outcome], started_s: float) -> None:
        """One span for requests that moved together, checksums and codec included."""
        first = requests[0].transfer
        args = {
            "bytes": sum(outcome.payload_bytes + outcome.padding_bytes for outcome in outcomes),
            "cause": ", ".join(sorted({request.transfer.cause for request in requests})),
        }
        if len(requests) > 1:
            args["neighbours"] = len(requests) - 1
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if error is not None:
            args["error"] = str(error)
        track = _TRACKS[first.direction]
        self._trace.complete(track, first.block, started_s, seconds(), block=first.block, **args)
