"""The plans of all ranks: alike ones together, shown, warned about, and refused by rank."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from launch.build import make_plan, make_plans, require_memory
from launch.config import RunConfig, load_config
from launch.mesh_plan import (
    RankPlan,
    as_ranges,
    merge_alike,
    mesh_lines,
    mesh_plan_to_dict,
    render_mesh_plan,
    require_all_fit,
)
from launch.plan import plan_to_dict
from launch.report import to_json
from ops.errors import ConfigError, PlanError
from tests.launch.helpers import memory_plan

MIB = 1 << 20
ROOMY = ("offload.host.capacity=2GiB", "offload.device.capacity=1GiB", "offload.nvme.capacity=4GiB")


def mesh_config(
    pp: int = 1, dp: int = 1, op: int = 1, ep: int = 1, *more: str, preset: str = "tiny-moe"
) -> RunConfig:
    keys = {"pipeline_stage": pp, "data_parallel": dp, "model_parallel": op, "expert_parallel": ep}
    sets = [f"parallel.{key}={value}" for key, value in keys.items()]
    return load_config(preset, [*sets, *more])


def shown(config: RunConfig, slots: tuple[int, ...] = ()) -> str:
    """What `plan` prints."""
    text = io.StringIO()
    render_mesh_plan(config, make_plans(config), Console(file=text, width=120), slots)
    return text.getvalue()


@pytest.mark.parametrize(
    "config",
    [
        mesh_config(3, 2, 2, 2),
        mesh_config(1, 4, 1, 2, "parallel.optimizer_parallel=false"),
        mesh_config(1, 4, 1, 2, "train.freeze=[layers.*.experts.0]"),
        mesh_config(2, 1, 1, 1, "parallel.pipeline_layers=[2,1]", "model.vocab_size=259"),
    ],
    ids=["all axes", "replicas", "frozen expert", "uneven layers"],
)
def test_every_rank_has_the_numbers_of_the_plan_it_is_grouped_under(config: RunConfig) -> None:
    plans = make_plans(config)
    ranks = [rank for item in plans for rank in item.ranks]
    assert sorted(ranks) == list(range(config.parallel.num_ranks))
    for item in plans:
        for rank in item.ranks:
            plan = make_plan(config, rank=rank)
            assert (plan.tiers, plan.components) == (item.plan.tiers, item.plan.components)
            assert 0 <= item.plan.parameters - plan.parameters < 100, "a few of them are padding"


def test_what_is_frozen_tells_ranks_apart() -> None:
    config = mesh_config(1, 4, 1, 2, "train.freeze=[layers.*.experts.0]")
    assert [item.ranks for item in make_plans(config)] == [(0, 2), (1, 3)]


def test_stages_in_the_middle_are_alike() -> None:
    config = mesh_config(4, 2, 1, 1, "model.num_hidden_layers=4")
    assert [item.ranks for item in make_plans(config)] == [(0, 1), (2, 3, 4, 5), (6, 7)]
    (line,) = (x for x in mesh_lines(config, make_plans(config)) if x.startswith("ranks 2-5"))
    assert "(stages 1-2, 1 layers each)" in line


def test_one_plan_is_made_for_each_stage_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 ranks of a 235B model are planned in the time of one rank with the whole of it."""
    from launch import build

    made = []
    plain = build.make_plan
    monkeypatch.setattr(
        build, "make_plan", lambda config, resumed, rank: made.append(rank) or plain(config)
    )
    make_plans(mesh_config(3, 4, 2, 4))
    assert made == [0, 8, 16]


def test_a_rank_takes_less_the_more_ranks_share_the_state() -> None:
    one = make_plan(mesh_config(1, 1, 1, 1, *ROOMY))
    for sizes in ((1, 4, 1, 1), (1, 1, 4, 1), (1, 2, 2, 2)):
        plan = make_plan(mesh_config(*sizes, *ROOMY), rank=3)
        assert plan.state_bytes < one.state_bytes / 3.8
        assert plan.tiers["host"].used_bytes < one.tiers["host"].used_bytes
    whole = make_plan(mesh_config(1, 4, 1, 1, "parallel.optimizer_parallel=false", *ROOMY))
    assert whole.state_bytes == one.state_bytes


def test_the_start_up_lines_tell_mesh_batch_and_every_rank() -> None:
    config = mesh_config(3, 2, 2, 2)
    mesh, batch, first, second, third = mesh_lines(config, make_plans(config), [4, 4, 4])
    assert mesh.startswith("mesh: 12 ranks = pipeline_stage 3 x data_parallel 2 x model_parallel 2")
    assert "expert_parallel 2, 1 replica of each expert; breadth_first, 3 chunks" in mesh
    assert batch.startswith("batch: 32 sequences a step = micro_batch_size 8 x")
    assert first.startswith("ranks 0-3 (stage 0, layers 0): ")
    assert second.startswith("ranks 4-7 (stage 1, layers 1): ")
    assert third.startswith("ranks 8-11 (stage 2, layers 2): ")
    plan = make_plan(config, rank=4)
    assert f"{plan.parameters:,} parameters" in second
    for tier in ("device", "host", "nvme"):
        assert f"{tier} " in second


