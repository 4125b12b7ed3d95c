"""What is refused between a plan that fits its budgets and a machine that lacks them."""

from __future__ import annotations

import pytest

from launch import build
from launch.build import make_plan, open_store, require_memory
from launch.config import load_config
from offload.arena import Arena
from offload.nvme.aligned import AccessMode
from offload.nvme.store import NvmeStore
from ops.errors import ConfigError, PlanError
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


def test_a_file_system_with_larger_units_than_planned_is_refused_and_nothing_discarded(
    tmp_path, monkeypatch
):
    """C10: blocks padded to more than the plan has charged would run out of room in mid-run."""
    with NvmeStore(str(tmp_path), 1 << 20) as store:
        store.publish(store.cut({"step": 3}))
    config = load_config("tiny-moe", [f"offload.nvme.path={tmp_path}"])
    wide = AccessMode(direct=True, alignment_bytes=16384, reason="a test")
    monkeypatch.setattr(build, "choose_access", lambda path: wide)
    with pytest.raises(ConfigError, match=rf"{tmp_path} asks .* 16384 bytes.*another file system"):
        open_store(config, make_plan(config))
    with NvmeStore(str(tmp_path), 1 << 20, resume=True) as store:
        assert store.recovered is not None and store.recovered.meta == {"step": 3}
