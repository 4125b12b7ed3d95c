"""What is refused between a plan that fits its budgets and a machine that lacks them."""

from __future__ import annotations

import pytest

from launch.build import make_plan, require_memory
from launch.config import load_config
from offload.arena import Arena
from ops.errors import PlanError
from ops.process import available_bytes, resident_bytes

GIB = 1 << 30


def test_a_budget_larger_than_the_machine_is_refused_before_anything_is_taken():
    """A lazily mapped arena of memory that does not exist ends in the kernel's OOM killer."""
    config = load_config("qwen3-30b-a3b")
    plan = make_plan(config)
    assert plan.fits
    with pytest.raises(PlanError, match=r"8\.0 GiB of memory available.*offload\.host\.capacity"):
        require_memory(config, plan, 8 * GIB)


def test_a_capacity_that_will_not_be_used_up_is_no_reason_to_refuse():
    overrides = ["offload.host.capacity=64GiB", "offload.device.capacity=64GiB"]
    config = load_config("tiny-moe", overrides)
    require_memory(config, make_plan(config), 1 * GIB)


def test_available_memory_is_a_number_of_this_machine():
    assert available_bytes() > 0
    assert 0 < resident_bytes() < 1 << 50


def test_an_arena_larger_than_the_machine_may_be_mapped_but_not_one_larger_than_an_address():
    assert Arena("host", 100 * GIB).allocate(4096) is not None
    with pytest.raises(PlanError, match=r"offload\.host\.capacity: this machine cannot map"):
        Arena("host", 1 << 60)
