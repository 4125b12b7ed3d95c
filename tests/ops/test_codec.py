"""Frames decode to exactly what was encoded, and nothing else decodes at all."""

from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.codec import (
    FRAME_BYTES_MAX,
    SEGMENTS_MAX,
    CorruptFrame,
    Segment,
    decode_frame,
    encode_frame,
    new_scratch,
)

SCRATCH = new_scratch()
HEAD_BYTES, ROW_BYTES = 12, 12
MIB = 1 << 20


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """float32 as weights are: one plane of four compresses a little."""
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)


def encoded(data, segments, out_bytes=2 * MIB):
    out = bytearray(out_bytes)
    result = encode_frame(memoryview(data).cast("B"), segments, SCRATCH, memoryview(out))
    return None if result is None else out[: result.nbytes]


def decoded(stored, nbytes):
    back = bytearray(b"\xee" * nbytes)
    decode_frame(memoryview(stored), memoryview(back))
    return bytes(back)


def frame(nbytes=4096, segments=None):
    """An encoded frame of zeros: small, and every field of it matters."""
    stored = encoded(bytes(nbytes), segments or [Segment(nbytes, 4)])
    assert stored is not None
    return stored


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 5, 63, 64, 65, 4095, 4097, MIB - 1, MIB])
def test_round_trip_is_exact(nbytes, item_bytes, pack):
    data = numbers(MIB // 4).view(np.uint8)[:nbytes].tobytes()
    stored = encoded(data, [Segment(nbytes, item_bytes, pack)])
    assert decoded(stored, nbytes) == data


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(
        st.tuples(
            st.integers(0, 3000),
            st.sampled_from([1, 2, 4]),
            st.booleans(),
            st.sampled_from(["zeros", "numbers", "noise"]),
        ),
        min_size=1,
        max_size=SEGMENTS_MAX,
    ).filter(lambda rows: sum(row[0] for row in rows) > 0)
)
def test_round_trip_of_any_segments(shape):
    parts = []
    for index, (nbytes, _, _, kind) in enumerate(shape):
        noise = np.random.default_rng(index).integers(0, 256, nbytes, np.uint8)
        content = {
            "zeros": np.zeros(nbytes, np.uint8),
            "numbers": numbers(750, index).view(np.uint8)[:nbytes],
            "noise": noise,
        }
        parts.append(content[kind])
    data = np.concatenate(parts).tobytes()
    stored = encoded(data, [Segment(*row[:3]) for row in shape])
    assert decoded(stored, len(data)) == data


