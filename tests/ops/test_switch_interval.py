"""The process's switch interval is lowered while somebody wants it, and put back."""

from __future__ import annotations

import sys

import pytest

from ops.switch_interval import (
    SWITCH_INTERVAL_S,
    restore_switch_interval,
    shorten_switch_interval,
)


@pytest.fixture(autouse=True)
def interval():
    found_s = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield
    sys.setswitchinterval(found_s)


def test_it_is_short_until_the_last_holder_lets_go():
    shorten_switch_interval()
    shorten_switch_interval()
    restore_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    restore_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_shorter_one_is_left_alone():
    sys.setswitchinterval(SWITCH_INTERVAL_S / 5)
    shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S / 5, abs=2e-6)
    restore_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S / 5, abs=2e-6)
