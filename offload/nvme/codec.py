"""Encodes the frames of the blocks being written, where it pays.

A block is cut into frames of one checksum chunk. Each owns its place in the block's extents whether
it is encoded or not, so encoding saves transfer, not room, and nothing has to be allocated while
a write runs. Components for which encoding pays (`offload/nvme/codec_policy.py`) are packed, the
others are kept as they are within the frame; a frame that would not shrink by a unit of the
alignment is stored raw. What is read back never depends on any of this.

Workers call `encode` at the same time, each with its own scratch memory, taken at open. Measures in
core-seconds of the calling thread, so that waiting does not count. Does no I/O.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.nvme.codec_policy import CodecPolicy, ComponentCodec, DriveSpeed, Sample
from offload.runs import GAP, Piece, Run, pieces_of
from ops import clock
from ops.codec import EncodedFrame, Segment, encode_frame, new_scratch, pack_segment, unpack_segment
from ops.kernels.arrays import U8
from ops.units import round_up

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodecStats:
    """The codec's part of a store's statistics: the drive it measured, and every component."""

    drive: DriveSpeed
    components: dict[str, ComponentCodec]


class FrameCodec:
    """Decides and encodes, for one store."""

    def __init__(
        self,
        name: str,
        alignment_bytes: int,
        speed: Callable[[], DriveSpeed],
        *,
        core_seconds: Callable[[], float] = clock.thread_seconds,
    ) -> None:
        """`name` is for the log; a frame must shrink by a unit of `alignment_bytes`; `speed` tells
        what the drive carries now, `core_seconds` what the calling thread has used.
        """
        self._name = name
        self._alignment_bytes = alignment_bytes
        self._speed = speed
        self._core_seconds = core_seconds
        self._lock = threading.Lock()
        self._policy = CodecPolicy()
        self._logged: set[str] = set()

    @staticmethod
    def new_scratch() -> U8:
        """Memory for one worker to encode in."""
        return new_scratch()

    def encode(
        self, data: memoryview, start: int, runs: Sequence[Run], scratch: U8, out: memoryview
    ) -> int:
        """Encode the frame `data`, which lies at byte `start` of a block with `runs`, into `out`.

        Returns the encoded bytes, or 0 when the frame is to be stored raw. `out` (at least as long
        as a frame) and `scratch` are the worker's own and are overwritten in any case.
        """
        pieces = pieces_of(runs, start, start + data.nbytes)
        self._sample(data, pieces, scratch, out)
        segments = self._decide(pieces)
        encoded = None
        if any(segment.pack for segment in segments):
            room_bytes = round_up(data.nbytes, self._alignment_bytes) - self._alignment_bytes
            encoded = encode_frame(data, segments, scratch, out[: min(room_bytes, out.nbytes)])
        self._note(pieces, segments, encoded)
        return 0 if encoded is None else encoded.nbytes

    def stats(self) -> CodecStats:
        """The decisions and what they rest on, now."""
        with self._lock:
            return CodecStats(self._speed(), self._policy.components())

    def _sample(
        self, data: memoryview, pieces: Sequence[Piece], scratch: U8, out: memoryview
    ) -> None:
        start = 0
        for piece in pieces:
            source = data[start : start + piece.nbytes]
            start += piece.nbytes
            with self._lock:
                due = piece.component != GAP and self._policy.begin_sample(
                    piece.component, piece.nbytes
                )
            if not due:
                continue
            begin_s = self._core_seconds()
            packed = pack_segment(source, piece.item_bytes, scratch)
            middle_s = self._core_seconds()
            unpack_segment(memoryview(packed), out[: piece.nbytes], piece.item_bytes)
            end_s = self._core_seconds()
            sample = Sample(piece.nbytes, len(packed), middle_s - begin_s, end_s - middle_s)
            with self._lock:
                self._policy.note_sample(piece.component, sample)

    def _decide(self, pieces: Sequence[Piece]) -> list[Segment]:
        speed = self._speed()
        with self._lock:
            segments = [
                Segment(
                    piece.nbytes,
                    piece.item_bytes,
                    piece.component != GAP and self._policy.encodes(piece.component, speed),
                )
                for piece in pieces
            ]
            known = self._policy.components()
            news = [
                (component, known[component])
                for component in {piece.component for piece in pieces} - self._logged
                if component in known and known[component].decision != "unknown"
            ]
            self._logged.update(component for component, _ in news)
        for component, codec in news:
            self._log(component, codec, speed)
        return segments

    def _note(
        self, pieces: Sequence[Piece], segments: Sequence[Segment], encoded: EncodedFrame | None
    ) -> None:
        """Count the frame for every component in it."""
        with self._lock:
            for index, (piece, segment) in enumerate(zip(pieces, segments, strict=True)):
                if piece.component == GAP:
                    continue
                if not segment.pack:
                    self._policy.note_raw(piece.component)
                    continue
                stored_bytes = piece.nbytes if encoded is None else encoded.stored_bytes[index]
                self._policy.note_attempt(piece.component, piece.nbytes, stored_bytes)

    def _log(self, component: str, codec: ComponentCodec, speed: DriveSpeed) -> None:
        log.info(
            "%s: codec %s for %s: encoding saves %.1f %% of its bytes at %.2f + %.2f ns a byte; "
            "the drive reads %.0f and writes %.0f MB/s",
            self._name,
            codec.decision,
            component,
            100 * codec.saved_share,
            1e9 * codec.encode_s_per_byte,
            1e9 * codec.decode_s_per_byte,
            speed.read_bytes_per_s / 1e6,
            speed.write_bytes_per_s / 1e6,
        )
