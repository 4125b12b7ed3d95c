"""Requests of blocks whose frames may be encoded, frame by frame; all others pass through.

A frame is one checksum chunk of a block and owns its place in the block's extents. Stored encoded,
only its encoded bytes move, rounded up to what a transfer must be a multiple of, at the start of
that place; the rest of the place is of any content. `StoredBlock.encoded_bytes` says how long each
is, its checksum covers exactly these bytes, and it is verified before anything is decoded.

Encoded bytes pass through the worker's bounce buffer, raw frames take the way they always take.
Called on worker threads only; blocks. No locks, no queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.nvme.aligned import AccessMode
from offload.nvme.codec import FrameCodec
from offload.nvme.request_io import (
    CallFailed,
    Outcome,
    Part,
    RequestIo,
    new_bounce_buffer,
    stored_of,
)
from offload.nvme.transfers import Direction, Request
from ops.checksum import CHUNK_BYTES, checksum
from ops.codec import CorruptFrame, decode_frame, new_scratch
from ops.kernels.arrays import U8
from ops.units import round_up


class WorkerMemory:
    """What one worker works in: its bounce buffer, and scratch memory if it encodes."""

    def __init__(self, access: AccessMode, *, encodes: bool) -> None:
        self.bounce = new_bounce_buffer(access)
        self.scratch: U8 | None = new_scratch() if encodes else None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.bounce.nbytes + (0 if self.scratch is None else self.scratch.nbytes)


class FrameIo:
    """Runs requests on the data files of a store, with its codec (None: it writes raw frames)."""

    def __init__(self, io: RequestIo, access: AccessMode, codec: FrameCodec | None) -> None:
        self._io = io
        self._access = access
        self._io_alignment_bytes = access.io_alignment_bytes
        self._codec = codec

    def new_memory(self) -> WorkerMemory:
        """Memory for one more worker."""
        return WorkerMemory(self._access, encodes=self._codec is not None)

    def stop(self) -> None:
        """As `RequestIo.stop`."""
        self._io.stop()

    def run(self, requests: Sequence[Request], memory: WorkerMemory) -> list[Outcome]:
        """As `RequestIo.run`, for any requests; one with encoded frames comes alone."""
        first = requests[0]
        if stored_of(first).encoded_bytes is None:
            return self._io.run(requests, memory.bounce)
        assert len(requests) == 1
        outcome = Outcome()
        is_write = first.transfer.direction is Direction.WRITE
        try:
            for start in range(first.start, first.stop, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, first.stop)
                frame = Request(first.transfer, start, stop, skip=False)
                if is_write:
                    self._write(frame, memory, outcome)
                else:
                    self._read(frame, memory, outcome)
        except CallFailed as failed:
            outcome.error = failed.error
        except Exception as error:
            outcome.error = error
        return [outcome]

    def _write(self, frame: Request, memory: WorkerMemory, outcome: Outcome) -> None:
        transfer, stored = frame.transfer, stored_of(frame)
        assert stored.encoded_bytes is not None
        chunk, nbytes = frame.start // CHUNK_BYTES, 0
        if self._codec is not None and memory.scratch is not None:
            data = transfer.data[frame.start : frame.stop]
            nbytes = self._codec.encode(
                data, frame.start, transfer.runs, memory.scratch, memory.bounce
            )
        stored.encoded_bytes[chunk] = nbytes
        if not nbytes:
            self._io.move([frame], memory.bounce, [outcome])
            return
        stored.checksums[chunk] = checksum(memory.bounce[:nbytes])
        padded_bytes = round_up(nbytes, self._io_alignment_bytes)
        memory.bounce[nbytes:padded_bytes] = bytes(padded_bytes - nbytes)
        self._move_encoded(frame, memory.bounce[:padded_bytes], nbytes, outcome)

    def _read(self, frame: Request, memory: WorkerMemory, outcome: Outcome) -> None:
        transfer, stored = frame.transfer, stored_of(frame)
        assert stored.encoded_bytes is not None
        chunk = frame.start // CHUNK_BYTES
        nbytes = stored.encoded_bytes[chunk]
        if not nbytes:
            self._io.move([frame], memory.bounce, [outcome])
            self._io.verify(frame)
            return
        padded_bytes = round_up(nbytes, self._io_alignment_bytes)
        self._move_encoded(frame, memory.bounce[:padded_bytes], nbytes, outcome)
        encoded = memory.bounce[:nbytes]
        expected, found = stored.checksums[chunk], checksum(encoded)
        if found != expected:
            reason = f"checksum mismatch: stored {expected:016x}, read {found:016x}"
            raise self._io.corrupt(transfer, chunk, reason, nbytes)
        try:
            decode_frame(encoded, transfer.data[frame.start : frame.stop])
        except CorruptFrame as error:
            # Its checksum is right, so it was written so, by another program or a broken one.
            reason = f"encoded frame: {error}"
            raise self._io.corrupt(transfer, chunk, reason, nbytes) from error

    def _move_encoded(
        self, frame: Request, memory: memoryview, nbytes: int, outcome: Outcome
    ) -> None:
        """Move `nbytes` and their padding between `memory` and the frame's place."""
        done_bytes = 0
        while done_bytes < memory.nbytes:
            # The place may lie in several extents; each but the block's last ends aligned, and an
            # encoded frame with its padding ends before the last one does.
            drive, offset, room_bytes = stored_of(frame).locate(frame.start + done_bytes)
            piece = memory[done_bytes : done_bytes + room_bytes]
            self._io.call([Part(frame, frame.start, frame.start, drive, offset, piece, False)])
            done_bytes += piece.nbytes
        outcome.payload_bytes += nbytes
        outcome.padding_bytes += memory.nbytes - nbytes
