"""Which meshes suit a model and its batch; every refusal lists what would. Pure.

Nothing is adjusted silently: a value that cannot be obeyed, or has no effect, is an error.
"""

from __future__ import annotations

from math import gcd

from moe.config import ModelConfig, TrainConfig
from moe.mesh import ParallelConfig
from ops.errors import ConfigError
from ops.validate import refuse


def check_mesh(
    config: ParallelConfig, model: ModelConfig, train: TrainConfig, num_ranks: int | None = None
) -> None:
    """Raise ConfigError unless `model` and `train` can be divided as `config` says.

    `num_ranks`: how many ranks have been started, where that is known.
    """
    _check_operators(config, model)
    _check_experts(config, model)
    _check_layers(config, model)
    _check_schedule(config, train)
    _check_sequence(config, train)
    if config.data_parallel == 1 and not config.optimizer_parallel:
        raise refuse(
            "parallel.optimizer_parallel",
            config.optimizer_parallel,
            "it has no effect with parallel.data_parallel = 1; allowed is true, or a "
            "parallel.data_parallel above 1",
        )
    if num_ranks is not None:
        check_num_ranks(config, num_ranks)


def check_num_ranks(config: ParallelConfig, num_ranks: int) -> None:
    """Raise ConfigError unless the mesh has exactly `num_ranks` ranks."""
    if config.num_ranks == num_ranks:
        return
    pp, dp, op = config.pipeline_stage, config.data_parallel, config.model_parallel
    fixed = pp * op
    choices = [f"{config.num_ranks} ranks (`headrace launch -n {config.num_ranks}`)"]
    if num_ranks % fixed == 0 and (num_ranks // fixed) % config.expert_parallel == 0:
        choices.append(f"parallel.data_parallel = {num_ranks // fixed}")
    else:
        choices.append(
            f"a mesh of {num_ranks}, whose axes are divisors of it ({_list(divisors(num_ranks))})"
        )
    raise ConfigError(
        "parallel.pipeline_stage * parallel.data_parallel * parallel.model_parallel = "
        f"{pp} * {dp} * {op} = {config.num_ranks} ranks, but {num_ranks} "
        f"{'is' if num_ranks == 1 else 'are'} running: allowed are {' or '.join(choices)}."
    )


def divisors(number: int) -> list[int]:
    """Every divisor of a positive number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _check_divides(key: str, value: int, numbers: dict[str, int]) -> None:
    """Refuse a `value` that does not divide each of the named `numbers`, listing those that do."""
    failing = [f"{name} = {number}" for name, number in numbers.items() if number % value]
    if failing:
        choices = _list(divisors(gcd(*numbers.values())))
        raise refuse(key, value, f"it has to divide {' and '.join(failing)}; allowed are {choices}")


def _check_operators(config: ParallelConfig, model: ModelConfig) -> None:
    numbers = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_key_value_heads": model.num_key_value_heads,
        "model.moe_intermediate_size": model.moe_intermediate_size,
    }
    if model.n_shared_experts:
        shared = "model.n_shared_experts * model.moe_intermediate_size"
        numbers[shared] = model.shared_intermediate_size
    numbers["model.vocab_size"] = model.vocab_size
    if model.vocab_size > model.vocab_slice_rows:  # then so do the rows of the last slice
        numbers["model.vocab_slice_rows"] = model.vocab_slice_rows
    _check_divides("parallel.model_parallel", config.model_parallel, numbers)


def _check_experts(config: ParallelConfig, model: ModelConfig) -> None:
    numbers = {
        "parallel.data_parallel": config.data_parallel,
        "model.num_experts": model.num_experts,
    }
    _check_divides("parallel.expert_parallel", config.expert_parallel, numbers)


def _check_layers(config: ParallelConfig, model: ModelConfig) -> None:
    chunks, layers = config.num_chunks, model.num_hidden_layers
    product = (
        f"parallel.pipeline_stage * parallel.pp_interleave_num = {config.pipeline_stage} * "
        f"{config.pp_interleave_num}"
    )
    if config.pipeline_stage == 1:
        for key, value, neutral in (
            ("pp_interleave_num", config.pp_interleave_num, 1),
            ("pipeline_layers", config.pipeline_layers, []),
        ):
            if value != neutral:
                allowed = f"it has no effect with one stage; allowed is {neutral}, or a "
                raise refuse(f"parallel.{key}", value, f"{allowed}parallel.pipeline_stage above 1")
    if config.pipeline_layers:
        counts = config.pipeline_layers
        if len(counts) != chunks or sum(counts) != layers:
            allowed = (
                f"allowed are {chunks} numbers ({product}) of at least 1 with the sum "
                f"model.num_hidden_layers = {layers}"
            )
            found = f"these are {len(counts)} with the sum {sum(counts)}"
            raise refuse("parallel.pipeline_layers", counts, f"{allowed}; {found}")
    elif layers % chunks:
        stages = [n for n in divisors(layers) if layers % (n * config.pp_interleave_num) == 0]
        choices = (
            f"allowed are {_list(stages)} with parallel.pp_interleave_num = "
            f"{config.pp_interleave_num}"
            if stages
            else f"allowed are products of {_list(divisors(layers))}"
        )
        raise refuse(
            "parallel.pipeline_stage",
            config.pipeline_stage,
            f"{product} chunks have to divide model.num_hidden_layers = {layers}; {choices}, or "
            "parallel.pipeline_layers that state the layers of each chunk",
        )


def _check_schedule(config: ParallelConfig, train: TrainConfig) -> None:
    if config.pipeline_schedule != "1f1b":
        return
    key = "parallel.pipeline_schedule"
    if config.pipeline_stage == 1:
        allowed = (
            "it has no effect with one stage; allowed is breadth_first, or a "
            "parallel.pipeline_stage above 1"
        )
        raise refuse(key, config.pipeline_schedule, allowed)
    if config.pp_interleave_num > 1:
        raise refuse(
            "parallel.pp_interleave_num",
            config.pp_interleave_num,
            f"with {key} = 1f1b allowed is 1; more needs breadth_first",
        )
    if train.micro_batch_order != "batch_major":
        # Said, not changed: the configuration a user reads is the one in force.
        raise refuse(
            "train.micro_batch_order",
            train.micro_batch_order,
            f"{key} = 1f1b finishes one micro-batch after the other; allowed is batch_major, or "
            f"{key} = breadth_first",
        )


def _check_sequence(config: ParallelConfig, train: TrainConfig) -> None:
    if not config.use_seq_parallel:
        return
    op = config.model_parallel
    if op == 1:
        allowed = (
            "it has no effect with parallel.model_parallel = 1; allowed is false, or a "
            "parallel.model_parallel above 1"
        )
        raise refuse("parallel.use_seq_parallel", config.use_seq_parallel, allowed)
    tokens = train.micro_batch_tokens
    if tokens % op:
        raise refuse(
            "parallel.use_seq_parallel",
            config.use_seq_parallel,
            f"parallel.model_parallel = {op} has to divide train.micro_batch_size * train.seq_len "
            f"= {tokens}; allowed is false, or tokens that are a multiple of {op}",
        )
