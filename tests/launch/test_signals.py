"""The first signal stops after the step, the second at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from launch.signals import stop_on_signals
from tests.launch.helpers import ROOT

# The child says `ready`, waits for the flag, says `stopping`, and then never ends its step.
CHILD = """
import threading
from launch.signals import stop_on_signals
stop = threading.Event()
with stop_on_signals(stop):
    print("ready", flush=True)
    stop.wait(60)
    print("stopping", flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_sets_the_flag(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    stop = threading.Event()
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        assert stop.wait(10)
    assert signal.getsignal(number) is before
    assert "Stopping after this step" in capfd.readouterr().err


def test_handlers_return_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="step"), stop_on_signals(threading.Event()):
        raise RuntimeError("step")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_exits_at_once_with_130(second: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "stopping\n"
        child.send_signal(second)
        assert child.wait(timeout=30) == 130
    finally:
        child.kill()
        child.communicate()
