"""Whether encoding a component pays: pure arithmetic on measured numbers.

Encoding a byte costs a core the seconds to encode it when it is written and to decode it when it is
read again. It saves the drive a share of that byte in both directions. It pays when

    encode + decode  <  saved share * (1 / write speed + 1 / read speed)

in seconds per byte. A core-second counts as much as a second of the drive: with every core busy,
what a worker spends on encoding, the step's compute goes without.

A component's numbers come from a sample of a part of its first frame and of every 256th after it;
of frames that are stored encoded, the saved share is known anyway and noted. So what changes
(moments start as zeros, another job shares the drive) is noticed. The decision changes only for a
clear win or loss.

No clock, no locks, no I/O: whoever measures passes the numbers in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RESAMPLE_FRAMES = 256
SAMPLE_BYTES_MIN = 4096
"""Less than this says nothing about a component, and saves nothing."""

SAMPLE_BYTES_MAX = 256 << 10
"""More tells little more: each of four planes is as long as a compressor looks back."""

PATIENCE_FRAMES = 64
"""How many more frames are written before a sample that was asked for is asked for again."""

_CLEARLY = 1.1
_NEWEST_WEIGHT = 0.5


@dataclass(frozen=True)
class DriveSpeed:
    """Bytes per second that the drive moves in each direction; 0 where nothing is known yet."""

    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def seconds_per_byte(self) -> float | None:
        """Seconds to write a byte and read it again; None when neither speed is known.

        One unknown direction is taken to be as fast as the other.
        """
        read = self.read_bytes_per_s or self.write_bytes_per_s
        written = self.write_bytes_per_s or self.read_bytes_per_s
        return 1 / read + 1 / written if read and written else None


@dataclass(frozen=True)
class Sample:
    """One attempt: `nbytes` became `stored_bytes`; seconds of one core."""

    nbytes: int
    stored_bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class ComponentCodec:
    """What is known and decided about one component.

    `decision`: `lz4`, `none`, or `unknown` until both the component and the drive are measured.
    `saved_share` of its bytes encoding saves (0 to 1); core-seconds per byte; frames that held some
    of it, by how they were stored.
    """

    decision: str = "unknown"
    saved_share: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    num_samples: int = 0
    frames_encoded: int = 0
    frames_raw: int = 0


class CodecPolicy:
    """Decides for each component, by name. Calls must be serialised."""

    def __init__(self) -> None:
        self._components: dict[str, ComponentCodec] = {}
        self._samples_begun: dict[str, int] = {}
        self._asked_at: dict[str, int] = {}

    def wants_sample(self, component: str, nbytes: int) -> bool:
        """Whether a block about to be written, with `nbytes` of `component` in its frames, should
        be looked at because a sample is due.

        Asks for one block at a time: many may be queued before the first of them is written.
        """
        frames = self._frames(component)
        asked_at = self._asked_at.get(component)
        if not self._sample_is_due(component, nbytes) or (
            asked_at is not None and frames < asked_at + PATIENCE_FRAMES
        ):
            return False
        self._asked_at[component] = frames
        return True

    def begin_sample(self, component: str, nbytes: int) -> bool:
        """Whether the caller should sample the frame at hand, which holds `nbytes` of `component`.

        Says so once for each sample that is due; `note_sample` must follow.
        """
        due = self._sample_is_due(component, nbytes)
        if due:
            self._samples_begun[component] = self._samples_begun.get(component, 0) + 1
            self._asked_at.pop(component, None)
        return due

    def note_sample(self, component: str, sample: Sample) -> None:
        """Take in the result of a sample."""
        known = self._of(component)
        share = max(0.0, 1 - sample.stored_bytes / sample.nbytes)
        encode, decode = sample.encode_s / sample.nbytes, sample.decode_s / sample.nbytes
        first = known.num_samples == 0
        self._components[component] = replace(
            known,
            saved_share=share if first else _blend(known.saved_share, share),
            encode_s_per_byte=encode if first else _blend(known.encode_s_per_byte, encode),
            decode_s_per_byte=decode if first else _blend(known.decode_s_per_byte, decode),
            num_samples=known.num_samples + 1,
        )

    def encodes(self, component: str, speed: DriveSpeed) -> bool:
        """Whether bytes of `component` should be encoded on a drive of this `speed`.

        Records the decision. False as long as the component or the drive is unknown.
        """
        known = self._of(component)
        seconds_per_byte = speed.seconds_per_byte
        if known.num_samples == 0 or seconds_per_byte is None:
            return known.decision == "lz4"
        gain = known.saved_share * seconds_per_byte
        cost = known.encode_s_per_byte + known.decode_s_per_byte
        if known.decision == "lz4":
            pays = gain * _CLEARLY > cost
        else:
            pays = gain > cost * _CLEARLY
        decision = "lz4" if pays else "none"
        if decision != known.decision:
            self._components[component] = replace(known, decision=decision)
        return pays

    def note_raw(self, component: str, num_frames: int = 1) -> None:
        """Count frames in which `component` was stored as it is, without an attempt."""
        known = self._of(component)
        self._components[component] = replace(known, frames_raw=known.frames_raw + num_frames)

    def note_attempt(self, component: str, nbytes: int, stored_bytes: int) -> None:
        """Count a frame whose `nbytes` of `component` take `stored_bytes` after an attempt."""
        known = self._of(component)
        smaller = stored_bytes < nbytes
        self._components[component] = replace(
            known,
            frames_encoded=known.frames_encoded + smaller,
            frames_raw=known.frames_raw + (not smaller),
            saved_share=_blend(known.saved_share, 1 - stored_bytes / nbytes),
        )

    def components(self) -> dict[str, ComponentCodec]:
        """A snapshot by component."""
        return dict(self._components)

    def _sample_is_due(self, component: str, nbytes: int) -> bool:
        begun = self._samples_begun.get(component, 0)
        return nbytes >= SAMPLE_BYTES_MIN and self._frames(component) >= begun * RESAMPLE_FRAMES

    def _frames(self, component: str) -> int:
        known = self._of(component)
        return known.frames_encoded + known.frames_raw

    def _of(self, component: str) -> ComponentCodec:
        return self._components.get(component) or ComponentCodec()


def _blend(old: float, new: float) -> float:
    return old + _NEWEST_WEIGHT * (new - old)
