"""Every mesh that cannot work, or would be ignored, is refused with what is allowed (C56)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import TrainConfig
from moe.mesh import Mesh, ParallelConfig
from moe.mesh_check import check_mesh, check_num_ranks
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
        ({"expert_parallel": 2}, {}, "parallel.data_parallel = 1; allowed are 1."),
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
            ("parallel.pipeline_stage = 4", "= 6", "1, 2, 3, 6 with", "parallel.pipeline_layers"),
        ),
        (
            {"pipeline_stage": 3, "pp_interleave_num": 3},
            ("3 * 3 chunks", "allowed are 1, 2 with parallel.pp_interleave_num = 3"),
        ),
        ({"pipeline_stage": 2, "pp_interleave_num": 4}, ("products of 1, 2, 3, 6",)),
        (
            {"pipeline_stage": 2, "pipeline_layers": [2, 3]},
            ("pipeline_layers = [2, 3]", "2 numbers", "= 6", "2 with the sum 5"),
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
        ({"optimizer_parallel": False, "model_parallel": 2}, "parallel.data_parallel above 1"),
        ({"use_seq_parallel": True}, "parallel.use_seq_parallel = True"),
        ({"use_seq_parallel": True, "data_parallel": 2}, "parallel.model_parallel above 1"),
        ({"pp_interleave_num": 2}, "parallel.pp_interleave_num = 2"),
        ({"pipeline_layers": [6]}, "parallel.pipeline_layers = [6]"),
        ({"pipeline_schedule": "1f1b"}, "allowed is breadth_first"),
    ],
)
def test_a_key_without_effect_is_refused(parallel, message):
    found = refusal(parallel, BATCH_MAJOR)
    assert message in found and "no effect" in found


def test_1f1b_runs_one_chunk_a_stage_and_one_micro_batch_at_a_time():
    parallel = {"pipeline_stage": 2, "pipeline_schedule": "1f1b"}
    found = refusal(parallel)
    assert "train.micro_batch_order = 'layer_major' is not possible" in found
    assert "allowed is batch_major" in found
    found = refusal({**parallel, "pp_interleave_num": 3}, BATCH_MAJOR)
    assert "parallel.pp_interleave_num = 3" in found and "allowed is 1" in found
    check_mesh(ParallelConfig(**parallel), make_model(), TrainConfig(**BATCH_MAJOR))


def test_sequence_parallelism_divides_the_tokens_of_a_micro_batch():
    parallel = {"model_parallel": 4, "use_seq_parallel": True}
    found = refusal(parallel, {"micro_batch_size": 3, "seq_len": 2})
    assert "micro_batch_size * train.seq_len = 6" in found and "multiple of 4" in found
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


def test_the_started_ranks_have_to_be_those_of_the_mesh():
    config = ParallelConfig(data_parallel=2, model_parallel=2, expert_parallel=2)
    check_num_ranks(config, 4)
    with pytest.raises(ConfigError, match=r"1 \* 2 \* 2 = 4 ranks, but 8 are running") as caught:
        check_mesh(config, make_model(), TrainConfig(), num_ranks=8)
    assert "headrace launch -n 4" in str(caught.value)
    assert "parallel.data_parallel = 4" in str(caught.value)
    with pytest.raises(ConfigError, match=r"3 are running.*a mesh of 3, .*\(1, 3\)"):
        check_num_ranks(config, 3)
    with pytest.raises(ConfigError, match="1 is running"):
        check_num_ranks(config, 1)


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
