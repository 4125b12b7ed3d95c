"""The only place where things are constructed: from a configuration to a plan or a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import RunConfig
from moe.memory import activation_specs, demands_of, is_batch_major, layouts_of, stage_dims
from moe.schedule import gradient_uses
from offload.placement import MemoryPlan, plan_memory
from ops.errors import HeadraceError, PlanError

if TYPE_CHECKING:
    from launch.progress import Observers
    from moe.trainer import RunTotals
    from offload.engine import OffloadEngine
    from offload.nvme.store import NvmeStore


def make_plan(config: RunConfig) -> MemoryPlan:
    """Where everything would live, and whether it fits; needs no MindSpore and no disk."""
    layouts = layouts_of(config.model, config.train, config.optimizer.decay_norms)
    demands = demands_of(config.model, config.train, layouts)
    return plan_memory(layouts, config.offload, demands)


def open_store(config: RunConfig, plan: MemoryPlan) -> NvmeStore | None:
    """The cold store the plan needs, or None; ConfigError when its path cannot be used."""
    from offload.nvme.store import NvmeStore

    required = plan.tiers["nvme"].used_bytes
    if not required:
        return None
    return NvmeStore(
        config.offload.nvme.path,
        config.offload.nvme.capacity,
        workers=config.offload.io_workers,
        request_bytes=config.offload.io_request_size,
        required_bytes=required,
    )


def run_training(
    config: RunConfig,
    run_dir: Path,
    steps_limit: int | None,
    observer: Observers,
    stop: threading.Event,
) -> dict[str, Any]:
    """Train as configured; returns the report, which `observer` has been given too.

    Raises PlanError before anything is taken when the plan does not fit, DataError for unusable
    text, StorageError, NumericAlarm or Stopped when the run ends early (after the report).
    """
    from moe.data.bigram import bigram_nats_per_token
    from moe.data.load import load_data
    from ops.kernels.warm_up import warm_up
    from ops.process import peak_resident_bytes, reset_peak, resident_bytes

    plan = make_plan(config)
    if not plan.fits:
        raise PlanError("; ".join((*plan.problems, *plan.remedies)))
    model, train = config.model, config.train
    data = load_data(config.data, vocab_size=model.vocab_size, seq_len=train.seq_len)
    batches = _batches(config, data)
    bigram = bigram_nats_per_token(data.train, data.held_out, model.vocab_size)
    store = open_store(config, plan)
    try:
        from ops.backend import MindSporeBackend
        from ops.kernels.pool import KernelPool
        from ops.nn.stages import Stages

        backend = MindSporeBackend()
        backend.configure(config.runtime.num_threads)
        stages = Stages(stage_dims(model, train), train.compute_dtype)
        observer.on_message(f"data: {data.describe()}")
        observer.on_message("compiling kernels and stages")
        warm_up()
        _warm_up_stages(stages, config)
        reset_peak()
        baseline = resident_bytes()
        with KernelPool(config.runtime.num_threads) as pool:
            engine = make_engine(config, plan, backend, pool, store)
            try:
                trainer = _make_trainer(
                    config,
                    engine,
                    stages,
                    backend,
                    store,
                    batches,
                    data,
                    observer,
                    stop,
                    steps_limit,
                )
                observer.on_start(_start_info(config, plan, trainer.num_steps))
                reason = "done"
                try:
                    initialize(config, engine)
                    trainer.run()
                except HeadraceError as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise
                finally:
                    process = {
                        "peak_rss_bytes": peak_resident_bytes(),
                        "baseline_rss_bytes": baseline,
                    }
                    report = _report(config, plan, engine, backend, trainer.totals)
                    report |= {"process": process, "bigram_loss": bigram, "exit_reason": reason}
                    observer.on_end(report)
            finally:
                engine.close()
        return report
    finally:
        if store is not None:
            store.close(delete=True)


def make_engine(
    config: RunConfig,
    plan: MemoryPlan,
    backend: Any,
    pool: Any,
    store: NvmeStore | None,
    **options: Any,
) -> OffloadEngine:
    """An engine for this configuration; `options` are further fields of `EngineParts`."""
    from offload.engine import EngineParts, OffloadEngine

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
    from moe.params import initial_values

    engine.initialize(lambda tensor: initial_values(tensor, config.train.seed))


def _batches(config: RunConfig, data: Any) -> Any:
    from moe.data.stream import BatchStream, Cursor

    train = config.train
    return BatchStream(
        data.train,
        train.seq_len,
        train.batch_sequences,
        Cursor(seed=config.data.seed),
        vocab_size=config.model.vocab_size,
    )


def _make_trainer(
    config: RunConfig,
    engine: OffloadEngine,
    stages: Any,
    backend: Any,
    store: NvmeStore | None,
    batches: Any,
    data: Any,
    observer: Any,
    stop: threading.Event,
    steps_limit: int | None,
) -> Any:
    from moe.data.stream import evaluation_batches
    from moe.step import TrainingStep
    from moe.trainer import Trainer

    model, train = config.model, config.train

    def held_out() -> Any:
        return evaluation_batches(
            data.held_out,
            train.seq_len,
            train.batch_sequences,
            train.eval_batches,
            vocab_size=model.vocab_size,
        )

    step = TrainingStep(model, train, engine, stages, backend)
    return Trainer(
        train, config.optimizer, step, engine, store, batches, held_out, observer, stop, steps_limit
    )


def _warm_up_stages(stages: Any, config: RunConfig) -> None:
    model, train = config.model, config.train
    stages.warm_up(
        num_sequences=train.micro_batch_size,
        ffn_size=model.moe_intermediate_size,
        shared_ffn_size=model.shared_intermediate_size,
        vocab_size=model.vocab_size,
        slice_rows=model.vocab_slice_rows,
    )


def _start_info(config: RunConfig, plan: MemoryPlan, steps: int) -> dict[str, Any]:
    return {
        "name": config.name,
        "steps": steps,
        "first_step": 0,
        "parameters": plan.parameters,
        "state_bytes": plan.state_bytes,
        "tokens_per_step": config.train.batch_sequences * config.train.seq_len,
        "tiers": {
            name: {"capacity_bytes": tier.capacity_bytes} for name, tier in plan.tiers.items()
        },
    }


def _report(
    config: RunConfig, plan: MemoryPlan, engine: OffloadEngine, backend: Any, totals: RunTotals
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
        "tokens_per_s": totals.tokens_per_s,
        "stall_share": totals.stall_share,
        "eval": totals.evals,
        "weights_digest": totals.weights_digest,
    }
