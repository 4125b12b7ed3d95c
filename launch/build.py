"""The only place where things are constructed: from a configuration to a plan or a run."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import RunConfig
from launch.mesh_plan import RankPlan, merge_alike
from launch.resume import StartingPoint, save_plan, starting_point
from moe.data.bigram import bigram_nats_per_token
from moe.data.load import RunData, load_data
from moe.data.stream import BatchStream, Cursor, Sequences, evaluation_batches
from moe.memory import activation_specs, demands_of, is_batch_major, layouts_of, stage_dims
from moe.mesh import Mesh
from moe.params import initial_values, slice_rows
from moe.schedule import gradient_uses
from offload.engine import OffloadEngine
from offload.nvme.aligned import AccessMode, choose_access
from offload.nvme.directory import path_error
from offload.nvme.store import NvmeStore
from offload.parts import EngineParts
from offload.placement import ALIGN_BYTES, MemoryPlan, plan_memory
from ops.device import Backend
from ops.errors import ConfigError, HeadraceError, PlanError
from ops.kernels.pool import KernelPool
from ops.process import available_bytes, peak_resident_bytes, reset_peak, resident_bytes
from ops.trace import NO_TRACE, Tracer
from ops.units import format_bytes

if TYPE_CHECKING:  # these import MindSpore, which a plan does without
    from launch.progress import Observers
    from moe.trainer import RunTotals, Trainer
    from ops.backend import MindSporeBackend
    from ops.nn.stages import Stages


def make_plan(config: RunConfig, resumed: bool = False, rank: int = 0) -> MemoryPlan:
    """Where everything of `rank` would live, and whether it fits; no MindSpore, no disk.

    A `resumed` run has to keep the commit it starts from.
    """
    share = Mesh(config.parallel).share(config.model, rank)
    layouts = layouts_of(config.model, config.train, config.optimizer.decay_norms, share)
    demands = demands_of(config.model, config.train, layouts, share)
    return plan_memory(
        layouts,
        config.offload,
        demands,
        speculative=config.optimizer.speculative,
        resumed=resumed,
    )


def make_plans(config: RunConfig, resumed: bool = False) -> list[RankPlan]:
    """The plans of all ranks, one for each set of ranks that are alike.

    Ranks of a stage differ in which heads, rows and experts they have, not in how many; only what
    is frozen can tell experts apart. So the cost is about that of one rank's plan of the model.
    """
    mesh = Mesh(config.parallel)
    alike: dict[tuple[int, int], list[int]] = {}
    for rank in range(mesh.num_ranks):
        at = mesh.coordinates(rank)
        alike.setdefault((at.pp, at.ep if config.train.freeze else 0), []).append(rank)
    return merge_alike(
        [RankPlan(tuple(ranks), make_plan(config, resumed, ranks[0])) for ranks in alike.values()]
    )


def require_memory(
    config: RunConfig, plan: MemoryPlan, available: int, rank: int = 0, local_ranks: int = 1
) -> None:
    """Raise PlanError when this machine has fewer than the bytes the plan will touch.

    `plan` is that of `rank`, one of `local_ranks` here that take about as much each. On CPU the
    device's memory is the host's. A capacity larger than what will be used costs nothing, because
    arenas take their pages on first use.
    """
    share = Mesh(config.parallel).share(config.model, rank)
    layouts = layouts_of(config.model, config.train, config.optimizer.decay_norms, share)
    # A gathered unit is dropped after its use; only whole ones stay on the device.
    kept = sum(layout.device_nbytes for layout in layouts if layout.gathered is layout)
    device = plan.tiers["device"]
    device_bytes = min(device.capacity_bytes, device.minimum_bytes + plan.ahead_bytes + kept)
    host_bytes = plan.tiers["host"].used_bytes
    if local_ranks * (host_bytes + device_bytes) > available:
        who = "the run" if local_ranks == 1 else f"each of the {local_ranks} ranks on it"
        raise PlanError(
            f"this machine has {format_bytes(available)} of memory available, but {who} would "
            f"take {format_bytes(host_bytes)} for offload.host.capacity and "
            f"{format_bytes(device_bytes)} for offload.device.capacity (on CPU the device's memory "
            "is the host's): lower one of them, see `headrace plan`."
        )


def open_store(
    config: RunConfig, plan: MemoryPlan, resume: bool = False, trace: Tracer = NO_TRACE
) -> NvmeStore:
    """The cold store; ConfigError when its path cannot be used.

    With `resume` it is opened at its newest whole commit, if it has one; else what an earlier run
    has left there is given up.
    """
    paths = config.offload.nvme.paths
    modes = [_access(path) for path in paths]
    return NvmeStore(
        paths,
        config.offload.nvme.capacity,
        workers=config.offload.io_workers,
        request_bytes=config.offload.io_request_size,
        required_bytes=plan.tiers["nvme"].used_bytes,
        keep_commits=config.offload.keep_in_store,
        codec=config.offload.codec,
        resume=resume,
        access=modes[0] if len(modes) == 1 else None,
        trace=trace,
    )


def _access(path: str) -> AccessMode:
    """How files at `path` are accessed; ConfigError where blocks take more room than is planned.

    Asked before the store is opened, which may discard what is there.
    """
    try:
        os.makedirs(path, exist_ok=True)
        access = choose_access(path)
    except OSError as error:
        raise path_error(path, error) from error
    if access.alignment_bytes > ALIGN_BYTES:
        raise ConfigError(
            f"offload.nvme.path: the file system of {path} asks for transfers in multiples of "
            f"{access.alignment_bytes} bytes, and plans are made for at most {ALIGN_BYTES}; choose "
            "a path on another file system."
        )
    return access


def run_training(
    config: RunConfig,
    run_dir: Path,
    steps_limit: int | None,
    observer: Observers,
    stop: threading.Event,
    trace: Tracer = NO_TRACE,
    resume: bool = False,
) -> dict[str, Any]:
    """Train as configured; returns the report, which `observer` has been given too.

    With `resume` the run goes on where the newest commit of the store was made, if there is one.

    What runs when is drawn into `trace`, which the caller closes.

    Raises PlanError before anything is taken when the plan does not fit, DataError for unusable
    text, StorageError, NumericAlarm or Stopped when the run ends early (after the report).
    """
    from moe.step import TrainingStep
    from moe.trainer import Trainer

    plan = make_plan(config, resume)
    if not plan.fits:
        raise PlanError("; ".join((*plan.problems, *plan.remedies)))
    require_memory(config, plan, available_bytes())
    model, train = config.model, config.train
    with trace.span("start-up", "load data"):
        data = load_data(config.data, vocab_size=model.vocab_size, seq_len=train.seq_len)
        bigram = bigram_nats_per_token(data.train, data.held_out, model.vocab_size)
    observer.on_message(f"data: {data.describe()}")
    store = open_store(config, plan, resume, trace)
    try:
        start = starting_point(config, store, resume)
        observer.on_message(start.message)
        batches = _batches(config, data, start.cursor)
        observer.on_message("compiling kernels and stages (kernels are kept for the next run)")
        with trace.span("start-up", "compile"):
            backend, stages = compute_parts(config)
        baseline_bytes = resident_bytes()
        reset_peak()
        with (
            KernelPool(config.runtime.num_threads) as pool,
            closing(make_engine(config, plan, backend, pool, store, trace=trace)) as engine,
        ):
            step = TrainingStep(model, train, engine, stages, backend)
            held_out = _held_out(config, data)
            trainer = Trainer(
                train, config.optimizer, step, engine, store, batches, held_out, observer,
                stop, steps_limit, start.step, save_plan(config),
            )  # fmt: skip
            observer.on_start(_start_info(config, plan, trainer.num_steps, start.step))
            if start.resumed and start.step >= trainer.num_steps:
                observer.on_message(
                    f"nothing is left to train: step {start.step} of {trainer.num_steps} is done; "
                    "set train.steps (or --steps) above it to go on"
                )
            failure = _run(config, engine, trainer, trace, start.resumed)
            report = _report(config, plan, engine, backend, trainer.totals)
            report |= _account_of_commits(start, engine, store, trainer.totals)
            report["process"] = {
                "peak_rss_bytes": peak_resident_bytes(),
                "baseline_rss_bytes": baseline_bytes,
                "host_memory_locked": engine.host.is_locked,
            }
            report["bigram_loss"] = bigram
            report["exit_reason"] = _reason(failure)
            _end(observer, report, failure)
        return report
    finally:
        store.close()


def _run(
    config: RunConfig, engine: OffloadEngine, trainer: Trainer, trace: Tracer, resumed: bool
) -> BaseException | None:
    """Initialise and train; the error that ended it, so that the report comes before the raise."""
    try:
        if resumed:
            with trace.span("start-up", "restore"):
                engine.restore()
        else:
            with trace.span("start-up", "initial values"):
                initialize(config, engine)
        trainer.run()
    except BaseException as error:
        return error
    return None


def _reason(failure: BaseException | None) -> str:
    return "done" if failure is None else f"{type(failure).__name__}: {failure}"


def _end(observer: Observers, report: dict[str, Any], failure: BaseException | None) -> None:
    """Hand over the report, then raise what ended the run; a second error never hides it."""
    try:
        observer.on_end(report)
    except HeadraceError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def compute_parts(config: RunConfig) -> tuple[MindSporeBackend, Stages]:
    """The backend and the stages, with every kernel and shape compiled."""
    from ops.backend import MindSporeBackend
    from ops.kernels.warm_up import warm_up as warm_up_kernels
    from ops.nn.stages import Stages
    from ops.nn.warm_up import warm_up as warm_up_stages

    model, train = config.model, config.train
    backend = MindSporeBackend(config.runtime.onednn_fpmath.upper())
    backend.configure(config.runtime.num_threads)
    stages = Stages(stage_dims(model, train), train.compute_dtype)
    warm_up_kernels()
    warm_up_stages(
        stages,
        train.micro_batch_size,
        ffn_size=model.moe_intermediate_size,
        shared_ffn_size=model.shared_intermediate_size,
        vocab_rows=[rows for _, rows in slice_rows(model)],
    )
    return backend, stages


def make_engine(
    config: RunConfig,
    plan: MemoryPlan,
    backend: Backend,
    pool: KernelPool,
    store: NvmeStore | None,
    **options: Any,
) -> OffloadEngine:
    """An engine for this configuration; `options` are further fields of `EngineParts`."""
    model, train = config.model, config.train
    parts = EngineParts(
        layouts=layouts_of(model, train, config.optimizer.decay_norms),
        plan=plan,
        backend=backend,
        pool=pool,
        store=store,
        activations=activation_specs(model, train),
        gradient_uses=gradient_uses(model),
        batch_major=is_batch_major(train),
        loss_scaling=train.compute_dtype == "float16",
        **options,
    )
    return OffloadEngine(parts, config.offload, config.optimizer)


def initialize(config: RunConfig, engine: OffloadEngine) -> None:
    """Give the engine the initial values that belong to `train.seed`."""
    engine.initialize(lambda tensor: initial_values(tensor, config.train.seed))


def _batches(config: RunConfig, data: RunData, cursor: Cursor) -> BatchStream:
    train = config.train
    return BatchStream(
        data.train,
        train.seq_len,
        train.batch_sequences,
        cursor,
        vocab_size=config.model.vocab_size,
    )


def _held_out(config: RunConfig, data: RunData) -> Callable[[], Iterator[Sequences]]:
    train = config.train
    return lambda: evaluation_batches(
        data.held_out,
        train.seq_len,
        train.batch_sequences,
        train.eval_batches,
        vocab_size=config.model.vocab_size,
    )


def _start_info(config: RunConfig, plan: MemoryPlan, steps: int, first: int) -> dict[str, Any]:
    return {
        "name": config.name,
        "steps": steps,
        "first_step": first,
        "parameters": plan.parameters,
        "state_bytes": plan.state_bytes,
        "tokens_per_step": config.train.batch_sequences * config.train.seq_len,
        "tiers": {
            name: {"capacity_bytes": tier.capacity_bytes} for name, tier in plan.tiers.items()
        },
    }


def _report(
    config: RunConfig,
    plan: MemoryPlan,
    engine: OffloadEngine,
    backend: MindSporeBackend,
    totals: RunTotals,
) -> dict[str, Any]:
    peaks = engine.peak_bytes()
    return {
        "arithmetic": {
            "weight_dtype": config.train.weight_dtype,
            "compute_dtype": config.train.compute_dtype,
            "grad_dtype": config.train.grad_dtype,
            "onednn_fpmath": backend.onednn_mode(),
            "threads": config.runtime.num_threads,
        },
        "tiers": {
            name: {"capacity_bytes": tier.capacity_bytes, "peak_bytes": peaks[name]}
            for name, tier in plan.tiers.items()
        },
        "parameters": plan.parameters,
        "state_bytes": plan.state_bytes,
        "steps": totals.steps,
        "redone_steps": totals.redone_steps,
        "tokens_per_s": totals.tokens_per_s,
        "stall_share": totals.stall_share,
        "eval": totals.evals,
        "weights_digest": totals.weights_digest,
    }


def _account_of_commits(
    start: StartingPoint, engine: OffloadEngine, store: NvmeStore, totals: RunTotals
) -> dict[str, Any]:
    """The report's account of what can be resumed, of guesses that failed, and of the codec."""
    commits, codec = engine.commits, store.stats().codec
    last = commits.last_step
    if last is None and start.resumed:
        last = start.step  # the commit it came from is kept
    trained = totals.steps - start.step
    return {
        "resumed_from": start.step if start.resumed else None,
        "commits": {
            "published": commits.num_published,
            "seconds": commits.publish_seconds,
            "last_step": last,
        },
        "redone_share": totals.redone_steps / trained if trained else 0.0,
        "codec": None if codec is None else dataclasses.asdict(codec),
    }
