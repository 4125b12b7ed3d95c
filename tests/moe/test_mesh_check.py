"""Every mesh that cannot work, or would be ignored, is refused with what is allowed (C56)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import TrainConfig
from moe.mesh import Mesh, ParallelConfig
from moe.mesh_check import check_mesh
from moe.params import rank_slice_rows
from ops.errors import ConfigError
from tests.moe.test_mesh import make_model

BATCH_MAJOR = {"micro_batch_order": "batch_major", "gradient_accumulation_steps": 2}


def refusal(parallel, train=None, **model):
    with pytest.raises(ConfigError) as caught:
        check_mesh(ParallelConfig(**parallel), make_model(**model), TrainConfig(**(train or {})))
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "model", "number", "choices"),
    [
        (16, {"num_key_value_heads": 8}, "num_attention_heads = 8", "1, 2, 4"),
        (8, {}, "num_key_value_heads = 4", "1, 2, 4"),
        (4, {"moe_intermediate_size": 6}, "moe_intermediate_size = 6", "1, 2"),
        (4, {"vocab_size": 66}, "vocab_size = 66", "1, 2"),
        (4, {"vocab_size": 60, "vocab_slice_rows": 18}, "vocab_slice_rows = 18", "1, 2"),
    ],
)
def test_operator_parallelism_has_to_divide_every_operator(size, model, number, choices):
    message = refusal({"model_parallel": size}, **model)
    assert f"parallel.model_parallel = {size} is not possible" in message
    assert f"model.{number}" in message
    assert message.endswith(f"allowed are {choices}.")


def test_shared_experts_have_to_be_divisible_too():
    message = refusal({"model_parallel": 8}, n_shared_experts=1, num_key_value_heads=8)
    assert "model.n_shared_experts * model.moe_intermediate_size = 12" in message
    assert message.endswith("allowed are 1, 2, 4.")


def test_every_number_that_is_not_divided_is_named():
    message = refusal({"model_parallel": 3})
    for number in ("num_attention_heads = 8", "num_key_value_heads = 4", "vocab_size = 64"):
        assert number in message
    assert "moe_intermediate_size" not in message


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        ({"data_parallel": 2, "expert_parallel": 4}, {}, "parallel.data_parallel = 2"),
        ({"data_parallel": 6, "expert_parallel": 3}, {}, "model.num_experts = 8"),
        ({"expert_parallel": 2}, {}, "parallel.data_parallel = 1; allowed is 1."),
        ({"data_parallel": 6, "expert_parallel": 6}, {}, "allowed are 1, 2."),
    ],
)
def test_expert_parallelism_has_to_divide_data_parallelism_and_experts(parallel, model, message):
    found = refusal(parallel, **model)
    assert f"parallel.expert_parallel = {parallel['expert_parallel']} is not possible" in found
    assert message in found


@pytest.mark.parametrize(
    ("parallel", "messages"),
    [
        (
            {"pipeline_stage": 4},
            (
                "parallel.pipeline_stage = 4",
                "= 6",
                "allowed are 1, 2, 3, 6 or parallel.pipeline_layers = [2, 2, 1, 1].",
            ),
        ),
        (
            {"pipeline_stage": 3, "pp_interleave_num": 3},
            ("3 * 3 chunks", "allowed are 2 or parallel.pp_interleave_num = 1, 2."),
        ),
        (
            {"pipeline_stage": 2, "pp_interleave_num": 4},
            ("2 * 4 chunks", "allowed are parallel.pp_interleave_num = 1, 3."),
        ),
        (
            {"pipeline_stage": 2, "pipeline_layers": [2, 3]},
            ("pipeline_layers = [2, 3]", "2 numbers", "= 6", "2 with the sum 5", "are [3, 3], []"),
        ),
        ({"pipeline_stage": 2, "pipeline_layers": [1, 2, 3]}, ("2 numbers", "3 with the sum 6")),
    ],
)
def test_layers_have_to_fill_the_chunks(parallel, messages):
    found = refusal(parallel)
    for message in messages:
        assert message in found


@pytest.mark.parametrize("layers", [[0, 6], [-1, 7], [True, 5], ["a", 3], [2.0, 4]])
def test_a_chunk_has_a_whole_number_of_layers(layers):
    with pytest.raises(ConfigError, match=r"pipeline_layers.*whole numbers of at least 1"):
        ParallelConfig(pipeline_stage=2, pipeline_layers=layers)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"optimizer_parallel": False}, "parallel.optimizer_parallel = False"),
        (
            {"optimizer_parallel": False, "model_parallel": 2},
            "allowed are true or parallel.data_parallel = 2.",
        ),
        ({"use_seq_parallel": True}, "parallel.use_seq_parallel = True"),
        (
            {"use_seq_parallel": True, "data_parallel": 2},
            "allowed are false or parallel.model_parallel = 2, 4.",
        ),
        ({"pp_interleave_num": 2}, "parallel.pp_interleave_num = 2"),
        ({"pipeline_layers": [6]}, "parallel.pipeline_layers = [6]"),
        (
            {"pipeline_schedule": "1f1b"},
            "allowed are breadth_first or parallel.pipeline_stage = 2, 3, 6.",
        ),
    ],
)
def test_a_key_without_effect_is_refused(parallel, message):
    found = refusal(parallel, BATCH_MAJOR)
    assert message in found and "no effect" in found


def test_1f1b_runs_one_chunk_a_stage_and_one_micro_batch_at_a_time():
    parallel = {"pipeline_stage": 2, "pipeline_schedule": "1f1b"}
    found = refusal(parallel)
    assert "train.micro_batch_order = 'layer_major' is not possible" in found
    assert "allowed are batch_major or parallel.pipeline_schedule = breadth_first." in found
    found = refusal({**parallel, "pp_interleave_num": 3}, BATCH_MAJOR)
    assert "parallel.pp_interleave_num = 3" in found
    assert found.endswith("allowed are 1 or parallel.pipeline_schedule = breadth_first.")
    check_mesh(ParallelConfig(**parallel), make_model(), TrainConfig(**BATCH_MAJOR))


def test_sequence_parallelism_divides_the_tokens_of_a_micro_batch():
    parallel = {"model_parallel": 4, "use_seq_parallel": True}
    found = refusal(parallel, {"micro_batch_size": 3, "seq_len": 2})
    assert "micro_batch_size * train.seq_len = 6" in found
    assert found.endswith("allowed are false or train.micro_batch_size = 2.")
    check_mesh(ParallelConfig(**parallel), make_model(), TrainConfig(micro_batch_size=2, seq_len=2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pipeline_stage", 0),
        ("data_parallel", -1),
        ("model_parallel", True),
        ("expert_parallel", 1.0),
        ("pp_interleave_num", 0),
        ("optimizer_parallel", 1),
        ("use_seq_parallel", "yes"),
        ("pipeline_schedule", "gpipe"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=rf"parallel\.{key} = .* is not possible: allowed is"):
        ParallelConfig(**{key: value})


def wrong_number(num_ranks, **parallel):
    with pytest.raises(ConfigError) as caught:
        check_mesh(ParallelConfig(**parallel), make_model(), TrainConfig(), num_ranks)
    return str(caught.value)


def test_the_started_ranks_have_to_be_those_of_the_mesh():
    mesh = {"data_parallel": 2, "model_parallel": 2, "expert_parallel": 2}
    check_mesh(ParallelConfig(**mesh), make_model(), TrainConfig(), 4)
    found = wrong_number(8, **mesh)
    assert "1 * 2 * 2 = 4 ranks, but 8 are running: allowed are 4 ranks" in found
    assert found.endswith("(`headrace launch -n 4`) or parallel.data_parallel = 4.")
    # Three ranks cannot share the experts in pairs; as replicas they can be a mesh of their own.
    assert wrong_number(3, **mesh).endswith("allowed is 4 ranks (`headrace launch -n 4`).")
    found = wrong_number(3, data_parallel=2, model_parallel=2)
    assert found.endswith("or a mesh of 3 ranks such as 1 * 3 * 1.")
    found = wrong_number(2)
    assert "= 1 rank, but 2 are running: allowed are 1 rank (`headrace launch -n 1`) or" in found


def test_no_data_parallelism_is_suggested_to_whom_it_would_be_refused():
    """`data_parallel = 1` was, with an `optimizer_parallel: false` that needs more than one."""
    found = wrong_number(1, data_parallel=2, optimizer_parallel=False)
    assert found.endswith("2 ranks, but 1 is running: allowed is 2 ranks (`headrace launch -n 2`).")


@pytest.mark.parametrize(
    ("parallel", "ending"),
    [
        (
            {"pp_interleave_num": 2},
            "allowed are 2, 4 or parallel.pipeline_layers = [2, 2, 1, 1, 1, 1].",
        ),
        (
            {"pipeline_schedule": "1f1b"},
            "allowed are 2, 4, 8 or parallel.pipeline_layers = [3, 3, 2].",
        ),
    ],
)
def test_no_single_stage_is_suggested_to_whom_it_would_be_refused(parallel, ending):
    """It said that 1, 2, 4 are allowed; one stage has nothing to interleave and no schedule."""
    found = refusal({"pipeline_stage": 3, **parallel}, BATCH_MAJOR, num_hidden_layers=8)
    assert "num_hidden_layers = 8" in found and found.endswith(ending)


def test_two_mistakes_are_told_when_no_single_change_is_enough():
    found = refusal({"model_parallel": 3, "pipeline_stage": 4})
    assert "parallel.model_parallel = 3 is not possible" in found
    assert "no other value of one key is enough: with parallel.model_parallel = 1" in found
    assert "parallel.pipeline_stage = 4 is refused, as" in found


CHOICE = re.compile(
    r"(?:(parallel|train)\.)(\w+) = ((?:\[[\d, ]*\]|\w+)(?:, (?:\[[\d, ]*\]|\w+))*)"
)
AXES = re.compile(r"such as (\d+) \* (\d+) \* (\d+)")


def printed_choices(message):
    """Each choice of a refusal, as (section, name, value)."""
    refused = re.match(r"(parallel|train)\.(\w+) = .* is not possible: ", message)
    _, allowed, listed = re.fullmatch(r"(.*)\ballowed (is|are) (.*)\.", message, re.S).groups()
    found = []
    for text in listed.split(" or "):
        whole = CHOICE.fullmatch(text)
        section, name, values = whole.groups() if whole else (*refused.groups(), text)
        found += [(section, name, value) for value in yaml.safe_load(f"[{values}]")]
    assert allowed == ("is" if len(found) == 1 else "are")
    return found


small_meshes = st.builds(
    ParallelConfig,
    pipeline_stage=st.integers(1, 5),
    data_parallel=st.integers(1, 4),
    model_parallel=st.integers(1, 4),
    expert_parallel=st.integers(1, 4),
    optimizer_parallel=st.booleans(),
    use_seq_parallel=st.booleans(),
    pipeline_schedule=st.sampled_from(["breadth_first", "1f1b"]),
    pp_interleave_num=st.integers(1, 3),
    pipeline_layers=st.just([]) | st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
small_models = st.builds(
    make_model,
    num_hidden_layers=st.integers(1, 8),
    num_experts=st.sampled_from([2, 3, 4, 8]),
    num_key_value_heads=st.sampled_from([1, 2, 4]),
    vocab_slice_rows=st.sampled_from([12, 64]),
    n_shared_experts=st.integers(0, 1),
)
small_trains = st.builds(
    TrainConfig,
    seq_len=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    micro_batch_order=st.sampled_from(["layer_major", "batch_major"]),
)


@settings(deadline=None, max_examples=400)
@given(small_meshes, small_models, small_trains)
def test_every_choice_that_is_printed_is_accepted(parallel, model, train):
    try:
        check_mesh(parallel, model, train)
    except ConfigError as error:
        message = str(error)
    else:
        return
    if "no other value of one key is enough" in message:
        return
    for section, name, value in printed_choices(message):
        if section == "train":
            check_mesh(parallel, model, replace(train, **{name: value}))
        else:
            check_mesh(replace(parallel, **{name: value}), model, train)


@settings(deadline=None, max_examples=400)
@given(small_meshes, small_models, small_trains, st.integers(1, 24))
def test_every_mesh_that_is_printed_for_a_number_of_ranks_is_accepted(
    parallel, model, train, num_ranks
):
    try:
        check_mesh(parallel, model, train)
    except ConfigError:
        return
    try:
        check_mesh(parallel, model, train, num_ranks)
    except ConfigError as error:
        message = str(error)
    else:
        return
    for size in re.findall(r"parallel.data_parallel = (\d+)", message):
        check_mesh(replace(parallel, data_parallel=int(size)), model, train, num_ranks)
    for axes in AXES.findall(message):
        pp, dp, op = map(int, axes)
        other = replace(parallel, pipeline_stage=pp, data_parallel=dp, model_parallel=op)
        check_mesh(other, model, train, num_ranks)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(1, 200), st.integers(1, 64))
def test_an_accepted_mesh_divides_every_vocabulary_slice(op, vocab, slice_rows):
    model = make_model(
        vocab_size=vocab,
        vocab_slice_rows=slice_rows,
        num_attention_heads=op,
        num_key_value_heads=op,
        moe_intermediate_size=op,
    )
    config = ParallelConfig(model_parallel=op)
    try:
        check_mesh(config, model, TrainConfig())
    except ConfigError:
        slices = [min(slice_rows, vocab - row) for row in range(0, vocab, slice_rows)]
        assert vocab % op or (len(slices) > 1 and any(rows % op for rows in slices))
        return
    rows = [
        row
        for rank in range(op)
        for first, count in rank_slice_rows(model, Mesh(config).share(model, rank))
        for row in range(first, first + count)
    ]
    assert sorted(rows) == list(range(vocab))
