"""The run's configuration: bad input, cross checks, round trips (C56)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.compose import dotted_keys, parse_mapping
from launch.config import SIZE_KEYS, RunConfig, RuntimeConfig, exact_size, load_config, preset_names
from ops.errors import ConfigError
from ops.units import parse_bytes

MINIMAL = """
model: {vocab_size: 260, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2,
        num_key_value_heads: 1, head_dim: 4, moe_intermediate_size: 8, num_experts: 2,
        num_experts_per_tok: 1}
offload: {device: {capacity: 1MiB}, host: {capacity: 2MiB}, nvme: {capacity: 4MB, path: x/y}}
"""


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_round_trips_as_values_and_as_yaml(name: str) -> None:
    config = load_config(name)
    assert config.name == name
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(parse_mapping(config.to_yaml(), "t")) == config


def test_a_file_gets_every_default_and_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "my run.v2.yaml"
    path.write_text(MINIMAL)
    config = load_config(str(path))
    assert config.name == "my-run.v2"
    assert config.offload.nvme.capacity == 4_000_000
    assert config.offload.nvme.path == "x/y"
    assert config.train.steps == 100
    assert config.parallel.data_parallel == 1


def test_a_file_may_name_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(MINIMAL + "name: first\n")
    assert load_config(str(path)).name == "first"
    assert load_config(str(path), ["name=second"]).name == "second"
    with pytest.raises(ConfigError, match="name = 'a/b' is not possible"):
        load_config(str(path), ["name=a/b"])


def test_overrides_change_the_preset() -> None:
    overrides = ["offload.host.capacity=0.5GiB", "optimizer.learning_rate=1e-4"]
    config = load_config("tiny-moe", overrides)
    assert config.offload.host.capacity == 2**29
    assert config.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stps=3", "train.stps is not a configuration key; did you mean train.steps?"),
        ("train.learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("optimizer.lr=1", "optimizer.lr is not a configuration key; the keys of optimizer are"),
        ("offload.recompute=full", "did you mean train.recompute?"),
        ("ofload.pipeline=sync", "ofload is not a configuration key; did you mean offload?"),
        ("model.num_experts_per_tok=9", "allowed is at most model.num_experts = 8"),
        ("model.num_experts=0", "model.num_experts = 0 is not possible"),
        ("model.num_key_value_heads=3", "allowed is a divisor of model.num_attention_heads = 8"),
        ("model.head_dim=33", "an even number"),
        ("model.qk_norm=no", "model.qk_norm = 'no' is not possible: allowed is true or false"),
        ("train.steps=0", "train.steps = 0 is not possible"),
        ("train.steps=1.5", "train.steps = 1.5 is not possible: allowed is a whole number"),
        ("train.recompute=some", "allowed is none, selective, full"),
        ("train.recompute_every=2", "allowed is 1 unless train.recompute is full"),
        ("train.weight_dtype=float16", "exactly when train.compute_dtype is float16"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate = 'fast' is not possible"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate = nan is not possible"),
        ("optimizer.beta2=1", "optimizer.beta2 = 1.0 is not possible"),
        ("optimizer.warmup_steps=99999", "allowed is at most train.steps = "),
        ("optimizer.loss_scale.initial=2", "no effect unless train.compute_dtype is float16"),
        ("offload.host.capacity=4XB", "offload.host.capacity = '4XB' is not possible"),
        ("offload.host.capacity=-1", "offload.host.capacity = -1 is not possible"),
        ("offload.device.capacity=0", "offload.device.capacity = 0 is not possible"),
        ("offload.nvme.capacity=lots", "offload.nvme.capacity = 'lots' is not possible"),
        ("offload.nvme.path=3", "offload.nvme.path = 3 is not possible"),
        ("offload.nvme.path=''", "offload.nvme.path = '' is not possible"),
        ("offload.prefetch_buffer_size=1.5.2GiB", "offload.prefetch_buffer_size = '1.5.2GiB'"),
        ("offload.io_request_size=1KiB", "allowed is 1MiB to 8MiB"),
        ("offload.device=48MiB", "allowed is a section with the keys capacity"),
        ("offload.pipeline=async", "allowed is overlap, sync"),
        ("offload.codec=zstd", "offload.codec = 'zstd' is not possible: allowed is none, lz4"),
        ("offload.durability=always", "allowed is step, checkpoint, none"),
        ("offload.durability=checkpoint", "train.save_minutes = 0 contradict each other"),
        ("train.save_steps=5", "offload.durability = none and train.save_steps = 5, train."),
        ("train.save_minutes=5", "train.save_minutes = 5 contradict each other"),
        ("train.alarm_multiple=0.5", "allowed is 0 (off) or a number above 1"),
        ("train.alarm_multiple=-2", "train.alarm_multiple = -2.0 is not possible"),
        ("train.save_minutes=-1", "train.save_minutes = -1.0 is not possible"),
        ("offload.keep_in_store=0", "offload.keep_in_store = 0 is not possible"),
        ("offload.nvme.path=[]", "allowed is the path of a directory, or a list of such paths"),
        ("offload.nvme.path=[a, a]", "allowed is each directory once"),
        ("parallel.data_parallel=0", "parallel.data_parallel = 0 is not possible"),
        ("parallel.model_parallel=8", "model.vocab_size = 260; allowed are 1, 2, 4."),
        (
            "parallel.pipeline_stage=2",
            "of each; allowed are 1, 3 or parallel.pipeline_layers = [2, 1].",
        ),
        (
            "parallel.pipeline_layers=2",
            "parallel.pipeline_layers = 2 is not possible: allowed is a",
        ),
        ("parallel.use_seq_parallel=true", "no effect with parallel.model_parallel = 1"),
        ("parallel.tensor_parallel=1", "parallel.tensor_parallel is not a configuration key"),
        ("runtime.onednn_fpmath=fp16", "allowed is strict, bf16"),
        ("runtime.threads=-1", "runtime.threads = -1 is not possible"),
        ("runtime.collective_timeout=0", "allowed is a number of at least 1 and at most 2592000"),
        ("runtime.collective_timeout=.inf", "runtime.collective_timeout = inf is not possible"),
        ("runtime.collective_timeout=10min", "allowed is a number"),
        ("data.held_out_fraction=0", "data.held_out_fraction"),
        ("data.source=3", "data.source = 3 is not possible"),
    ],
)
def test_bad_input_is_refused_with_key_value_and_what_is_allowed(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny-moe", [override])
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_mesh_is_read_from_the_configuration_and_multiplies_the_batch() -> None:
    config = load_config(
        "tiny-moe",
        [
            "parallel={pipeline_stage: 2, pipeline_layers: [1, 2]}",
            "parallel.data_parallel=4",
            "parallel.model_parallel=2",
            "parallel.expert_parallel=2",
        ],
    )
    assert config.parallel.num_ranks == 16
    assert config.global_batch_sequences == 4 * config.train.batch_sequences
    assert RunConfig.from_dict(parse_mapping(config.to_yaml(), "t")) == config


def test_a_key_without_effect_is_refused() -> None:
    overrides = ["offload.idle_expert_policy=dense", "offload.replay_lag_max=8"]
    with pytest.raises(ConfigError, match=r"offload\.replay_lag_max = 8 has no effect"):
        load_config("tiny-moe", overrides)


def test_loss_scale_is_accepted_where_it_has_an_effect() -> None:
    overrides = [
        "train.compute_dtype=float16",
        "train.weight_dtype=float16",
        "optimizer.loss_scale.initial=1024",
    ]
    assert load_config("tiny-moe", overrides).optimizer.loss_scale.initial == 1024.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tiny-mo", "tiny-mo is neither a file nor a preset; did you mean tiny-moe?"),
        ("no/such.yaml", "no/such.yaml is neither a file nor a preset; the presets are mixtral"),
        ("/", "the configuration / cannot be read: Is a directory."),
        ("a\0b", "cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert message in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        load_config(str(path))


def test_missing_required_keys_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(MINIMAL.replace("hidden_size: 8, ", "").replace("head_dim: 4, ", ""))
    with pytest.raises(ConfigError, match=r"model\.hidden_size, model\.head_dim are missing"):
        load_config(str(path))


def test_threads_default_to_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 5, 7})
    assert RuntimeConfig().num_threads == 3
    assert RuntimeConfig(threads=8).num_threads == 8


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 3 * 2**20, 2**30 + 1, 2**40, 400 * 10**9])
def test_exact_sizes_are_read_back_exactly(nbytes: int) -> None:
    assert parse_bytes(exact_size(nbytes)) == nbytes


def test_size_keys_exist() -> None:
    assert set(dotted_keys(RunConfig)) >= SIZE_KEYS


def test_checkpoints_may_be_counted_in_steps_or_minutes() -> None:
    for overrides in (["train.save_minutes=0.5"], ["train.save_steps=2"]):
        both = [*overrides, "offload.durability=checkpoint"]
        assert load_config("tiny-moe", both).offload.durability == "checkpoint"
