"""Which meshes suit a model and its batch; every refusal lists what would. Pure.

Nothing is adjusted silently: a value that cannot be obeyed, or has no effect, is an error. A choice
is listed only if the whole mesh is accepted with it, all other keys as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from moe.config import ModelConfig, TrainConfig
from moe.mesh import ParallelConfig
from ops.errors import ConfigError
from ops.validate import refuse

Choices = Sequence[tuple[str, Sequence[Any]]]
"""Keys of which one can be changed, and the values that each might then have."""


@dataclass(frozen=True)
class _Mesh:
    """What is checked together."""

    config: ParallelConfig
    model: ModelConfig
    train: TrainConfig

    def with_value(self, key: str, value: Any) -> _Mesh:
        """The same with another value of a dotted key."""
        section, _, name = key.partition(".")
        if section == "train":
            return replace(self, train=replace(self.train, **{name: value}))
        return replace(self, config=replace(self.config, **{name: value}))


@dataclass(frozen=True)
class _Problem:
    """Why the `value` of `key` is refused, and what might be put in its place."""

    key: str
    value: Any
    reason: str
    choices: Choices


def check_mesh(
    config: ParallelConfig, model: ModelConfig, train: TrainConfig, num_ranks: int | None = None
) -> None:
    """Raise ConfigError unless `model` and `train` can be divided as `config` says.

    `num_ranks`: how many ranks have been started, where that is known.
    """
    mesh = _Mesh(config, model, train)
    problem = _first_problem(mesh)
    if problem is not None:
        allowed = f"{problem.reason}; {_allowed(mesh, problem)}"
        raise refuse(problem.key, problem.value, allowed)
    if num_ranks is not None:
        check_num_ranks(config, model, train, num_ranks)


def check_num_ranks(
    config: ParallelConfig, model: ModelConfig, train: TrainConfig, num_ranks: int
) -> None:
    """Raise ConfigError unless the mesh, which is accepted, has exactly `num_ranks` ranks."""
    if config.num_ranks == num_ranks:
        return
    pp, dp, op = config.pipeline_stage, config.data_parallel, config.model_parallel
    choices = [f"{_ranks(config.num_ranks)} (`headrace launch -n {config.num_ranks}`)"]
    mesh = _Mesh(config, model, train)
    count, rest = divmod(num_ranks, pp * op)
    if not rest and _suits(mesh, "parallel.data_parallel", count):
        choices.append(f"parallel.data_parallel = {count}")
    else:
        choices += _other_mesh(mesh, num_ranks)
    raise ConfigError(
        "parallel.pipeline_stage * parallel.data_parallel * parallel.model_parallel = "
        f"{pp} * {dp} * {op} = {_ranks(config.num_ranks)}, but {num_ranks} "
        f"{'is' if num_ranks == 1 else 'are'} running: allowed {_verb(choices)} "
        f"{' or '.join(choices)}."
    )


def divisors(number: int) -> list[int]:
    """Every divisor of a positive number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _verb(choices: Sequence[Any]) -> str:
    return "is" if len(choices) == 1 else "are"


