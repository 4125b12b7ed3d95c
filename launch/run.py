"""A run from its first line to its report: opens, restores, trains, accounts, ends.

With several ranks every one of them comes here; what only one does (messages, files of the run) is
in the observer it was given. What may fail on one rank alone is agreed on before the next
collective.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.build import (
    check_start,
    compute_parts,
    initialize,
    make_engine,
    make_plan,
    make_plans,
    model_size,
    require_memory,
)
from launch.config import RunConfig
from launch.mesh_plan import mesh_lines
from launch.origin import Origin, find_origin
from launch.own_path import require_nothing_lost
from launch.rank_store import RankStore, open_rank_store
from launch.ranks import detect_ranks
from launch.restore import restore_from
from launch.resume import StartingPoint, save_plan, starting_point
from launch.same_run import require_same_text
from launch.world import AGREED
from moe.data.bigram import bigram_nats_per_token
from moe.data.load import RunData, load_data
from moe.data.stream import ALL_ROWS, BatchStream, Cursor, HeldOutBatch, evaluation_batches
from moe.mesh import Mesh, ParallelConfig
from moe.parallel import ParallelGroups, open_groups
from moe.save_plan import Saves, never
from offload.engine import OffloadEngine
from offload.nvme.store import NvmeStore
from offload.placement import MemoryPlan
from ops.comm.base import World
from ops.comm.single import SingleRank
from ops.errors import HeadraceError, PlanError
from ops.kernels.pool import KernelPool
from ops.process import available_bytes, peak_resident_bytes, reset_peak, resident_bytes
from ops.trace import NO_TRACE, Tracer

if TYPE_CHECKING:  # these import MindSpore
    from launch.progress import Observers
    from moe.trainer import RunTotals, Trainer
    from ops.backend import MindSporeBackend

COMM_SHARE_HIGH = 0.2


@dataclass(frozen=True)
class _Rank:
    """What a rank knows of its place, and what it trains with."""

    config: RunConfig
    groups: ParallelGroups
    plan: MemoryPlan
    data: RunData
    bigram: float | None
    observer: Observers
    trace: Tracer

    @property
    def rows(self) -> slice:
        """The rows of a batch of all ranks that this one trains on."""
        count, index = self.config.train.batch_sequences, self.groups.share.at.dp
        return slice(index * count, (index + 1) * count)


def run_training(
    config: RunConfig,
    steps_limit: int | None,
    observer: Observers,
    stop: threading.Event,
    trace: Tracer = NO_TRACE,
    resume: str | None = None,
    world: World | None = None,
    save_asked: Callable[[], bool] = never,
) -> dict[str, Any]:
    """Train as configured; returns the report, which `observer` has been given too.

    With `resume` = `latest` the run goes on at the newest commit of its store, if there is one, or
    at that of the store or copy whose paths `resume` names; any mesh may have made it.
    What runs when is drawn into `trace`, which the caller closes. `world` are the ranks of
    `config.parallel`, this one among them; None is the only rank. `save_asked` is polled on rank 0
    at every step border: whether somebody asks for a commit.

    Raises PlanError before anything is taken when the plan does not fit, DataError for unusable
    text, StorageError, NumericAlarm or Stopped when the run ends early (after the report).
    """
    world = world or SingleRank()
    mesh = Mesh(config.parallel)
    assert mesh.num_ranks == world.size, "the command line compares them"
    origin = find_origin(config, resume, world)
    require_nothing_lost(config, origin, resume, world)
    if origin is None:  # a commit brings its weights
        check_start(config)
    start = starting_point(config, origin, resume is not None)
    own_bytes = 0 if origin is None else origin.own_bytes
    plan = make_plan(config, own_bytes > 0, world.rank, own_bytes)
    if not plan.fits:
        raise PlanError("; ".join((*plan.problems, *plan.remedies)))
    local_ranks = detect_ranks().local_size
    require_memory(config, plan, available_bytes(), world.rank, local_ranks)
    model, train = config.model, config.train
    with trace.span("start-up", "load data"):
        data = load_data(config.data, vocab_size=model.vocab_size, seq_len=train.seq_len)
        require_same_text(data.source, world)
        # Of what cannot be read from here on nothing may have been discarded.
        _stream(config, data, start.cursor)
        bigram = bigram_nats_per_token(data.train, data.held_out, model.vocab_size)
    observer.on_message(f"data: {data.describe()}")
    keeps_origin = origin is not None and origin.is_own
    for line in mesh_lines(config, make_plans(config, keeps_origin), _slots(world)):
        observer.on_message(line)
    with ExitStack() as parts:
        opened = open_rank_store(config, plan, origin, world, trace)
        parts.callback(opened.store.close)
        groups = open_groups(mesh, world, model)
        rank = _Rank(config, groups, plan, data, bigram, observer, trace)
        observer.on_message(start.message)
        saves = Saves(save_plan(config, data.source), save_asked)
        return _train(rank, opened, origin, start, steps_limit, stop, saves, parts)


def _slots(world: World) -> list[int]:
    """How many ranks in a row each machine has; asks all of them."""
    machines = world.all_gather_object(socket.gethostname())
    return [len(list(ranks)) for _, ranks in itertools.groupby(machines)]


def _train(
    rank: _Rank,
    opened: RankStore,
    origin: Origin | None,
    start: StartingPoint,
    steps_limit: int | None,
    stop: threading.Event,
    saves: Saves,
    parts: ExitStack,
) -> dict[str, Any]:
    """Make the engine, train to the end, hand over the report; `parts` are closed afterwards."""
    from moe.step import TrainingStep
    from moe.trainer import Trainer

    config, plan, observer, trace = rank.config, rank.plan, rank.observer, rank.trace
    train, groups, store = config.train, rank.groups, opened.store
    observer.on_message("compiling kernels and stages (kernels are kept for the next run)")
    with trace.span("start-up", "compile"):
        backend, stages = compute_parts(config, groups)
    baseline_bytes = resident_bytes()
    reset_peak()
    pool = parts.enter_context(KernelPool(config.runtime.num_threads))
    engine = make_engine(
        config, plan, backend, pool, store, groups, trace=trace, agree=opened.agree
    )
    parts.enter_context(closing(engine))
    step = TrainingStep(config.model, train, engine, stages, backend, groups)
    batches = _stream(config, rank.data, start.cursor, rank.rows)
    trainer = Trainer(
        train, config.optimizer, step, engine, store, batches,
        _held_out(rank), observer, stop, steps_limit, start.step, saves,
        groups.world, config.parallel.data_parallel, origin is not None and origin.in_place,
    )  # fmt: skip
    size = dict(zip(("parameters", "state_bytes"), model_size(config)))
    observer.on_start(_start_info(config, plan, size, trainer.num_steps, start.step))
    if start.resumed and start.step >= trainer.num_steps:
        observer.on_message(
            f"nothing is left to train: step {start.step} of {trainer.num_steps} is done; "
            "set train.steps (or --steps) above it to go on"
        )

    def restore() -> None:
        if origin is None:
            initialize(config, engine)
        elif origin.in_place:
            engine.restore()
        else:
            restore_from(origin, engine, config, groups.world, pool, store.directory)

    failure = _run(engine, trainer, trace, restore)
    if groups.world.size > 1 and not (failure is None or isinstance(failure, AGREED)):
        # Threads may wait in a collective for ranks that will not come, and closing would wait for
        # them. The caller ends the processes of all ranks (`launch/world.py`).
        parts.pop_all()
    report = _report(config, plan, engine, backend, trainer.totals, size)
    report |= _account_of_commits(start, engine, store, trainer.totals)
    report["comm"] = _account_of_ranks(rank, trainer.totals)
    if failure is None or isinstance(failure, AGREED):
        report["ranks"] = _account_of_each_rank(rank, engine)
    report["process"] = {
        "peak_rss_bytes": peak_resident_bytes(),
        "baseline_rss_bytes": baseline_bytes,
        "host_memory_locked": engine.host.is_locked,
    }
    report["bigram_loss"] = rank.bigram
    report["exit_reason"] = _reason(failure)
    _end(observer, report, failure)
    return report


def _account_of_each_rank(rank: _Rank, engine: OffloadEngine) -> list[dict[str, Any]]:
    """What every rank holds and held at most; entered by all ranks."""
    mine = {
        "parameters": rank.plan.parameters,
        "state_bytes": rank.plan.state_bytes,
        "peak_bytes": engine.peak_bytes(),
    }
    return rank.groups.world.all_gather_object(mine)


def advice(parallel: ParallelConfig) -> str:
    """What makes ranks of such a mesh wait less for each other."""
    ways = ["larger micro-batches"]
    if parallel.pipeline_stage > 1:
        ways.append("more of them a step (train.gradient_accumulation_steps)")
    if parallel.model_parallel > 1:
        ways.append("a smaller parallel.model_parallel")
    return ", or ".join(ways)


def _account_of_ranks(rank: _Rank, totals: RunTotals) -> dict[str, Any]:
    """How much this rank talked with others, and how long compute waited for it."""
    world = rank.groups.world
    if totals.comm_share > COMM_SHARE_HIGH:
        rank.observer.on_message(
            f"warning: compute waited {100 * totals.comm_share:.0f} % of the time in collectives: "
            f"{advice(rank.config.parallel)} would help"
        )
    counts = world.stats.snapshot()
    return {
        "ranks": world.size,
        "share": totals.comm_share,
        "by_kind": {kind: dataclasses.asdict(count) for kind, count in counts.items()},
    }


def _run(
    engine: OffloadEngine, trainer: Trainer, trace: Tracer, restore: Callable[[], None]
) -> BaseException | None:
    """Take values and train; the error that ended it, so that the report comes before the raise."""
    try:
        with trace.span("start-up", "values"):
            restore()
        trainer.run()
    except BaseException as error:
        return _settled(engine, error)
    return None


def _settled(engine: OffloadEngine, error: BaseException) -> BaseException:
    """`error`, once nobody waits for this rank any more; or the error that came before that.

    Where all ranks end together, the commit of their last step is under way: a rank that left it
    would leave the others waiting for its part.
    """
    if isinstance(error, AGREED):
        try:
            engine.drain()
            engine.commits.wait()
        except BaseException as second:
            return second
    return error


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


def _stream(
    config: RunConfig, data: RunData, cursor: Cursor, rows: slice = ALL_ROWS
) -> BatchStream:
    """The batches to train on; DataError when the cursor is of another text."""
    return BatchStream(
        data.train,
        config.train.seq_len,
        config.global_batch_sequences,
        cursor,
        vocab_size=config.model.vocab_size,
        rows=rows,
    )


def _held_out(rank: _Rank) -> Callable[[], Iterator[HeldOutBatch]]:
    config = rank.config
    return lambda: evaluation_batches(
        rank.data.held_out,
        config.train.seq_len,
        config.global_batch_sequences,
        config.train.eval_batches,
        vocab_size=config.model.vocab_size,
        rows=rank.rows,
    )


def _start_info(
    config: RunConfig, plan: MemoryPlan, size: Mapping[str, int], steps: int, first: int
) -> dict[str, Any]:
    return {
        "name": config.name,
        "steps": steps,
        "first_step": first,
        **size,
        "tokens_per_step": config.global_batch_sequences * config.train.seq_len,
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
    size: Mapping[str, int],
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
        **size,
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
            "published": commits.totals.published,
            "seconds": commits.totals.publish_seconds,
            "stall_seconds": commits.totals.stall_seconds,
            "stall_seconds_max": commits.totals.stall_seconds_max,
            "written_bytes": commits.totals.written_bytes,
            "last_step": last,
        },
        "redone_share": totals.redone_steps / trained if trained else 0.0,
        "codec": None if codec is None else dataclasses.asdict(codec),
    }