def test_shuffling_is_what_makes_numbers_compress():
    data = numbers(MIB // 4)
    plain = encoded(data, [Segment(MIB, 1)])
    shuffled = encoded(data, [Segment(MIB, 4)])
    assert len(shuffled) < 0.95 * MIB < len(plain)


def test_zeros_nearly_vanish():
    # Moments at the start of a run.
    assert len(encoded(bytes(MIB), [Segment(MIB, 4)])) < MIB / 200


def test_what_does_not_shrink_is_kept_within_its_frame():
    noise = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    data = noise.tobytes() + bytes(1000)
    stored = encoded(data, [Segment(1000, 2), Segment(1000, 4)])
    assert noise.tobytes() in stored
    assert len(stored) < 1000 + HEAD_BYTES + 2 * ROW_BYTES + 100


def test_a_frame_that_does_not_fit_is_refused_not_cut():
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    fits = HEAD_BYTES + ROW_BYTES + 4096
    assert len(encoded(data, [Segment(4096, 1)], fits)) == fits
    assert encoded(data, [Segment(4096, 1)], fits - 1) is None
    assert encoded(data, [Segment(4096, 1)], 0) is None


def test_more_segments_than_a_header_holds_do_not_fit():
    segments = [Segment(4, 4)] * (SEGMENTS_MAX + 1)
    assert encoded(bytes(4 * len(segments)), segments) is None


def test_segments_that_do_not_cover_the_frame_are_refused():
    for segments in ([], [Segment(9, 1)], [Segment(11, 1)], [Segment(12, 1), Segment(-2, 1)]):
        with pytest.raises(ValueError, match="cover"):
            encoded(bytes(10), segments)
    with pytest.raises(ValueError, match="a frame of 0 bytes"):
        encoded(b"", [Segment(0, 1)])
    with pytest.raises(ValueError, match="a frame of 1048577 bytes"):
        encoded(bytes(FRAME_BYTES_MAX + 1), [Segment(FRAME_BYTES_MAX + 1, 1)])


def test_every_truncation_is_noticed():
    # C05
    stored = frame(300, [Segment(100, 4), Segment(100, 2, pack=False), Segment(100, 1)])
    for nbytes in range(len(stored)):
        with pytest.raises(CorruptFrame):
            decoded(stored[:nbytes], 300)
    with pytest.raises(CorruptFrame, match="do not end"):
        decoded(stored + b"\0", 300)


def test_every_changed_byte_of_the_header_is_noticed_or_harmless():
    # C05, C68: whatever a header claims, decoding fails cleanly or fills exactly the buffer.
    stored = frame(300, [Segment(100, 4), Segment(200, 2, pack=False)])
    for place in range(HEAD_BYTES + 2 * ROW_BYTES):
        for value in (0, 1, 2, 4, 127, 255, stored[place] ^ 0x80):
            broken = bytearray(stored)
            broken[place] = value
            try:
                assert len(decoded(broken, 300)) == 300
            except CorruptFrame:
                continue


@settings(deadline=None, max_examples=300)
@given(junk=st.binary(max_size=200), nbytes=st.integers(1, 400))
def test_junk_behind_a_header_never_escapes(junk, nbytes):
    # C68
    row = struct.pack("<IIBBH", nbytes, len(junk), 4, 1, 0)
    stored = struct.pack("<4sIHH", b"HRF1", nbytes, 1, 0) + row + junk
    try:
        decoded(stored, nbytes)
    except CorruptFrame:
        return


@pytest.mark.parametrize("claim", ["frame", "segment", "count"])
def test_a_header_cannot_make_us_allocate_what_it_claims(claim):
    # C68
    stored = frame(4096)
    if claim == "frame":
        struct.pack_into("<I", stored, 4, 0xFFFFFFFF)
    elif claim == "segment":
        struct.pack_into("<I", stored, HEAD_BYTES, 0xFFFFFFF0)
    else:
        struct.pack_into("<H", stored, 8, 0xFFFF)
    back = memoryview(bytearray(4096))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFrame):
            decode_frame(memoryview(stored), back)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_frame_of_another_length_is_refused():
    with pytest.raises(CorruptFrame, match="claims 4096 bytes where 4000 belong"):
        decoded(frame(4096), 4000)


def test_a_segment_that_decodes_too_short_is_refused():
    stored = frame(4096)
    short = encoded(bytes(4000), [Segment(4000, 4)])
    broken = stored[: HEAD_BYTES + ROW_BYTES] + short[HEAD_BYTES + ROW_BYTES :]
    struct.pack_into("<I", broken, HEAD_BYTES + 4, len(broken) - HEAD_BYTES - ROW_BYTES)
    with pytest.raises(CorruptFrame, match="decodes to 4000 bytes, not 4096"):
        decoded(broken, 4096)


def test_threads_with_their_own_scratch_do_not_disturb_each_other():
    datas = [numbers(MIB // 4, seed).tobytes() for seed in range(4)]
    results = [b""] * 4

    def work(index):
        out = memoryview(bytearray(MIB))
        scratch = new_scratch()
        for _ in range(4):
            result = encode_frame(memoryview(datas[index]), [Segment(MIB, 4)], scratch, out)
            results[index] = decoded(out[: result.nbytes], MIB)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == datas
