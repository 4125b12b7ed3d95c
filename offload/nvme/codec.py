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

from offload.nvme.aligned import AccessMode
from offload.nvme.codec_policy import (
    SAMPLE_BYTES_MAX,
    CodecPolicy,
    ComponentCodec,
    DriveSpeed,
    Sample,
)
from offload.nvme.drive_meter import DriveMeter, metered
from offload.nvme.files import OpenFile
from offload.runs import GAP, ITEM_BYTES, Piece, Run, pieces_of
from ops import clock
from ops.codec import (
    FRAME_BYTES_MAX,
    EncodedFrame,
    Segment,
    encode_frame,
    new_scratch,
    pack_segment,
    unpack_segment,
)
from ops.errors import ConfigError
from ops.kernels.arrays import U8
from ops.units import round_up

log = logging.getLogger(__name__)

CODECS = ("none", "lz4")


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
        self._logged: set[str] = {GAP}
        # Kernels compile, and a missing package is missed, now and not on a worker in a step.
        scratch, item = new_scratch(), memoryview(bytearray(8))
        for item_bytes in ITEM_BYTES:
            unpack_segment(memoryview(pack_segment(item, item_bytes, scratch)), item, item_bytes)

    def wants(self, runs: Sequence[Run], nbytes: int) -> bool:
        """Whether the frames of a block of `nbytes` with `runs` should pass through `encode`.

        If not, nothing in it is worth encoding now, nor due to be sampled; it counts as stored.
        """
        if nbytes <= self._alignment_bytes:
            return False
        if any(self._decisions({run.component for run in runs}).values()):
            return True
        with self._lock:
            for component, _, start, stop in runs:
                if self._policy.wants_sample(component, min(stop - start, FRAME_BYTES_MAX)):
                    return True
            for component, _, start, stop in runs:
                num_frames = -(-stop // FRAME_BYTES_MAX) - start // FRAME_BYTES_MAX
                self._policy.note_raw(component, num_frames)
        return False

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
            source = data[start : start + min(piece.nbytes, SAMPLE_BYTES_MAX)]
            start += piece.nbytes
            with self._lock:
                due = piece.component != GAP and self._policy.begin_sample(
                    piece.component, piece.nbytes
                )
            if not due:
                continue
            # Once without a clock: pages and caches that are cold now are warm when frames follow.
            pack_segment(source, piece.item_bytes, scratch)
            begin_s = self._core_seconds()
            packed = pack_segment(source, piece.item_bytes, scratch)
            middle_s = self._core_seconds()
            unpack_segment(memoryview(packed), out[: source.nbytes], piece.item_bytes)
            end_s = self._core_seconds()
            sample = Sample(source.nbytes, len(packed), middle_s - begin_s, end_s - middle_s)
            with self._lock:
                self._policy.note_sample(piece.component, sample)

    def _decide(self, pieces: Sequence[Piece]) -> list[Segment]:
        packs = self._decisions({piece.component for piece in pieces})
        return [Segment(piece.nbytes, piece.item_bytes, packs[piece.component]) for piece in pieces]

    def _decisions(self, components: set[str]) -> dict[str, bool]:
        """Whether to encode each of `components`; logs what is decided for the first time."""
        speed = self._speed()
        with self._lock:
            encodes = {
                name: name != GAP and self._policy.encodes(name, speed) for name in components
            }
            if components <= self._logged:
                return encodes
            known = self._policy.components()
            news = [
                (name, known[name])
                for name in sorted(components - self._logged)
                if name in known and known[name].decision != "unknown"
            ]
            self._logged.update(name for name, _ in news)
        for name, codec in news:
            self._log(name, codec, speed)
        return encodes

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


class CodecSetup:
    """The codec that a store is to have, before the store is open."""

    def __init__(self, codec: str, drive_speed: Callable[[], DriveSpeed] | None) -> None:
        """`drive_speed` None: to be measured. ConfigError for a codec that does not exist."""
        if codec not in CODECS:
            raise ConfigError(f"offload.codec: {codec!r}; must be one of {', '.join(CODECS)}")
        self._encodes = codec != "none"
        self._meter = DriveMeter() if self._encodes and drive_speed is None else None
        self._speed = drive_speed or (lambda: DriveSpeed(0.0, 0.0))
        if self._meter is not None:
            self._speed = self._meter.speed

    def watched(self, open_file: OpenFile) -> OpenFile:
        """`open_file`, measured if it has to be."""
        return open_file if self._meter is None else metered(open_file, self._meter)

    def new_codec(self, name: str, access: AccessMode) -> FrameCodec | None:
        """The codec for the store `name`, or None where frames are written raw."""
        if not self._encodes:
            return None
        return FrameCodec(name, access.alignment_bytes, self._speed)
