"""The only place where things are constructed: from a configuration to a plan or a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launch.config import RunConfig
from launch.mesh_plan import RankPlan, merge_alike
from moe.memory import (
    activation_specs,
    demands_of,
    is_batch_major,
    is_sequence_parallel,
    layouts_of,
    stage_dims,
)
from moe.mesh import Mesh, Share
from moe.parallel import ParallelGroups
from moe.params import initial_values, rank_slice_rows
from moe.schedule import gradient_uses
from moe.weights.initial import check_initial_weights, initial_weights
from offload.engine import OffloadEngine
from offload.nvme.aligned import AccessMode, choose_access
from offload.nvme.directory import path_error
from offload.nvme.store import NvmeStore
from offload.parts import EngineParts
from offload.placement import ALIGN_BYTES, MemoryPlan, plan_memory, state_bytes
from ops.device import Backend
from ops.errors import ConfigError, PlanError
from ops.kernels.pool import KernelPool
from ops.trace import NO_TRACE, Tracer
from ops.units import format_bytes

if TYPE_CHECKING:  # these import MindSpore, which a plan does without
    from ops.backend import MindSporeBackend
    from ops.nn.stages import Stages


def make_plan(
    config: RunConfig, resumed: bool = False, rank: int = 0, retained_bytes: int = 0
) -> MemoryPlan:
    """Where everything of `rank` would live, and whether it fits; no MindSpore, no disk.

    A `resumed` run has to keep the commit it starts from, of `retained_bytes` if they are more
    than a commit of its own.
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
        retained_bytes=retained_bytes,
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


def model_size(config: RunConfig) -> tuple[int, int]:
    """Parameters of the whole model and bytes of its masters and moments; no mesh changes them."""
    model, train = config.model, config.train
    layouts = layouts_of(model, train, config.optimizer.decay_norms, Share.whole(model))
    return sum(layout.num_parameters for layout in layouts), state_bytes(layouts)


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
    config: RunConfig,
    plan: MemoryPlan,
    resume: bool = False,
    trace: Tracer = NO_TRACE,
    rank: int = 0,
    newest: int | None = None,
    before_discard: Callable[[], None] | None = None,
) -> NvmeStore:
    """The cold store of a rank; ConfigError when its path cannot be used.

    With `resume` it is opened at its newest whole commit (of a generation up to `newest`), if it
    has one; else `before_discard` is called, and what an earlier run has left is given up.
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
        rank=rank,
        resume=resume,
        newest=newest,
        before_discard=before_discard,
        access=modes[0] if len(modes) == 1 else None,
        trace=trace,
    )


def _access(path: str) -> AccessMode:
    """How files at `path` are accessed; ConfigError where blocks take more room than is planned.

    Asked before the store is opened, which may discard what is there. Every rank makes the path,
    which may be on a drive of its machine alone.
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


def compute_parts(
    config: RunConfig, groups: ParallelGroups | None = None
) -> tuple[MindSporeBackend, Stages]:
    """The backend and the stages of a rank, with every kernel and shape compiled.

    Entered by all ranks of a group of operator parallelism; without `groups`, by the only rank.
    """
    from ops.backend import MindSporeBackend
    from ops.kernels.warm_up import warm_up as warm_up_kernels
    from ops.nn.warm_up import warm_up as warm_up_stages

    model, train = config.model, config.train
    groups = groups or ParallelGroups.single(model)
    backend = MindSporeBackend(config.runtime.onednn_fpmath.upper())
    backend.configure(config.runtime.num_threads)
    stages = make_rank_stages(config, groups)
    warm_up_kernels()
    warm_up_stages(
        stages,
        train.micro_batch_size,
        ffn_size=model.moe_intermediate_size // groups.op.size,
        shared_ffn_size=model.shared_intermediate_size // groups.op.size,
        vocab_rows=[rows for _, rows in rank_slice_rows(model, groups.share)],
    )
    return backend, stages


def make_rank_stages(config: RunConfig, groups: ParallelGroups) -> Stages:
    """The stage functions of a rank, together with those it shares every operator with."""
    from ops.nn.operator_stages import make_stages

    return make_stages(
        stage_dims(config.model, config.train, groups.share),
        config.train.compute_dtype,
        groups.op,
        sequence_parallel=is_sequence_parallel(groups.share),
    )


def make_engine(
    config: RunConfig,
    plan: MemoryPlan,
    backend: Backend,
    pool: KernelPool,
    store: NvmeStore | None,
    groups: ParallelGroups | None = None,
    **options: Any,
) -> OffloadEngine:
    """A rank's engine for this configuration; `options` are further fields of `EngineParts`.

    Without `groups` it is the only rank.
    """
    model, train = config.model, config.train
    groups = groups or ParallelGroups.single(model)
    share = groups.share
    layouts = layouts_of(model, train, config.optimizer.decay_norms, share)
    parts = EngineParts(
        layouts=layouts,
        plan=plan,
        backend=backend,
        pool=pool,
        store=store,
        activations=activation_specs(model, train, share),
        gradient_uses=gradient_uses(model, share),
        batch_major=is_batch_major(train),
        loss_scaling=train.compute_dtype == "float16",
        sharing=groups.sharing(layouts),
        everyone=groups.world,
        is_told_here=lambda layout: share.is_first_of(layout.unit.expert is not None),
        **options,
    )
    return OffloadEngine(parts, config.offload, config.optimizer)


def initialize(config: RunConfig, engine: OffloadEngine) -> None:
    """Give the engine the weights in `train.init_from`, else the values of `train.seed`.

    Raises ConfigError when the directory does not hold this model, StorageError while reading it.
    """
    if config.train.init_from:
        where, dtype = config.train.init_from, config.train.weight_dtype
        with initial_weights(where, config.model, weight_dtype=dtype) as weights:
            engine.initialize(weights.values)
    else:
        engine.initialize(lambda tensor: initial_values(tensor, config.train.seed))


def check_start(config: RunConfig) -> None:
    """Raise ConfigError when what a new run would start with is not there, or of another model."""
    if config.train.init_from:
        check_initial_weights(config.train.init_from, config.model)
