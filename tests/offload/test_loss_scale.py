"""Dynamic loss scaling: growth, halving, floor."""

from __future__ import annotations

import pytest

from offload.config import LossScaleConfig
from offload.loss_scale import LossScaler
from ops.errors import ConfigError

CONFIG = LossScaleConfig(initial=8.0, growth_interval=3, minimum=2.0)


def test_the_scale_doubles_after_enough_good_steps_in_a_row():
    scaler = LossScaler(CONFIG, True)
    scales = [(scaler.update(True), scaler.scale)[1] for _ in range(7)]
    assert scales == [8, 8, 16, 16, 16, 32, 32]


def test_an_overflow_halves_the_scale_and_restarts_the_count():
    scaler = LossScaler(CONFIG, True)
    scaler.update(True), scaler.update(True)
    assert scaler.update(False)
    assert (scaler.scale, scaler.good_steps) == (4.0, 0)
    scaler.update(True), scaler.update(True)
    assert scaler.scale == 4.0
    scaler.update(True)
    assert scaler.scale == 8.0


def test_at_the_floor_another_overflow_is_reported_and_the_scale_stays():
    scaler = LossScaler(CONFIG, True)
    assert [scaler.update(False) for _ in range(4)] == [True, True, False, False]
    assert scaler.scale == 2.0


def test_without_scaling_the_scale_is_one_and_an_overflow_cannot_be_helped():
    scaler = LossScaler(CONFIG, False)
    assert scaler.scale == 1.0
    assert scaler.update(True) and not scaler.update(False)
    assert scaler.scale == 1.0


@pytest.mark.parametrize("name", ["initial", "minimum"])
def test_a_scale_that_is_no_power_of_two_is_refused(name):
    with pytest.raises(ConfigError, match="power of two"):
        LossScaleConfig(**{name: 3.0})