def _other_mesh(mesh: _Mesh, num_ranks: int) -> list[str]:
    """How to make so many ranks of the three axes, the expert groups as they are; nothing if no
    way suits the model. Of several, the one that changes the fewest axes."""
    config = mesh.config
    old = config.pipeline_stage, config.model_parallel
    found = []
    for pp in divisors(num_ranks):
        for op in divisors(num_ranks // pp):
            dp = num_ranks // pp // op
            other = replace(config, pipeline_stage=pp, data_parallel=dp, model_parallel=op)
            if _first_problem(replace(mesh, config=other)) is None:
                found.append(((pp != old[0]) + (op != old[1]), f"{pp} * {dp} * {op}"))
    if not found:
        return []
    return [f"a mesh of {_ranks(num_ranks)} such as {min(found)[1]}"]


# ---- what would be accepted


def _suits(mesh: _Mesh, key: str, value: Any) -> bool:
    try:
        return _first_problem(mesh.with_value(key, value)) is None
    except ConfigError:  # of that section alone
        return False


def _allowed(mesh: _Mesh, problem: _Problem) -> str:
    """The choices with which the whole mesh is accepted, or why there is none."""
    found = [
        (key, suitable)
        for key, values in problem.choices
        if (suitable := [value for value in values if _suits(mesh, key, value)])
    ]
    if not found:
        return f"no other value of one key is enough{_also(mesh, problem)}"
    texts = []
    for key, values in found:
        listed = ", ".join(_shown(value) for value in values)
        texts.append(listed if key == problem.key else f"{key} = {listed}")
    verb = _verb([value for _, values in found for value in values])
    return f"allowed {verb} {' or '.join(texts)}"


def _also(mesh: _Mesh, problem: _Problem) -> str:
    """What else is refused when this problem is not there any more."""
    for key, values in problem.choices:
        for value in values:
            other = _first_problem(mesh.with_value(key, value))
            if other is not None and other.reason != problem.reason:
                return (
                    f": with {key} = {_shown(value)}, {other.key} = {_shown(other.value)} is "
                    f"refused, as {other.reason}"
                )
    return ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- the rules


def _first_problem(mesh: _Mesh) -> _Problem | None:
    """The first rule that the mesh breaks."""
    return next(_problems(mesh), None)


def _problems(mesh: _Mesh) -> Iterator[_Problem]:
    """The rules that the mesh breaks; later ones may assume that earlier ones hold."""
    yield from _operator_problems(mesh)
    yield from _expert_problems(mesh)
    yield from _layer_problems(mesh)
    yield from _schedule_problems(mesh)
    yield from _sequence_problems(mesh)
    config = mesh.config
    if config.data_parallel == 1 and not config.optimizer_parallel:
        yield _Problem(
            "parallel.optimizer_parallel",
            config.optimizer_parallel,
            "it has no effect with parallel.data_parallel = 1",
            [("parallel.optimizer_parallel", [True]), ("parallel.data_parallel", [2])],
        )


def _not_dividing(key: str, value: int, numbers: dict[str, int]) -> Iterator[_Problem]:
    """The problem of a `value` that does not divide each of the named `numbers`."""
    failing = [f"{name} = {number}" for name, number in numbers.items() if number % value]
    if failing:
        choices = [(key, divisors(gcd(*numbers.values())))]
        yield _Problem(key, value, f"it has to divide {' and '.join(failing)}", choices)


def _operator_problems(mesh: _Mesh) -> Iterator[_Problem]:
    model = mesh.model
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
    yield from _not_dividing("parallel.model_parallel", mesh.config.model_parallel, numbers)


def _expert_problems(mesh: _Mesh) -> Iterator[_Problem]:
    numbers = {
        "parallel.data_parallel": mesh.config.data_parallel,
        "model.num_experts": mesh.model.num_experts,
    }
    yield from _not_dividing("parallel.expert_parallel", mesh.config.expert_parallel, numbers)


def _more_stages(mesh: _Mesh) -> tuple[str, Sequence[int]]:
    return "parallel.pipeline_stage", range(2, mesh.model.num_hidden_layers + 1)


def _layer_problems(mesh: _Mesh) -> Iterator[_Problem]:
    config, layers = mesh.config, mesh.model.num_hidden_layers
    chunks = config.num_chunks
    choices: Choices
    product = (
        f"parallel.pipeline_stage * parallel.pp_interleave_num = {config.pipeline_stage} * "
        f"{config.pp_interleave_num}"
    )
    if config.pipeline_stage == 1:
        for name, value, neutral in (
            ("pp_interleave_num", config.pp_interleave_num, 1),
            ("pipeline_layers", config.pipeline_layers, []),
        ):
            if value != neutral:
                key = f"parallel.{name}"
                choices = [(key, [neutral]), _more_stages(mesh)]
                yield _Problem(key, value, "it has no effect with one stage", choices)
    # One of the ways to divide the layers, unless there are too few.
    base, rest = divmod(layers, chunks)
    example = [[base + (chunk < rest) for chunk in range(chunks)]] if base else []
    stated = ("parallel.pipeline_layers", example)
    if config.pipeline_layers:
        counts = config.pipeline_layers
        if len(counts) != chunks or sum(counts) != layers:
            reason = (
                f"it needs {chunks} numbers ({product}) of at least 1 with the sum "
                f"model.num_hidden_layers = {layers}, these are {len(counts)} with the sum "
                f"{sum(counts)}"
            )
            choices = [(stated[0], [*example, []]), _more_stages(mesh)]
            yield _Problem("parallel.pipeline_layers", counts, reason, choices)
    elif layers % chunks:
        stages = range(1, layers + 1)
        yield _Problem(
            "parallel.pipeline_stage",
            config.pipeline_stage,
            f"{product} chunks have to divide model.num_hidden_layers = {layers}, or "
            "parallel.pipeline_layers to state the layers of each",
            [
                ("parallel.pipeline_stage", stages),
                ("parallel.pp_interleave_num", stages),
                stated,
            ],
        )


def _schedule_problems(mesh: _Mesh) -> Iterator[_Problem]:
    config = mesh.config
    if config.pipeline_schedule != "1f1b":
        return
    choices: Choices
    key = "parallel.pipeline_schedule"
    other = (key, ["breadth_first"])
    if config.pipeline_stage == 1:
        choices = [other, _more_stages(mesh)]
        yield _Problem(key, config.pipeline_schedule, "it has no effect with one stage", choices)
    if config.pp_interleave_num > 1:
        interleave = "parallel.pp_interleave_num"
        reason = f"{key} = 1f1b has one chunk of layers on each stage"
        choices = [(interleave, [1]), other]
        yield _Problem(interleave, config.pp_interleave_num, reason, choices)
    if mesh.train.micro_batch_order != "batch_major":
        # Said, not changed: the configuration a user reads is the one in force.
        order = "train.micro_batch_order"
        reason = f"{key} = 1f1b finishes one micro-batch after the other"
        choices = [(order, ["batch_major"]), other]
        yield _Problem(order, mesh.train.micro_batch_order, reason, choices)


def _sequence_problems(mesh: _Mesh) -> Iterator[_Problem]:
    config = mesh.config
    if not config.use_seq_parallel:
        return
    key, op, train = "parallel.use_seq_parallel", config.model_parallel, mesh.train
    off = (key, [False])
    if op == 1:
        more = ("parallel.model_parallel", divisors(mesh.model.num_key_value_heads)[1:])
        reason = "it has no effect with parallel.model_parallel = 1"
        yield _Problem(key, config.use_seq_parallel, reason, [off, more])
    if train.micro_batch_tokens % op:
        reason = (
            f"parallel.model_parallel = {op} has to divide train.micro_batch_size * train.seq_len "
            f"= {train.micro_batch_tokens}"
        )
        size = ("train.micro_batch_size", [op // gcd(op, train.seq_len)])
        yield _Problem(key, config.use_seq_parallel, reason, [off, size])
