"""What the store has moved and holds: exact byte counts per cause.

Payload (bytes of blocks as they were moved) and padding (bytes moved only because direct I/O moves
whole units) are counted apart; their sum is what went to and came from the drive. The logical bytes
are those of the blocks in memory: what encoded frames save is their difference to the payload.
Requests that failed are not counted. The store's lock serialises `count`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.nvme.codec import CodecStats

CAUSES = ("update", "weight", "replay", "wrong_guess", "spill", "commit")


def _zeros() -> dict[str, int]:
    return dict.fromkeys(CAUSES, 0)


@dataclass
class LaneStats:
    """One direction: bytes by cause, padding by cause, and how often workers went to the drive.

    Neighbours that were moved together are one request; a request may need several system calls.
    """

    payload_bytes: dict[str, int] = field(default_factory=_zeros)
    padding_bytes: dict[str, int] = field(default_factory=_zeros)
    logical_bytes: dict[str, int] = field(default_factory=_zeros)
    num_requests: int = 0

    @property
    def total_bytes(self) -> int:
        """Payload and padding of all causes."""
        return sum(self.payload_bytes.values()) + sum(self.padding_bytes.values())

    def count(self, cause: str, logical_bytes: int, payload_bytes: int, padding_bytes: int) -> None:
        """Add what a request has moved of one block."""
        self.logical_bytes[cause] += logical_bytes
        self.payload_bytes[cause] += payload_bytes
        self.padding_bytes[cause] += padding_bytes

    def copy(self) -> LaneStats:
        """A snapshot that later counts do not change."""
        return LaneStats(
            dict(self.payload_bytes),
            dict(self.padding_bytes),
            dict(self.logical_bytes),
            self.num_requests,
        )


@dataclass(frozen=True)
class StoreStats:
    """One moment of a store. `used_bytes` includes padding and versions still pinned.

    `used_bytes_by_drive` are its parts, in the order of the store's paths. `bounce_buffer_bytes`
    are all the workers' own memory. `codec` is None where none is configured.
    """

    read: LaneStats
    written: LaneStats
    used_bytes: int
    used_bytes_max: int
    used_bytes_by_drive: tuple[int, ...]
    capacity_bytes: int
    num_blocks: int
    num_transfers: int
    num_transfers_max: int
    bounce_buffer_bytes: int
    codec: CodecStats | None = None
