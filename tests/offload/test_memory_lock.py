"""C50: the host arena is locked where the limit allows it; else one line says so, same bits."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from offload.arena import Arena
from offload.testing import Toy, budgets, smallest_budgets, toy_run
from ops import memory_lock
from ops.process import resident_bytes

MIB = 1 << 20
TOY = Toy(layers=1, experts=2, needed=lambda step, layer: [step % 2])
SMALL = 256 << 10  # below any limit that a system sets by itself


def train(directory) -> list[int]:
    """Three steps at the smallest budgets: their losses and the digest."""
    with toy_run(TOY, smallest_budgets(TOY, budgets(directory))) as run:
        return [*(run.step(number, 1e-2) for number in (1, 2, 3)), run.digest()]


# Root is above the limit, so the child gives up every capability before it sets its own.
UNPRIVILEGED = """
import ctypes, logging, resource, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capset(header, nothing) == 0, ctypes.get_errno()
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
from tests.offload.test_memory_lock import train
print(train(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("limit_bytes", [0, 65536])
def test_a_limit_too_small_to_lock_is_one_line_and_the_same_bits(tmp_path, limit_bytes):
    wanted = train(tmp_path / "here")
    result = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(tmp_path / "there"), str(limit_bytes)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{wanted}\n"
    (line,) = result.stderr.splitlines()
    assert "not locked" in line and "changes no result" in line
    limit = "64.0 KiB" if limit_bytes else "0 B"
    assert f"the limit of locked memory is {limit}; raise it with `ulimit -l " in line


def pretend_library(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """Let the memory lock find a C library that has only these functions."""
    library = SimpleNamespace(**functions)
    found = SimpleNamespace(**vars(ctypes) | {"CDLL": lambda *args, **options: library})
    monkeypatch.setattr(memory_lock, "ctypes", found)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EPERM, "Operation not permitted"), (errno.ENOSYS, "Function not implemented")],
)
def test_a_system_that_refuses_is_told_apart_from_a_limit(
    tmp_path, monkeypatch, caplog, code, reason
):
    wanted = train(tmp_path / "locked")

    def mlock2(*args: object) -> int:
        ctypes.set_errno(code)
        return -1

    pretend_library(monkeypatch, mlock2=mlock2)
    monkeypatch.setattr(memory_lock.resource, "getrlimit", lambda kind: (-1, -1))
    assert train(tmp_path / "refused") == wanted
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and reason in record.message
    assert "ulimit" not in record.message


def test_a_c_library_without_the_call_is_no_error(monkeypatch, caplog):
    pretend_library(monkeypatch)
    assert not Arena("host", MIB).is_locked
    assert "has no mlock2" in caplog.text


def locked_kib() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmLck:"))


def test_the_host_is_locked_for_as_long_as_it_lives_and_the_device_is_not(caplog):
    before = locked_kib()
    arena = Arena("host", SMALL)
    if not arena.is_locked:
        pytest.skip(f"this system locks nothing: {caplog.text}")
    assert locked_kib() - before == SMALL >> 10
    assert not Arena("device", SMALL).is_locked
    buffer = arena.require(SMALL, "a")
    del arena
    assert locked_kib() - before == SMALL >> 10, "a buffer keeps its memory"
    del buffer
    assert locked_kib() == before


def test_locking_takes_nothing_that_is_not_touched(caplog):
    """Plain mlock would fill the range: a capacity larger than the machine would end the run."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    before = resident_bytes()
    arena = Arena("host", 2 * total)
    assert resident_bytes() - before < 8 * MIB
    arena.require(MIB, "a").array[:] = 1
    assert resident_bytes() - before < 16 * MIB


def test_an_arena_of_nothing_is_not_locked():
    assert not Arena("host", 0).is_locked
