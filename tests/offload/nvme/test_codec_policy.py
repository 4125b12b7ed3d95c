"""Encoding is chosen where it wins, and chosen again when that changes."""

from __future__ import annotations

import pytest

from offload.nvme.codec_policy import (
    PATIENCE_FRAMES,
    RESAMPLE_FRAMES,
    SAMPLE_BYTES_MIN,
    CodecPolicy,
    DriveSpeed,
    Sample,
)

MIB = 1 << 20
SLOW = DriveSpeed(50e6, 50e6)
FAST = DriveSpeed(1.4e9, 2.0e9)
UNKNOWN = DriveSpeed(0.0, 0.0)
# What exp_avg_sq of a trained model gave: 1.18 smaller, 0.5 GB/s to encode, 2 GB/s to decode.
TRAINED = Sample(MIB, int(MIB / 1.18), MIB / 0.5e9, MIB / 2e9)
ZEROS = Sample(MIB, MIB // 250, MIB / 10e9, MIB / 10e9)
NOISE = Sample(MIB, MIB + 20, MIB / 10e9, MIB / 10e9)


def policy_with(sample):
    policy = CodecPolicy()
    policy.note_sample("m", sample)
    return policy


@pytest.mark.parametrize(
    ("sample", "speed", "expected"),
    [
        (TRAINED, SLOW, True),
        (TRAINED, FAST, False),
        (ZEROS, FAST, True),
        (NOISE, SLOW, False),
        (TRAINED, DriveSpeed(50e6, 0.0), True),
        (TRAINED, DriveSpeed(0.0, 50e6), True),
        (TRAINED, DriveSpeed(50e6, 2e9), True),
        (TRAINED, UNKNOWN, False),
    ],
)
def test_encodes_where_it_wins(sample, speed, expected):
    assert policy_with(sample).encodes("m", speed) is expected


def test_break_even_is_where_core_seconds_equal_drive_seconds():
    share, cost = 0.2, 4e-9  # a drive of 100 MB/s in each direction saves 0.2 * 20 ns = 4 ns
    sample = Sample(1_000_000, int(1_000_000 * (1 - share)), 0.75 * cost * 1e6, 0.25 * cost * 1e6)
    assert policy_with(sample).encodes("m", DriveSpeed(90e6, 90e6))
    assert not policy_with(sample).encodes("m", DriveSpeed(101e6, 101e6))


def test_near_break_even_the_decision_stays_what_it_was():
    share, cost = 0.2, 4e-9
    sample = Sample(1_000_000, int(1_000_000 * (1 - share)), cost * 1e6, 0.0)
    near = [DriveSpeed(rate, rate) for rate in (97e6, 103e6)]
    policy = policy_with(sample)
    assert not any(policy.encodes("m", speed) for speed in near)
    assert policy.encodes("m", DriveSpeed(80e6, 80e6))
    assert all(policy.encodes("m", speed) for speed in near)
    assert not policy.encodes("m", DriveSpeed(120e6, 120e6))
    assert not any(policy.encodes("m", speed) for speed in near)


def test_a_component_without_a_sample_is_stored_raw():
    policy = CodecPolicy()
    assert not policy.encodes("m", SLOW)
    policy.note_raw("m")
    assert policy.components()["m"].decision == "unknown"
    assert policy.components()["m"].frames_raw == 1


def test_components_are_decided_apart():
    policy = CodecPolicy()
    policy.note_sample("m", TRAINED)
    policy.note_sample("noise", NOISE)
    assert (policy.encodes("m", SLOW), policy.encodes("noise", SLOW)) == (True, False)
    assert {name: codec.decision for name, codec in policy.components().items()} == {
        "m": "lz4",
        "noise": "none",
    }


def test_the_first_frame_and_every_256th_after_it_are_sampled_once():
    policy, sampled = CodecPolicy(), []
    for frame in range(2 * RESAMPLE_FRAMES + 1):
        if policy.begin_sample("m", MIB):
            sampled.append(frame)
            assert not policy.begin_sample("m", MIB)  # another worker does not do it as well
            policy.note_sample("m", TRAINED)
        policy.note_raw("m")
    assert sampled == [0, RESAMPLE_FRAMES, 2 * RESAMPLE_FRAMES]


def test_a_sample_is_asked_of_one_block_at_a_time():
    policy = CodecPolicy()
    assert policy.wants_sample("m", MIB)
    asked = []
    for frame in range(2 * PATIENCE_FRAMES + 1):  # queued behind it, or it has failed
        if policy.wants_sample("m", MIB):
            asked.append(frame)
        policy.note_raw("m")
    assert asked == [PATIENCE_FRAMES, 2 * PATIENCE_FRAMES]
    assert policy.begin_sample("m", MIB)
    assert not policy.wants_sample("m", MIB)
    policy.note_raw("m", RESAMPLE_FRAMES)
    assert policy.wants_sample("m", MIB)


def test_scraps_are_no_sample():
    policy = CodecPolicy()
    assert not policy.begin_sample("m", SAMPLE_BYTES_MIN - 1)
    assert policy.begin_sample("m", SAMPLE_BYTES_MIN)


def test_moments_that_stop_being_zeros_are_noticed_within_frames():
    policy = policy_with(ZEROS)
    assert policy.encodes("m", FAST)
    frames = 0
    while policy.encodes("m", FAST):
        policy.note_attempt("m", MIB, MIB)
        frames += 1
    assert frames < 10
    assert policy.components()["m"].decision == "none"


def test_a_drive_that_becomes_slow_is_noticed_at_once():
    policy = policy_with(TRAINED)
    assert not policy.encodes("m", FAST)
    assert policy.encodes("m", SLOW)


def test_a_later_sample_changes_the_decision():
    policy = policy_with(NOISE)
    assert not policy.encodes("m", SLOW)
    policy.note_sample("m", TRAINED)
    policy.note_sample("m", TRAINED)
    assert policy.encodes("m", SLOW)


def test_frames_are_counted_by_what_became_of_them():
    policy = policy_with(TRAINED)
    policy.note_attempt("m", MIB, MIB // 2)
    policy.note_attempt("m", MIB, MIB)
    policy.note_raw("m")
    known = policy.components()["m"]
    assert (known.frames_encoded, known.frames_raw, known.num_samples) == (1, 2, 1)
