"""The threads that draw requests from the queue and settle what they have done.

Invariants: a bounded number of threads, each with its own memory, taken at start; a transfer
completes its handle without any lock held, so callbacks may take their own. Bytes are counted when
a request has succeeded. A worker that fails outside its requests (a fault of ours) is a failure of
the store: it is latched, and everything in flight finishes with it.
"""

from __future__ import annotations

import logging
import threading

from offload.nvme.frame_io import FrameIo, WorkerMemory
from offload.nvme.ordering import TransferOrder
from offload.nvme.request_io import CorruptBlock, Outcome
from offload.nvme.stats import LaneStats
from offload.nvme.transfers import Direction, Request, Transfer, TransferQueue
from ops.clock import seconds
from ops.errors import StorageError
from ops.switch_interval import restore_switch_interval, shorten_switch_interval
from ops.trace import NO_TRACE, Tracer

log = logging.getLogger(__name__)

_TRACKS = {Direction.READ: "nvme read", Direction.WRITE: "nvme write"}


def num_threads(num_workers: int) -> int:
    """How many threads keep `num_workers` system calls in flight while others compute checksums.

    At most that many calls are in flight (`Movers`). Half as many threads again have the next calls
    ready when one has been made; fewer than 4 workers get no others beside them.
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
        self._ending = threading.Lock()  # two threads may close a store at once
        self._ended = False
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(memory,),
                name=f"nvme-{index}",
                daemon=True,  # an owner that forgot to close must not keep the process from ending
            )
            for index, memory in enumerate(memories)
        ]
        shorten_switch_interval()
        for thread in self._threads:
            thread.start()

    def refuse_on_worker(self) -> None:
        """Raise RuntimeError on a worker's own thread: what waits there waits for itself."""
        if threading.current_thread() in self._threads:
            raise RuntimeError("a callback must not wait for, or call, the store that runs it")

    def join(self) -> None:
        """Wait until the workers have ended; the queue has been stopped before."""
        with self._ending:
            if self._ended:
                return
            for thread in self._threads:
                thread.join()
            self._io.stop()
            restore_switch_interval()
            self._ended = True

    def _work(self, memory: WorkerMemory) -> None:
        requests: list[Request] | None = None
        try:
            while (requests := self._queue.take()) is not None:
                skip = requests[0].skip
                started_s = seconds()
                outcomes = [Outcome()] if skip else self._io.run(requests, memory)
                if self._trace is not NO_TRACE and not skip:
                    self._draw(requests, outcomes, started_s)
                self._complete(requests, outcomes)  # an error reaches the caller at its next wait
                del requests, outcomes  # no buffer is kept while waiting for work
                requests = None
        except BaseException as error:
            log.exception("an I/O worker failed outside its requests")
            self._give_up(requests or [], error)

    def _complete(self, requests: list[Request], outcomes: list[Outcome]) -> None:
        """Account for `requests`, which leave the list: this thread holds them no longer."""
        finished: list[Transfer] = []
        try:
            with self._queue.lock:
                held, requests[:] = list(requests), []
                for request in held:
                    request.transfer.running -= 1
                lane = self.lanes[held[0].transfer.direction]
                lane.num_requests += not held[0].skip
                for request, outcome in zip(held, outcomes):
                    transfer, error = request.transfer, outcome.error
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
        finally:
            self._finish(finished)

    def _finish(self, finished: list[Transfer]) -> None:
        """Complete the handles of settled transfers, then give up their places."""
        if not finished:
            return
        for done in finished:
            done.handle.complete(done.error)
        with self._queue.lock:
            self._order.leave(len(finished))

    def _give_up(self, held: list[Request], error: BaseException) -> None:
        """Latch what ended this worker and finish all that no other worker will finish."""
        failure = StorageError(f"an I/O worker failed: {error!r}")
        failure.__cause__ = error
        finished: list[Transfer] = []
        with self._queue.lock:
            self._queue.latch(failure)
            for request in held:
                request.transfer.running -= 1
            for transfer in self._queue.unfinished():
                transfer.error = transfer.error or self._queue.failure
                # The others finish with the last request of theirs that a worker holds, or with
                # the transfer that they run after.
                if transfer.running == 0 and transfer.runs_after is None:
                    finished += self._order.settle(transfer)
        self._finish(finished)

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
