"""Plans: homes fit, terms add up, the smallest budgets are exact, refusals show the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.blocks import TensorSpec, UnitLayout, UnitSpec
from offload.config import NvmeConfig, OffloadConfig, TierConfig
from offload.placement import Demands, block_bytes, plan_memory
from offload.testing import Toy, budgets, smallest_budgets, toy_plan, toy_run
from ops.units import parse_bytes

AMPLE = 1 << 40
DEMANDS = Demands(activation_bytes=8192, accumulator_bytes=4096, workspace_bytes=1 << 16)


def layouts_of(sizes, dtype="bfloat16", grad="bfloat16", compute="float32"):
    return [
        UnitLayout(
            UnitSpec(f"u{i}", i, None, (TensorSpec(f"u{i}.w", (n,), i % 3 == 2, True, 0.02),)),
            dtype,
            grad,
            compute,
        )
        for i, n in enumerate(sizes)
    ]


def config_of(device=AMPLE, host=AMPLE, nvme=AMPLE, **options) -> OffloadConfig:
    return OffloadConfig(
        TierConfig(device), TierConfig(host), NvmeConfig(nvme, "unused"), **options
    )


def minimum_of(layouts, **options):
    """A configuration with the least the plan accepts in every tier."""
    config = config_of(1, 1, **options)
    tiers = plan_memory(layouts, config, DEMANDS).tiers
    config = config_of(tiers["device"].minimum_bytes, tiers["host"].minimum_bytes, 1, **options)
    nvme_bytes = plan_memory(layouts, config, DEMANDS).tiers["nvme"].minimum_bytes
    return replace(config, nvme=NvmeConfig(max(nvme_bytes, 1), "unused"))


shapes = st.lists(st.integers(1, 60_000), min_size=1, max_size=12)
spills = st.sampled_from(["auto", "never", "always"])
dtypes = st.sampled_from(["bfloat16", "float16", "float32"])
grads = st.sampled_from(["bfloat16", "float32"])


@settings(deadline=None, max_examples=150)
@given(shapes, spills, dtypes, grads)
def test_the_minimum_is_accepted_and_a_byte_less_refused_in_every_tier(sizes, spill, dtype, grad):
    """C52. Regression: with gradient_spill always, a minimum meant for unspilled gradients was
    accepted for small models, and the engine then ran out of memory for its slots."""
    layouts = layouts_of(sizes, dtype, grad)
    config = minimum_of(layouts, gradient_spill=spill)
    plan = plan_memory(layouts, config, DEMANDS)
    assert plan.fits, plan.problems
    for tier in plan.tiers.values():
        assert tier.used_bytes <= tier.capacity_bytes or not tier.terms
    tighter = {
        "device": replace(config, device=TierConfig(config.device.capacity - 1)),
        "host": replace(config, host=TierConfig(config.host.capacity - 1)),
    }
    if plan.tiers["nvme"].minimum_bytes > 1:
        less = config.nvme.capacity - 1
        tighter["nvme"] = replace(config, nvme=NvmeConfig(less, "unused"))
    for name, smaller in tighter.items():
        refused = plan_memory(layouts, smaller, DEMANDS)
        assert not refused.fits
        need = refused.tiers[name].minimum_bytes
        assert f"offload.{name}.capacity" in refused.problems[0]
        assert f"{need} B = " in refused.problems[0]
        remedy = next(text for text in refused.remedies if f"offload.{name}.capacity" in text)
        advised = parse_bytes(remedy.rpartition(" ")[2])
        assert need <= advised < need + (1 << 20), "enough, in a size people write"


@settings(deadline=None, max_examples=150)
@given(shapes, spills, dtypes, st.integers(0, 4_000_000), st.sampled_from([0, 1 << 12, 1 << 20]))
def test_any_host_budget_above_the_minimum_is_filled_but_never_exceeded(
    sizes, spill, dtype, extra, window
):
    layouts = layouts_of(sizes, dtype)
    config = minimum_of(layouts, gradient_spill=spill, prefetch_buffer_size=window)
    config = replace(
        config,
        host=TierConfig(config.host.capacity + extra),
        nvme=NvmeConfig(AMPLE, "unused"),
    )
    plan = plan_memory(layouts, config, DEMANDS)
    assert plan.fits, plan.problems
    host = plan.tiers["host"]
    assert sum(term.nbytes for term in host.terms) == host.used_bytes <= host.capacity_bytes
    stay = sum(
        block_bytes(x, part)
        for x in layouts
        for part in ("weight", "state")
        if plan.homes[x.name, part] == "host"
    )
    assert {t.name: t.nbytes for t in host.terms}["homes"] == stay
    grads = sum(block_bytes(x, "grad") for x in layouts if x.name not in plan.spilled)
    assert {t.name: t.nbytes for t in host.terms}["gradients"] == grads
    for x in layouts:
        need = block_bytes(x, "weight") + block_bytes(x, "state")
        need += block_bytes(x, "grad") if x.name in plan.spilled else 0
        cold = "nvme" in (plan.homes[x.name, "weight"], plan.homes[x.name, "state"])
        if cold or x.name in plan.spilled:
            assert plan.update_slot_bytes >= need
            assert plan.lease_slot_bytes >= block_bytes(x, "weight")
        if x.name in plan.spilled:
            assert plan.grad_slot_bytes >= block_bytes(x, "grad")
    assert not plan.spilled or spill != "never"


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 3_000_000))
def test_components_add_up_to_the_state(sizes, extra):
    layouts = layouts_of(sizes)
    config = minimum_of(layouts)
    config = replace(config, host=TierConfig(config.host.capacity + extra))
    plan = plan_memory(layouts, config, DEMANDS)
    state = {"weight", "residual", "master", "exp_avg", "exp_avg_sq"}
    rows = [row for name, row in plan.components.items() if name in state]
    assert sum(sum(row.values()) for row in rows) == plan.state_bytes
    assert plan.parameters == sum(sizes)
    assert plan.components["grad"]["host"] + plan.components["grad"]["nvme"] == 2 * sum(sizes)


def test_weights_are_homed_in_host_before_optimizer_state_and_early_units_first():
    layouts = layouts_of([40_000] * 8)
    low = minimum_of(layouts)
    for extra in range(0, 6_000_000, 250_000):
        config = replace(
            low, host=TierConfig(low.host.capacity + extra), nvme=NvmeConfig(AMPLE, "-")
        )
        plan = plan_memory(layouts, config, DEMANDS)
        homes = [plan.homes[x.name, part] for part in ("weight", "state") for x in layouts[:2]]
        if plan.homes["u0", "state"] == "host":
            assert all(plan.homes[x.name, "weight"] == "host" for x in layouts)
        assert homes == sorted(homes)  # host before nvme


def test_the_share_homed_in_host_follows_the_budget():
    """C55: of what the terms leave, less than the smallest cold block stays unused."""
    layouts = layouts_of([40_000] * 50)
    low = minimum_of(layouts, prefetch_buffer_size=0)
    total = sum(block_bytes(x, "weight") + block_bytes(x, "state") for x in layouts)
    for extra in (5_000_000, 10_000_000, 15_000_000):
        config = replace(
            low, host=TierConfig(low.host.capacity + extra), nvme=NvmeConfig(AMPLE, "-")
        )
        host = plan_memory(layouts, config, DEMANDS).tiers["host"]
        terms = {term.name: term.nbytes for term in host.terms}
        wanted = host.capacity_bytes - (host.used_bytes - terms["homes"])
        assert abs(terms["homes"] - wanted) <= 0.02 * total


def test_offload_to_nvme_needs_less_host_memory_than_offload_to_host():
    """C54."""
    layouts = layouts_of([40_000] * 50)
    plan = plan_memory(layouts, config_of(), DEMANDS)
    assert set(plan.homes.values()) == {"host"}
    in_host = plan.tiers["host"].used_bytes
    assert plan.tiers["host"].minimum_bytes < 0.2 * in_host


def test_a_state_of_four_times_the_host_budget_fits_with_spilling():
    layouts = layouts_of([40_000] * 50)
    state = plan_memory(layouts, config_of(), DEMANDS).state_bytes
    plan = plan_memory(layouts, config_of(host=state // 4), DEMANDS)
    assert plan.fits
    assert plan.state_bytes >= 4 * plan.tiers["host"].capacity_bytes
    tight = plan_memory(layouts, config_of(host=state // 9), DEMANDS)
    assert tight.fits and tight.spilled
    # The last layers' gradients come first and are needed last: those go.
    assert "u49" in tight.spilled and "u0" not in tight.spilled


def test_a_window_larger_than_the_device_shrinks_to_what_is_left():
    """C52: the default buffers are larger than the budget."""
    layouts = layouts_of([40_000] * 4)
    low = minimum_of(layouts)
    device = replace(low, device=TierConfig(low.device.capacity + 4096))
    plan = plan_memory(layouts, replace(device, prefetch_buffer_size=1 << 30), DEMANDS)
    assert plan.fits
    assert {t.name: t.nbytes for t in plan.tiers["device"].terms}["window"] == 4096
    plan = plan_memory(layouts, replace(low, prefetch_buffer_size=1 << 30), DEMANDS)
    assert plan.fits and plan.tiers["device"].used_bytes == low.device.capacity


def test_never_spilling_is_refused_with_the_way_out_where_only_spilling_fits():
    layouts = layouts_of([40_000] * 50)
    auto = minimum_of(layouts)
    plan = plan_memory(layouts, replace(auto, gradient_spill="never"), DEMANDS)
    assert not plan.fits
    assert any("gradient_spill" in remedy for remedy in plan.remedies)


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("extra", [0, 4096, 60_000])
def test_a_small_model_that_always_spills_starts_at_its_minimum(tmp_path, experts, extra):
    """The engine's side of the regression above: what the plan accepts, the arena can hold."""
    toy = Toy(layers=1, experts=experts, needed=lambda step, layer: [0])
    config = smallest_budgets(toy, budgets(tmp_path, gradient_spill="always"))
    config = replace(config, host=TierConfig(config.host.capacity + extra))
    nvme_bytes = toy_plan(toy, config).tiers["nvme"].minimum_bytes
    config = replace(config, nvme=NvmeConfig(nvme_bytes, config.nvme.path))
    with toy_run(toy, config) as run:
        run.step(1, 1e-3)
        run.digest()
        run.check_buffers()


