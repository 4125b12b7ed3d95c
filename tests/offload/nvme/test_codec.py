"""Frames are encoded where it wins, and only if they shrink by a unit of the alignment."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from offload.nvme.codec import FrameCodec
from offload.nvme.codec_policy import DriveSpeed
from offload.runs import Run, untyped
from ops.codec import decode_frame, new_scratch

MIB = 1 << 20
UNIT = 4096
SLOW = DriveSpeed(50e6, 50e6)
FAST = DriveSpeed(1.4e9, 2.0e9)


class CoreClock:
    """Core-seconds that pass with every look: encoding a sample takes 0.05 ms, decoding as much."""

    def __init__(self, per_call: float = 5e-5) -> None:
        self._now, self._per_call = 0.0, per_call

    def __call__(self) -> float:
        self._now += self._per_call
        return self._now


def codec_on(speed):
    return FrameCodec("store", UNIT, lambda: speed, core_seconds=CoreClock())


def moments(count=MIB // 4):
    """float32 whose exponents resemble each other."""
    values = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    return (values * values).view(np.uint8)


def noise(nbytes=MIB):
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def encode(codec, data, runs=None, start=0):
    out = memoryview(bytearray(MIB))
    runs = untyped(start + data.nbytes) if runs is None else runs
    nbytes = codec.encode(memoryview(data), start, runs, new_scratch(), out)
    if nbytes:
        back = np.zeros_like(data)
        decode_frame(out[:nbytes], memoryview(back))
        assert (back == data).all()
    return nbytes


STATE = (Run("exp_avg_sq", 4, 0, 8 * MIB),)


def test_a_slow_drive_encodes_and_a_fast_one_does_not():
    assert 0 < encode(codec_on(SLOW), moments(), STATE) <= MIB - UNIT
    assert encode(codec_on(FAST), moments(), STATE) == 0


def test_an_unknown_drive_stores_raw_and_learns():
    speed = DriveSpeed(0.0, 0.0)
    codec = FrameCodec("store", UNIT, lambda: speed, core_seconds=CoreClock())
    assert encode(codec, moments(), STATE) == 0
    speed = SLOW
    assert encode(codec, moments(), STATE) > 0
    assert codec.stats().components["exp_avg_sq"].num_samples == 1


def test_noise_is_stored_raw_on_any_drive():
    codec = codec_on(SLOW)
    assert encode(codec, noise()) == 0
    known = codec.stats().components["bytes"]
    assert (known.decision, known.saved_share, known.frames_raw) == ("none", 0.0, 1)


def test_components_that_share_a_frame_are_decided_apart():
    half = MIB // 2
    data = np.concatenate([noise(half), moments(half // 4)])
    runs = (Run("residual", 2, 0, half), Run("exp_avg_sq", 4, half, 9 * MIB))
    codec = codec_on(SLOW)
    nbytes = encode(codec, data, runs)
    assert half < nbytes < MIB
    decisions = {name: known.decision for name, known in codec.stats().components.items()}
    assert decisions == {"residual": "none", "exp_avg_sq": "lz4"}


def test_gaps_are_of_no_component_and_kept():
    data = moments()
    runs = (Run("exp_avg_sq", 4, 0, MIB - 4096), Run("rest", 4, MIB - 64, MIB))
    codec = codec_on(SLOW)
    assert encode(codec, data, runs) > 0
    assert set(codec.stats().components) == {"exp_avg_sq", "rest"}


def test_a_frame_later_in_its_block_finds_its_runs():
    runs = (Run("residual", 2, 0, 3 * MIB), Run("exp_avg_sq", 4, 3 * MIB, 4 * MIB))
    codec = codec_on(SLOW)
    assert encode(codec, moments(), runs, start=3 * MIB) > 0
    assert set(codec.stats().components) == {"exp_avg_sq"}


@pytest.mark.parametrize("nbytes", [1, UNIT - 1, UNIT])
def test_a_frame_of_one_unit_has_nothing_to_save(nbytes):
    assert encode(codec_on(SLOW), np.zeros(nbytes, np.uint8)) == 0


def test_a_frame_must_shrink_by_a_whole_unit():
    # 4096 zeros shrink to some tens of bytes, and the frame's header takes some as well: just
    # short of a unit is saved when all else is noise.
    codec = FrameCodec("store", UNIT, lambda: DriveSpeed(1.0, 1.0), core_seconds=CoreClock())
    runs = (Run("noise", 1, 0, 15 * UNIT), Run("zeros", 1, 15 * UNIT, MIB))
    just_not = np.concatenate([noise(15 * UNIT), np.zeros(UNIT, np.uint8)])
    just = np.concatenate([noise(15 * UNIT), np.zeros(2 * UNIT, np.uint8)])
    assert encode(codec, just_not, runs) == 0
    assert 0 < encode(codec, just, runs) <= 16 * UNIT
    known = codec.stats().components["zeros"]
    assert (known.frames_encoded, known.frames_raw) == (1, 1)


def test_every_decision_is_logged_once_for_each_component(caplog):
    caplog.set_level(logging.INFO, logger="offload.nvme.codec")
    codec = codec_on(SLOW)
    for _ in range(3):
        encode(codec, moments(), STATE)
    encode(codec, noise())
    assert [record.getMessage().split(": encoding")[0] for record in caplog.records] == [
        "store: codec lz4 for exp_avg_sq",
        "store: codec none for bytes",
    ]
    assert "reads 50 and writes 50 MB/s" in caplog.text


def test_blocks_without_anything_to_gain_pass_by():
    codec = codec_on(FAST)
    assert codec.wants(STATE, 8 * MIB)  # to be sampled
    assert encode(codec, moments(), STATE) == 0
    for _ in range(31):
        assert not codec.wants(STATE, 8 * MIB)
    assert codec.stats().components["exp_avg_sq"].frames_raw == 1 + 31 * 8
    assert not codec.wants(STATE, 8 * MIB)
    assert codec.wants(STATE, 8 * MIB)  # the 256 frames are over: to be sampled again


def test_blocks_with_something_to_gain_are_wanted():
    codec = codec_on(SLOW)
    encode(codec, moments(), STATE)
    assert codec.wants(STATE, 8 * MIB)
    assert not codec.wants(STATE, UNIT)


def test_a_drive_that_becomes_slow_makes_blocks_wanted():
    speed = FAST
    codec = FrameCodec("store", UNIT, lambda: speed, core_seconds=CoreClock())
    encode(codec, moments(), STATE)
    assert not codec.wants(STATE, 8 * MIB)
    speed = SLOW
    assert codec.wants(STATE, 8 * MIB)


def test_real_core_seconds_are_measured():
    codec = FrameCodec("store", UNIT, lambda: SLOW)
    encode(codec, moments(), STATE)
    known = codec.stats().components["exp_avg_sq"]
    assert known.encode_s_per_byte > 0 and known.decode_s_per_byte > 0
