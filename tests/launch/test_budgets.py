"""C07, C51, C54, C55 on the shipped models: what blocks cost, and what a budget buys."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from launch.config import RunConfig, load_config, preset_names
from moe.memory import demands_of, layouts_of
from offload.arena import Arena
from offload.blocks import PARTS, TensorSpec, UnitLayout, UnitSpec
from offload.config import NvmeConfig, TierConfig
from offload.nvme.extents import ExtentAllocator
from offload.placement import ALIGN_BYTES, Demands, MemoryPlan, block_bytes, plan_memory

AMPLE = 1 << 50
PLANNED = ("small-moe", "qwen3-30b-a3b")


@cache
def parts_of(name: str) -> tuple[RunConfig, list[UnitLayout], Demands]:
    config = load_config(name)
    layouts = layouts_of(config.model, config.train, config.optimizer.decay_norms)
    return config, layouts, demands_of(config.model, config.train, layouts)


def planned(name: str, host: int = AMPLE) -> MemoryPlan:
    """The preset's plan with `host` bytes of host memory and no other limit."""
    config, layouts, demands = parts_of(name)
    offload = replace(
        config.offload,
        device=TierConfig(AMPLE),
        host=TierConfig(host),
        nvme=NvmeConfig(AMPLE, config.offload.nvme.path),
    )
    return plan_memory(layouts, offload, demands)


def payloads(name: str) -> list[int]:
    """Bytes of every block of the model without any padding, in forward order."""
    return [
        sum(item.nbytes for item in layout.fields[part])
        for layout in parts_of(name)[1]
        for part in PARTS
        if layout.nbytes(part)
    ]


@pytest.mark.parametrize("name", PLANNED)
def test_every_block_costs_less_than_a_page_and_all_less_than_five_percent(name):
    """C51: an allocator that rounds to powers of two would take a third more."""
    sizes = payloads(name)
    stored = [
        layout.nbytes(part) for layout in parts_of(name)[1] for part in PARTS if layout.nbytes(part)
    ]
    allocator = ExtentAllocator(2 * sum(sizes), ALIGN_BYTES)
    for payload, nbytes in zip(sizes, stored):
        extent = allocator.allocate(nbytes)
        assert extent is not None and payload <= extent.nbytes < payload + ALIGN_BYTES + 256
    assert allocator.used_bytes <= 1.01 * sum(sizes)
    powers = sum(1 << (nbytes - 1).bit_length() for nbytes in sizes)
    assert powers > 1.05 * sum(sizes), "the mix tells the two kinds of allocator apart"


def test_an_arena_of_the_plans_size_holds_every_block_of_the_model():
    """C51 in memory: an ample plan's host bytes are taken to the last one, and no more."""
    _, layouts, _ = parts_of("small-moe")
    total = sum(block_bytes(layout, part) for layout in layouts for part in PARTS)
    arena = Arena("device", total)
    order = [(layout, part) for layout in layouts for part in PARTS if layout.nbytes(part)]
    random.Random(1).shuffle(order)
    for layout, part in order:
        assert arena.allocate(layout.nbytes(part)) is not None
    assert arena.used_bytes == total <= 1.05 * sum(payloads("small-moe"))


@pytest.mark.parametrize("name", PLANNED)
def test_rewriting_every_block_out_of_place_keeps_the_overhead(name):
    """C51 after use: the room the plan asks for suffices however scattered it has become."""
    rng = random.Random(5)
    plan = planned(name, host=planned(name, host=1).tiers["host"].minimum_bytes)
    config, layouts, _ = parts_of(name)
    sizes = [
        layout.nbytes(part)
        for layout in layouts
        for part in ("weight", "state")
        if plan.homes[layout.name, part] == "nvme"
    ]
    sizes += [layout.nbytes("grad") for layout in layouts if layout.name in plan.spilled]
    store = ExtentAllocator(plan.tiers["nvme"].used_bytes, ALIGN_BYTES)
    where = [store.allocate_pieces(nbytes) for nbytes in sizes]
    used_bytes, most = store.used_bytes, 2 * max(sizes)
    for index in rng.choices(range(len(sizes)), k=4 * len(sizes) + 2000):
        pieces = store.allocate_pieces(sizes[index])
        assert pieces is not None, f"{config.name}: {store.free_bytes} bytes are free"
        for piece in where[index] or ():
            store.free(piece)
        where[index] = pieces
    assert store.used_bytes == used_bytes <= 1.05 * sum(sizes)
    assert store.used_bytes_max <= used_bytes + most


def test_five_thousand_tiny_parameters_cost_their_bytes():
    """C07 in the tiers: tensors of a unit are neighbours, none has a buffer of its own."""
    tensors = tuple(
        TensorSpec(f"layers.0.a_long_name_{'x' * 40}.{i}", (i % 7 + 1,), i % 2 == 0, True, 0.02)
        for i in range(5000)
    )
    layout = UnitLayout(UnitSpec("l0", 0, None, tensors), "bfloat16", "bfloat16", "float32")
    for part in PARTS:
        payload = sum(item.nbytes for item in layout.fields[part])
        assert payload <= block_bytes(layout, part) < payload + ALIGN_BYTES + 256
    assert layout.device_nbytes < 4 * sum(t.size for t in tensors) + 256


@pytest.mark.parametrize("name", preset_names())
def test_offload_to_nvme_needs_less_host_memory_than_offload_to_host(name):
    """C54: of the same model, at its smallest and under the budget that ships with it."""
    config, _, _ = parts_of(name)
    in_host = planned(name)
    assert set(in_host.homes.values()) == {"host"}
    shipped = planned(name, host=config.offload.host.capacity)
    smallest = planned(name, host=planned(name, host=1).tiers["host"].minimum_bytes)
    assert smallest.fits and set(smallest.homes.values()) == {"nvme"}
    used = [plan.tiers["host"].used_bytes for plan in (smallest, shipped, in_host)]
    assert used == sorted(used)
    assert used[0] < 0.5 * used[2]


@pytest.mark.parametrize("name", preset_names())
def test_the_share_in_host_follows_the_budget_from_the_minimum_to_everything(name):
    """C55: homes are what the budget leaves beside the plan's other terms, within 2 %."""
    _, layouts, _ = parts_of(name)
    total = sum(block_bytes(x, "weight") + block_bytes(x, "state") for x in layouts)
    low = planned(name, host=1).tiers["host"].minimum_bytes
    high = planned(name).tiers["host"].used_bytes
    before = 0
    for step in range(13):
        capacity = low + (high - low) * step // 12
        plan = planned(name, host=capacity)
        assert plan.fits, plan.problems
        host = plan.tiers["host"]
        placed = sum(
            block_bytes(x, part)
            for x in layouts
            for part in ("weight", "state")
            if plan.homes[x.name, part] == "host"
        )
        others = sum(term.nbytes for term in host.terms if term.name != "homes")
        requested = min(capacity - others, total)
        assert abs(placed - requested) <= 0.02 * total, f"{placed} of {requested} at {capacity}"
        assert placed >= before, "more memory never places less"
        before = placed
    assert before == total
