"""`headrace checkpoint export` and `... import`: exchange with the safetensors world."""

from __future__ import annotations

import dataclasses
import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from launch.config import RunConfig, load_config
from launch.environment import versions
from launch.resume import save_plan
from launch.terminal import byte_bar, say
from moe.checkpoint import saved_ledger, saved_run
from moe.data.stream import Cursor
from moe.mesh import ParallelConfig
from moe.weights.directory import ExportDirectory
from moe.weights.export import DTYPES, Export, ExportOptions, facts_of
from moe.weights.facts import Facts, read_facts
from moe.weights.importing import Import
from moe.weights.names import IN_OUT, OUT_IN
from offload.checkpoint.catalog import Checkpoint, find_checkpoints, open_parts
from offload.checkpoint.units import UnitReader
from offload.loss_scale import LossScaler
from ops.errors import ConfigError
from ops.kernels.pool import KernelPool
from ops.units import format_bytes, parse_bytes

_VERSIONS = ("headrace", "mindspore", "numpy")

PathsArgument = Annotated[
    list[Path],
    typer.Argument(
        help="The path of a store or of a native copy; all of them, if there are several.",
        metavar="PATH...",
    ),
]


def export(
    paths: PathsArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="An empty or new directory.")],
    moments: Annotated[
        bool, typer.Option("--moments", help="Also the optimizer's state: it can be imported.")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 (the masters) or bfloat16.")
    ] = "float32",
    packed_experts: Annotated[
        bool,
        typer.Option("--packed-experts", help="Two tensors a layer: experts x in x out."),
    ] = False,
    transposed: Annotated[
        bool,
        typer.Option("--transposed", help="Packed: experts x out x in, as transformers 5 loads."),
    ] = False,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="The most bytes of a file.")
    ] = "4GiB",
    step: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it at run time
        typer.Option("--step", help="Which checkpoint; default: the newest."),
    ] = None,
) -> None:
    """Write a checkpoint as safetensors files. Exit: 0, 2 refused, 3 storage fault."""
    options = _options(moments, dtype, packed_experts, transposed, shard_size)
    console = Console()
    with ExitStack() as stack:
        checkpoint = _chosen(find_checkpoints([str(path) for path in paths]), step)
        parts = open_parts(checkpoint, hold=True)
        for part in parts:
            stack.callback(part.close)
        meta = parts[0].meta
        run = saved_run(meta)
        stored = [block.nbytes for part in parts for block in part.blocks.values()]
        run.require_held(len(parts), len(stored), sum(stored))
        ledger = saved_ledger(run, {rank: part.meta for rank, part in enumerate(parts)})
        directory = stack.enter_context(ExportDirectory(str(out)))
        pool = stack.enter_context(KernelPool(_num_threads()))
        source = UnitReader(
            dict(enumerate(parts)),
            run.layouts,
            ledger,
            run.optimizer.weight_decay,
            pool,
            replays=run.idle_expert_policy != "skip",
        )
        work = Export(run, options)
        told = {name: x for name, x in versions().items() if name in _VERSIONS}
        facts = facts_of(run, meta, ledger.step, options, told)
        with byte_bar("exporting") as begin:
            advance = begin(work.data_bytes)
            nbytes = work.write(source, ledger.step, directory, facts, advance, pool)
    what = "weights and moments" if moments else "weights"
    say(console, f"exported {what} of step {run.step} to {out}: {format_bytes(nbytes)}")


def import_checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Safetensors files.")],
    out: Annotated[Path, typer.Option("--out", metavar="NATIVE", help="A path for the store.")],
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--config", metavar="CONFIG", help="A YAML file or preset: the model."),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="KEY=VALUE", help="Override one key of CONFIG."),
    ] = None,
) -> None:
    """Make a checkpoint to resume at of safetensors files. Exit: 0, 2 refused, 3 storage fault."""
    if overrides and source is None:
        raise ConfigError("--set changes a key of --config CONFIG, which is not given.")
    config = None if source is None else load_config(source, overrides or ())
    facts = read_facts(str(directory))
    meta = _meta(str(directory), facts, config)
    work = Import(str(directory), meta, facts)
    with KernelPool(_num_threads()) as pool, byte_bar("importing") as begin:
        work.write(str(out), begin(work.data_bytes), pool)
    nbytes = format_bytes(work.data_bytes)
    say(
        Console(),
        f"imported {directory} as a checkpoint of step {meta['step']} to {out}: {nbytes}; resume "
        f"with --set {shlex.quote(f'offload.nvme.path={out}')} --resume latest",
    )


def _options(
    moments: bool, dtype: str, packed: bool, transposed: bool, shard_size: str
) -> ExportOptions:
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: allowed is {' or '.join(DTYPES)}.")
    if moments and dtype != "float32":
        raise ConfigError(
            f"--moments makes an export that a run can go on from, but --dtype {dtype} rounds the "
            "weights: allowed with it is float32."
        )
    if transposed and not packed:
        raise ConfigError("--transposed has no effect without --packed-experts.")
    try:
        shard_bytes = parse_bytes(shard_size)
    except ValueError as error:
        raise ConfigError(f"--shard-size: {error}.") from None
    if shard_bytes < 1:
        raise ConfigError(f"--shard-size {shard_size}: allowed is at least one byte.")
    form = (OUT_IN if transposed else IN_OUT) if packed else None
    return ExportOptions(dtype, moments, form, shard_bytes)


def _chosen(found: list[Checkpoint], step: int | None) -> Checkpoint:
    """The newest checkpoint, or the newest of `step`; ConfigError when it is incomplete."""
    wanted = found if step is None else [x for x in found if x.step == step]
    if not wanted:
        steps = ", ".join(str(x.step) for x in found)
        raise ConfigError(f"--step {step}: there is no such checkpoint; there are steps {steps}.")
    if not wanted[0].is_complete:
        whole = ", ".join(str(x.step) for x in found if x.is_complete) or "none"
        raise ConfigError(
            f"the checkpoint of step {wanted[0].step} is incomplete: "
            f"{'; '.join(wanted[0].missing)} (complete are those of steps: {whole})."
        )
    return wanted[0]


def _meta(directory: str, facts: Facts | None, config: RunConfig | None) -> dict[str, Any]:
    """What the commit says: of the exported run, of the run that `config` would begin, or both."""
    alone = dataclasses.asdict(ParallelConfig())
    if config is not None:
        config = dataclasses.replace(config, parallel=ParallelConfig())
        told = dict(save_plan(config).facts)
        if facts is not None and facts.has_moments:
            return facts.meta(**told)
        scaler = LossScaler(config.optimizer.loss_scale, config.train.compute_dtype == "float16")
        cursor = Cursor(seed=config.data.seed).to_json()
        return Facts(0, 0, False, {"cursor": cursor, **told}, scaler.to_json()).meta()
    if facts is None or not facts.has_moments:
        raise ConfigError(
            f"{directory} holds weights without moments: name the model and the run that they are "
            "for with --config CONFIG."
        )
    return facts.meta(ranks=1, parallel=alone)


def _num_threads() -> int:
    """Threads of the kernels: every core this process may use."""
    return len(os.sched_getaffinity(0))
