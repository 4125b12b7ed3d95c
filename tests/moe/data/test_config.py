import math

import pytest

from moe.data.config import SEED_MAX, DataConfig
from ops.errors import ConfigError


def test_defaults_need_no_download():
    assert DataConfig() == DataConfig(source="cpython", seed=1, held_out_fraction=0.05)


@pytest.mark.parametrize("fraction", [0, -0.1, 0.51, 1, math.nan, math.inf, "0.1", None, True])
def test_refuses_a_held_out_fraction_naming_key_value_and_limit(fraction):
    with pytest.raises(ConfigError) as caught:
        DataConfig(held_out_fraction=fraction)
    message = str(caught.value)
    assert "data.held_out_fraction" in message
    assert repr(fraction) in message
    assert "0.5" in message


@pytest.mark.parametrize("fraction", [1e-6, 0.05, 0.5])
def test_accepts_fractions_up_to_a_half(fraction):
    assert DataConfig(held_out_fraction=fraction).held_out_fraction == fraction


@pytest.mark.parametrize("seed", [-1, SEED_MAX + 1, 1.0, "1", True, None])
def test_refuses_a_seed_that_is_no_64_bit_count(seed):
    with pytest.raises(ConfigError, match=r"data\.seed"):
        DataConfig(seed=seed)


@pytest.mark.parametrize("source", ["", "  ", None, 3])
def test_refuses_an_empty_source(source):
    with pytest.raises(ConfigError, match=r"data\.source.*headrace data prepare"):
        DataConfig(source=source)
