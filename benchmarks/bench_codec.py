"""What the codec of the cold store does on one core, by component, and where it would pay.

The state is that of a split bfloat16 parameter after Adam steps on Gaussian weights and gradients
whose scale differs from element to element, as layers' gradients do; `zeros` are moments before the
first step. One line for each component and direction: bytes per second of one core with whole
frames, beside lz4 on the same bytes without the byte planes, and

    smaller              bytes / stored bytes; `smaller_without_planes` is the reference's
    break_even_mb_per_s  a drive slower than this, in both directions, gains (a core-second counts
                         as much as a second of the drive)

Two more lines show the byte planes alone beside NumPy's transposed copy. From the repository root:

    python -m benchmarks.bench_codec [--frames 8] [--steps 200] [--pairs 9]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from benchmarks.common import compare, seconds_of
from ops.codec import FRAME_BYTES_MAX, Segment, decode_frame, encode_frame, new_scratch
from ops.kernels.adamw import AdamW, update_split
from ops.kernels.shuffle import shuffle, unshuffle
from ops.kernels.split import split_master
from ops.kernels.warm_up import warm_up

LR, WEIGHT_DECAY, GRADIENT_STD = 1e-3, 0.1, 1e-3


def trained_state(size: int, steps: int) -> dict[str, Any]:
    """Components of `size` parameters after `steps` Adam steps."""
    rng = np.random.default_rng(0)
    weight, residual = np.zeros(size, np.uint16), np.zeros(size, np.int16)
    master = rng.standard_normal(size, np.float32) * np.float32(0.02)
    split_master(master, weight, residual)
    exp_avg, exp_avg_sq = np.zeros(size, np.float32), np.zeros(size, np.float32)
    scale = np.exp(rng.standard_normal(size, np.float32)) * np.float32(GRADIENT_STD)
    adam = AdamW()
    for step in range(1, steps + 1):
        grad = rng.standard_normal(size, np.float32) * scale
        row = adam.scalars(step, LR, WEIGHT_DECAY)
        update_split(weight, residual, exp_avg, exp_avg_sq, grad, 1.0, row)
    return {
        "weight": weight,
        "residual": residual,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "grad": (grad.view(np.uint32) >> 16).astype(np.uint16),
        "zeros": np.zeros(size, np.float32),
    }


class Frames:
    """Whole frames of one component, encoded with items of one size."""

    def __init__(self, values: Any, item_bytes: int) -> None:
        data = values.view(np.uint8)
        whole = data.size // FRAME_BYTES_MAX * FRAME_BYTES_MAX
        self.frames = [
            data[start : start + FRAME_BYTES_MAX].data for start in range(0, whole, FRAME_BYTES_MAX)
        ]
        self.nbytes = whole
        self._segments = [Segment(FRAME_BYTES_MAX, item_bytes)]
        self._scratch = new_scratch()
        self._out = memoryview(bytearray(FRAME_BYTES_MAX + 4096))
        self._back = memoryview(bytearray(FRAME_BYTES_MAX))
        self.stored: list[bytes] = []
        for frame in self.frames:
            nbytes = self._encode(frame)
            self.stored.append(bytes(self._out[:nbytes]))

    def _encode(self, frame: memoryview) -> int:
        encoded = encode_frame(frame, self._segments, self._scratch, self._out)
        if encoded is None:
            raise RuntimeError("a frame did not fit into its own length and a page")
        return encoded.nbytes

    @property
    def smaller(self) -> float:
        """Bytes over stored bytes."""
        return self.nbytes / sum(map(len, self.stored))

    def encode_rate(self) -> float:
        """Bytes per second, all frames once."""
        return self.nbytes / seconds_of(lambda: [self._encode(frame) for frame in self.frames])

    def decode_rate(self) -> float:
        """Bytes per second, all frames once."""
        stored = [memoryview(frame) for frame in self.stored]
        return self.nbytes / seconds_of(lambda: [decode_frame(x, self._back) for x in stored])


def compare_component(name: str, values: Any, pairs: int) -> None:
    """Both directions of one component beside lz4 without byte planes."""
    planes, plain = Frames(values, values.itemsize), Frames(values, 1)
    cost = sum(
        1 / statistics.median(rate() for _ in range(5))
        for rate in (planes.encode_rate, planes.decode_rate)
    )
    saved_share = max(0.0, 1 - 1 / planes.smaller)
    facts = {
        "smaller": planes.smaller,
        "smaller_without_planes": plain.smaller,
        "break_even_mb_per_s": 2 * saved_share / cost / 1e6,
        "threads": 1,
    }
    for verb, ours, reference in (
        ("encode", planes.encode_rate, plain.encode_rate),
        ("decode", planes.decode_rate, plain.decode_rate),
    ):
        line = f"codec_{verb}_{name}"
        compare(line, "bytes/s", ours, reference, "lz4 without byte planes", pairs, **facts)


def compare_planes(pairs: int) -> None:
    """The byte planes of one frame of float32 alone, beside NumPy."""
    source = np.random.default_rng(0).integers(0, 256, FRAME_BYTES_MAX, np.uint8)
    target = np.zeros_like(source)

    def numpy_planes() -> None:
        target.reshape(4, -1)[:] = source.reshape(-1, 4)[:, ::-1].T

    def numpy_items() -> None:
        target.reshape(-1, 4)[:] = source.reshape(4, -1)[::-1].T

    for name, function, reference in (
        ("codec_shuffle", shuffle, numpy_planes),
        ("codec_unshuffle", unshuffle, numpy_items),
    ):
        compare(
            name,
            "bytes/s",
            lambda function=function: (
                source.size / seconds_of(lambda: function(source, target, 4), 20)
            ),
            lambda reference=reference: source.size / seconds_of(reference, 20),
            "NumPy's transposed copy",
            pairs,
            threads=1,
        )


def main() -> None:
    """Parse the command line, run the comparisons, print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=8, help="frames of a float32 component")
    parser.add_argument("--steps", type=int, default=200, help="Adam steps before measuring")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    warm_up()
    compare_planes(args.pairs)
    for name, values in trained_state(args.frames * FRAME_BYTES_MAX // 4, args.steps).items():
        compare_component(name, values, args.pairs)


if __name__ == "__main__":
    main()
