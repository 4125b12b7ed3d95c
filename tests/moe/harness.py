"""A small real model on MindSpore, trained for a few steps under any configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from launch.build import initialize, make_engine, make_plan, open_store
from launch.config import RunConfig
from moe.digest import weights_digest
from moe.memory import stage_dims
from moe.step import TrainingStep
from ops.backend import MindSporeBackend
from ops.kernels.pool import KernelPool
from ops.nn.stages import Stages

MODEL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_slice_rows": 32,
    "initializer_range": 0.2,
    "n_shared_experts": 1,
}
TRAIN: dict[str, Any] = {
    "steps": 8,
    "seq_len": 8,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
HUGE = 1 << 28
Batches = Callable[[RunConfig, int], tuple[np.ndarray, np.ndarray]]


@dataclass
class Trained:
    """What a run produced."""

    losses: list[str]
    norms: list[float]
    digest: str
    idle: int
    peaks: dict[str, int]
    evals: list[float]
    engine: Any


def make_config(
    path: Path,
    *,
    device: int = HUGE,
    host: int = HUGE,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **offload: Any,
) -> RunConfig:
    """The harness's model with these overrides; capacities in bytes."""
    return RunConfig.from_dict(
        {
            "name": "harness",
            "model": MODEL | (model or {}),
            "train": TRAIN | (train or {}),
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3} | (optimizer or {}),
            "offload": {
                "device": {"capacity": device},
                "host": {"capacity": host},
                "nvme": {"capacity": HUGE, "path": str(path)},
                "prefetch_buffer_size": 1 << 16,
                "io_workers": 2,
            }
            | offload,
            "runtime": {"threads": 2},
        }
    )


def smallest(path: Path, **options: Any) -> RunConfig:
    """The same with the smallest device and host budgets the plan accepts."""
    tiers = make_plan(make_config(path, device=1, host=1, **options)).tiers
    return make_config(
        path,
        device=tiers["device"].minimum_bytes,
        host=tiers["host"].minimum_bytes,
        **options,
    )


def batch(config: RunConfig, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of step `number`: Zipf-like, so that a few experts see most tokens."""
    rng = np.random.default_rng(number)
    shape = (config.train.batch_sequences, config.train.seq_len + 1)
    tokens = np.minimum(rng.zipf(1.6, shape) - 1, config.model.vocab_size - 1).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


@cache
def shared_backend() -> MindSporeBackend:
    """The one backend of the test process.

    Threads of MindSpore wait for each other in a loop: two in each of the processes of pytest-xdist
    would fight for the cores, and tests would last twice as long.
    """
    backend = MindSporeBackend()
    backend.configure(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    return backend


def run(
    config: RunConfig,
    steps: int = 5,
    *,
    evaluate: bool = False,
    batches: Batches = batch,
    **options: Any,
) -> Trained:
    """Train `steps` steps from scratch; `options` go to the engine's parts."""
    plan = make_plan(config)
    assert plan.fits, plan.problems
    backend = shared_backend()
    stages = Stages(stage_dims(config.model, config.train), config.train.compute_dtype)
    store = open_store(config, plan)
    try:
        with KernelPool(2) as pool:
            engine = make_engine(config, plan, backend, pool, store, **options)
            try:
                return _train(config, engine, stages, backend, steps, evaluate, batches)
            finally:
                engine.close()
    finally:
        if store is not None:
            store.close(delete=True)


def _train(
    config: RunConfig,
    engine: Any,
    stages: Stages,
    backend: Any,
    steps: int,
    evaluate: bool,
    batches: Batches,
) -> Trained:
    initialize(config, engine)
    step = TrainingStep(config.model, config.train, engine, stages, backend)
    losses, norms, evals, idle = [], [], [], 0
    for number in range(1, steps + 1):
        result = step.train(*batches(config, number), 1e-2 / number)
        losses.append(float(result.loss).hex())
        norms.append(result.outcome.grad_norm)
        idle += result.outcome.idle_units
        if evaluate:
            engine.drain()
            evals.append(step.evaluate(*batches(config, 1000 + number)))
    digest = weights_digest(engine)
    return Trained(losses, norms, digest, idle, engine.peak_bytes(), evals, engine)