def nvme_terms(**options) -> dict[str, int]:
    layouts = layouts_of([40_000] * 20)
    state = plan_memory(layouts, config_of(), DEMANDS).state_bytes
    planned = {key: options.pop(key) for key in ("speculative", "resumed") if key in options}
    plan = plan_memory(layouts, config_of(host=state // 3, **options), DEMANDS, **planned)
    terms = {term.name: term.nbytes for term in plan.tiers["nvme"].terms}
    assert sum(terms.values()) == plan.tiers["nvme"].minimum_bytes
    return terms


def test_commits_are_charged_with_every_block_of_every_commit_kept():
    none = nvme_terms()
    whole = none["cold state"] + none["committed"]
    assert "retained commits" not in none
    assert nvme_terms(resumed=True)["retained commits"] == whole
    for durability in ("step", "checkpoint"):
        assert nvme_terms(durability=durability)["retained commits"] == whole
    assert nvme_terms(durability="step", keep_in_store=3)["retained commits"] == 3 * whole


def test_speculation_is_charged_with_what_it_may_have_to_undo():
    """Cold blocks in their old version on nvme, weights that stay on the host a second time."""
    terms = nvme_terms(speculative=True)
    assert terms["old versions"] == terms["cold state"]
    assert "old versions" not in nvme_terms(speculative=True, durability="step")
    layouts = layouts_of([40_000] * 20)
    state = plan_memory(layouts, config_of(), DEMANDS).state_bytes
    plan = plan_memory(layouts, config_of(host=state // 3), DEMANDS, speculative=True)
    undone = {
        x.name
        for x in layouts
        if (plan.homes[x.name, "weight"], plan.homes[x.name, "state"]) == ("host", "nvme")
    }
    assert undone and plan.undone == undone
    assert plan.tiers["host"].used_bytes <= state // 3


def test_a_small_disk_is_refused_for_commits_before_anything_starts():
    layouts = layouts_of([40_000] * 4)
    state = plan_memory(layouts, config_of(), DEMANDS).state_bytes
    plan = plan_memory(layouts, config_of(nvme=state, durability="step"), DEMANDS)
    assert not plan.fits and "retained commits" in plan.problems[0]
