"""The shipped configurations have the published sizes, and every one of them can be planned."""

from __future__ import annotations

import pytest

from launch.build import make_plan
from launch.config import load_config, preset_names
from moe.config import ModelConfig
from moe.params import build_units

PUBLISHED = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
}


def count_parameters(model: ModelConfig) -> int:
    """Parameters from first principles, independent of `moe/params.py`."""
    hidden, head = model.hidden_size, model.head_dim
    query = model.num_attention_heads * head
    key_value = model.num_key_value_heads * head
    attention = 2 * hidden * query + 2 * hidden * key_value + (2 * head if model.qk_norm else 0)
    expert = 3 * hidden * model.moe_intermediate_size
    experts = (model.num_experts + model.n_shared_experts) * expert
    layer = attention + experts + hidden * model.num_experts + 2 * hidden
    vocabulary = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return model.num_hidden_layers * layer + vocabulary + hidden


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_equal_the_published_total(name: str, parameters: int) -> None:
    assert count_parameters(load_config(name).model) == parameters


@pytest.mark.parametrize("name", preset_names())
def test_units_hold_every_parameter_once(name: str) -> None:
    model = load_config(name).model
    total = sum(
        rows_and_columns(tensor.shape) for unit in build_units(model) for tensor in unit.tensors
    )
    assert total == count_parameters(model)


def rows_and_columns(shape: tuple[int, ...]) -> int:
    """Elements of a tensor."""
    count = 1
    for size in shape:
        count *= size
    return count


def test_the_default_model_exercises_all_three_tiers() -> None:
    config = load_config("tiny-moe")
    parameters = count_parameters(config.model)
    assert 19e6 < parameters < 21e6
    assert 12 * parameters >= 4 * config.offload.device.capacity
    assert 12 * parameters >= 2 * config.offload.host.capacity


def test_the_small_model_is_about_450_million() -> None:
    assert 440e6 < count_parameters(load_config("small-moe").model) < 460e6


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_fits_its_own_budgets(name: str) -> None:
    config = load_config(name)
    plan = make_plan(config)
    assert plan.fits, plan.problems
    assert plan.parameters == count_parameters(config.model)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("schedule", ["chased", "speculative"])
def test_every_preset_has_room_to_commit_every_step_and_to_go_on(name: str, schedule: str) -> None:
    """A run that was started must not be told at its resume that the drive is too small."""
    for durability in ("none", "step"):
        keys = [f"offload.durability={durability}", f"optimizer.update_schedule={schedule}"]
        plan = make_plan(load_config(name, keys), resumed=True)
        assert plan.fits, plan.problems