def test_the_start_up_lines_warn_of_operators_across_machines() -> None:
    config = mesh_config(1, 2, 4)
    assert "cross" not in "".join(mesh_lines(config, make_plans(config), [4, 4]))
    assert "cross" not in "".join(mesh_lines(config, make_plans(config)))
    lines = mesh_lines(config, make_plans(config), [2] * 4)
    assert lines[-1].startswith("warning: parallel.model_parallel = 4: 2 of 2 operator-parallel")
    with pytest.raises(ConfigError, match="6 slots"):
        mesh_lines(config, make_plans(config), [2] * 3)


def test_one_rank_starts_and_plans_as_ever() -> None:
    config = load_config("tiny-moe")
    plans = make_plans(config)
    assert mesh_lines(config, plans, [1]) == []
    assert mesh_plan_to_dict(config, plans) == plan_to_dict("tiny-moe", make_plan(config))


def test_tables_show_each_set_of_ranks_and_the_terms_of_the_fullest() -> None:
    text = shown(mesh_config(3, 2, 2, 2, *ROOMY), (3, 3, 6))
    for part in ("12 ranks", "32 sequences", "0-3", "stage 2, layers 2", "with least to spare"):
        assert part in text
    assert "warning: parallel.model_parallel = 2: 1 of 6" in text.replace("\n", " ")
    assert text.rstrip().endswith("The plan of every rank fits.")
    assert "..." not in text and "…" not in text


def test_json_holds_the_mesh_and_every_rank_once() -> None:
    config = mesh_config(3, 2, 2, 2)
    found = json.loads(to_json(mesh_plan_to_dict(config, make_plans(config), [1] * 12)))
    assert found["mesh"]["num_ranks"] == 12
    assert found["mesh"]["layer_chunks"][1] == {"stage": 1, "first_layer": 1, "num_layers": 1}
    assert found["mesh"]["global_batch_sequences"] == 32
    assert len(found["warnings"]) == 1
    assert [rank for item in found["ranks"] for rank in item["ranks"]] == list(range(12))
    state = sum(make_plan(config, rank=rank).state_bytes for rank in range(12))
    assert found["state_bytes"] == state
    assert found["ranks"][0]["tiers"]["host"]["capacity_bytes"] == 112 * MIB


def test_a_plan_that_cannot_fit_is_refused_with_arithmetic_and_remedy() -> None:
    require_all_fit([RankPlan((0,), memory_plan(fits=True))])
    with pytest.raises(PlanError, match=r"^offload\.host.*minimum of 8\.0 MiB; set off") as caught:
        require_all_fit([RankPlan((0,), memory_plan(fits=False))])
    assert caught.value.exit_code == 2


def test_the_ranks_that_do_not_fit_are_named() -> None:
    """Only the last stage has the scores of a large vocabulary on its device."""
    sets = ("model.tie_word_embeddings=false", "model.vocab_size=16000", *ROOMY)
    plans = make_plans(mesh_config(3, 2, 1, 1, *sets))
    first, middle, last = (item.plan.tiers["device"].minimum_bytes for item in plans)
    assert max(first, middle) < last
    enough = f"offload.device.capacity={last}"
    require_all_fit(make_plans(mesh_config(3, 2, 1, 1, *sets, enough)))
    config = mesh_config(3, 2, 1, 1, *sets, f"offload.device.capacity={last - 1}")
    with pytest.raises(PlanError, match=r"^ranks 4-5: offload\.device\.capacity") as caught:
        require_all_fit(make_plans(config))
    assert "0-1" not in str(caught.value)
    assert shown(config).rstrip().endswith("The plan does not fit.")
    assert "ranks 4-5, with least to spare" in shown(config)


def test_ranks_on_one_machine_share_its_memory() -> None:
    config = mesh_config(1, 4, 1, 1)
    plan = make_plan(config, rank=3)
    require_memory(config, plan, 300 * MIB, rank=3)
    with pytest.raises(PlanError, match="each of the 4 ranks on it would take"):
        require_memory(config, plan, 300 * MIB, rank=3, local_ranks=4)


def test_alike_plans_are_merged_in_order_of_their_first_rank() -> None:
    fits, lacks = memory_plan(True), memory_plan(False)
    parts = [RankPlan((4, 6), fits), RankPlan((1,), lacks), RankPlan((0, 2), fits)]
    assert merge_alike(parts) == [RankPlan((0, 2, 4, 6), fits), RankPlan((1,), lacks)]


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7")]
)
def test_ranks_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert as_ranges(numbers) == text
    assert RankPlan(tuple(numbers), memory_plan()).title.startswith(
        "ranks " if len(numbers) > 1 else "rank "
    )
