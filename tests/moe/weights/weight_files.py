"""Small models and their weights in safetensors files, written with the library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from launch.build import initialize, make_engine, make_plan, open_store
from launch.config import RunConfig
from moe.config import ModelConfig
from moe.weights.names import model_shapes
from offload.engine import OffloadEngine
from ops.device import NumpyBackend
from ops.kernels.pool import KernelPool
from tests.moe.harness import make_config

NUMPY = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
Tensors = dict[str, np.ndarray]

# The harness's model has shared experts, which no published architecture has with these names.
PLAIN: dict[str, Any] = {"n_shared_experts": 0}


def model_of(path: Path, **model: Any) -> ModelConfig:
    """The harness's model without shared experts."""
    return make_config(path, model=PLAIN | model).model


def random_weights(model: ModelConfig, dtype: str = "F32", seed: int = 3) -> Tensors:
    """Numbers of this dtype for every tensor of the model."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(NUMPY[dtype])
        for name, shape in model_shapes(model).items()
    }


def dtype_name(array: np.ndarray) -> str:
    """The dtype of an array in the words of safetensors."""
    return next(name for name, dtype in NUMPY.items() if array.dtype == dtype)


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file, by the library."""
    rows = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(rows, path, {"format": "pt"})


def save_shards(folder: Path, tensors: Mapping[str, np.ndarray], count: int) -> None:
    """`count` files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for index in range(count):
        file = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = names[index::count]
        save(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def packed(model: ModelConfig, tensors: Mapping[str, np.ndarray], form: str) -> Tensors:
    """The same weights with each layer's experts in two tensors, made with plain loops."""
    out = {name: array for name, array in tensors.items() if ".mlp.experts." not in name}
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        both, down = [], []
        for expert in range(model.num_experts):
            gate, up, last = (
                tensors[f"{prefix}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down")
            )
            stacked = np.concatenate([gate, up], axis=0)  # [2 x width, in]
            both.append(stacked.T if form == "in-out" else stacked)
            down.append(last.T if form == "in-out" else last)
        out[f"{prefix}.gate_up_proj"] = np.stack(both)
        out[f"{prefix}.down_proj"] = np.stack(down)
    return out


@contextmanager
def started(config: RunConfig) -> Iterator[OffloadEngine]:
    """An engine with the values that a new run of `config` starts with."""
    plan = make_plan(config)
    assert plan.fits, plan.problems
    store = open_store(config, plan)
    try:
        with KernelPool(2) as pool:
            engine = make_engine(config, plan, NumpyBackend(), pool, store)
            try:
                initialize(config, engine)
                yield engine
            finally:
                engine.close()
    finally:
        store.close(delete=True)
