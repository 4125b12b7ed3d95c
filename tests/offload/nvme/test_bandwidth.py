"""The probe gives plausible rates, leaves nothing behind and says what it found."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from offload.nvme import bandwidth
from offload.nvme.aligned import choose_access
from offload.nvme.bandwidth import measure_bandwidth
from offload.testing_storage import BUFFERED


@pytest.mark.parametrize("access", [None, BUFFERED], ids=["probed", "buffered"])
def test_every_directory_gets_a_rate_and_stays_empty(tmp_path, caplog, access):
    directories = [str(tmp_path / name) for name in "ab"]
    for directory in directories:
        os.mkdir(directory)
    with caplog.at_level(logging.INFO):
        rates = measure_bandwidth(directories, access or choose_access(directories[0]))
    assert len(rates) == 2 and all(1e5 < rate < 1e13 for rate in rates)
    assert [os.listdir(directory) for directory in directories] == [[], []]
    assert all(directory in caplog.text for directory in directories)


def test_the_rate_is_bytes_both_ways_over_seconds(tmp_path, monkeypatch):
    now = iter([10.0, 12.0, 20.0, 23.0])  # write from, to; read from, to
    monkeypatch.setattr(bandwidth.clock, "seconds", lambda: next(now))
    assert measure_bandwidth([str(tmp_path)], BUFFERED) == [2 * bandwidth.PROBE_BYTES / 5]


def test_a_failing_probe_is_removed_and_raises(tmp_path, monkeypatch):
    def refuse(path, direct):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(bandwidth, "open_os_file", refuse)
    with pytest.raises(OSError):
        measure_bandwidth([str(tmp_path)], BUFFERED)
    assert os.listdir(tmp_path) == []
