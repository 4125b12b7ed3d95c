"""Where the arrays of a layer and micro-batch lie among the copies of their names. Pure.

`moe/memory.py` takes as many copies as this file counts, so that no index is ever out of range.
"""

from __future__ import annotations

from moe.config import TrainConfig
from moe.mesh import Share
from moe.schedule import chunk_micro_batches, num_lanes, segments


class Places:
    """Copy indices of what a rank saves for its layers.

    Saved arrays (q, k, v, ...) have a slot a layer; under `recompute: full` a slot a layer of one
    segment, which every segment uses anew. The residual stream that enters a segment is kept for
    each of them ("h_in"), inside a segment it is not ("h_seg"). What has to survive from a chunk's
    forward pass to its backward pass exists once a lane, see `num_lanes`.
    """

    def __init__(self, train: TrainConfig, share: Share) -> None:
        full = train.recompute == "full"
        runs = segments(train, share)
        self._micro = chunk_micro_batches(train)
        self._lanes = num_lanes(train, share)
        self._slot_lanes = 1 if full else self._lanes
        self._slots: dict[int, int] = {}
        self._streams: dict[int, tuple[str, int]] = {}
        for number, segment in enumerate(runs):
            for offset, layer in enumerate(segment):
                self._slots[layer] = offset if full else len(self._slots)
                self._streams[layer] = ("h_seg", offset) if offset else ("h_in", number)
        self.num_checkpoints = len(runs) * self._lanes
        """Copies of "h_in", for each micro-batch of a chunk."""
        self.num_slots = (max(self._slots.values()) + 1) * self._slot_lanes
        """Copies of each saved array and of "h_seg", for each micro-batch of a chunk."""

    def lane(self, chunk: int) -> int:
        """The lane of a chunk."""
        return chunk % self._lanes

    def slot(self, layer: int, m: int, chunk: int) -> int:
        """Index of the saved arrays of `layer` for micro-batch `m` of `chunk`."""
        lane = chunk % self._slot_lanes
        return (self._slots[layer] * self._slot_lanes + lane) * self._micro + m

    def stream_in(self, layer: int, m: int, chunk: int) -> tuple[str, int]:
        """Name and index of the residual stream that enters `layer`."""
        name, number = self._streams[layer]
        if name == "h_in":
            number = number * self._lanes + self.lane(chunk)
        return name, number * self._micro + m
