"""Direct I/O is probed, never assumed; the fallback is chosen once and says why (C09)."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from offload.nvme.aligned import (
    ALIGNMENT_BYTES_MIN,
    HUGE_PAGE_BYTES,
    DioAlignment,
    address_of,
    aligned_buffer,
    choose_access,
    statx_dio_alignment,
)


def _refusing(code):
    def open_fd(path, flags):
        raise OSError(code, os.strerror(code))

    return open_fd


def test_refused_o_direct_falls_back_and_says_why(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        access = choose_access(str(tmp_path), open_fd=_refusing(errno.EINVAL))
    assert not access.direct and access.io_alignment_bytes == 1
    assert access.alignment_bytes >= ALIGNMENT_BYTES_MIN
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "buffered" in caplog.text and "EINVAL" in caplog.text and str(tmp_path) in caplog.text


def test_an_unexpected_error_of_the_probe_is_not_hidden(tmp_path):
    def open_fd(path, flags):
        read_end, write_end = os.pipe()  # positioned transfers on a pipe are refused
        os.close(write_end)
        return read_end

    with pytest.raises(OSError):  # ESPIPE says nothing about direct I/O
        choose_access(str(tmp_path), open_fd=open_fd)
    assert os.listdir(tmp_path) == []


def test_statx_that_denies_direct_io_is_believed(tmp_path):
    access = choose_access(str(tmp_path), statx=lambda path: DioAlignment(0, 0))
    assert not access.direct and "no direct I/O" in access.reason


@pytest.mark.parametrize(
    ("reported", "expected"),
    [(512, 4096), (4096, 4096), (16384, 16384), (65536, 65536)],
)
def test_alignment_is_the_file_systems_but_at_least_4096(tmp_path, reported, expected):
    access = choose_access(str(tmp_path), statx=lambda path: DioAlignment(512, reported))
    assert access.alignment_bytes == expected


def test_without_statx_the_block_size_decides(tmp_path):
    access = choose_access(str(tmp_path), statx=lambda path: None)
    block_bytes = os.stat(tmp_path).st_blksize
    assert access.alignment_bytes >= max(4096, min(block_bytes, 1 << 20))


def test_probing_leaves_nothing_behind(tmp_path):
    choose_access(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_statx_of_a_missing_file_tells_nothing(tmp_path):
    assert statx_dio_alignment(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("alignment", [1, 512, 4096, 65536])
def test_aligned_buffers_are_aligned_and_zeroed(alignment):
    for nbytes in (0, 1, alignment, 3 * alignment + 1):
        buffer = aligned_buffer(nbytes, alignment)
        assert buffer.nbytes == nbytes and not buffer.any()
        assert address_of(memoryview(buffer)) % alignment == 0


def test_large_buffers_can_have_huge_pages():
    """Shared anonymous memory gets none, and 4 KiB pages cost a third of the drive's bandwidth."""
    buffer = aligned_buffer(5 << 20, 4096)
    address = address_of(memoryview(buffer))
    assert buffer.nbytes == 5 << 20 and address % HUGE_PAGE_BYTES == 0 and not buffer.any()
    with open("/proc/self/maps", encoding="utf-8") as file:
        maps = [line.split() for line in file]
    ranges = [(*(int(end, 16) for end in line[0].split("-")), line[1]) for line in maps]
    (flags,) = [flags for start, stop, flags in ranges if start <= address < stop]
    assert flags == "rw-p"


def test_address_follows_slices():
    data = memoryview(aligned_buffer(100, 4096))
    assert address_of(data[7:]) == address_of(data) + 7
